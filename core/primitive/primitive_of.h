// Ops with attributes. An aggregate A says what they are (core/primitive/attributes.h); its members
// are members of the op, kernels read them with attributes_of<A>, and no op writes how they are
// visited or read.
#pragma once
#include "core/primitive/attributes.h"
#include "core/primitive/primitive.h"

namespace tessera {

/// What the ops with attributes A share, and the base of a family of them.
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

/// The base of the op Self: `T` is its attributes, or the family (derived from PrimitiveWith) to
/// which it belongs. Self is made of its attributes, or of one of its OpInfos and those; with
/// `using PrimitiveOf::PrimitiveOf` it is, and has an OpInfo kOp where there is only one. What the
/// attributes must fulfil together, a public `static void check_attributes(const A&)` says, by
/// throwing UserError: values that were read are given to it.
template <class Self, class T>
class PrimitiveOf : public PrimitiveBase<T>::type {
  using Base = typename PrimitiveBase<T>::type;
  using A = typename Base::Attributes;

 public:
  PrimitiveOf(const OpInfo& op, const A& a) : Base(op, a) {}
  explicit PrimitiveOf(const A& a) requires requires { Self::kOp; } : Base(Self::kOp, a) {
  }

  PrimRef with_attributes(AttributeReader& reader) const final {
    A a = static_cast<const A&>(*this);
    FieldReader f(reader);
    A::fields(a, f);
    if constexpr (requires { Self::check_attributes(a); }) Self::check_attributes(a);
    if constexpr (std::is_constructible_v<Self, const A&>)
      return PrimRef(new Self(a));
    else
      return PrimRef(new Self(this->info(), a));
  }
};

}  // namespace tessera
