#include "core/ops/update.h"

#include <cmath>

#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/scalar_range.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

// An op whose operands are lists of tensors of any shapes: how it may be split is not a matter of
// loops.
Meta same(const Meta* m) { return Meta::contiguous(m->shape, m->dtype, m->device); }

class Adam final : public PrimitiveOf<Adam, AdamUpdate> {
 public:
  int64_t operand_count() const override { return 3 + 4 * int64_t(count); }
  static inline const OpInfo kOp{"adam", {OpKind::kOther, Precision::kAsGiven, 3}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    Metas out;
    for (int list : {0, 2, 3})
      for (int i = 0; i < count; ++i) out.push_back(same(in[size_t(3 + list * count + i)]));
    for (int i = 0; i < count; ++i)
      for (int list : {1, 2, 3}) {
        const Meta *p = in[size_t(3 + i)], *o = in[size_t(3 + list * count + i)];
        TESSERA_CHECK_AS(ShapeError, p->shape == o->shape && p->dtype == o->dtype,
                         "adam: parameter {} is {}{}, its {} is {}{}", i, name_of(p->dtype),
                         to_string(p->shape), list == 1 ? "gradient" : "moment", name_of(o->dtype),
                         to_string(o->shape));
      }
    return out;
  }
  bool differentiable() const override { return false; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    const Tensor &lr = in[0], &step = in[1], &scale = in[2];
    Tensors p2, m2, v2;
    for (int i = 0; i < count; ++i) {
      auto at = [&](int list) -> const Tensor& { return in[size_t(3 + list * count + i)]; };
      DType t = at(0).dtype();
      auto c = [&](const Tensor& x) { return cast(x, t); };
      Tensor p = at(0), g = at(1) * c(scale);
      if (!decoupled && weight_decay != 0) g = g + p * weight_decay;
      Tensor m = at(2) * beta1 + g * (1 - beta1), v = at(3) * beta2 + square(g) * (1 - beta2);
      Tensor c1 = c(1.0 - pow(full({}, beta1, {kF64}), step)),
             c2 = c(1.0 - pow(full({}, beta2, {kF64}), step));
      if (decoupled) p = p * c(1.0 - lr * weight_decay);
      p2.push_back(p - c(lr) / c1 * m / (sqrt(v) / sqrt(c2) + eps)), m2.push_back(m),
          v2.push_back(v);
    }
    for (Tensor& t : m2) p2.push_back(t);
    for (Tensor& t : v2) p2.push_back(t);
    for (int k = 0; if_finite && k < 3; ++k)
      for (int i = 0; i < count; ++i) {
        Tensor& t = p2[size_t(k * count + i)];
        t = where(isfinite(scale), t, in[size_t(3 + (k ? k + 1 : 0) * count + i)]);
      }
    return p2;
  }
};

class Sgd final : public PrimitiveOf<Sgd, SgdUpdate> {
 public:
  int64_t operand_count() const override { return 2 + (momentum != 0 ? 3 : 2) * int64_t(count); }
  static inline const OpInfo kOp{"sgd", {OpKind::kOther, Precision::kAsGiven, 2}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    Metas out;
    for (int i = 0; i < count; ++i) {
      const Meta *p = in[size_t(2 + i)], *g = in[size_t(2 + count + i)];
      TESSERA_CHECK_AS(ShapeError, p->shape == g->shape && p->dtype == g->dtype,
                       "sgd: parameter {} is {}{}, its gradient {}{}", i, name_of(p->dtype),
                       to_string(p->shape), name_of(g->dtype), to_string(g->shape));
      out.push_back(same(p));
    }
    for (int i = 0; momentum != 0 && i < count; ++i)
      out.push_back(same(in[size_t(2 + 2 * count + i)]));
    return out;
  }
  bool differentiable() const override { return false; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    Tensors params, buffers;
    for (int i = 0; i < count; ++i) {
      auto at = [&](int list) -> const Tensor& { return in[size_t(2 + list * count + i)]; };
      DType t = at(0).dtype();
      Tensor g = at(1) * cast(in[1], t);
      if (weight_decay != 0) g = g + at(0) * weight_decay;
      if (momentum != 0) {
        Tensor b = first ? g : at(2) * momentum + g * (1 - dampening);
        g = nesterov ? g + b * momentum : b;
        buffers.push_back(b);
      }
      params.push_back(at(0) - cast(in[0], t) * g);
    }
    for (Tensor& b : buffers) params.push_back(b);
    for (int k = 0; if_finite && k < (momentum != 0 ? 2 : 1); ++k)
      for (int i = 0; i < count; ++i) {
        Tensor& t = params[size_t(k * count + i)];
        t = where(isfinite(in[1]), t, in[size_t(2 + 2 * k * count + i)]);
      }
    return params;
  }
};

