// The rows of the pointwise ops: their traits, what vjp reads, how the derivative is formed, how
// promotion works, where to sample. Broadcasting is handled once, in Pointwise: a row's derivative
// is written as if all operands had the result's shape.
#include "core/ops/pointwise.h"

#include <cmath>
#include <unordered_map>

#include "core/dispatch/context.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/scalar_range.h"
#include "core/ops/views.h"
#include "core/tensor/wrapped.h"

namespace tessera {
namespace {

using Vjp = Tensors (*)(const VjpArgs&);

// Operands: made floats | any | integers only | any, and the result is bool.
enum class Kind : uint8_t { kFloat, kAny, kBits, kBool };

// Where samples are drawn: away from kinks, poles and the ends of domains.
struct Domain {
  double low = -2, high = 2;
  double low2 = -2, high2 = 2;  // of the operands after the first
};

struct Row {
  OpInfo op;
  Kind kind;
  SaveMask saved = {};
  Vjp vjp = nullptr;  // null: not differentiable
  Domain domain = {};
  uint32_t linear_in = 0;
  bool jointly_linear = false;
};

using V = const VjpArgs&;
constexpr SaveMask kNone{}, kX{1, 0}, kY{2, 0}, kXY{3, 0}, kXYZ{7, 0}, kOut{0, 1};
const Tensor& x(V v) { return v.in[0]; }
const Tensor& y(V v) { return v.in[1]; }
const Tensor& g(V v) { return v.cot[0]; }
const Tensor& out(V v) { return v.out[0]; }
const PrimRef& primitive(std::string_view name);
Tensor call(const PrimRef& p, Tensor a, Tensor b) {
  return dispatch1(p, operands(std::move(a), std::move(b)));
}
// `t` where `condition` holds, zero elsewhere.
Tensor keep(Tensor condition, Tensor t) {
  return where(std::move(condition), t, scalar_tensor(0.0, t.dtype(), t.device()));
}
// The cotangent of an operand of maximum or minimum: none where it `lost`, half where both are
// equal.
Tensor share(Tensor lost, V v) {
  return keep(logical_not(std::move(lost)), where(eq(x(v), y(v)), g(v) * 0.5, g(v)));
}
Tensors refuse(V) {
  throw NotDifferentiable("trigamma: its derivative, polygamma(2), is not there");
}
Tensors zero(V) { return {Tensor()}; }  // piecewise constant: the derivative is zero

const double kLn2 = std::log(2.0), kLn10 = std::log(10.0);
const double kSqrt2OverPi = std::sqrt(2 / M_PI), kTwoOverSqrtPi = 2 / std::sqrt(M_PI);

// phi(x), the density of the standard normal distribution.
Tensor normal_density(const Tensor& t) { return exp(square(t) * -0.5) * (1 / std::sqrt(2 * M_PI)); }
// d/dx of gelu_tanh'(x), for its second derivative: u = sqrt(2/pi) (x + 0.044715 x^3), t = tanh(u).
Tensor gelu_tanh_second(const Tensor& x) {
  Tensor u1 = (square(x) * (3 * 0.044715) + 1.0) * kSqrt2OverPi,
         u2 = x * (6 * 0.044715 * kSqrt2OverPi);
  Tensor t = tanh((x * square(x) * 0.044715 + x) * kSqrt2OverPi), s = 1.0 - square(t);
  return s * u1 + x * s * (u2 * 0.5 - t * square(u1));
}

// Traits of ops of one, two and three operands: how autocast computes them, their cost, and what
// else holds.
using enum Precision;
constexpr OpTraits pointwise(int operands, Precision precision, int cost, OpTraits traits) {
  traits.kind = OpKind::kPointwise, traits.precision = precision;
  traits.operands = operands, traits.cost = cost;
  if (operands > 1) traits.promotion = Promotion::kAll;
  return traits;
}
constexpr OpTraits one(Precision p, int cost, OpTraits t = {}) { return pointwise(1, p, cost, t); }
constexpr OpTraits two(Precision p, int cost, OpTraits t = {}) { return pointwise(2, p, cost, t); }
constexpr OpTraits three(Precision p, int cost) { return pointwise(3, p, cost, {}); }

// One op a line.
// clang-format off
const Row kRows[] = {
    {{"exp", one(kWide, 12)}, Kind::kFloat, kOut, [](V v) -> Tensors { return {g(v) * out(v)}; }},
    {{"exp2", one(kWide, 12)}, Kind::kFloat, kOut, [](V v) -> Tensors { return {g(v) * out(v) * kLn2}; }},
    {{"expm1", one(kWide, 12)}, Kind::kFloat, kOut, [](V v) -> Tensors { return {g(v) * (out(v) + 1.0)}; }},
    {{"log", one(kWide, 12, {.keeps_nan = true})}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) / x(v)}; }, {0.3, 3}},
    {{"log2", one(kWide, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) / (x(v) * kLn2)}; }, {0.3, 3}},
    {{"log10", one(kWide, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) / (x(v) * kLn10)}; }, {0.3, 3}},
    {{"log1p", one(kWide, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) / (x(v) + 1.0)}; }, {-0.5, 3}},
    {{"sin", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * cos(x(v))}; }},
    {{"cos", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {-(g(v) * sin(x(v)))}; }},
    {{"tan", one(kWide, 12)}, Kind::kFloat, kOut, [](V v) -> Tensors { return {g(v) * (square(out(v)) + 1.0)}; }, {-1, 1}},
    {{"asin", one(kWide, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * rsqrt(1.0 - square(x(v)))}; }, {-0.8, 0.8}},
    {{"acos", one(kWide, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {-(g(v) * rsqrt(1.0 - square(x(v))))}; }, {-0.8, 0.8}},
    {{"atan", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) / (square(x(v)) + 1.0)}; }},
    {{"sinh", one(kWide, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * cosh(x(v))}; }},
    {{"cosh", one(kWide, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * sinh(x(v))}; }},
    {{"tanh", one(kAsGiven, 12)}, Kind::kFloat, kOut, [](V v) -> Tensors { return {call(primitive("tanh_grad"), g(v), out(v))}; }},
    {{"asinh", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * rsqrt(square(x(v)) + 1.0)}; }},
    {{"acosh", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * rsqrt(square(x(v)) - 1.0)}; }, {1.3, 3}},
    {{"atanh", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) / (1.0 - square(x(v)))}; }, {-0.8, 0.8}},
    {{"erf", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * exp(-square(x(v))) * kTwoOverSqrtPi}; }},
    {{"erfc", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * exp(-square(x(v))) * -kTwoOverSqrtPi}; }},
    {{"erfinv", one(kWide, 12)}, Kind::kFloat, kOut, [](V v) -> Tensors { return {g(v) * exp(square(out(v))) * (1 / kTwoOverSqrtPi)}; }, {-0.8, 0.8}},
    {{"lgamma", one(kWide, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * digamma(x(v))}; }, {0.3, 3}},
    {{"digamma", one(kWide, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * trigamma(x(v))}; }, {0.3, 3}},
    {{"trigamma", one(kWide, 12)}, Kind::kFloat, kNone, refuse, {0.3, 3}},
    {{"sqrt", one(kAsGiven, 4)}, Kind::kFloat, kOut, [](V v) -> Tensors { return {g(v) / (out(v) * 2.0)}; }, {0.3, 3}},
    {{"rsqrt", one(kWide, 12)}, Kind::kFloat, kOut, [](V v) -> Tensors { return {g(v) * out(v) * square(out(v)) * -0.5}; }, {0.3, 3}},
    {{"reciprocal", one(kWide, 4)}, Kind::kFloat, kOut, [](V v) -> Tensors { return {-(g(v) * square(out(v)))}; }, {0.3, 3}},
    {{"sigmoid", one(kAsGiven, 12)}, Kind::kFloat, kOut, [](V v) -> Tensors { return {call(primitive("sigmoid_grad"), g(v), out(v))}; }},
    {{"logsigmoid", one(kWide, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * sigmoid(-x(v))}; }},
    {{"softplus", one(kWide, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {g(v) * sigmoid(x(v))}; }},
    {{"silu", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { Tensor s = sigmoid(x(v)); return {g(v) * (s * (x(v) * (1.0 - s) + 1.0))}; }},
    {{"mish", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { Tensor t = tanh(softplus(x(v))); return {g(v) * (t + x(v) * sigmoid(x(v)) * (1.0 - square(t)))}; }},
    {{"gelu", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {call(primitive("gelu_grad"), g(v), x(v))}; }},
    {{"gelu_tanh", one(kAsGiven, 12)}, Kind::kFloat, kX, [](V v) -> Tensors { return {call(primitive("gelu_tanh_grad"), g(v), x(v))}; }},

    {{"neg", one(kAsGiven, 1, {.refuses_bool = true, .keeps_nan = true, .plain = true})}, Kind::kAny, kNone, [](V v) -> Tensors { return {-g(v)}; }, {}, 0, true},
    {{"abs", one(kAsGiven, 1, {.refuses_bool = true})}, Kind::kAny, kX, [](V v) -> Tensors { return {g(v) * sign(x(v))}; }, {0.3, 2}},
    {{"sign", one(kAsGiven, 1)}, Kind::kAny, kNone, zero, {0.3, 2}},
    {{"square", one(kAsGiven, 1, {.plain = true})}, Kind::kAny, kX, [](V v) -> Tensors { return {g(v) * x(v) * 2.0}; }},
    {{"relu", one(kAsGiven, 1)}, Kind::kAny, kOut, [](V v) -> Tensors { return {call(primitive("relu_grad"), g(v), out(v))}; }, {0.3, 2}},
    {{"floor", one(kAsGiven, 12, {.refuses_bool = true})}, Kind::kAny, kNone, zero, {0.1, 0.9}},
    {{"ceil", one(kAsGiven, 12, {.refuses_bool = true})}, Kind::kAny, kNone, zero, {0.1, 0.9}},
    {{"trunc", one(kAsGiven, 12, {.refuses_bool = true})}, Kind::kAny, kNone, zero, {0.1, 0.9}},
    {{"round", one(kAsGiven, 12, {.refuses_bool = true})}, Kind::kAny, kNone, zero, {0.1, 0.4}},
    {{"isnan", one(kAsGiven, 12)}, Kind::kBool}, {{"isinf", one(kAsGiven, 12)}, Kind::kBool}, {{"isfinite", one(kAsGiven, 12)}, Kind::kBool}, {{"logical_not", one(kAsGiven, 1)}, Kind::kBool},
    {{"bitwise_not", one(kAsGiven, 1)}, Kind::kBits},

    {{"add", two(kAsGiven, 1, {.keeps_nan = true, .plain = true})}, Kind::kAny, kNone, [](V v) -> Tensors { return {g(v), g(v)}; }, {}, 0, true},
    {{"sub", two(kAsGiven, 1, {.refuses_bool = true, .keeps_nan = true, .plain = true})}, Kind::kAny, kNone, [](V v) -> Tensors { return {g(v), v.wants(1) ? -g(v) : Tensor()}; }, {}, 0, true},
    {{"mul", two(kAsGiven, 1, {.keeps_nan = true, .plain = true})}, Kind::kAny, kXY, [](V v) -> Tensors { return {v.wants(0) ? g(v) * y(v) : Tensor(), v.wants(1) ? g(v) * x(v) : Tensor()}; }, {}, 3},
    {{"div", two(kAsGiven, 4, {.keeps_nan = true, .plain = true})}, Kind::kFloat, kXY, [](V v) -> Tensors { Tensor q = g(v) / y(v); return {q, v.wants(1) ? -(q * (x(v) / y(v))) : Tensor()}; }, {-2, 2, 0.5, 2}, 1},
    {{"floor_divide", two(kAsGiven, 12, {.refuses_bool = true, .may_trap = true})}, Kind::kAny, kNone, [](V) -> Tensors { return {Tensor(), Tensor()}; }, {0.1, 0.4, 0.5, 2}},
    {{"remainder", two(kAsGiven, 12, {.refuses_bool = true, .may_trap = true})}, Kind::kAny, kXY, [](V v) -> Tensors { return {g(v), v.wants(1) ? -(g(v) * floor(x(v) / y(v))) : Tensor()}; }, {1.1, 1.4, 0.6, 0.65}},
    {{"fmod", two(kAsGiven, 12, {.refuses_bool = true, .may_trap = true})}, Kind::kAny, kXY, [](V v) -> Tensors { return {g(v), v.wants(1) ? -(g(v) * trunc(x(v) / y(v))) : Tensor()}; }, {1.1, 1.4, 0.6, 0.65}},
    {{"pow", two(kWide, 12, {.refuses_bool = true})}, Kind::kAny, {3, 1}, [](V v) -> Tensors {
       Tensor zero = scalar_tensor(0.0, x(v).dtype(), x(v).device());
       Tensor dx = v.wants(0) ? where(eq(y(v), 0), zero, g(v) * y(v) * pow(x(v), y(v) - 1.0)) : Tensor();
       Tensor dy = v.wants(1) ? where(logical_and(eq(x(v), 0), ge(y(v), 0)), zero, g(v) * out(v) * log(x(v))) : Tensor();
       return {dx, dy}; }, {0.5, 2}},
    {{"maximum", two(kAsGiven, 1)}, Kind::kAny, kXY, [](V v) -> Tensors { return {share(lt(x(v), y(v)), v), share(gt(x(v), y(v)), v)}; }},
    {{"minimum", two(kAsGiven, 1)}, Kind::kAny, kXY, [](V v) -> Tensors { return {share(gt(x(v), y(v)), v), share(lt(x(v), y(v)), v)}; }},
    {{"atan2", two(kAsGiven, 12)}, Kind::kFloat, kXY, [](V v) -> Tensors {
       Tensor d = square(x(v)) + square(y(v)), s = g(v) / where(eq(d, 0), scalar_tensor(1.0, d.dtype(), d.device()), d);  // 0 at the origin
       return {s * y(v), -(s * x(v))}; }, {0.5, 2, 0.5, 2}},
    {{"leaky_relu", two(kAsGiven, 12)}, Kind::kFloat, kXY, [](V v) -> Tensors { Tensor p = gt(x(v), 0); return {where(p, g(v), g(v) * y(v)), keep(logical_not(p), g(v) * x(v))}; }, {0.3, 2}},
    {{"elu", two(kAsGiven, 12)}, Kind::kFloat, kXY, [](V v) -> Tensors { Tensor p = gt(x(v), 0); return {where(p, g(v), g(v) * y(v) * exp(x(v))), keep(logical_not(p), g(v) * expm1(x(v)))}; }, {-2, -0.3}},
    {{"tanh_grad", two(kAsGiven, 4)}, Kind::kFloat, kXY, [](V v) -> Tensors { return {call(primitive("tanh_grad"), g(v), y(v)), g(v) * x(v) * y(v) * -2.0}; }, {}, 1},
    {{"sigmoid_grad", two(kAsGiven, 12)}, Kind::kFloat, kXY, [](V v) -> Tensors { return {call(primitive("sigmoid_grad"), g(v), y(v)), g(v) * x(v) * (1.0 - y(v) * 2.0)}; }, {}, 1},
    {{"relu_grad", two(kAsGiven, 1)}, Kind::kFloat, kY, [](V v) -> Tensors { return {call(primitive("relu_grad"), g(v), y(v)), Tensor()}; }, {-2, 2, 0.3, 2}, 1},
    {{"gelu_grad", two(kAsGiven, 12)}, Kind::kFloat, kXY, [](V v) -> Tensors {
       return {call(primitive("gelu_grad"), g(v), y(v)), v.wants(1) ? g(v) * x(v) * normal_density(y(v)) * (2.0 - square(y(v))) : Tensor()}; }, {}, 1},
    {{"gelu_tanh_grad", two(kAsGiven, 12)}, Kind::kFloat, kXY, [](V v) -> Tensors {
       return {call(primitive("gelu_tanh_grad"), g(v), y(v)), v.wants(1) ? g(v) * x(v) * gelu_tanh_second(y(v)) : Tensor()}; }, {}, 1},
    {{"eq", two(kAsGiven, 1)}, Kind::kBool}, {{"ne", two(kAsGiven, 1)}, Kind::kBool}, {{"lt", two(kAsGiven, 1)}, Kind::kBool}, {{"le", two(kAsGiven, 1)}, Kind::kBool}, {{"gt", two(kAsGiven, 1)}, Kind::kBool}, {{"ge", two(kAsGiven, 1)}, Kind::kBool},
    {{"logical_and", two(kAsGiven, 1)}, Kind::kBool}, {{"logical_or", two(kAsGiven, 1)}, Kind::kBool}, {{"logical_xor", two(kAsGiven, 1)}, Kind::kBool},
    {{"bitwise_and", two(kAsGiven, 1)}, Kind::kBits}, {{"bitwise_or", two(kAsGiven, 1)}, Kind::kBits}, {{"bitwise_xor", two(kAsGiven, 1)}, Kind::kBits},
    {{"bitwise_left_shift", two(kAsGiven, 12, {.refuses_bool = true})}, Kind::kBits}, {{"bitwise_right_shift", two(kAsGiven, 12, {.refuses_bool = true})}, Kind::kBits},

    // At a bound itself, and for NaN, nothing passes, as in PyTorch since 2.0.
    {{"clamp", three(kAsGiven, 12)}, Kind::kAny, kXYZ, [](V v) -> Tensors {
       const Tensor &low = y(v), &high = v.in[2];
       return {v.wants(0) ? keep(logical_and(gt(x(v), low), lt(x(v), high)), g(v)) : Tensor(),
               v.wants(1) ? keep(logical_and(le(x(v), low), lt(low, high)), g(v)) : Tensor(),
               v.wants(2) ? keep(ge(maximum(x(v), low), high), g(v)) : Tensor()}; }},
    {{"lerp", three(kAsGiven, 12)}, Kind::kFloat, kXYZ, [](V v) -> Tensors { return {g(v) * (1.0 - v.in[2]), g(v) * v.in[2], g(v) * (y(v) - x(v))}; }},
    {{"mul_add", three(kAsGiven, 1)}, Kind::kAny, kXY, [](V v) -> Tensors { return {g(v) * y(v), g(v) * x(v), g(v)}; }},
};
// clang-format on

class Pointwise final : public Primitive {
 public:
  explicit Pointwise(const Row& row) : Primitive(row.op), row_(row) {}

  Metas infer(MetaSpan in) const override {
    Shape shape = in[0]->shape;
    for (size_t i = 1; i < in.size(); ++i) {
      shape = broadcast(shape, in[i]->shape, name());
      TESSERA_CHECK(in[i]->dtype == in[0]->dtype, "{}: operands are {}; convert them to one dtype",
                    name(), describe(in));
    }
    return {
        Meta::contiguous(shape, row_.kind == Kind::kBool ? kBool : in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    Shape shape = in[0]->shape;
    for (const Meta* m : in) shape = broadcast(shape, m->shape, name());
    AxisMap map = pointwise_axes(in, shape);
    map.linear_in = row_.linear_in;
    map.jointly_linear = row_.jointly_linear;
    return map;
  }
  SaveMask saved() const override { return row_.saved; }
  bool differentiable() const override { return row_.vjp != nullptr; }
  Tensors vjp(const VjpArgs& v) const override {
    if (!row_.vjp) return Primitive::vjp(v);
    Tensors grads = row_.vjp(v);
    for (size_t i = 0; i < grads.size(); ++i)
      if (grads[i].defined() && v.wants(int(i)))
        grads[i] = sum_to(std::move(grads[i]), v.in[i].shape());
    return grads;
  }

 private:
  const Row& row_;
};

struct Entry {
  const Row* row;
  PrimRef prim;
};
const std::unordered_map<std::string_view, Entry>& entries() {
  static const auto* map = [] {
    auto* m = new std::unordered_map<std::string_view, Entry>;
    for (const Row& row : kRows) m->emplace(row.op.name, Entry{&row, PrimRef(new Pointwise(row))});
    return m;
  }();
  return *map;
}
const PrimRef& primitive(std::string_view name) { return entries().at(name).prim; }

Tensor as_float(Tensor t) {
  return is_floating(t.dtype()) ? t : cast(std::move(t), context().default_dtype);
}

// The operand as an op of `kind` takes it.
Tensor prepare(Kind kind, const PrimRef& p, Tensor t) {
  if (kind == Kind::kFloat) return as_float(std::move(t));
  if (kind == Kind::kBits)
    TESSERA_CHECK(is_integral(t.dtype()), "{}: takes integers or bool, got {}; cast it first",
                  p->name(), describe(t));
  return t;
}
Tensor unary(const PrimRef& p, Kind kind, Tensor t) {
  return dispatch1(p, operands(prepare(kind, p, std::move(t))));
}

// Operands of an op on floats none of which is one; with one among them the others meet it.
template <class... T>
bool none_floats(Kind kind, const T&... t) {
  return kind == Kind::kFloat && !(is_floating(t.dtype()) || ...);
}

Tensor binary(const PrimRef& p, Kind kind, Tensor a, Tensor b) {
  if (kind == Kind::kBits || none_floats(kind, a, b))
    a = prepare(kind, p, std::move(a)), b = prepare(kind, p, std::move(b));
  return dispatch1(p, operands(std::move(a), std::move(b)));
}

DType number_dtype(Kind kind, const Tensor& a, Scalar b) {
  DType t = result_type(a, b);
  return kind == Kind::kFloat && !is_floating(t) ? context().default_dtype : t;
}
Tensor binary(const PrimRef& p, Kind kind, Tensor a, Scalar b) {
  DType t = number_dtype(kind, a, b);
  Tensor number = scalar_tensor(b, t, a.device());
  a = cast(std::move(a), t);
  if (kind == Kind::kBits) a = prepare(kind, p, std::move(a));
  return dispatch1(p, operands(std::move(a), std::move(number)));
}
Tensor binary(const PrimRef& p, Kind kind, Scalar a, Tensor b) {
  DType t = number_dtype(kind, b, a);
  Tensor number = scalar_tensor(a, t, b.device());
  return dispatch1(p, operands(std::move(number), cast(std::move(b), t)));
}

Tensor ternary(const PrimRef& p, Kind kind, Tensor a, Tensor b, Tensor c) {
  if (none_floats(kind, a, b, c))
    a = as_float(std::move(a)), b = as_float(std::move(b)), c = as_float(std::move(c));
  return dispatch1(p, operands(std::move(a), std::move(b), std::move(c)));
}

// ------------------------------------------------------------------------------------- samples

std::vector<Sample> samples_of(const Row& row, const PrimRef& prim) {
  const Domain& d = row.domain;
  auto draw = [&](const Shape& shape, int operand, uint64_t key) {
    DType t = row.kind == Kind::kBits ? kI64 : kF64;
    double low = operand ? d.low2 : d.low, high = operand ? d.high2 : d.high;
    return row.kind == Kind::kBits ? sample_integers(shape, 0, 60, key)
                                   : cast(sample_values(shape, low, high, key), t);
  };
  bool smooth = row.vjp != nullptr && row.vjp != Vjp(refuse);
  std::vector<Sample> s;
  if (row.op.traits.operands == 1) {
    s.push_back({prim, {draw({3, 4}, 0, 1)}, smooth});
    s.push_back({prim, {permute(draw({3, 4}, 0, 2), {1, 0})}, smooth});
    s.push_back({prim, {draw({}, 0, 3)}, smooth});
  } else if (row.op.traits.operands == 2) {
    s.push_back({prim, {draw({3, 4}, 0, 1), draw({3, 4}, 1, 2)}, smooth});
    s.push_back({prim, {draw({3, 4}, 0, 1), draw({4}, 1, 2)}, smooth});
    s.push_back({prim, {draw({3, 1}, 0, 1), draw({2, 1, 4}, 1, 2)}, smooth});
    s.push_back({prim, {draw({2, 3}, 0, 1), draw({}, 1, 2)}, smooth});
  } else {
    s.push_back({prim, {draw({3, 4}, 0, 1), draw({4}, 1, 2), draw({3, 1}, 1, 3)}, smooth});
    s.push_back({prim, {draw({3, 4}, 0, 1), draw({}, 1, 2), draw({}, 1, 3)}, smooth});
  }
  return s;
}

// An op by name, found once per call site.
struct Op {
  const Entry& e;
  explicit Op(std::string_view name) : e(entries().at(name)) {}
  void check(bool is_bool) const {
    TESSERA_CHECK(!(e.row->op.traits.refuses_bool && is_bool),
                  "{}: bool has no such operation; cast it to an integer or use the logical ops",
                  e.row->op.name);
  }
  static bool is_bool(const Tensor& t) { return t.dtype() == kBool; }
  static bool is_bool(Scalar s) { return s.kind() == kBool; }
  Tensor operator()(Tensor a) const {
    check(is_bool(a));
    return unary(e.prim, e.row->kind, std::move(a));
  }
  template <class A, class B>
  Tensor operator()(A a, B b) const {
    check(is_bool(a) && is_bool(b));
    return binary(e.prim, e.row->kind, std::move(a), std::move(b));
  }
  Tensor operator()(Tensor a, Tensor b, Tensor c) const {
    return ternary(e.prim, e.row->kind, std::move(a), std::move(b), std::move(c));
  }
};

}  // namespace

// One op a line.
// clang-format off
Tensor exp(Tensor x) { static const Op op("exp"); return op(std::move(x)); }
Tensor exp2(Tensor x) { static const Op op("exp2"); return op(std::move(x)); }
Tensor expm1(Tensor x) { static const Op op("expm1"); return op(std::move(x)); }
Tensor log(Tensor x) { static const Op op("log"); return op(std::move(x)); }
Tensor log2(Tensor x) { static const Op op("log2"); return op(std::move(x)); }
Tensor log10(Tensor x) { static const Op op("log10"); return op(std::move(x)); }
Tensor log1p(Tensor x) { static const Op op("log1p"); return op(std::move(x)); }
Tensor sin(Tensor x) { static const Op op("sin"); return op(std::move(x)); }
Tensor cos(Tensor x) { static const Op op("cos"); return op(std::move(x)); }
Tensor tan(Tensor x) { static const Op op("tan"); return op(std::move(x)); }
Tensor asin(Tensor x) { static const Op op("asin"); return op(std::move(x)); }
Tensor acos(Tensor x) { static const Op op("acos"); return op(std::move(x)); }
Tensor atan(Tensor x) { static const Op op("atan"); return op(std::move(x)); }
Tensor sinh(Tensor x) { static const Op op("sinh"); return op(std::move(x)); }
Tensor cosh(Tensor x) { static const Op op("cosh"); return op(std::move(x)); }
Tensor tanh(Tensor x) { static const Op op("tanh"); return op(std::move(x)); }
Tensor asinh(Tensor x) { static const Op op("asinh"); return op(std::move(x)); }
Tensor acosh(Tensor x) { static const Op op("acosh"); return op(std::move(x)); }
Tensor atanh(Tensor x) { static const Op op("atanh"); return op(std::move(x)); }
Tensor erf(Tensor x) { static const Op op("erf"); return op(std::move(x)); }
Tensor erfc(Tensor x) { static const Op op("erfc"); return op(std::move(x)); }
Tensor erfinv(Tensor x) { static const Op op("erfinv"); return op(std::move(x)); }
Tensor lgamma(Tensor x) { static const Op op("lgamma"); return op(std::move(x)); }
Tensor digamma(Tensor x) { static const Op op("digamma"); return op(std::move(x)); }
Tensor trigamma(Tensor x) { static const Op op("trigamma"); return op(std::move(x)); }
Tensor sqrt(Tensor x) { static const Op op("sqrt"); return op(std::move(x)); }
Tensor rsqrt(Tensor x) { static const Op op("rsqrt"); return op(std::move(x)); }
Tensor reciprocal(Tensor x) { static const Op op("reciprocal"); return op(std::move(x)); }
Tensor sigmoid(Tensor x) { static const Op op("sigmoid"); return op(std::move(x)); }
Tensor logsigmoid(Tensor x) { static const Op op("logsigmoid"); return op(std::move(x)); }
Tensor softplus(Tensor x) { static const Op op("softplus"); return op(std::move(x)); }
Tensor silu(Tensor x) { static const Op op("silu"); return op(std::move(x)); }
Tensor mish(Tensor x) { static const Op op("mish"); return op(std::move(x)); }
Tensor gelu(Tensor x) { static const Op op("gelu"); return op(std::move(x)); }
Tensor gelu_tanh(Tensor x) { static const Op op("gelu_tanh"); return op(std::move(x)); }
Tensor neg(Tensor x) { static const Op op("neg"); return op(std::move(x)); }
Tensor abs(Tensor x) { static const Op op("abs"); return op(std::move(x)); }
Tensor sign(Tensor x) { static const Op op("sign"); return op(std::move(x)); }
Tensor square(Tensor x) { static const Op op("square"); return op(x.dtype() == kBool ? cast(std::move(x), kI64) : std::move(x)); }
Tensor relu(Tensor x) { static const Op op("relu"); return op(std::move(x)); }
Tensor floor(Tensor x) { static const Op op("floor"); return op(std::move(x)); }
Tensor ceil(Tensor x) { static const Op op("ceil"); return op(std::move(x)); }
Tensor trunc(Tensor x) { static const Op op("trunc"); return op(std::move(x)); }
Tensor round(Tensor x) { static const Op op("round"); return op(std::move(x)); }
Tensor isnan(Tensor x) { static const Op op("isnan"); return op(std::move(x)); }
Tensor isinf(Tensor x) { static const Op op("isinf"); return op(std::move(x)); }
Tensor isfinite(Tensor x) { static const Op op("isfinite"); return op(std::move(x)); }
Tensor logical_not(Tensor x) { static const Op op("logical_not"); return op(std::move(x)); }
Tensor bitwise_not(Tensor x) { static const Op op("bitwise_not"); return x.dtype() == kBool ? logical_not(std::move(x)) : op(std::move(x)); }

Tensor add(Tensor a, Tensor b) { static const Op op("add"); return op(std::move(a), std::move(b)); }
Tensor sub(Tensor a, Tensor b) { static const Op op("sub"); op.check(a.dtype() == kBool || b.dtype() == kBool); return op(std::move(a), std::move(b)); }
Tensor mul(Tensor a, Tensor b) { static const Op op("mul"); return op(std::move(a), std::move(b)); }
Tensor div(Tensor a, Tensor b) { static const Op op("div"); return op(std::move(a), std::move(b)); }
Tensor floor_divide(Tensor a, Tensor b) { static const Op op("floor_divide"); return op(std::move(a), std::move(b)); }
Tensor remainder(Tensor a, Tensor b) { static const Op op("remainder"); return op(std::move(a), std::move(b)); }
Tensor fmod(Tensor a, Tensor b) { static const Op op("fmod"); return op(std::move(a), std::move(b)); }
Tensor pow(Tensor a, Tensor b) { static const Op op("pow"); return op(std::move(a), std::move(b)); }
Tensor maximum(Tensor a, Tensor b) { static const Op op("maximum"); return op(std::move(a), std::move(b)); }
Tensor minimum(Tensor a, Tensor b) { static const Op op("minimum"); return op(std::move(a), std::move(b)); }
Tensor atan2(Tensor a, Tensor b) { static const Op op("atan2"); return op(std::move(a), std::move(b)); }
Tensor leaky_relu(Tensor a, Tensor b) { static const Op op("leaky_relu"); return op(std::move(a), std::move(b)); }
Tensor elu(Tensor a, Tensor b) { static const Op op("elu"); return op(std::move(a), std::move(b)); }
Tensor eq(Tensor a, Tensor b) { static const Op op("eq"); return op(std::move(a), std::move(b)); }
Tensor ne(Tensor a, Tensor b) { static const Op op("ne"); return op(std::move(a), std::move(b)); }
Tensor lt(Tensor a, Tensor b) { static const Op op("lt"); return op(std::move(a), std::move(b)); }
Tensor le(Tensor a, Tensor b) { static const Op op("le"); return op(std::move(a), std::move(b)); }
Tensor gt(Tensor a, Tensor b) { static const Op op("gt"); return op(std::move(a), std::move(b)); }
Tensor ge(Tensor a, Tensor b) { static const Op op("ge"); return op(std::move(a), std::move(b)); }
Tensor logical_and(Tensor a, Tensor b) { static const Op op("logical_and"); return op(std::move(a), std::move(b)); }
Tensor logical_or(Tensor a, Tensor b) { static const Op op("logical_or"); return op(std::move(a), std::move(b)); }
Tensor logical_xor(Tensor a, Tensor b) { static const Op op("logical_xor"); return op(std::move(a), std::move(b)); }
Tensor bitwise_and(Tensor a, Tensor b) { static const Op op("bitwise_and"); return op(std::move(a), std::move(b)); }
Tensor bitwise_or(Tensor a, Tensor b) { static const Op op("bitwise_or"); return op(std::move(a), std::move(b)); }
Tensor bitwise_xor(Tensor a, Tensor b) { static const Op op("bitwise_xor"); return op(std::move(a), std::move(b)); }
Tensor bitwise_left_shift(Tensor a, Tensor b) { static const Op op("bitwise_left_shift"); return op(std::move(a), std::move(b)); }
Tensor bitwise_right_shift(Tensor a, Tensor b) { static const Op op("bitwise_right_shift"); return op(std::move(a), std::move(b)); }

Tensor add(Tensor a, Scalar b) { static const Op op("add"); return op(std::move(a), b); }
Tensor sub(Tensor a, Scalar b) { static const Op op("sub"); return op(std::move(a), b); }
Tensor mul(Tensor a, Scalar b) { static const Op op("mul"); return op(std::move(a), b); }
Tensor div(Tensor a, Scalar b) { static const Op op("div"); return op(std::move(a), b); }
Tensor pow(Tensor a, Scalar b) {
  static const Op op("pow");
  TESSERA_CHECK(b.kind() == kF64 || b.integer() >= 0 || !is_integral(a.dtype()),
                "pow: {} to the power {}; integers have no negative powers, cast them to floats", describe(a), b.integer());
  return op(std::move(a), b);
}
Tensor pow(Scalar a, Tensor b) { static const Op op("pow"); return op(a, std::move(b)); }
Tensor remainder(Tensor a, Scalar b) { static const Op op("remainder"); return op(std::move(a), b); }
Tensor bitwise_and(Tensor a, Scalar b) { static const Op op("bitwise_and"); return op(std::move(a), b); }
Tensor bitwise_or(Tensor a, Scalar b) { static const Op op("bitwise_or"); return op(std::move(a), b); }
Tensor bitwise_xor(Tensor a, Scalar b) { static const Op op("bitwise_xor"); return op(std::move(a), b); }
Tensor maximum(Tensor a, Scalar b) { static const Op op("maximum"); return op(std::move(a), b); }
Tensor minimum(Tensor a, Scalar b) { static const Op op("minimum"); return op(std::move(a), b); }
Tensor eq(Tensor a, Scalar b) { static const Op op("eq"); return op(std::move(a), b); }
Tensor ne(Tensor a, Scalar b) { static const Op op("ne"); return op(std::move(a), b); }
Tensor lt(Tensor a, Scalar b) { static const Op op("lt"); return op(std::move(a), b); }
Tensor le(Tensor a, Scalar b) { static const Op op("le"); return op(std::move(a), b); }
Tensor gt(Tensor a, Scalar b) { static const Op op("gt"); return op(std::move(a), b); }
Tensor ge(Tensor a, Scalar b) { static const Op op("ge"); return op(std::move(a), b); }
Tensor leaky_relu(Tensor a, Scalar b) { static const Op op("leaky_relu"); return op(std::move(a), b); }
Tensor elu(Tensor a, Scalar b) { static const Op op("elu"); return op(std::move(a), b); }
Tensor sub(Scalar a, Tensor b) { static const Op op("sub"); return op(a, std::move(b)); }
Tensor div(Scalar a, Tensor b) { static const Op op("div"); return op(a, std::move(b)); }

Tensor lerp(Tensor a, Tensor b, Tensor c) { static const Op op("lerp"); return op(std::move(a), std::move(b), std::move(c)); }
Tensor mul_add(Tensor a, Tensor b, Tensor c) { static const Op op("mul_add"); return op(std::move(a), std::move(b), std::move(c)); }
// clang-format on

// Bounds that are tensors share gradients with equal elements and pass NaN on, as maximum and
// minimum do.
Tensor clamp(Tensor x, Tensor low, Tensor high) {
  const LayerMask recorded = context().enabled & bit(Layer::kAutograd);
  if (asks_at_any_level(low, recorded) || asks_at_any_level(high, recorded)) {
    Tensor nan = logical_or(isnan(x), logical_or(isnan(low), isnan(high)));  // moves no bound
    low = where(nan, low.detach(), low), high = where(nan, high.detach(), high);
  }
  return minimum(maximum(std::move(x), std::move(low)), std::move(high));
}

Tensor clamp(Tensor x, Scalar low, Scalar high) {
  DType t = result_type(empty(x.shape(), result_type(x, low), kMeta), high);
  Tensor l = scalar_tensor(nearest_in(t, low), t, x.device()),
         h = scalar_tensor(nearest_in(t, high), t, x.device());
  static const Op op("clamp");
  return op(std::move(x), std::move(l), std::move(h));
}

const PrimRef& pointwise_primitive(std::string_view name) { return primitive(name); }

void register_pointwise_ops(OpRegistry& registry) {
  for (const Row& row : kRows) {
    const Entry& e = entries().at(row.op.name);
    registry.add(row.op.name, [&e] { return samples_of(*e.row, e.prim); });
  }
}

}  // namespace tessera
