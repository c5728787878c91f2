// Pointwise ops: operands broadcast as NumPy does and meet in the dtype that result_type says.
// Where an op needs floats, integers become the default float dtype. Operands are taken by value: a
// temporary may be overwritten by the result. Throws ShapeError when shapes do not broadcast.
#pragma once
#include "core/ops/scalar.h"
#include "core/primitive/registry.h"

namespace tessera {

// float functions of one operand
Tensor exp(Tensor x);
Tensor exp2(Tensor x);
Tensor expm1(Tensor x);
Tensor log(Tensor x);
Tensor log2(Tensor x);
Tensor log10(Tensor x);
Tensor log1p(Tensor x);
Tensor sin(Tensor x);
Tensor cos(Tensor x);
Tensor tan(Tensor x);
Tensor asin(Tensor x);
Tensor acos(Tensor x);
Tensor atan(Tensor x);
Tensor sinh(Tensor x);
Tensor cosh(Tensor x);
Tensor tanh(Tensor x);
Tensor asinh(Tensor x);
Tensor acosh(Tensor x);
Tensor atanh(Tensor x);
Tensor erf(Tensor x);
Tensor erfc(Tensor x);
Tensor erfinv(Tensor x);    // +-inf at +-1, NaN beyond
Tensor lgamma(Tensor x);    // log |Gamma(x)|
Tensor digamma(Tensor x);   // its derivative
Tensor trigamma(Tensor x);  // and the next, which is where derivatives end
Tensor sqrt(Tensor x);
Tensor rsqrt(Tensor x);
Tensor reciprocal(Tensor x);
Tensor sigmoid(Tensor x);
Tensor logsigmoid(Tensor x);
Tensor softplus(Tensor x);   // log(1 + exp(x))
Tensor silu(Tensor x);       // x sigmoid(x)
Tensor mish(Tensor x);       // x tanh(softplus(x))
Tensor gelu(Tensor x);       // x (1 + erf(x / sqrt 2)) / 2
Tensor gelu_tanh(Tensor x);  // its tanh approximation: Hendrycks, Gimpel 2016

// functions of one operand of any dtype
Tensor neg(Tensor x);
Tensor abs(Tensor x);
Tensor sign(Tensor x);
Tensor square(Tensor x);
Tensor relu(Tensor x);
Tensor floor(Tensor x);
Tensor ceil(Tensor x);
Tensor trunc(Tensor x);
Tensor round(Tensor x);  // half to even
Tensor isnan(Tensor x);
Tensor isinf(Tensor x);
Tensor isfinite(Tensor x);
Tensor logical_not(Tensor x);
Tensor bitwise_not(Tensor x);

// functions of two operands
Tensor add(Tensor a, Tensor b);
Tensor sub(Tensor a, Tensor b);
Tensor mul(Tensor a, Tensor b);
Tensor div(Tensor a, Tensor b);           // true division: integers give floats
Tensor floor_divide(Tensor a, Tensor b);  // rounds down
Tensor remainder(Tensor a, Tensor b);     // sign of b, as Python's %
Tensor fmod(Tensor a, Tensor b);          // sign of a, as C's %
Tensor pow(Tensor a, Tensor b);           // integers to negative powers: rounded to 0
Tensor maximum(Tensor a, Tensor b);       // NaN wins
Tensor minimum(Tensor a, Tensor b);
Tensor atan2(Tensor y, Tensor x);
Tensor leaky_relu(Tensor x, Tensor slope);
Tensor elu(Tensor x, Tensor alpha);
Tensor eq(Tensor a, Tensor b);
Tensor ne(Tensor a, Tensor b);
Tensor lt(Tensor a, Tensor b);
Tensor le(Tensor a, Tensor b);
Tensor gt(Tensor a, Tensor b);
Tensor ge(Tensor a, Tensor b);
Tensor logical_and(Tensor a, Tensor b);
Tensor logical_or(Tensor a, Tensor b);
Tensor logical_xor(Tensor a, Tensor b);
Tensor bitwise_and(Tensor a, Tensor b);  // integers and bool only, as the next four
Tensor bitwise_or(Tensor a, Tensor b);
Tensor bitwise_xor(Tensor a, Tensor b);
Tensor bitwise_left_shift(Tensor a, Tensor b);
Tensor bitwise_right_shift(Tensor a, Tensor b);

// functions of three operands
Tensor clamp(Tensor x, Tensor low, Tensor high);
Tensor lerp(Tensor a, Tensor b, Tensor weight);  // a + weight (b - a)
Tensor mul_add(Tensor a, Tensor b, Tensor c);    // a b + c, rounded twice
/// Elements of `a` where `condition` (bool) holds, of `b` elsewhere.
Tensor where(Tensor condition, Tensor a, Tensor b);
Tensor where(Tensor condition, Tensor a, Scalar b);
Tensor where(Tensor condition, Scalar a, Tensor b);
/// Of the default float dtype, i64 or bool: that in which the numbers meet.
Tensor where(Tensor condition, Scalar a, Scalar b);

// the same with a number on one side
Tensor add(Tensor a, Scalar b);
Tensor sub(Tensor a, Scalar b);
Tensor sub(Scalar a, Tensor b);
Tensor mul(Tensor a, Scalar b);
Tensor div(Tensor a, Scalar b);
Tensor div(Scalar a, Tensor b);
Tensor pow(Tensor a, Scalar b);  // throws for integers to a negative power
Tensor pow(Scalar a, Tensor b);
Tensor remainder(Tensor a, Scalar b);
Tensor bitwise_and(Tensor a, Scalar b);
Tensor bitwise_or(Tensor a, Scalar b);
Tensor bitwise_xor(Tensor a, Scalar b);
Tensor maximum(Tensor a, Scalar b);
Tensor minimum(Tensor a, Scalar b);
Tensor eq(Tensor a, Scalar b);
Tensor ne(Tensor a, Scalar b);
Tensor lt(Tensor a, Scalar b);
Tensor le(Tensor a, Scalar b);
Tensor gt(Tensor a, Scalar b);
Tensor ge(Tensor a, Scalar b);
Tensor clamp(Tensor x, Scalar low, Scalar high);
Tensor leaky_relu(Tensor x, Scalar slope = 0.01);
Tensor elu(Tensor x, Scalar alpha = 1.0);

inline Tensor operator+(Tensor a, Tensor b) { return add(std::move(a), std::move(b)); }
inline Tensor operator-(Tensor a, Tensor b) { return sub(std::move(a), std::move(b)); }
inline Tensor operator*(Tensor a, Tensor b) { return mul(std::move(a), std::move(b)); }
inline Tensor operator/(Tensor a, Tensor b) { return div(std::move(a), std::move(b)); }
inline Tensor operator-(Tensor a) { return neg(std::move(a)); }
inline Tensor operator+(Tensor a, Scalar b) { return add(std::move(a), b); }
inline Tensor operator+(Scalar a, Tensor b) { return add(std::move(b), a); }
inline Tensor operator-(Tensor a, Scalar b) { return sub(std::move(a), b); }
inline Tensor operator-(Scalar a, Tensor b) { return sub(a, std::move(b)); }
inline Tensor operator*(Tensor a, Scalar b) { return mul(std::move(a), b); }
inline Tensor operator*(Scalar a, Tensor b) { return mul(std::move(b), a); }
inline Tensor operator/(Tensor a, Scalar b) { return div(std::move(a), b); }
inline Tensor operator/(Scalar a, Tensor b) { return div(a, std::move(b)); }
inline Tensor operator%(Tensor a, Tensor b) { return remainder(std::move(a), std::move(b)); }
inline Tensor operator%(Tensor a, Scalar b) { return remainder(std::move(a), b); }
// Of bool tensors the logical operations: (x > 0) & ~(y > 0). && and || would look at one answer.
inline Tensor operator~(Tensor a) { return bitwise_not(std::move(a)); }
inline Tensor operator!(Tensor a) { return logical_not(std::move(a)); }
inline Tensor operator&(Tensor a, Tensor b) { return bitwise_and(std::move(a), std::move(b)); }
inline Tensor operator|(Tensor a, Tensor b) { return bitwise_or(std::move(a), std::move(b)); }
inline Tensor operator^(Tensor a, Tensor b) { return bitwise_xor(std::move(a), std::move(b)); }
inline Tensor operator&(Tensor a, Scalar b) { return bitwise_and(std::move(a), b); }
inline Tensor operator|(Tensor a, Scalar b) { return bitwise_or(std::move(a), b); }
inline Tensor operator^(Tensor a, Scalar b) { return bitwise_xor(std::move(a), b); }
// Element by element, as in PyTorch: a == b is a bool tensor. equal() in compose.h is one answer.
inline Tensor operator==(Tensor a, Tensor b) { return eq(std::move(a), std::move(b)); }
inline Tensor operator!=(Tensor a, Tensor b) { return ne(std::move(a), std::move(b)); }
inline Tensor operator<(Tensor a, Tensor b) { return lt(std::move(a), std::move(b)); }
inline Tensor operator<=(Tensor a, Tensor b) { return le(std::move(a), std::move(b)); }
inline Tensor operator>(Tensor a, Tensor b) { return gt(std::move(a), std::move(b)); }
inline Tensor operator>=(Tensor a, Tensor b) { return ge(std::move(a), std::move(b)); }
inline Tensor operator==(Tensor a, Scalar b) { return eq(std::move(a), b); }
inline Tensor operator!=(Tensor a, Scalar b) { return ne(std::move(a), b); }
inline Tensor operator<(Tensor a, Scalar b) { return lt(std::move(a), b); }
inline Tensor operator<=(Tensor a, Scalar b) { return le(std::move(a), b); }
inline Tensor operator>(Tensor a, Scalar b) { return gt(std::move(a), b); }
inline Tensor operator>=(Tensor a, Scalar b) { return ge(std::move(a), b); }
inline Tensor operator==(Scalar a, Tensor b) { return eq(std::move(b), a); }
inline Tensor operator!=(Scalar a, Tensor b) { return ne(std::move(b), a); }
inline Tensor operator<(Scalar a, Tensor b) { return gt(std::move(b), a); }
inline Tensor operator<=(Scalar a, Tensor b) { return ge(std::move(b), a); }
inline Tensor operator>(Scalar a, Tensor b) { return lt(std::move(b), a); }
inline Tensor operator>=(Scalar a, Tensor b) { return le(std::move(b), a); }

/// The same values in `dtype`; floats to integers truncate.
Tensor cast(Tensor x, DType dtype);

/// Sums `g` over the dims in which `to` was broadcast to g's shape: the vjp of broadcasting.
Tensor sum_to(Tensor g, const Shape& to);

/// The primitive behind cast.
const PrimRef& cast_primitive(DType to);
/// The primitive behind a pointwise function, by name ("add").
const PrimRef& pointwise_primitive(std::string_view name);

void register_pointwise_ops(OpRegistry& registry);

}  // namespace tessera
