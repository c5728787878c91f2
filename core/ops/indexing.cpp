// Three primitives carry all indexing: gather, scatter (overwrites) and scatter_sum (adds into
// zeros), each along one dim with equal extents elsewhere. Indexing in several dims flattens them
// into one; windows, broadcasting and negative positions are prepared here in ordinary ops.
#include "core/ops/indexing.h"

#include <algorithm>
#include <limits>

#include "core/base/function_ref.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/precision.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/dim_attributes.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/scalar_range.h"
#include "core/ops/scan.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/wrapped.h"

namespace tessera {
namespace {

void check_fit(std::string_view op, MetaSpan in, int dim) {
  bool fits = dim < in[0]->shape.size() && in[1]->dtype == kI64;
  for (const Meta* m : in) fits = fits && m->shape.size() == in[0]->shape.size();
  for (int d = 0; d < in[0]->shape.size() && fits; ++d)
    fits = d == dim || in[0]->shape[d] == in[1]->shape[d];
  if (in.size() > 2) fits = fits && in[2]->shape == in[1]->shape && in[2]->dtype == in[0]->dtype;
  TESSERA_CHECK_AS(
      ShapeError, fits,
      "{}: operands {} do not fit along dim {}; an i64 index of equal extents elsewhere is needed",
      op, describe(in), dim);
}

// Loops of the other dims, shared; then one of `dim` in the indexed operand and one in the index.
AxisMap index_axes(MetaSpan in, int dim, Factor::Kind of_index, bool out_is_indexed) {
  AxisMap m;
  const Shape& x = in[0]->shape;
  OperandLoops indexed, index;
  for (int d = 0; d < x.size(); ++d) {
    DimLoops loop;
    if (d != dim) loop.push_back(m.add(Factor::kPass, x[d]));
    indexed.push_back(loop), index.push_back(loop);
  }
  size_t at = size_t(dim);
  indexed[at].push_back(m.add(Factor::kWhole, x[dim]));
  index[at].push_back(m.add(of_index, in[1]->shape[dim]));
  m.in.push_back(indexed);
  for (size_t i = 1; i < in.size(); ++i) m.in.push_back(index);
  m.out.push_back(out_is_indexed ? indexed : index);
  return m;
}

class Gather final : public PrimitiveOf<Gather, DimAttributes> {
 public:
  static inline const OpInfo kOp{"gather", {OpKind::kOther, Precision::kAsGiven, 2}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    check_fit("gather", in, dim);
    return {Meta::contiguous(in[1]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = index_axes(in, dim, Factor::kPass, false);
    m.linear_in = 1;
    return m;
  }
  SaveMask saved() const override { return {2, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    return {scatter_sum(v.in[0], dim, v.in[1], v.cot[0]), Tensor()};
  }
};

class ScatterSum final : public PrimitiveOf<ScatterSum, DimAttributes> {
 public:
  static inline const OpInfo kOp{"scatter_sum", {OpKind::kOther, Precision::kAsGiven, 3}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    check_fit("scatter_sum", in, dim);
    return {Meta::contiguous(in[0]->shape, in[2]->dtype, in[2]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = index_axes(in, dim, Factor::kSum, true);
    m.linear_in = 4;
    m.shape_only = 1;
    return m;
  }
  SaveMask saved() const override { return {2, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    return {Tensor(), Tensor(), gather(v.cot[0], dim, v.in[1])};
  }
};

class Scatter final : public PrimitiveOf<Scatter, DimAttributes> {
 public:
  static inline const OpInfo kOp{"scatter", {OpKind::kOther, Precision::kAsGiven, 3}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    check_fit("scatter", in, dim);
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return index_axes(in, dim, Factor::kWhole, true); }
  SaveMask saved() const override { return {2, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    return {v.wants(0) ? scatter(v.cot[0], dim, v.in[1], 0.0) : Tensor(), Tensor(),
            v.wants(2) ? gather(v.cot[0], dim, v.in[1]) : Tensor()};
  }
};

// The product, maximum or minimum of x and the sources that have the same place.
class ScatterCombine final : public PrimitiveOf<ScatterCombine, DimAttributes> {
 public:
  static inline const OpInfo kProd{"scatter_prod", {OpKind::kOther, Precision::kAsGiven, 3}},
      kMax{"scatter_amax", {OpKind::kOther, Precision::kAsGiven, 3}},
      kMin{"scatter_amin", {OpKind::kOther, Precision::kAsGiven, 3}};
  using PrimitiveOf::PrimitiveOf;
  static const OpInfo& op_of(ScatterReduce how) {
    return how == ScatterReduce::kProd ? kProd : how == ScatterReduce::kAmax ? kMax : kMin;
  }
  Metas infer(MetaSpan in) const override {
    check_fit(name(), in, dim);
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return index_axes(in, dim, Factor::kWhole, true); }
  SaveMask saved() const override { return {7, id() == kProd.id ? 0u : 1u}; }
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor &x = v.in[0], &index = v.in[1], &src = v.in[2], &g = v.cot[0];
    if (id() == kProd.id) return vjp_of_product(x, index, src, g);
    // All that equal the result share its cotangent.
    Tensor mine = cast(eq(x, v.out[0]), x.dtype()),
           theirs = cast(eq(src, gather(v.out[0], dim, index)), x.dtype());
    Tensor share = g / (mine + scatter_sum(x, dim, index, theirs));
    return {mine * share, Tensor(), theirs * gather(share, dim, index)};
  }

 private:
  // A factor's derivative is the product of the others: of all but zeros, divided by itself, unless
  // another zero makes it vanish. Second derivatives hold where no factor is zero.
  Tensors vjp_of_product(const Tensor& x, const Tensor& index, const Tensor& src,
                         const Tensor& g) const {
    Tensor one = number_beside(x, 1.0, x.dtype());
    Tensor x0 = eq(x, 0), s0 = eq(src, 0), x1 = where(x0, one, x), s1 = where(s0, one, src);
    Tensor zeros = cast(x0, x.dtype()) + scatter_sum(x, dim, index, cast(s0, x.dtype()));
    Tensor all = g * dispatch1(PrimRef(new ScatterCombine(info(), {dim})),
                               operands(Tensor(x1), Tensor(index), Tensor(s1)));
    auto others = [](const Tensor& is_zero, const Tensor& zeros, const Tensor& product,
                     const Tensor& factor) {
      Tensor alone = eq(zeros, cast(is_zero, zeros.dtype()));
      return where(alone, product / factor, number_beside(factor, 0.0, factor.dtype()));
    };
    return {others(x0, zeros, all, x1), Tensor(),
            others(s0, gather(zeros, dim, index), gather(all, dim, index), s1)};
  }
};

// The number that changes no result of `how`.
Scalar identity_of(ScatterReduce how, DType t) {
  bool high = how == ScatterReduce::kAmin;
  if (how == ScatterReduce::kProd) return 1;
  if (how == ScatterReduce::kSum || how == ScatterReduce::kMean) return 0;
  switch (t) {
    case kBool: return high;
    case kU8: return high ? 255 : 0;
    case kI32:
      return high ? std::numeric_limits<int32_t>::max() : std::numeric_limits<int32_t>::min();
    case kI64:
      return high ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
    default: {
      double inf = std::numeric_limits<double>::infinity();
      return high ? inf : -inf;
    }
  }
}

class WrapIndex final : public PrimitiveOf<WrapIndex, WrapIndexAttributes> {
 public:
  static inline const OpInfo kOp{"wrap_index", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK(in[0]->dtype == kI64, "wrap_index: takes i64, got {}", describe(in));
    return {Meta::contiguous(in[0]->shape, kI64, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return pointwise_axes(in, in[0]->shape); }
  bool differentiable() const override { return false; }
};

Tensor as_index(const char* op, const Tensor& index) {
  TESSERA_CHECK(is_integral(index.dtype()) && index.dtype() != kBool,
                "{}: the index is {}; it must hold integers", op, describe(index));
  return cast(index, kI64);
}

struct Pair {
  Tensor x, src;
};
// Casts both to one dtype; under autocast two float dtypes meet in the wider one.
Pair of_one_dtype(const char* op, const Tensor& x, const Tensor& src) {
  Tensor both[] = {x, src};
  autocast_operands(Precision::kWidest, both);
  TESSERA_CHECK(both[0].dtype() == both[1].dtype(),
                "{}: x is {}, src is {}; convert them to one dtype", op, describe(x),
                describe(src));
  return {std::move(both[0]), std::move(both[1])};
}

// `index` [N] seen with the dims of `x` outside `dim`, by strides of 0.
Tensor rows_index(const char* op, const Tensor& x, int dim, const Tensor& index) {
  TESSERA_CHECK_AS(ShapeError, index.ndim() <= 1 && x.ndim() > 0,
                   "{}: x is {}, the index {}; the index must have one dim", op, describe(x),
                   describe(index));
  Shape s = Dims::filled(x.ndim(), 1), to = x.shape();
  s[dim] = to[dim] = index.numel();
  return expand(reshape(as_index(op, index), s), to);
}

// The part of `t` that has the extents of `index` outside `dim` (everywhere when dim is -1).
Tensor window(const char* op, Tensor t, const Tensor& index, int dim) {
  TESSERA_CHECK_AS(ShapeError, t.ndim() == index.ndim(), "{}: the index is {}, but it goes with {}",
                   op, describe(index), describe(t));
  for (int d = 0; d < t.ndim(); ++d) {
    if (d == dim || t.shape()[d] == index.shape()[d]) continue;
    TESSERA_CHECK_AS(ShapeError, index.shape()[d] < t.shape()[d],
                     "{}: the index is {}, larger in dim {} than {}", op, describe(index), d,
                     describe(t));
    t = narrow(t, d, 0, index.shape()[d]);
  }
  return t;
}

// x with the part that the index reaches, from dim `d` on, replaced by `write` of that part.
Tensor in_reach(const char* op, const Tensor& x, int dim, const Tensor& index, int d,
                FunctionRef<Tensor(const Tensor&)> write) {
  for (; d < x.ndim() && d < index.ndim(); ++d) {
    int64_t have = x.shape()[d], n = index.shape()[d];
    if (d == dim || n == have) continue;
    TESSERA_CHECK_AS(ShapeError, n < have, "{}: the index is {}, larger in dim {} than {}", op,
                     describe(index), d, describe(x));
    Tensor parts[] = {in_reach(op, narrow(x, d, 0, n), dim, index, d + 1, write),
                      narrow(x, d, n, have - n)};
    return cat(parts, d);
  }
  return write(x);
}

Tensor overwritten(const Tensor& x, int dim, const Tensor& index, const Tensor& src) {
  return dispatch1(PrimRef(new Scatter({dim})), operands(Tensor(x), Tensor(index), Tensor(src)));
}

// scatter_reduce where x and the index have equal extents outside `dim`.
Tensor combined(const Tensor& x, int dim, const Tensor& index, const Tensor& src, ScatterReduce how,
                bool include_self) {
  Tensor base = x;
  if (!include_self) {
    Tensor identity = scalar_tensor(identity_of(how, x.dtype()), x.dtype(), x.device());
    base = overwritten(x, dim, index, expand(identity, index.shape()));
  }
  if (how != ScatterReduce::kSum && how != ScatterReduce::kMean)
    return dispatch1(PrimRef(new ScatterCombine(ScatterCombine::op_of(how), {dim})),
                     operands(std::move(base), Tensor(index), Tensor(src)));
  Tensor total = base + scatter_sum(x, dim, index, src);
  if (how == ScatterReduce::kSum) return total;
  Tensor counts = scatter_sum(empty(x.shape(), kI64, x.device()), dim, index,
                              ones(index.shape(), {.dtype = kI64, .device = x.device()}));
  counts = include_self ? counts + 1 : maximum(counts, 1);
  return is_floating(x.dtype()) ? total / counts : cast(floor_divide(total, counts), x.dtype());
}

}  // namespace

AxisMap along_dim_axes(MetaSpan in, std::span<const Meta> out, int dim) {
  AxisMap m;
  const Shape& first = in[0]->shape;
  for (int d = 0; d < first.size(); ++d) m.add(d == dim ? Factor::kWhole : Factor::kPass, first[d]);
  auto loops = [&](const Shape& s) {
    OperandLoops l;
    for (int d = 0; d < s.size(); ++d)
      l.push_back({s[d] == first[d] ? d : m.add(Factor::kWhole, s[d])});
    return l;
  };
  for (const Meta* t : in) m.in.push_back(loops(t->shape));
  for (const Meta& t : out) m.out.push_back(loops(t.shape));
  return m;
}

Tensor gather(const Tensor& x, int64_t dim, const Tensor& index) {
  int d = wrap_dim(dim, x.ndim(), "gather");
  if (x.ndim() == 0)
    return reshape(gather(reshape(x, {1}), 0, reshape(index, {index.numel()})), index.shape());
  Tensor i = as_index("gather", index);
  return dispatch1(PrimRef(new Gather({d})), operands(window("gather", x, i, d), Tensor(i)));
}

Tensor scatter_sum(const Tensor& like, int64_t dim, const Tensor& index, const Tensor& src) {
  int d = wrap_dim(dim, like.ndim(), "scatter_sum");
  return dispatch1(PrimRef(new ScatterSum({d})),
                   operands(Tensor(like), Tensor(index), cast(src, like.dtype())));
}

Tensor take_along_dim(const Tensor& x, const Tensor& index, int64_t dim) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() == index.ndim(),
                   "take_along_dim: x is {}, the index {}; give them equal ndim", describe(x),
                   describe(index));
  int d = wrap_dim(dim, x.ndim(), "take_along_dim");
  Shape a = x.shape(), b = index.shape();
  a[d] = b[d] = 1;
  Shape both = broadcast(a, b, "take_along_dim"), to = both;
  both[d] = x.shape()[d], to[d] = index.shape()[d];
  return gather(expand(x, both), d, expand(wrap_index(index, x.shape()[d]), to));
}

Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index) {
  int d = wrap_dim(dim, x.ndim(), "index_select");
  return dispatch1(PrimRef(new Gather({d})),
                   operands(Tensor(x), rows_index("index_select", x, d, index)));
}

Tensor scatter(const Tensor& to, int64_t dim, const Tensor& index, const Tensor& from) {
  int d = wrap_dim(dim, to.ndim(), "scatter");
  const auto [x, src] = of_one_dtype("scatter", to, from);
  Tensor i = as_index("scatter", index);
  Tensor s = window("scatter", src, i, -1);
  return in_reach("scatter", x, d, i, 0, [&](const Tensor& t) { return overwritten(t, d, i, s); });
}

Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, Scalar value) {
  return scatter(x, dim, index, expand(scalar_tensor(value, x.dtype(), x.device()), index.shape()));
}

Tensor scatter_add(const Tensor& to, int64_t dim, const Tensor& index, const Tensor& from) {
  int d = wrap_dim(dim, to.ndim(), "scatter_add");
  const auto [x, src] = of_one_dtype("scatter_add", to, from);
  Tensor i = as_index("scatter_add", index);
  Tensor sums =
      scatter_sum(window("scatter_add", x, i, d), d, i, window("scatter_add", src, i, -1));
  for (int k = 0; k < x.ndim(); ++k)
    if (sums.shape()[k] != x.shape()[k]) sums = unslice(sums, k, 0, 1, x.shape()[k]);
  return x + std::move(sums);
}

Tensor scatter_reduce(const Tensor& to, int64_t dim, const Tensor& index, const Tensor& from,
                      ScatterReduce how, bool include_self) {
  int d = wrap_dim(dim, to.ndim(), "scatter_reduce");
  const auto [x, src] = of_one_dtype("scatter_reduce", to, from);
  bool adds = how == ScatterReduce::kSum || how == ScatterReduce::kMean;
  if (adds && is_floating(x.dtype()) && size_of(x.dtype()) == 2)  // rounded to 16 bits once
    return cast(scatter_reduce(cast(x, kF32), dim, index, cast(src, kF32), how, include_self),
                x.dtype());
  Tensor i = as_index("scatter_reduce", index), s = window("scatter_reduce", src, i, -1);
  return in_reach("scatter_reduce", x, d, i, 0,
                  [&](const Tensor& t) { return combined(t, d, i, s, how, include_self); });
}

Tensor index_add(const Tensor& to, int64_t dim, const Tensor& index, const Tensor& from,
                 Scalar alpha) {
  int d = wrap_dim(dim, to.ndim(), "index_add");
  const auto [x, src] = of_one_dtype("index_add", to, from);
  return x + scatter_sum(x, d, rows_index("index_add", x, d, index), cast(src * alpha, x.dtype()));
}

Tensor index_copy(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& src) {
  int d = wrap_dim(dim, x.ndim(), "index_copy");
  return scatter(x, d, rows_index("index_copy", x, d, wrap_index(index, x.size(d))), src);
}

Tensor index_fill(const Tensor& x, int64_t dim, const Tensor& index, Scalar value) {
  int d = wrap_dim(dim, x.ndim(), "index_fill");
  return scatter(x, d, rows_index("index_fill", x, d, wrap_index(index, x.size(d))), value);
}

Tensor masked_fill(const Tensor& x, const Tensor& mask, Scalar value) {
  TESSERA_CHECK(mask.dtype() == kBool, "masked_fill: the mask is {}; it must be bool",
                describe(mask));
  check_holds("masked_fill", x.dtype(), value);
  return where(mask, number_beside(x, value, x.dtype()), x);
}

Tensor masked_select(const Tensor& x, const Tensor& mask) {
  TESSERA_CHECK(mask.dtype() == kBool, "masked_select: the mask is {}; it must be bool",
                describe(mask));
  Shape s = broadcast(x.shape(), mask.shape(), "masked_select");
  Tensor at = nonzero(reshape(expand(mask, s), {-1}));
  return index_select(reshape(expand(x, s), {-1}), 0, reshape(at, {-1}));
}

Tensor nonzero(const Tensor& x) {
  TESSERA_CHECK(!x.device().is_meta(),
                "nonzero: the extent of the result depends on the values of {}, which has none",
                describe(x));
  const Tensor set = on_host(contiguous(x.dtype() == kBool ? x.detach() : ne(x, 0)));
  const bool* p = set.values<bool>();
  int64_t count = std::count(p, p + set.numel(), true), row = 0;
  Tensor out = empty({count, x.ndim()}, kI64);
  Strides st = contiguous_strides(x.shape());
  for (int64_t i = 0; i < set.numel(); ++i) {
    if (!p[i]) continue;
    int64_t rest = i;
    for (int d = 0; d < x.ndim(); ++d)
      out.data<int64_t>()[row * x.ndim() + d] = rest / st[d], rest %= st[d];
    ++row;
  }
  return out.to(x.device());
}

Tensor one_hot(const Tensor& x, int64_t classes) {
  Tensor i = as_index("one_hot", x);
  if (classes < 0) {
    TESSERA_CHECK(x.numel() > 0,
                  "one_hot: {} has no elements to count classes by; give their number",
                  describe(x));
    classes = amax(i).item<int64_t>() + 1;
  }
  if (x.numel() > 0 && !is_sample(x)) {  // a sample of vmap has no values to read: scatter refuses
    const int64_t least = amin(i).item<int64_t>(), most = amax(i).item<int64_t>();
    TESSERA_CHECK(least >= 0, "one_hot: class {} of {}; classes start at 0", least, describe(x));
    TESSERA_CHECK(most < classes, "one_hot: class {} of {}; there are {} classes", most,
                  describe(x), classes);
  }
  Shape s = i.shape();
  s.push_back(classes);
  return scatter(zeros(s, {.dtype = kI64, .device = x.device()}), -1, unsqueeze(i, -1), 1);
}

Tensor take(const Tensor& x, const Tensor& index) {
  const Tensor at = wrap_index(reshape(index, {-1}), x.numel());
  return reshape(index_select(reshape(x, {-1}), 0, at), index.shape());
}

Tensor masked_scatter(const Tensor& x, const Tensor& mask, const Tensor& src) {
  TESSERA_CHECK(mask.dtype() == kBool && src.dtype() == x.dtype(),
                "masked_scatter: mask {} and source {} for {}; takes bools and elements of its "
                "dtype",
                describe(mask), describe(src), describe(x));
  const Tensor where_to = expand(mask, x.shape());
  if (src.numel() == 0) {
    TESSERA_CHECK(!any(where_to).item<bool>(),
                  "masked_scatter: source {} is empty, and the mask is true somewhere; give an "
                  "element for each true of the mask",
                  describe(src));
    return x.clone();
  }
  // Each place's number among those that the mask takes; in front of them the first, for nothing.
  const Tensor number = clamp_min(cumsum(reshape(where_to, {-1}), 0) - 1, 0);
  return where(where_to, reshape(index_select(reshape(src, {-1}), 0, number), x.shape()), x);
}

Tensor select_scatter(const Tensor& x, const Tensor& src, int64_t dim, int64_t index) {
  const int d = wrap_dim(dim, x.ndim(), "select_scatter");
  return index_copy(x, d, tensor({index}, {.device = x.device()}), unsqueeze(src, d));
}

Tensor tril_indices(int64_t rows, int64_t columns, int64_t diagonal) {
  return contiguous(transpose(nonzero(tril(ones({rows, columns}), diagonal)), 0, 1));
}
Tensor triu_indices(int64_t rows, int64_t columns, int64_t diagonal) {
  return contiguous(transpose(nonzero(triu(ones({rows, columns}), diagonal)), 0, 1));
}

Tensor wrap_index(const Tensor& index, int64_t extent) {
  return dispatch1(PrimRef(new WrapIndex({extent})), operands(as_index("index", index)));
}

void register_indexing_ops(OpRegistry& registry) {
  auto x = [] { return sample_values({3, 5, 2}, -1, 1, 1); };
  auto i = [] { return sample_integers({3, 4, 2}, 0, 5, 2); };
  registry.add("gather", [=] {
    return std::vector<Sample>{
        {PrimRef(new Gather({1})), {x(), i()}},
        {PrimRef(new Gather({0})),
         {x(), expand(reshape(sample_integers({4}, 0, 3, 3), {4, 1, 1}), {4, 5, 2})}}};
  });
  registry.add("scatter_sum", [=] {
    return std::vector<Sample>{
        {PrimRef(new ScatterSum({1})), {x(), i(), sample_values({3, 4, 2}, -1, 1, 3)}},
        {PrimRef(new ScatterSum({0})),
         {sample_values({4}, -1, 1, 3), sample_integers({7}, 0, 4, 4),
          sample_values({7}, -1, 1, 5)}}};
  });
  registry.add("scatter", [=] {
    // Each element is written at most once: positions are a permutation's first ones.
    Tensor at = expand(reshape(from_values<int64_t>({4, 0, 3, 1}, {4}), {1, 4, 1}), {3, 4, 2});
    return std::vector<Sample>{
        {PrimRef(new Scatter({1})), {x(), at, sample_values({3, 4, 2}, -1, 1, 3)}}};
  });
  for (auto how : {ScatterReduce::kProd, ScatterReduce::kAmax, ScatterReduce::kAmin})
    registry.add(ScatterCombine::op_of(how).name, [=] {
      auto combine = [&](int dim) {
        return PrimRef(new ScatterCombine(ScatterCombine::op_of(how), {dim}));
      };
      return std::vector<Sample>{{combine(1), {x(), i(), sample_values({3, 4, 2}, -1, 1, 3)}},
                                 {combine(0),
                                  {sample_values({4}, 0.5, 2, 3), sample_integers({7}, 0, 4, 4),
                                   sample_values({7}, 0.5, 2, 5)}}};
    });
  registry.add("wrap_index", [] {
    return std::vector<Sample>{
        {PrimRef(new WrapIndex({5})), {sample_integers({3, 4}, -5, 5, 1)}, false}};
  });
}

}  // namespace tessera
