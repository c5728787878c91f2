// The base classes of ops with attributes. An aggregate A lists them (core/primitive/attributes.h);
// its members become members of the op, and kernels read them with attributes_of<A>. Invariant: no
// op writes by hand how its attributes are visited, read or compared.
#pragma once
#include <concepts>
#include <type_traits>

#include "core/primitive/attributes.h"
#include "core/primitive/primitive.h"

namespace tessera {

/// The base of every op with attributes A, and of a family of such ops.
template <class A>
class PrimitiveWith : public Primitive, public A {
 public:
  using Attributes = A;
  PrimitiveWith(const OpInfo& op, const A& a) : Primitive(op), A(a) {}
  void attributes(AttributeVisitor& v) const final {
    FieldWriter f(v);
    A::fields(static_cast<const A&>(*this), f);
  }
};

/// The attributes of an op that is a PrimitiveWith<A>.
template <class A>
const A& attributes_of(const Primitive& prim) {
  return static_cast<const PrimitiveWith<A>&>(prim);
}

template <class T>
struct PrimitiveBase {
  using type = PrimitiveWith<T>;
};
template <std::derived_from<Primitive> T>
struct PrimitiveBase<T> {
  using type = T;
};

/// The base of the op Self. `T` is its attributes, or a family (derived from PrimitiveWith) that it
/// belongs to. With `using PrimitiveOf::PrimitiveOf` the op is constructed from its attributes,
/// where its OpInfo is a static member kOp, or from an OpInfo and its attributes. A public `static
/// void check_attributes(const A&)` of Self throws UserError for values that do not fit together;
/// with_attributes calls it on the values that it read.
template <class Self, class T>
class PrimitiveOf : public PrimitiveBase<T>::type {
 public:
  using typename PrimitiveBase<T>::type::Attributes;
  PrimitiveOf(const OpInfo& op, const Attributes& a) : PrimitiveBase<T>::type(op, a) {}
  explicit PrimitiveOf(const Attributes& a) : PrimitiveBase<T>::type(Self::kOp, a) {}

  PrimRef with_attributes(AttributeReader& reader) const final {
    Attributes a = static_cast<const Attributes&>(*this);
    FieldReader f(reader);
    Attributes::fields(a, f);
    if constexpr (requires { Self::check_attributes(a); }) Self::check_attributes(a);
    if constexpr (std::is_constructible_v<Self, const OpInfo&, const Attributes&>)
      return PrimRef(new Self(this->info(), a));
    else
      return PrimRef(new Self(a));
  }
};

}  // namespace tessera
