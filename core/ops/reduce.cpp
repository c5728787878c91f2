#include "core/ops/reduce.h"

#include <cmath>
#include <limits>

#include "core/dispatch/context.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/precision.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce_attributes.h"
#include "core/ops/samples.h"
#include "core/ops/scan.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/wrapped.h"

namespace tessera {
namespace {

const char* reduce_name(ReduceKind k) {
  constexpr const char* names[] = {"sum", "prod", "amax", "amin", "any", "all"};
  return names[int(k)];
}

// Floats as wide as sums are kept; what is derived from a sum is rounded to 16 bits once, at the
// end.
Tensor wide_float(const Tensor& x, const char* op) {
  TESSERA_CHECK(is_floating(x.dtype()), "{}: {} does not hold floats; cast it first", op,
                describe(x));
  return size_of(x.dtype()) == 2 ? cast(x, kF32) : x;
}

Tensor as_float(Tensor x) {
  return is_floating(x.dtype()) ? x : cast(std::move(x), context().default_dtype);
}

// Element i is the product of those before it along `dim`.
Tensor products_before(const Tensor& x, int dim) {
  Shape one = x.shape();
  one[dim] = 1;
  Tensor parts[] = {expand(scalar_tensor(1.0, x.dtype(), x.device()), one),
                    narrow(cumprod(x, dim), dim, 0, x.size(dim) - 1)};
  return cat(parts, dim);
}

class Reduce final : public PrimitiveOf<Reduce, ReduceAttributes> {
 public:
  static inline const OpInfo kOps[] = {{"sum", {OpKind::kReduce, Precision::kWide, 1}},
                                       {"prod", {OpKind::kReduce, Precision::kWide, 1}},
                                       {"amax", {OpKind::kReduce, Precision::kAsGiven, 1}},
                                       {"amin", {OpKind::kReduce, Precision::kAsGiven, 1}},
                                       {"any", {OpKind::kReduce, Precision::kAsGiven, 1}},
                                       {"all", {OpKind::kReduce, Precision::kAsGiven, 1}}};
  explicit Reduce(const ReduceAttributes& a) : PrimitiveOf(kOps[int(a.kind)], a) {}
  Metas infer(MetaSpan in) const override {
    Shape s;
    int64_t n = 1;
    for (int d = 0; d < in[0]->shape.size(); ++d) {
      if (!(mask >> d & 1))
        s.push_back(in[0]->shape[d]);
      else if (n *= in[0]->shape[d]; keepdim)
        s.push_back(1);
    }
    TESSERA_CHECK_AS(ShapeError, n > 0 || (kind != ReduceKind::kMax && kind != ReduceKind::kMin),
                     "{}: {} has no elements to choose from", name(), describe(in));
    DType t = in[0]->dtype;
    if (kind == ReduceKind::kAny || kind == ReduceKind::kAll)
      t = t == kU8 ? kU8 : kBool;  // u8 was PyTorch's bool once
    else if (kind <= ReduceKind::kProd && is_integral(t))
      t = kI64;
    return {Meta::contiguous(s, t, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape& s = in[0]->shape;
    AxisMap m;
    Factor::Kind reduced = kind == ReduceKind::kSum   ? Factor::kSum
                           : kind == ReduceKind::kMax ? Factor::kMax
                                                      : Factor::kWhole;
    for (int d = 0; d < s.size(); ++d) m.add(mask >> d & 1 ? reduced : Factor::kPass, s[d]);
    m.in.push_back(broadcast_loops(s, s));
    OperandLoops out;
    for (int d = 0; d < s.size(); ++d) {
      if (!(mask >> d & 1))
        out.push_back(m.in[0][size_t(d)]);
      else if (keepdim)
        out.push_back({});
    }
    m.out.push_back(out);
    m.jointly_linear = kind == ReduceKind::kSum;
    return m;
  }
  SaveMask saved() const override {
    if (kind == ReduceKind::kMax || kind == ReduceKind::kMin || kind == ReduceKind::kProd)
      return {1, 1};
    return {};
  }
  bool differentiable() const override { return kind <= ReduceKind::kMin; }
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor& x = v.in[0];
    if (kind == ReduceKind::kSum) return {expand_like(with_dims(v.cot[0], x), x)};
    if (kind == ReduceKind::kProd)
      return {expand_like(with_dims(v.cot[0], x), x) * product_of_others(x)};
    TESSERA_ASSERT(differentiable(), "{}: vjp", name());
    Tensor chosen = cast(eq(x, with_dims(v.out[0], x)), x.dtype());
    Tensor share = v.cot[0] / sum(chosen, dims(x), keepdim);
    return {chosen * with_dims(share, x)};
  }

 private:
  Dims dims(const Tensor& x) const {
    Dims d;
    for (int i = 0; i < x.ndim(); ++i)
      if (mask >> i & 1) d.push_back(i);
    return d;
  }
  // `t`, a result, with the reduced dims put back as extent 1.
  Tensor with_dims(const Tensor& t, const Tensor& x) const {
    if (keepdim) return t;
    Shape s = x.shape();
    for (int d = 0; d < s.size(); ++d)
      if (mask >> d & 1) s[d] = 1;
    return reshape(t, s);
  }
  // For each element, the product of the others: running products from both sides, so that no zero
  // is divided by.
  Tensor product_of_others(const Tensor& x) const {
    Dims order, back = Dims::filled(x.ndim(), 0);
    int64_t n = 1;
    for (int d = 0; d < x.ndim(); ++d)
      if (!(mask >> d & 1)) order.push_back(d);
    Shape kept;
    for (int64_t d : order) kept.push_back(x.shape()[int(d)]);
    for (int d = 0; d < x.ndim(); ++d)
      if (mask >> d & 1) order.push_back(d), n *= x.shape()[d];
    for (int i = 0; i < order.size(); ++i) back[int(order[i])] = i;
    Tensor p = permute(x, order);
    Shape permuted = p.shape();
    kept.push_back(n);
    int last = kept.size() - 1;
    if (x.numel() == 0) return x;
    p = wide_float(reshape(p, kept), "prod");
    Tensor others = products_before(p, last) * flip(products_before(flip(p, {last}), last), {last});
    return permute(reshape(cast(std::move(others), x.dtype()), permuted), back);
  }
};

uint32_t mask_of(const Tensor& x, const Dims& dims, const char* op) {
  if (dims.empty()) return (1u << x.ndim()) - 1;
  uint32_t mask = 0;
  for (int64_t d : dims) {
    int i = wrap_dim(d, x.ndim(), op);
    TESSERA_CHECK_AS(ShapeError, !(mask >> i & 1), "{}: dim {} is named twice in {}", op, i,
                     to_string(dims));
    if (x.ndim()) mask |= 1u << i;
  }
  return mask;
}

Tensor reduce(ReduceKind kind, const Tensor& x, const Dims& dims, bool keepdim) {
  return dispatch1(PrimRef(new Reduce({kind, mask_of(x, dims, reduce_name(kind)), keepdim})),
                   operands(Tensor(x)));
}

// any and all: 0 or 1, also for an empty reduction or a u8, which would otherwise pass through.
Tensor truth(ReduceKind kind, const Tensor& x, const Dims& dims, bool keepdim) {
  if (x.dtype() != kU8) return reduce(kind, x, dims, keepdim);
  return cast(reduce(kind, ne(x, 0), dims, keepdim), kU8);
}

int64_t reduced_count(const Tensor& x, const Dims& dims, const char* op) {
  int64_t n = 1;
  uint32_t mask = mask_of(x, dims, op);
  for (int d = 0; d < x.ndim(); ++d)
    if (mask >> d & 1) n *= x.shape()[d];
  return n;
}

// s^e for s >= 0 and 0 < e < 1, whose derivative at 0, infinite, is taken as 0.
Tensor root(const Tensor& s, double e) {
  if (!asks_at_any_level(s, context().enabled & bit(Layer::kAutograd)))
    return e == 0.5 ? sqrt(s) : pow(s, e);
  Tensor none = eq(s.detach(), 0), one = number_beside(s, 1.0, s.dtype());
  Tensor safe = where(none, one, s);
  return where(none, number_beside(s, 0.0, s.dtype()), e == 0.5 ? sqrt(safe) : pow(safe, e));
}

class ExpandLike final : public Primitive {
 public:
  static inline const OpInfo kOp{
      "expand_like",
      {.kind = OpKind::kView, .precision = Precision::kAsGiven, .operands = 2, .shows_all = true}};
  ExpandLike() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK_AS(ShapeError,
                     broadcast(in[0]->shape, in[1]->shape, "expand_like") == in[1]->shape,
                     "expand_like: {} does not expand", describe(in));
    return {Meta::contiguous(in[1]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = pointwise_axes(in, in[1]->shape);
    m.linear_in = 1;
    m.shape_only = 2;
    return m;
  }
  Tensors vjp(const VjpArgs& v) const override {
    return {sum_to(v.cot[0], v.in[0].shape()), Tensor()};
  }
  Tensors view(std::span<const Tensor> in) const override {
    const Shape& to = in[1].shape();
    return {Tensor(
        {to, broadcast_strides(in[0].shape(), in[0].strides(), to), in[0].dtype(), in[0].device()},
        in[0].storage(), in[0].offset())};
  }
};

}  // namespace

std::string_view name_of(ReduceKind kind) { return Reduce::kOps[int(kind)].name; }

Tensor sum(const Tensor& x, const Dims& dims, bool keepdim) {
  return reduce(ReduceKind::kSum, x, dims, keepdim);
}
Tensor prod(const Tensor& x, const Dims& dims, bool keepdim) {
  return reduce(ReduceKind::kProd, x, dims, keepdim);
}
Tensor amax(const Tensor& x, const Dims& dims, bool keepdim) {
  return reduce(ReduceKind::kMax, x, dims, keepdim);
}
Tensor amin(const Tensor& x, const Dims& dims, bool keepdim) {
  return reduce(ReduceKind::kMin, x, dims, keepdim);
}
Tensor any(const Tensor& x, const Dims& dims, bool keepdim) {
  return truth(ReduceKind::kAny, x, dims, keepdim);
}
Tensor all(const Tensor& x, const Dims& dims, bool keepdim) {
  return truth(ReduceKind::kAll, x, dims, keepdim);
}

Tensor mean(const Tensor& x, const Dims& dims, bool keepdim) {
  const Tensor given = autocast_operand(Precision::kWide, x);
  Tensor total = sum(wide_float(given, "mean"), dims, keepdim);
  return cast(std::move(total) / double(reduced_count(x, dims, "mean")), given.dtype());
}

Tensor var(const Tensor& x, const Dims& dims, int64_t correction, bool keepdim) {
  const Tensor given = autocast_operand(Precision::kWide, x);
  Tensor f = wide_float(given, "var");
  double degrees = double(std::max<int64_t>(reduced_count(x, dims, "var") - correction, 0));
  return cast(sum(square(f - mean(f, dims, true)), dims, keepdim) / degrees, given.dtype());
}
Tensor stddev(const Tensor& x, const Dims& dims, int64_t correction, bool keepdim) {
  const Tensor given = autocast_operand(Precision::kWide, x);
  Tensor f = wide_float(given, "stddev");
  return cast(root(var(f, dims, correction, keepdim), 0.5), given.dtype());
}

Tensor logsumexp(const Tensor& x, const Dims& dims, bool keepdim) {
  const Tensor given = as_float(autocast_operand(Precision::kWide, x));
  const DType result = given.dtype();
  Tensor f = wide_float(given, "logsumexp");
  if (reduced_count(x, dims, "logsumexp") == 0)
    return cast(log(sum(f, dims, keepdim)), result);  // log 0
  Tensor top = amax(f.detach(), dims, true);
  top = where(isfinite(top), top, number_beside(f, 0.0, f.dtype()));
  Tensor s = cast(log(sum(exp(f - top), dims, true)) + top, result);
  return keepdim ? s : sum(s, dims, false);  // the reduced dims have extent 1: this only drops them
}

Tensor norm(const Tensor& x, double p, const Dims& dims, bool keepdim) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const Tensor given = as_float(autocast_operand(Precision::kWide, x));
  Tensor f = wide_float(given, "norm"), y;
  if (p == kInf)
    y = amax(abs(f), dims, keepdim);
  else if (p == -kInf)
    y = amin(abs(f), dims, keepdim);
  else if (p == 0)
    y = cast(sum(ne(f, 0), dims, keepdim), f.dtype());
  else if (p == 1)
    y = sum(abs(f), dims, keepdim);
  else if (p == 2)
    y = root(sum(square(f), dims, keepdim), 0.5);
  else
    y = root(sum(p > 0 && p < 1 ? root(abs(f), p) : pow(abs(f), p), dims, keepdim), 1 / p);
  return cast(std::move(y), given.dtype());
}

Tensor expand_like(const Tensor& x, const Tensor& like) {
  if (bypasses_layers(x) && bypasses_layers(like)) return expand(x, like.shape());
  static const PrimRef prim(new ExpandLike);
  return dispatch1(prim, operands(Tensor(x), Tensor(like)));
}

Tensor sum_to(Tensor g, const Shape& to) {
  if (g.shape() == to) return g;
  Dims dims;
  int lead = g.ndim() - to.size();
  for (int d = 0; d < g.ndim(); ++d)
    if (d < lead || (to[d - lead] == 1 && g.shape()[d] != 1)) dims.push_back(d);
  return reshape(dims.empty() ? g : sum(g, dims, true), to);
}

void register_reduce_ops(OpRegistry& registry) {
  for (int k = 0; k < 6; ++k)
    registry.add(reduce_name(ReduceKind(k)), [k] {
      auto kind = ReduceKind(k);
      bool smooth = kind <= ReduceKind::kMin;
      Tensor x = sample_values({2, 3, 4}, 0.5, 2, 1);
      if (!smooth) x = gt(x, 1.2);
      return std::vector<Sample>{
          {PrimRef(new Reduce({kind, 2, false})), {x}, smooth},
          {PrimRef(new Reduce({kind, 5, true})), {x}, smooth},
          {PrimRef(new Reduce({kind, 7, false})), {permute(x, {2, 0, 1})}, smooth}};
    });
  registry.add("expand_like", [] {
    return std::vector<Sample>{
        {PrimRef(new ExpandLike),
         {sample_values({3, 1}, -1, 1, 1), sample_values({2, 3, 4}, -1, 1, 2)}}};
  });
}

}  // namespace tessera
