// Softmax, log-softmax and cross-entropy. Each kernel works on the last dim; other dims are moved
// there first.
#include <algorithm>

#include "core/dispatch/context.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/fused_attributes.h"
#include "core/ops/indexing.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/wrapped.h"

namespace tessera {
namespace {

// The last dim is computed as a whole; every operand has the shape of the result.
AxisMap whole_last_axes(MetaSpan in) {
  AxisMap m = pointwise_axes(in, in[0]->shape);
  m.factors.back().kind = Factor::kWhole;
  return m;
}
Metas like_first(MetaSpan in) {
  return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
}

// softmax_grad(y, g) = y (g - sum(g y)); log_softmax_grad(y, g) = g - exp(y) sum(g).
class SoftmaxGrad final : public Primitive {
 public:
  static inline const OpInfo kPlain{"softmax_grad", {OpKind::kOther, Precision::kAsGiven, 2}},
      kLog{"log_softmax_grad", {OpKind::kOther, Precision::kAsGiven, 2}};
  explicit SoftmaxGrad(bool log) : Primitive(log ? kLog : kPlain), log_(log) {}
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK_AS(ShapeError, in[0]->shape == in[1]->shape && in[0]->dtype == in[1]->dtype,
                     "{}: takes a result and its cotangent, got {}", name(), describe(in));
    return like_first(in);
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = whole_last_axes(in);
    m.linear_in = 2;
    return m;
  }
  SaveMask saved() const override { return {3, 0}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    const Tensor &y = in[0], &g = in[1];
    if (log_) return {g - exp(y) * sum(g, {-1}, true)};
    return {y * (g - sum(g * y, {-1}, true))};
  }
  Tensors vjp(const VjpArgs& v) const override { return vjp_by_decomposition(*this, v); }

 private:
  bool log_;
};

class Softmax final : public Primitive {
 public:
  static inline const OpInfo kPlain{"softmax", {OpKind::kOther, Precision::kWide, 1}},
      kLog{"log_softmax", {OpKind::kOther, Precision::kWide, 1}};
  explicit Softmax(bool log) : Primitive(log ? kLog : kPlain), log_(log) {}
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK_AS(ShapeError, in[0]->shape.size() > 0 && is_floating(in[0]->dtype),
                     "{}: takes floats with at least one dim, got {}", name(), describe(in));
    return like_first(in);
  }
  AxisMap axes(MetaSpan in) const override { return whole_last_axes(in); }
  SaveMask saved() const override { return {0, 1}; }
  Tensors vjp(const VjpArgs& v) const override {
    static const PrimRef grads[] = {PrimRef(new SoftmaxGrad(false)),
                                    PrimRef(new SoftmaxGrad(true))};
    return {dispatch1(grads[log_], operands(Tensor(v.out[0]), Tensor(v.cot[0])))};
  }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    Tensor shifted = in[0] - amax(in[0], {-1}, true);
    if (log_) return {shifted - log(sum(exp(shifted), {-1}, true))};
    Tensor e = exp(shifted);
    return {e / sum(e, {-1}, true)};
  }

 private:
  bool log_;
};

Tensor over_dim(const char* op, const PrimRef& prim, const Tensor& x, int64_t dim) {
  int d = wrap_dim(dim, x.ndim(), op);
  if (x.ndim() == 0) return reshape(over_dim(op, prim, reshape(x, {1}), 0), {});
  Tensor f = is_floating(x.dtype()) ? x : cast(x, context().default_dtype);
  if (d == x.ndim() - 1) return dispatch1(prim, operands(std::move(f)));
  return transpose(dispatch1(prim, operands(transpose(f, d, -1))), d, -1);
}

// Bool [.., V]: where the class is the target.
Tensor one_hot_mask(const Tensor& targets, int64_t classes) {
  return eq(unsqueeze(targets, -1), arange(0, classes, 1, {kI64, targets.device()}));
}