class GlobalNorm final : public Primitive {
 public:
  int64_t operand_count() const override { return kAnyNumber; }
  static inline const OpInfo kOp{"global_norm", {OpKind::kOther, Precision::kAsGiven, 1}};
  GlobalNorm() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override { return {Meta::contiguous({}, kF64, in[0]->device)}; }
  bool differentiable() const override { return false; }
};

// global_norm in two halves, between which the rows of a sharded tensor are gathered. x [R, ..] ->
// the sum of squares of each row, f64 [R].
class RowSquares final : public Primitive {
 public:
  static inline const OpInfo kOp{"row_squares", {OpKind::kOther, Precision::kAsGiven, 1}};
  RowSquares() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK_AS(ShapeError, in[0]->shape.size() > 0, "row_squares: {} has no rows",
                     describe(in));
    return {Meta::contiguous({in[0]->shape[0]}, kF64, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m;
    const Shape& s = in[0]->shape;
    for (int d = 0; d < s.size(); ++d) m.add(d == 0 ? Factor::kPass : Factor::kSum, s[d]);
    m.in.push_back(broadcast_loops(s, s));
    m.out.push_back({m.in[0][0]});
    return m;
  }
  bool differentiable() const override { return false; }
};

// Operands f64 [R_i], sums of squares of the rows of each tensor.
class NormOfRows final : public Primitive {
 public:
  int64_t operand_count() const override { return kAnyNumber; }
  static inline const OpInfo kOp{"norm_of_rows", {OpKind::kOther, Precision::kAsGiven, 1}};
  NormOfRows() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    for (const Meta* m : in)
      TESSERA_CHECK_AS(ShapeError, m->shape.size() == 1 && m->dtype == kF64,
                       "norm_of_rows: takes sums of squares, f64 [R], got {}", describe(in));
    return {Meta::contiguous({}, kF64, in[0]->device)};
  }
  bool differentiable() const override { return false; }
};

class MaxMagnitude final : public Primitive {
 public:
  int64_t operand_count() const override { return kAnyNumber; }
  static inline const OpInfo kOp{"max_magnitude", {OpKind::kOther, Precision::kAsGiven, 1}};
  MaxMagnitude() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override { return {Meta::contiguous({}, kF64, in[0]->device)}; }
  bool differentiable() const override { return false; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    std::vector<Tensor> largest;
    for (const Tensor& t : in)
      if (t.numel() > 0) largest.push_back(cast(amax(abs(t)), kF64));
    if (largest.empty()) return {scalar_tensor(0.0, kF64, in[0].device())};
    return {amax(stack(largest))};
  }
};

void check_kept(const char* op, DType result, const Tensor& dst) {
  TESSERA_CHECK(can_cast(result, dst.dtype()),
                "{}_: the result is {}, which {} cannot hold; write out of place", op,
                name_of(result), describe(dst));
}
void refuse_bool(const char* op, const Tensor& dst, DType operand) {
  TESSERA_CHECK(dst.dtype() != kBool && operand != kBool,
                "{}: bool has no such operation; cast it to an integer or use the logical ops", op);
}
DType quotient_type(DType t) { return is_floating(t) ? t : context().default_dtype; }
Tensor number_for(const Tensor& dst, Scalar value) {
  return number_beside(dst, value, dst.dtype());
}

