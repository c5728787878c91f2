// x[i, :, j]: the indexed dims are brought together and flattened into one, and so are their
// positions; then it is one index_select, or one write into the flattened dim. Invariant: every
// position is checked against the extent of its own dim before it is flattened.
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

struct Flattened {
  Dims order;       // of x's dims: indexed ones together, at `at`
  int at = 0;       // where the indexed dims, and those of the result, begin
  int indexed = 0;  // how many there are
  Tensor position;  // i64, in the flattened dim
};

// Bool entries become one integer entry per dim; the list gets an entry per dim of x.
std::vector<Tensor> integer_entries(const Tensor& x, std::span<const Tensor> indices) {
  std::vector<Tensor> list;
  for (const Tensor& entry : indices) {
    if (!entry.defined() || entry.dtype() != kBool) {
      list.push_back(entry);
      continue;
    }
    Tensor positions = nonzero(entry);
    for (int d = 0; d < entry.ndim(); ++d) {
      int at = int(list.size());
      TESSERA_CHECK_AS(ShapeError, at < x.ndim() && x.shape()[at] == entry.shape()[d],
                       "index: the mask {} does not fit dims {} on of {}", describe(entry), at - d,
                       describe(x));
      list.push_back(select(positions, 1, d));
    }
  }
  TESSERA_CHECK_AS(ShapeError, int(list.size()) <= x.ndim(), "index: {} indices for {}",
                   list.size(), describe(x));
  list.resize(size_t(x.ndim()));
  return list;
}

Flattened flatten_entries(const Tensor& x, std::span<const Tensor> indices) {
  std::vector<Tensor> list = integer_entries(x, indices);
  Flattened f;
  int first = -1, last = -1;
  for (int d = 0; d < x.ndim(); ++d) {
    if (!list[size_t(d)].defined()) continue;
    if (first < 0) first = d;
    last = d, ++f.indexed;
  }
  TESSERA_CHECK(f.indexed > 0, "index: no dim of {} is indexed", describe(x));
  // Indices that are not adjacent put their dims first, as in NumPy.
  f.at = last - first + 1 == f.indexed ? first : 0;
  for (int d = 0; d < f.at; ++d) f.order.push_back(d);
  for (int d = first; d <= last; ++d)
    if (list[size_t(d)].defined()) f.order.push_back(d);
  for (int d = f.at; d < x.ndim(); ++d)
    if (!list[size_t(d)].defined()) f.order.push_back(d);
  for (int d = first; d <= last; ++d) {
    if (!list[size_t(d)].defined()) continue;
    Tensor i = wrap_index(list[size_t(d)], x.shape()[d]);
    f.position = f.position.defined() ? f.position * x.shape()[d] + i : i;
  }
  return f;
}

// x with its indexed dims flattened into one.
Tensor flattened(const Tensor& x, const Flattened& f) {
  return flatten(permute(x, f.order), f.at, f.at + f.indexed - 1);
}

}  // namespace

Tensor index(const Tensor& x, std::span<const Tensor> indices) {
  Flattened f = flatten_entries(x, indices);
  return unflatten(index_select(flattened(x, f), f.at, reshape(f.position, {-1})), f.at,
                   f.position.shape());
}

Tensor index(const Tensor& x, std::span<const TensorIndex> at) {
  using Kind = TensorIndex::Kind;
  auto dims_of = [](const TensorIndex& e) {
    if (e.kind == Kind::kTensor) return e.tensor.dtype() == kBool ? e.tensor.ndim() : 1;
    return e.kind == Kind::kPosition || e.kind == Kind::kSlice ? 1 : 0;
  };
  int taken = 0, ellipses = 0;
  for (const TensorIndex& e : at) taken += dims_of(e), ellipses += e.kind == Kind::kEllipsis;
  TESSERA_CHECK_AS(ShapeError, taken <= x.ndim() && ellipses <= 1,
                   "index: {} entries for dims and {} ellipses for {}", taken, ellipses,
                   describe(x));
  Tensor y = x;
  int d = 0;                    // of y
  int listed = 0;               // dims of y that `tensors` speak of
  std::vector<Tensor> tensors;  // undefined: a whole dim
  for (const TensorIndex& e : at) switch (e.kind) {
      case Kind::kPosition: y = select(y, d, e.position); break;
      case Kind::kSlice:
        y = slice(y, d++, e.slice.begin.value_or(0), e.slice.end.value_or(INT64_MAX), e.slice.step);
        break;
      case Kind::kNone: y = unsqueeze(y, d++); break;
      case Kind::kEllipsis: d += x.ndim() - taken; break;
      case Kind::kTensor:
        for (; listed < d; ++listed) tensors.push_back({});
        tensors.push_back(e.tensor);
        d += dims_of(e), listed = d;
    }
  return tensors.empty() ? y : index(y, tensors);
}
Tensor Tensor::index(std::initializer_list<TensorIndex> at) const& {
  return tessera::index(*this, std::span<const TensorIndex>(at.begin(), at.size()));
}
Tensor Tensor::index(std::initializer_list<TensorIndex> at) && { return let_go(index(at)); }

Tensor index_put(const Tensor& x, std::span<const Tensor> indices, const Tensor& values,
                 bool accumulate) {
  Flattened f = flatten_entries(x, indices);
  Tensor flat = flattened(x, f);
  Shape result;
  for (int d = 0; d < f.at; ++d) result.push_back(flat.shape()[d]);
  for (int64_t e : f.position.shape()) result.push_back(e);
  for (int d = f.at + 1; d < flat.ndim(); ++d) result.push_back(flat.shape()[d]);
  Tensor v = expand(values, result);
  Shape rows = flat.shape();
  rows[f.at] = f.position.numel();
  v = reshape(v, rows);
  Tensor at = reshape(f.position, {-1});
  Tensor written = accumulate ? index_add(flat, f.at, at, v) : index_copy(flat, f.at, at, v);
  Shape apart;
  Dims back = f.order;
  for (int i = 0; i < x.ndim(); ++i)
    apart.push_back(x.shape()[int(f.order[i])]), back[int(f.order[i])] = i;
  return permute(reshape(written, apart), back);
}

void index_put_(const Tensor& x, std::span<const Tensor> indices, const Tensor& values,
                bool accumulate) {
  assign_(x, index_put(x, indices, values, accumulate));
}

}  // namespace tessera