// The gradient is formed in the forward pass, while the row's exponentials are at hand: logits need
// not be saved, and backward only multiplies by the cotangent of the loss.
class CrossEntropy final : public PrimitiveOf<CrossEntropy, CrossEntropyAttributes> {
 public:
  static inline const OpInfo kOp{"cross_entropy", {OpKind::kOther, Precision::kWide, 2}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    const Shape &x = in[0]->shape, &t = in[1]->shape;
    TESSERA_CHECK_AS(ShapeError,
                     x.size() == 2 && t.size() == 1 && x[0] == t[0] && is_floating(in[0]->dtype) &&
                         in[1]->dtype == kI64,
                     "cross_entropy: takes float logits [N, V] and i64 targets [N], got {}",
                     describe(in));
    DType sum_type = in[0]->dtype == kF64 ? kF64 : kF32;
    Metas out{Meta::contiguous({}, sum_type, in[0]->device)};
    if (with_grad) out.push_back(Meta::contiguous(x, in[0]->dtype, in[0]->device));
    return out;
  }
  SaveMask saved() const override { return {2, with_grad ? 2u : 0u}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    int64_t classes = in[0].size(-1);
    DType t = in[0].dtype() == kF64 ? kF64 : kF32;
    Tensor x = cast(in[0], t), hot = one_hot_mask(in[1], classes),
           counted = unsqueeze(ne(in[1], ignore_index), 1);
    Tensor scale = mean ? 1.0 / sum(cast(counted, t)) : number_beside(x, 1.0, t),
           zero = number_beside(x, 0.0, t);
    Tensor logp = log_softmax(x);
    Tensors out{-sum(where(logical_and(hot, counted), logp, zero)) * scale};
    if (with_grad)
      out.push_back(cast(where(counted, (exp(logp) - cast(hot, t)) * scale, zero), in[0].dtype()));
    return out;
  }
  Tensors vjp(const VjpArgs& v) const override {
    TESSERA_CHECK(with_grad, "cross_entropy: was computed without its gradient");
    if (!v.cot[1].defined()) {
      DType t = v.out[1].dtype();
      return {std::move(v.out[1]) * cast(v.cot[0], t), Tensor()};
    }
    Tensor g = second_order(v);
    if (v.cot[0].defined()) g = g + v.out[1] * cast(v.cot[0], v.out[1].dtype());
    return {g, Tensor()};
  }

 private:
  // With rows d = s (p - hot), the Jacobian's product with c is s (p c - p sum(p c)).
  Tensor second_order(const VjpArgs& v) const {
    DType t = v.out[1].dtype();
    Tensor counted = cast(ne(v.in[1], ignore_index), t);
    Tensor scale = unsqueeze(mean ? counted / sum(counted) : counted, 1);
    Tensor counts = gt(scale, 0), safe = where(counts, scale, number_beside(scale, 1.0, t));
    Tensor p = where(counts, v.out[1] / safe, number_beside(scale, 0.0, t)) +
               cast(one_hot_mask(v.in[1], v.in[0].size(-1)), t);
    Tensor pc = p * v.cot[1];
    return scale * (pc - p * sum(pc, {-1}, true));
  }
};

// Smoothing, class weights and unreduced losses, in ordinary ops.
Tensor general_cross_entropy(const Tensor& logits, const Tensor& targets,
                             const CrossEntropyOptions& o) {
  int64_t classes = logits.size(-1);
  Tensor logp = log_softmax(logits), zero = number_beside(logp, 0.0, logp.dtype());
  Tensor counted = ne(targets, o.ignore_index);
  // What does not count is read at class 0; gather refuses classes that do not exist.
  Tensor at = unsqueeze(where(counted, targets, number_beside(targets, 0, kI64)), -1);
  auto pick = [&](const Tensor& of_classes) {
    return where(counted, squeeze(gather(of_classes, -1, at), -1), zero);
  };
  Tensor per_class =
      o.weight.defined() ? cast(o.weight, logp.dtype()) : number_beside(logp, 1.0, logp.dtype());
  Tensor weighted = logp * per_class;
  Tensor loss = -pick(weighted), row_weight = pick(expand(per_class, logp.shape()));
  if (o.label_smoothing > 0) {
    Tensor uniform = -sum(weighted, {-1}) / double(classes);
    loss = loss * (1 - o.label_smoothing) + where(counted, uniform, zero) * o.label_smoothing;
  }
  if (o.reduction == Reduction::kNone) return loss;
  return o.reduction == Reduction::kSum ? sum(loss) : sum(loss) / sum(row_weight);
}

// Targets that are distributions over the classes: every row counts, weights do not enter the mean.
Tensor probability_cross_entropy(const Tensor& logits, const Tensor& targets,
                                 const CrossEntropyOptions& o) {
  TESSERA_CHECK(o.ignore_index < 0,
                "cross_entropy: ignore_index {} with probabilities; leave such rows out",
                o.ignore_index);
  DType wide = logits.dtype() == kF64 ? kF64 : kF32;
  double classes = double(logits.size(-1));
  Tensor p = cast(targets, wide);
  if (o.label_smoothing != 0) p = p * (1 - o.label_smoothing) + o.label_smoothing / classes;
  if (o.weight.defined()) p = p * cast(o.weight, wide);
  Tensor loss = -sum(log_softmax(cast(logits, wide)) * p, {-1});
  if (o.reduction == Reduction::kMean) loss = sum(loss) / double(loss.numel());
  if (o.reduction == Reduction::kSum) loss = sum(loss);
  return cast(std::move(loss), logits.dtype());
}

}  // namespace