// dst op= src, in place where the kernel may write into its own operand.
void update(const Tensor& dst, const char* op, Tensor src, DType result) {
  check_kept(op, result, dst);
  assign({&dst, 1}, pointwise_primitive(op),
         operands(Tensor(dst), cast(std::move(src), dst.dtype())));
}
Tensor or_one(const Tensor& scale, Device device) {
  return scale.defined() ? scale : scalar_tensor(1.0, kF64, device);
}

void check_lists(const char* op, std::span<const Tensor> params,
                 std::initializer_list<std::span<const Tensor>> others) {
  for (auto& list : others)
    TESSERA_CHECK(list.size() == params.size(), "{}: {} parameters, but a list of {}", op,
                  params.size(), list.size());
}

}  // namespace

void assign_(const Tensor& dst, const Tensor& src) {
  if (src.device() != dst.device() && !src.device().is_meta() && !dst.device().is_meta())
    return assign_(dst, src.to(dst.device()));
  Tensor value = cast(src.shape() == dst.shape() ? src : expand(src, dst.shape()), dst.dtype());
  // A number is the same on every rank, however its elements are placed.
  Scoped<bool> number(context().replicate_plain, context().replicate_plain || src.ndim() == 0);
  assign({&dst, 1}, copy_primitive(), operands(std::move(value)));
}

void add_(const Tensor& dst, const Tensor& src) { update(dst, "add", src, result_type(dst, src)); }
void sub_(const Tensor& dst, const Tensor& src) {
  refuse_bool("sub_", dst, src.dtype());
  update(dst, "sub", src, result_type(dst, src));
}
void mul_(const Tensor& dst, const Tensor& src) { update(dst, "mul", src, result_type(dst, src)); }
void div_(const Tensor& dst, const Tensor& src) {
  update(dst, "div", src, quotient_type(result_type(dst, src)));
}
void add_(const Tensor& dst, Scalar value) {
  update(dst, "add", number_for(dst, value), result_type(dst, value));
}
void sub_(const Tensor& dst, Scalar value) {
  refuse_bool("sub_", dst, value.kind());
  update(dst, "sub", number_for(dst, value), result_type(dst, value));
}
void mul_(const Tensor& dst, Scalar factor) {
  update(dst, "mul", number_for(dst, factor), result_type(dst, factor));
}
void div_(const Tensor& dst, Scalar divisor) {
  update(dst, "div", number_for(dst, divisor), quotient_type(result_type(dst, divisor)));
}
void clamp_(const Tensor& dst, Scalar low, Scalar high) {
  bring_up_to_date({&dst, 1});
  // Backward reads what was clamped.
  const bool recorded = dst.layers() & context().enabled & bit(Layer::kAutograd);
  const Tensor value = clamp(recorded ? clone(dst) : dst, low, high);
  check_kept("clamp", value.dtype(), dst);
  assign_(dst, value);
}
void fill_(const Tensor& dst, Scalar value) {
  check_holds("fill_", dst.dtype(), value);
  assign_(dst, scalar_tensor(value, dst.dtype(), dst.device()));
}
void zero_(const Tensor& dst) { fill_(dst, 0); }

void adam_update_(std::span<const Tensor> params, std::span<const Tensor> grads,
                  std::span<const Tensor> m, std::span<const Tensor> v, const Tensor& lr,
                  const Tensor& step, const Tensor& scale, AdamUpdate o) {
  check_lists("adam", params, {grads, m, v});
  if (params.empty()) return;
  std::vector<Tensor> in{lr, step, or_one(scale, params[0].device())}, dst;
  for (auto& list : {params, grads, m, v}) in.insert(in.end(), list.begin(), list.end());
  for (auto& list : {params, m, v}) dst.insert(dst.end(), list.begin(), list.end());
  o.count = int(params.size());
  assign(dst, PrimRef(new Adam(o)), in);
}

