// Segments of a dim. One primitive sums, multiplies or chooses. A search in the offsets finds the
// segment of each element, and derivatives are gathers by that.
#include "core/dispatch/dispatch.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"
#include "core/ops/scan.h"
#include "core/ops/sort.h"
#include "core/ops/sparse.h"
#include "core/ops/sparse_attributes.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

class Segment final : public PrimitiveOf<Segment, SegmentAttributes> {
 public:
  static inline const OpInfo kOps[] = {
      {"segment_sum", {OpKind::kOther, Precision::kWide, 2}},
      {"segment_prod", {OpKind::kOther, Precision::kWide, 2}},
      {"segment_amax", {OpKind::kOther, Precision::kAsGiven, 2}},
      {"segment_amin", {OpKind::kOther, Precision::kAsGiven, 2}}};  // by ReduceKind
  explicit Segment(const SegmentAttributes& a) : PrimitiveOf(kOps[int(a.kind)], a) {}
  Metas infer(MetaSpan in) const override {
    const Shape& offsets = in[1]->shape;
    Shape s = in[0]->shape;
    TESSERA_CHECK_AS(ShapeError,
                     dim < s.size() && is_floating(in[0]->dtype) && in[1]->dtype == kI64 &&
                         offsets.size() == 1 && offsets[0] >= 1,
                     "{}: takes floats with dim {} and i64 offsets [S + 1], got {}", name(), dim,
                     describe(in));
    s[dim] = offsets[0] - 1;
    return {Meta::contiguous(s, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m;
    const Shape& x = in[0]->shape;
    OperandLoops data, out;
    for (int d = 0; d < x.size(); ++d) {
      int64_t here = d == dim ? in[1]->shape[0] - 1 : x[d];
      int loop = m.add(d == dim ? Factor::kWhole : Factor::kPass, x[d]);
      data.push_back({loop}), out.push_back({d == dim ? m.add(Factor::kWhole, here) : loop});
    }
    m.in.push_back(data);
    m.in.push_back({DimLoops{m.add(Factor::kWhole, in[1]->shape[0])}});
    m.out.push_back(out);
    m.linear_in = kind == ReduceKind::kSum ? 1 : 0;
    return m;
  }
  SaveMask saved() const override {
    if (kind == ReduceKind::kSum) return {2, 0};
    return {3, kind == ReduceKind::kProd ? 0u : 1u};
  }
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor &x = v.in[0], &offsets = v.in[1], &g = v.cot[0];
    Tensor every = arange(0, x.size(dim), 1, {.device = x.device()});
    Tensor segment = searchsorted(offsets, every, true) - 1;
    auto spread = [&](const Tensor& t) { return index_select(t, dim, segment); };
    auto reduced = [&](ReduceKind k, const Tensor& t) {
      return dispatch1(PrimRef(new Segment({dim, k})), operands(Tensor(t), Tensor(offsets)));
    };
    if (kind == ReduceKind::kSum) return {spread(g), Tensor()};
    if (kind == ReduceKind::kProd) {
      // The product of the others: of all but zeros, divided by itself, unless another zero makes
      // it vanish. Second derivatives hold where no factor is zero.
      Tensor one = number_beside(x, 1.0, x.dtype()), is_zero = eq(x, 0),
             factor = where(is_zero, one, x), zero = cast(is_zero, x.dtype());
      Tensor all = g * reduced(ReduceKind::kProd, factor);
      Tensor alone = eq(spread(reduced(ReduceKind::kSum, zero)), zero);
      return {where(alone, spread(all) / factor, number_beside(x, 0.0, x.dtype())), Tensor()};
    }
    Tensor chosen = cast(eq(x, spread(v.out[0])), x.dtype());
    Tensor ties = maximum(reduced(ReduceKind::kSum, chosen), 1);  // none in an empty segment
    return {chosen * spread(g / ties), Tensor()};
  }
};

}  // namespace

Tensor offsets_of(const Tensor& lengths) {
  TESSERA_CHECK_AS(ShapeError, lengths.ndim() == 1 && is_integral(lengths.dtype()),
                   "offsets_of: lengths are {}; give one integer for each segment",
                   describe(lengths));
  Tensor parts[] = {zeros({1}, {.dtype = kI64, .device = lengths.device()}), cumsum(lengths, 0)};
  return cat(parts, 0);
}

Tensor segment_reduce(const Tensor& data, const Tensor& offsets, ScatterReduce how, int64_t dim) {
  int d = wrap_dim(dim, data.ndim(), "segment_reduce");
  TESSERA_CHECK_AS(ShapeError, is_integral(offsets.dtype()),
                   "segment_reduce: offsets are {}; expected integers", describe(offsets));
  Tensor at = cast(offsets, kI64);
  if (how == ScatterReduce::kMean) {
    if (is_floating(data.dtype()) && size_of(data.dtype()) == 2)  // rounded to 16 bits once
      return cast(segment_reduce(cast(data, kF32), at, how, d), data.dtype());
    Tensor total = segment_reduce(data, at, ScatterReduce::kSum, d);
    Shape aligned = Dims::filled(data.ndim(), 1);
    aligned[d] = total.shape()[d];
    return total / cast(reshape(diff(at), aligned), data.dtype());
  }
  ReduceKind kind = how == ScatterReduce::kSum    ? ReduceKind::kSum
                    : how == ScatterReduce::kProd ? ReduceKind::kProd
                    : how == ScatterReduce::kAmax ? ReduceKind::kMax
                                                  : ReduceKind::kMin;
  return dispatch1(PrimRef(new Segment({d, kind})), operands(Tensor(data), std::move(at)));
}

void register_segment_ops(OpRegistry& registry) {
  for (ReduceKind k : {ReduceKind::kSum, ReduceKind::kProd, ReduceKind::kMax, ReduceKind::kMin})
    registry.add(Segment::kOps[int(k)].name, [k] {
      bool empty =
          k == ReduceKind::kSum || k == ReduceKind::kProd;  // extremes of nothing: infinite
      Tensor offsets =
          empty ? from_values<int64_t>({0, 2, 2, 5}, {4}) : from_values<int64_t>({0, 1, 2, 5}, {4});
      return std::vector<Sample>{
          {PrimRef(new Segment({0, k})), {sample_values({5, 3}, 0.5, 2, 1), offsets}},
          {PrimRef(new Segment({1, k})), {sample_values({2, 5, 3}, -1, 1, 2), offsets}}};
    });
}

}  // namespace tessera
