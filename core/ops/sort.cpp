// Two primitives choose elements (sort, which may keep only the first ones, and argmax); values and
// gradients of everything else follow from the positions they return, by gather.
#include "core/ops/sort.h"

#include <cmath>

#include "core/dispatch/dispatch.h"
#include "core/ops/create.h"
#include "core/ops/dim_attributes.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/scan.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

class Sort final : public PrimitiveOf<Sort, SortAttributes> {
 public:
  static inline const OpInfo kOp{"sort", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    Shape s = in[0]->shape;
    TESSERA_CHECK_AS(ShapeError, dim < s.size() && count >= 0 && count <= s[dim],
                     "sort: {} elements of dim {} of {}", count, dim, describe(in));
    s[dim] = count;
    return {Meta::contiguous(s, in[0]->dtype, in[0]->device),
            Meta::contiguous(s, kI64, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return along_dim_axes(in, infer(in), dim); }
  SaveMask saved() const override { return {0, 2}; }
  Tensors vjp(const VjpArgs& v) const override {
    return {v.cot[0].defined() ? scatter_sum(v.in[0], dim, v.out[1], v.cot[0]) : Tensor()};
  }
};

class ArgExtreme final : public PrimitiveOf<ArgExtreme, DimAttributes> {
 public:
  static inline const OpInfo kMax{"argmax", {OpKind::kOther, Precision::kAsGiven, 1}},
      kMin{"argmin", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    Shape s = in[0]->shape;
    TESSERA_CHECK_AS(ShapeError, dim < s.size() && s[dim] > 0,
                     "{}: dim {} of {} has no elements to choose from", name(), dim, describe(in));
    s[dim] = 1;
    return {Meta::contiguous(s, kI64, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return along_dim_axes(in, infer(in), dim); }
  bool differentiable() const override { return false; }
};

class SearchSorted final : public PrimitiveOf<SearchSorted, SearchAttributes> {
 public:
  static inline const OpInfo kOp{"searchsorted", {OpKind::kOther, Precision::kAsGiven, 2}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    const Shape &edges = in[0]->shape, &x = in[1]->shape;
    bool fits = in[0]->dtype == in[1]->dtype && edges.size() > 0 &&
                (edges.size() == 1 || edges.size() == x.size());
    for (int d = 0; d + 1 < edges.size() && fits; ++d) fits = edges[d] == x[d];
    TESSERA_CHECK_AS(
        ShapeError, fits,
        "searchsorted: edges and x {} do not fit; edges are [N], or [.., N] with x [.., M]",
        describe(in));
    return {Meta::contiguous(x, kI64, in[1]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape &edges = in[0]->shape, &x = in[1]->shape;
    AxisMap m;
    for (int64_t e : x) m.add(Factor::kPass, e);
    OperandLoops of_x = broadcast_loops(x, x), of_edges;
    for (int d = 0; d + 1 < edges.size(); ++d) of_edges.push_back(of_x[size_t(d)]);
    of_edges.push_back({m.add(Factor::kWhole, edges.back())});
    m.in.push_back(of_edges), m.in.push_back(of_x), m.out.push_back(of_x);
    return m;
  }
  bool differentiable() const override { return false; }
};

// Runs `f(x, dim)` on x, or on x as one dim when it has none.
Tensor at_least_1d(const Tensor& x) { return x.ndim() ? x : reshape(x, {1}); }

ValuesAndIndices sorted(const Tensor& x, int64_t count, int dim, bool descending) {
  Tensors out = dispatch(PrimRef(new Sort({dim, count, descending})), operands(at_least_1d(x)));
  if (x.ndim() == 0) return {reshape(out[0], {}), reshape(out[1], {})};
  return {out[0], out[1]};
}

Tensor extreme(const char* op, bool largest, const Tensor& x, int64_t dim, bool keepdim) {
  TESSERA_CHECK(x.dtype() != kBool, "{}: {} has no order; cast it to an integer", op, describe(x));
  int d = wrap_dim(dim, x.ndim(), op);
  Tensor i = dispatch1(PrimRef(new ArgExtreme(largest ? ArgExtreme::kMax : ArgExtreme::kMin, {d})),
                       operands(at_least_1d(x)));
  return keepdim && x.ndim() ? i : squeeze(i, d);
}

ValuesAndIndices chosen(const Tensor& x, int d, const Tensor& indices, bool keepdim) {
  if (x.ndim() == 0)
    return {reshape(gather(reshape(x, {1}), 0, reshape(indices, {1})), {}), reshape(indices, {})};
  Tensor values = gather(x, d, indices);
  if (keepdim) return {values, indices};
  return {squeeze(values, d), squeeze(indices, d)};
}

}  // namespace

ValuesAndIndices sort(const Tensor& x, int64_t dim, bool descending) {
  int d = wrap_dim(dim, x.ndim(), "sort");
  return sorted(x, x.ndim() ? x.shape()[d] : 1, d, descending);
}
Tensor argsort(const Tensor& x, int64_t dim, bool descending) {
  return sort(x.detach(), dim, descending).indices;
}

ValuesAndIndices topk(const Tensor& x, int64_t k, int64_t dim, bool largest) {
  int d = wrap_dim(dim, x.ndim(), "topk");
  int64_t have = x.ndim() ? x.shape()[d] : 1;
  TESSERA_CHECK_AS(ShapeError, k >= 0 && k <= have, "topk: {} of dim {} of {}, which has {}", k, d,
                   describe(x), have);
  return sorted(x, k, d, largest);
}

ValuesAndIndices kthvalue(const Tensor& x, int64_t k, int64_t dim, bool keepdim) {
  int d = wrap_dim(dim, x.ndim(), "kthvalue");
  int64_t have = x.ndim() ? x.shape()[d] : 1;
  TESSERA_CHECK_AS(ShapeError, k >= 1 && k <= have,
                   "kthvalue: number {} of dim {} of {}; it counts from 1", k, d, describe(x));
  Tensor order = sorted(x.detach(), k, d, false).indices;
  return chosen(x, d, x.ndim() ? narrow(order, d, k - 1, 1) : order, keepdim);
}

ValuesAndIndices median(const Tensor& x, int64_t dim, bool keepdim) {
  int d = wrap_dim(dim, x.ndim(), "median");
  int64_t have = x.ndim() ? x.shape()[d] : 1;
  TESSERA_CHECK_AS(ShapeError, have > 0, "median: dim {} of {} has no elements", d, describe(x));
  Tensor rows = x.detach();
  Tensor middle = kthvalue(rows, (have + 1) / 2, d, true).indices;
  if (is_floating(x.dtype()) && x.ndim())
    middle =
        where(any(isnan(rows), {d}, true), argmax(rows, d, true), middle);  // argmax finds the NaN
  return chosen(x, d, middle, keepdim);
}
Tensor median(const Tensor& x) { return median(reshape(x, {-1}), 0).values; }

Tensor argmax(const Tensor& x, int64_t dim, bool keepdim) {
  return extreme("argmax", true, x, dim, keepdim);
}
Tensor argmin(const Tensor& x, int64_t dim, bool keepdim) {
  return extreme("argmin", false, x, dim, keepdim);
}
Tensor argmax(const Tensor& x) { return argmax(reshape(x, {-1}), 0); }
Tensor argmin(const Tensor& x) { return argmin(reshape(x, {-1}), 0); }
ValuesAndIndices max(const Tensor& x, int64_t dim, bool keepdim) {
  return chosen(x, wrap_dim(dim, x.ndim(), "max"), argmax(x, dim, true), keepdim);
}
ValuesAndIndices min(const Tensor& x, int64_t dim, bool keepdim) {
  return chosen(x, wrap_dim(dim, x.ndim(), "min"), argmin(x, dim, true), keepdim);
}
Tensor max(const Tensor& x) { return amax(x); }
Tensor min(const Tensor& x) { return amin(x); }

UniqueResult unique(const Tensor& x) {
  Tensor flat = reshape(x.detach(), {-1});
  auto [values, indices] = sort(flat, 0);
  int64_t n = flat.numel();
  if (n == 0) return {values, reshape(indices, x.shape()), indices};
  // An element begins a run when it differs from the one before it; NaNs differ from one another.
  Tensor first[] = {ones({1}, {.dtype = kBool, .device = x.device()}),
                    ne(narrow(values, 0, 1, n - 1), narrow(values, 0, 0, n - 1))};
  Tensor begins = cat(first, 0);
  Tensor at = reshape(nonzero(begins), {-1});
  Tensor run = cumsum(begins, 0) - 1;
  Tensor end[] = {narrow(at, 0, 1, at.numel() - 1), full({1}, n, {.device = x.device()})};
  return {index_select(values, 0, at), reshape(scatter(indices, 0, indices, run), x.shape()),
          cat(end, 0) - at};
}

Tensor searchsorted(const Tensor& edges, const Tensor& x, bool right) {
  DType t = promote(edges.dtype(), x.dtype());
  return dispatch1(PrimRef(new SearchSorted({right})),
                   operands(cast(edges.detach(), t), cast(x.detach(), t)));
}

Tensor bincount(const Tensor& x, const Tensor& weights, int64_t length) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() == 1 && is_integral(x.dtype()),
                   "bincount: x is {}; it must be integers [N]", describe(x));
  Tensor i = cast(x, kI64);
  if (x.numel()) {
    TESSERA_CHECK(amin(i).item<int64_t>() >= 0, "bincount: x holds {}; it counts from 0",
                  amin(i).item<int64_t>());
    length = std::max(length, amax(i).item<int64_t>() + 1);
  }
  Tensor w = weights.defined() ? (is_floating(weights.dtype()) ? weights : cast(weights, kF64))
                               : ones({x.numel()}, {.dtype = kI64, .device = x.device()});
  return scatter_sum(empty({length}, w.dtype(), w.device()), 0, i, w);
}

void register_sort_ops(OpRegistry& registry) {
  auto x = [] { return sample_values({3, 5, 2}, -1, 1, 1); };
  registry.add("sort", [=] {
    return std::vector<Sample>{
        {PrimRef(new Sort({1, 5, false})), {x()}},
        {PrimRef(new Sort({0, 2, true})), {x()}},
        {PrimRef(new Sort({1, 3, true})), {sample_integers({2, 6}, 0, 3, 2)}, false}};
  });
  for (bool largest : {true, false})
    registry.add(largest ? "argmax" : "argmin", [=] {
      return std::vector<Sample>{
          {PrimRef(new ArgExtreme(largest ? ArgExtreme::kMax : ArgExtreme::kMin, {1})),
           {x()},
           false},
          {PrimRef(new ArgExtreme(largest ? ArgExtreme::kMax : ArgExtreme::kMin, {0})),
           {sample_integers({4, 3}, 0, 2, 3)},
           false}};
    });
  registry.add("searchsorted", [] {
    Tensor edges = sort(sample_values({2, 6}, -1, 1, 1)).values;
    return std::vector<Sample>{
        {PrimRef(new SearchSorted({false})), {edges, sample_values({2, 4}, -1, 1, 2)}, false},
        {PrimRef(new SearchSorted({true})),
         {select(edges, 0, 1), sample_values({2, 3, 4}, -1, 1, 2)},
         false}};
  });
}

}  // namespace tessera