void sgd_update_(std::span<const Tensor> params, std::span<const Tensor> grads,
                 std::span<const Tensor> buffers, const Tensor& lr, const Tensor& scale,
                 SgdUpdate o) {
  check_lists("sgd", params, {grads});
  if (o.momentum != 0) check_lists("sgd", params, {buffers});
  if (params.empty()) return;
  std::vector<Tensor> in{lr, or_one(scale, params[0].device())}, dst(params.begin(), params.end());
  in.insert(in.end(), params.begin(), params.end());
  in.insert(in.end(), grads.begin(), grads.end());
  if (o.momentum != 0) {
    in.insert(in.end(), buffers.begin(), buffers.end());
    dst.insert(dst.end(), buffers.begin(), buffers.end());
  }
  o.count = int(params.size());
  assign(dst, PrimRef(new Sgd(o)), in);
}

Tensor global_norm(std::span<const Tensor> tensors) {
  if (tensors.empty()) return scalar_tensor(0.0, kF64);
  static const PrimRef prim(new GlobalNorm);
  std::vector<Tensor> in(tensors.begin(), tensors.end());
  return dispatch1(prim, in);
}

Tensor row_squares(const Tensor& x) {
  static const PrimRef prim(new RowSquares);
  return dispatch1(prim, operands(x.ndim() ? Tensor(x) : reshape(x, {1})));
}

Tensor norm_of_rows(std::span<const Tensor> rows) {
  if (rows.empty()) return scalar_tensor(0.0, kF64);
  static const PrimRef prim(new NormOfRows);
  std::vector<Tensor> in(rows.begin(), rows.end());
  return dispatch1(prim, in);
}

Tensor max_magnitude(std::span<const Tensor> tensors) {
  if (tensors.empty()) return scalar_tensor(0.0, kF64);
  static const PrimRef prim(new MaxMagnitude);
  std::vector<Tensor> in;
  for (const Tensor& t : tensors)  // kernels take f32 and f64
    in.push_back(size_of(t.dtype()) < 4 ? cast(t, kF32) : t);
  return dispatch1(prim, in);
}

void register_update_ops(OpRegistry& registry) {
  auto number = [](double v) { return scalar_tensor(v, kF64); };
  auto list = [](uint64_t key, double low) { return sample_values({3, 4}, low, 1, key); };
  registry.add("adam", [=] {
    std::vector<Sample> s;
    auto add = [&](AdamUpdate o, double scale) {
      o.weight_decay = 0.1, o.count = 2;
      s.push_back({PrimRef(new Adam(o)),
                   {number(0.1), number(3), number(scale), list(1, -1), list(2, -1), list(3, -1),
                    list(4, -1), list(5, -1), list(6, -1), list(7, 0), list(8, 0)},
                   false});
    };
    for (bool decoupled : {false, true}) add({.decoupled = decoupled}, 0.5);
    for (double scale : {0.5, double(NAN)}) add({.if_finite = true}, scale);
    return s;
  });
  registry.add("sgd", [=] {
    return std::vector<Sample>{
        {PrimRef(new Sgd({.momentum = 0.9, .weight_decay = 0.1, .nesterov = true, .count = 2})),
         {number(0.1), number(0.5), list(1, -1), list(2, -1), list(3, -1), list(4, -1), list(5, -1),
          list(6, -1)},
         false},
        {PrimRef(new Sgd({.first = true, .count = 1})),
         {number(0.1), number(1), list(1, -1), list(2, -1)},
         false},
        {PrimRef(new Sgd({.momentum = 0.9, .if_finite = true, .count = 1})),
         {number(0.1), number(INFINITY), list(1, -1), list(2, -1), list(3, -1)},
         false}};
  });
  registry.add("global_norm", [=] {
    return std::vector<Sample>{{PrimRef(new GlobalNorm), {list(1, -1), list(2, -1)}, false}};
  });
  registry.add("max_magnitude", [=] {
    return std::vector<Sample>{{PrimRef(new MaxMagnitude), {list(1, -1), list(2, -1)}, false}};
  });
  registry.add("row_squares", [=] {
    return std::vector<Sample>{{PrimRef(new RowSquares), {list(1, -1)}, false}};
  });
  registry.add("norm_of_rows", [=] {
    return std::vector<Sample>{{PrimRef(new NormOfRows),
                                {sample_values({4}, 0, 1, 1), sample_values({3}, 0, 1, 2)},
                                false}};
  });
}

}  // namespace tessera
