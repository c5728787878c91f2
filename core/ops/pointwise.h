// Pointwise ops: operands broadcast as NumPy does and meet in the dtype that result_type says.
// Where an op needs floats, integers become the default float dtype. Operands are taken by value: a
// temporary may be overwritten by the result. Throws ShapeError when shapes do not broadcast.
#pragma once
#include "core/ops/scalar.h"
#include "core/primitive/registry.h"

namespace tessera {

// The functions of pointwise.def: exp(x), add(x, y), ..; comments there say what each computes.
#define TESSERA_OP1(name, ...) Tensor name(Tensor x);
#define TESSERA_OP2(name, ...) Tensor name(Tensor x, Tensor y);
#define TESSERA_OP3(name, ...) Tensor name(Tensor x, Tensor y, Tensor z);
#define TESSERA_PRIMITIVE1(...)
#define TESSERA_PRIMITIVE2(...)
#define TESSERA_PRIMITIVE3(...)
#include "core/ops/pointwise.def"

Tensor square(Tensor x);  // of bool: i64
Tensor bitwise_not(Tensor x);
Tensor sub(Tensor x, Tensor y);
/// min(max(x, low), high); NaN wins.
Tensor clamp(Tensor x, Tensor low, Tensor high);
/// Elements of `a` where `condition` (bool) holds, of `b` elsewhere.
Tensor where(Tensor condition, Tensor a, Tensor b);
Tensor where(Tensor condition, Tensor a, Scalar b);
Tensor where(Tensor condition, Scalar a, Tensor b);
/// Elements of the dtype in which the numbers meet: the default float dtype, i64 or bool.
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
// On bool tensors these are logical: (x > 0) & ~(y > 0). && and || would ask for one truth value.
inline Tensor operator~(Tensor a) { return bitwise_not(std::move(a)); }
inline Tensor operator!(Tensor a) { return logical_not(std::move(a)); }
inline Tensor operator&(Tensor a, Tensor b) { return bitwise_and(std::move(a), std::move(b)); }
inline Tensor operator|(Tensor a, Tensor b) { return bitwise_or(std::move(a), std::move(b)); }
inline Tensor operator^(Tensor a, Tensor b) { return bitwise_xor(std::move(a), std::move(b)); }
inline Tensor operator&(Tensor a, Scalar b) { return bitwise_and(std::move(a), b); }
inline Tensor operator|(Tensor a, Scalar b) { return bitwise_or(std::move(a), b); }
inline Tensor operator^(Tensor a, Scalar b) { return bitwise_xor(std::move(a), b); }
// Element by element, as in PyTorch: a == b is a bool tensor. equal(a, b) gives one answer.
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
