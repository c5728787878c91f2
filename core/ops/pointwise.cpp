// What follows from the lines of pointwise.def: primitives with their traits and derivatives,
// public functions, samples. Broadcasting is handled once, in Pointwise: a derivative is written as
// if all operands had the result's shape.
#include "core/ops/pointwise.h"

#include <cmath>
#include <span>
#include <unordered_map>

#include "core/dispatch/context.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/pointwise_columns.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/scalar_range.h"
#include "core/ops/views.h"
#include "core/tensor/wrapped.h"

namespace tessera {
namespace {

using columns::Kind;
using Vjp = Tensors (*)(const VjpArgs&);

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
const PrimRef& primitive(std::string_view name);
Tensor call(std::string_view name, Tensor a, Tensor b) {
  return dispatch1(primitive(name), operands(std::move(a), std::move(b)));
}

// ---- what derivatives of pointwise.def are made of

const double kLn2 = std::log(2.0), kLn10 = std::log(10.0);
const double kSqrt2OverPi = std::sqrt(2 / M_PI), kTwoOverSqrtPi = 2 / std::sqrt(M_PI);

// `t` where `condition` holds, zero elsewhere.
Tensor keep(Tensor condition, Tensor t) {
  return where(std::move(condition), t, number_beside(t, 0.0, t.dtype()));
}
// The cotangent of an operand of maximum or minimum: none where it `lost`, half where both are
// equal.
Tensor share(Tensor lost, const Tensor& x, const Tensor& y, const Tensor& g) {
  return keep(logical_not(std::move(lost)), where(eq(x, y), g * 0.5, g));
}
Tensor silu_slope(const Tensor& x) {
  Tensor s = sigmoid(x);
  return s * (x * (1.0 - s) + 1.0);
}
Tensor mish_slope(const Tensor& x) {
  Tensor t = tanh(softplus(x));
  return t + x * sigmoid(x) * (1.0 - square(t));
}
// phi(x), the density of the standard normal distribution.
Tensor normal_density(const Tensor& t) { return exp(square(t) * -0.5) * (1 / std::sqrt(2 * M_PI)); }
// d/dx of gelu_tanh'(x), for its second derivative: u = sqrt(2/pi) (x + 0.044715 x^3), t = tanh(u).
Tensor gelu_tanh_second(const Tensor& x) {
  Tensor u1 = (square(x) * (3 * 0.044715) + 1.0) * kSqrt2OverPi,
         u2 = x * (6 * 0.044715 * kSqrt2OverPi);
  Tensor t = tanh((x * square(x) * 0.044715 + x) * kSqrt2OverPi), s = 1.0 - square(t);
  return s * u1 + x * s * (u2 * 0.5 - t * square(u1));
}

// ---- derivatives whose operands share work, or that are longer than a line

Tensors refuse(V) {
  throw NotDifferentiable("trigamma: its derivative, polygamma(2), is not there");
}
Tensors zero(V v) { return Tensors(v.in.size()); }  // piecewise constant

Tensors div_vjp(V v) {
  const Tensor &x = v.in[0], &y = v.in[1];
  Tensor q = v.cot[0] / y;
  return {q, v.wants(1) ? -(q * (x / y)) : Tensor()};
}
Tensors pow_vjp(V v) {
  const Tensor &x = v.in[0], &y = v.in[1], &g = v.cot[0], &out = v.out[0];
  Tensor none = number_beside(x, 0.0, x.dtype());
  Tensor dx = v.wants(0) ? where(eq(y, 0), none, g * y * pow(x, y - 1.0)) : Tensor();
  Tensor dy =
      v.wants(1) ? where(logical_and(eq(x, 0), ge(y, 0)), none, g * out * log(x)) : Tensor();
  return {dx, dy};
}
Tensors atan2_vjp(V v) {
  const Tensor &x = v.in[0], &y = v.in[1];
  Tensor d = square(x) + square(y), one = number_beside(d, 1.0, d.dtype());
  Tensor s = v.cot[0] / where(eq(d, 0), one, d);  // 0 at the origin
  return {s * y, -(s * x)};
}
Tensors leaky_relu_vjp(V v) {
  const Tensor &x = v.in[0], &y = v.in[1], &g = v.cot[0];
  Tensor p = gt(x, 0);
  return {where(p, g, g * y), keep(logical_not(p), g * x)};
}
Tensors elu_vjp(V v) {
  const Tensor &x = v.in[0], &y = v.in[1], &g = v.cot[0];
  Tensor p = gt(x, 0);
  return {where(p, g, g * y * exp(x)), keep(logical_not(p), g * expm1(x))};
}

// ---- rows

OpTraits traits_of(int operands, Precision precision, int cost, unsigned facts) {
  return {.kind = OpKind::kPointwise,
          .precision = precision,
          .operands = operands,
          .cost = cost,
          .refuses_bool = (facts & columns::kNoBool) != 0,
          .may_trap = (facts & columns::kMayTrap) != 0,
          .keeps_nan = (facts & columns::kKeepsNan) != 0,
          .plain = (facts & columns::kPlain) != 0,
          .promotion = operands > 1 ? Promotion::kAll : Promotion::kNone};
}
constexpr uint32_t linear_in(unsigned facts) {
  return (facts & columns::kLinearInX ? 1u : 0u) | (facts & columns::kLinearInY ? 2u : 0u);
}
constexpr Domain within(double low, double high, double low2 = -2, double high2 = 2) {
  return {low, high, low2, high2};
}

// GRAD(dx, ..) of the table is a Vjp.
// clang-format off
#define GRAD(...) GRAD_OF(__VA_ARGS__, GRAD3, GRAD2, GRAD1)(__VA_ARGS__)
#define GRAD_OF(dx, dy, dz, chosen, ...) chosen
#define GRAD1(dx)         [](V v) -> Tensors { OPERANDS1; return {dx}; }
#define GRAD2(dx, dy)     [](V v) -> Tensors { OPERANDS2; return {WANTED(0, dx), WANTED(1, dy)}; }
#define GRAD3(dx, dy, dz) [](V v) -> Tensors { OPERANDS3; return {WANTED(0, dx), WANTED(1, dy), WANTED(2, dz)}; }
#define WANTED(i, gradient) (v.wants(i) ? gradient : Tensor())
#define OPERANDS1 [[maybe_unused]] const Tensor &x = v.in[0], &g = v.cot[0], &out = v.out[0]
#define OPERANDS2 OPERANDS1; [[maybe_unused]] const Tensor& y = v.in[1]
#define OPERANDS3 OPERANDS2; [[maybe_unused]] const Tensor& z = v.in[2]
// clang-format on

std::span<const Row> rows() {
  using namespace columns;
  using enum Precision;
  [[maybe_unused]] constexpr SaveMask kX{1, 0}, kY{2, 0}, kXY{3, 0}, kXYZ{7, 0}, kOut{0, 1},
      kXOut{1, 1}, kXYOut{3, 1};
#define ROW(operands, name, precision, cost, facts, kind, samples, reads, ...) \
  {{#name, traits_of(operands, precision, cost, unsigned{facts})},             \
   kind,                                                                       \
   {reads},                                                                    \
   Vjp{__VA_ARGS__},                                                           \
   {samples},                                                                  \
   linear_in(unsigned{facts}),                                                 \
   (unsigned{facts} & kLinear) != 0},
#define TESSERA_OP1(name, kernel, kind, precision, cost, facts, samples, reads, ...) \
  ROW(1, name, precision, cost, facts, kind, samples, reads, __VA_ARGS__)
#define TESSERA_OP2(name, kernel, kind, precision, cost, facts, samples, reads, ...) \
  ROW(2, name, precision, cost, facts, kind, samples, reads, __VA_ARGS__)
#define TESSERA_OP3(name, kernel, kind, precision, cost, facts, samples, reads, ...) \
  ROW(3, name, precision, cost, facts, kind, samples, reads, __VA_ARGS__)
  static const Row rows[] = {
#include "core/ops/pointwise.def"
  };
  return rows;
}
const std::span<const Row> kRows = rows();  // made at start, when ops are to be known by name

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
        Meta::contiguous(shape, row_.kind == Kind::kTest ? kBool : in[0]->dtype, device_of(in))};
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
  Tensor number = number_beside(a, b, t);
  a = cast(std::move(a), t);
  if (kind == Kind::kBits) a = prepare(kind, p, std::move(a));
  return dispatch1(p, operands(std::move(a), std::move(number)));
}
Tensor binary(const PrimRef& p, Kind kind, Scalar a, Tensor b) {
  DType t = number_dtype(kind, b, a);
  Tensor number = number_beside(b, a, t);
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

#define TESSERA_OP1(name, ...) \
  Tensor name(Tensor x) {      \
    static const Op op(#name); \
    return op(std::move(x));   \
  }
#define TESSERA_OP2(name, ...)             \
  Tensor name(Tensor x, Tensor y) {        \
    static const Op op(#name);             \
    return op(std::move(x), std::move(y)); \
  }
#define TESSERA_OP3(name, ...)                           \
  Tensor name(Tensor x, Tensor y, Tensor z) {            \
    static const Op op(#name);                           \
    return op(std::move(x), std::move(y), std::move(z)); \
  }
#define TESSERA_PRIMITIVE1(...)
#define TESSERA_PRIMITIVE2(...)
#define TESSERA_PRIMITIVE3(...)
#include "core/ops/pointwise.def"

Tensor square(Tensor x) {
  static const Op op("square");
  return op(x.dtype() == kBool ? cast(std::move(x), kI64) : std::move(x));
}
Tensor bitwise_not(Tensor x) {
  static const Op op("bitwise_not");
  return x.dtype() == kBool ? logical_not(std::move(x)) : op(std::move(x));
}
Tensor sub(Tensor x, Tensor y) {
  static const Op op("sub");
  op.check(x.dtype() == kBool || y.dtype() == kBool);
  return op(std::move(x), std::move(y));
}

// With a number on one side. One op a line.
// clang-format off
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
  Tensor l = number_beside(x, nearest_in(t, low), t), h = number_beside(x, nearest_in(t, high), t);
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