Tensor softmax(const Tensor& x, int64_t dim) {
  static const PrimRef prim(new Softmax(false));
  return over_dim("softmax", prim, x, dim);
}
Tensor log_softmax(const Tensor& x, int64_t dim) {
  static const PrimRef prim(new Softmax(true));
  return over_dim("log_softmax", prim, x, dim);
}

Tensor classes_last(const char* op, const Tensor& x, std::optional<int64_t> dim) {
  const int at = wrap_dim(dim.value_or(x.ndim() > 2 ? 1 : -1), x.ndim(), op);
  return at >= x.ndim() - 1 ? x : movedim(x, {at}, {-1});
}

Tensor cross_entropy(const Tensor& given, const Tensor& targets, const CrossEntropyOptions& o) {
  const Tensor logits = classes_last("cross_entropy", given, o.dim);
  TESSERA_CHECK(o.label_smoothing >= 0 && o.label_smoothing <= 1,
                "cross_entropy: label_smoothing {}; expected 0 to 1", o.label_smoothing);
  TESSERA_CHECK_AS(
      ShapeError,
      !o.weight.defined() || (logits.ndim() > 0 && o.weight.shape() == Shape{logits.size(-1)}),
      "cross_entropy: the weight is {}, the logits {}; it takes one for each class",
      describe(o.weight), describe(given));
  if (is_floating(targets.dtype()) && is_floating(logits.dtype())) {
    TESSERA_CHECK_AS(ShapeError, given.ndim() > 0 && given.shape() == targets.shape(),
                     "cross_entropy: takes logits and probabilities of the same shape (or integer "
                     "targets without the dim of the classes), got {} and {}",
                     describe(given), describe(targets));
    return probability_cross_entropy(logits, classes_last("cross_entropy", targets, o.dim), o);
  }
  TESSERA_CHECK_AS(
      ShapeError,
      logits.ndim() == targets.ndim() + 1 &&
          std::equal(targets.shape().begin(), targets.shape().end(), logits.shape().begin()),
      "cross_entropy: takes logits [N, V, ..] and targets [N, ..], got {} and {}; classes are in "
      "dim 1 (of one dim or two: the last), or where .dim says: -1 for [B, T, V]",
      describe(given), describe(targets));
  TESSERA_CHECK(is_floating(logits.dtype()) && is_integral(targets.dtype()),
                "cross_entropy: takes float logits and integer targets, got {} and {}; cast them "
                "first",
                describe(given), describe(targets));
  Tensor t = cast(targets, kI64);
  if (o.label_smoothing != 0 || o.weight.defined() || o.reduction == Reduction::kNone)
    return general_cross_entropy(logits, t, o);
  int64_t classes = logits.size(-1);
  bool with_grad = asks_at_any_level(logits, context().enabled & bit(Layer::kAutograd));
  PrimRef prim(new CrossEntropy({o.ignore_index, o.reduction == Reduction::kMean, with_grad}));
  return dispatch1(prim, operands(reshape(logits, {t.numel(), classes}), reshape(t, {t.numel()})));
}

void register_softmax_ops(OpRegistry& registry) {
  for (bool log : {false, true}) {
    registry.add(log ? "log_softmax" : "softmax", [log] {
      return std::vector<Sample>{
          {PrimRef(new Softmax(log)), {sample_values({3, 5}, -2, 2, 1)}},
          {PrimRef(new Softmax(log)), {sample_values({2, 2, 37}, -2, 2, 2)}}};
    });
    registry.add(log ? "log_softmax_grad" : "softmax_grad", [log] {
      Tensor y = log ? log_softmax(sample_values({3, 5}, -1, 1, 1))
                     : softmax(sample_values({3, 5}, -1, 1, 1));
      return std::vector<Sample>{
          {PrimRef(new SoftmaxGrad(log)), {y, sample_values({3, 5}, -1, 1, 2)}}};
    });
  }
  registry.add("cross_entropy", [] {
    Tensor x = sample_values({4, 5}, -2, 2, 1), t = from_values<int64_t>({1, 4, -100, 0}, {4});
    std::vector<Sample> s;
    for (bool mean : {false, true})
      for (bool grad : {false, true})
        s.push_back({PrimRef(new CrossEntropy({-100, mean, grad})), {x, t}, grad});
    return s;
  });
}

}  // namespace tessera
