// Types that the templates of custom_op.h are made of: they read from a function's parameters which
// are operands, numbers and results, and store the functions of an op with their types erased.
// Internal: not part of the public interface.
#pragma once
#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "core/ops/scalar.h"
#include "core/primitive/primitive.h"

namespace tessera::detail {

using Numbers = std::span<const Scalar>;

/// An op of a program's own, without the types of its functions. Either infer and forward are
/// there, or formula.
struct OpParts {
  std::string name;
  int operands = 0;
  size_t results = 0;
  std::vector<Scalar> numbers;  // zeros, of the kinds that the op takes
  std::function<Metas(MetaSpan, Numbers)> infer = {};
  std::function<void(std::span<const Tensor>, Numbers, std::span<Tensor>)> forward = {};
  std::function<Tensor(std::span<const Tensor>, Numbers)> formula = {};
  std::function<Tensors(const VjpArgs&, Numbers)> vjp = {};  // null: none was given
  SaveMask saved = {};                                       // what vjp reads
  Precision precision = Precision::kAsGiven;
  std::function<AxisMap(MetaSpan)> axes = {};
};
class OpDefinition;
/// Throws UserError where there is an op of this name. Thread-safe.
const OpDefinition& define_op(OpParts parts);
Tensors call_op(const OpDefinition& op, Inputs in, Numbers numbers);

/// The gradient `g` of operand `i` must have the shape of `in`, or one that `in` would broadcast
/// to, which is then summed; another float dtype is cast. Throws ShapeError naming `op`. As in
/// PyTorch.
Tensor fit_gradient(std::string_view op, size_t i, Tensor g, const Tensor& in);

// ---- the parameters of a function

enum class Role : uint8_t { kOperand, kNumber, kResult, kNone };

template <class P>
constexpr Role role_of() {
  using T = std::remove_cvref_t<P>;
  if (std::is_same_v<P, Tensor&>) return Role::kResult;
  if (std::is_lvalue_reference_v<P> && !std::is_const_v<std::remove_reference_t<P>>)
    return Role::kNone;
  if (std::is_same_v<T, Tensor> || std::is_same_v<T, Meta>) return Role::kOperand;
  return std::is_arithmetic_v<T> ? Role::kNumber : Role::kNone;
}

template <class... P>
struct ParameterList {
  static constexpr size_t size = sizeof...(P);
  static constexpr std::array<Role, size> roles{role_of<P>()...};
  /// Parameters of this role among the first `end`.
  static constexpr size_t count(Role role, size_t end = size) {
    size_t n = 0;
    for (size_t i = 0; i < end; ++i) n += roles[i] == role;
    return n;
  }
  static constexpr size_t place(size_t i) { return count(roles[i], i); }
  template <size_t I>
  using At = std::tuple_element_t<I, std::tuple<P...>>;
  template <class More>
  using And = ParameterList<P..., More>;
};

template <class Function>
struct Signature;
template <class R, class... P>
struct Signature<std::function<R(P...)>> {
  using Result = R;
  using Parameters = ParameterList<P...>;
};
template <class F>
using SignatureOf = Signature<decltype(std::function(std::declval<F>()))>;

/// The type of a call: CustomOp's argument.
template <class P>
using Given =
    std::conditional_t<role_of<P>() == Role::kResult, std::tuple<>,
                       std::conditional_t<role_of<P>() == Role::kOperand, std::tuple<const Tensor&>,
                                          std::tuple<std::remove_cvref_t<P>>>>;
template <class R, class Arguments>
struct CallOf;
template <class R, class... A>
struct CallOf<R, std::tuple<A...>> {
  using Type = R(A...);
};
template <class List>
struct CallOfList;
template <class... P>
struct CallOfList<ParameterList<P...>> {
  static constexpr size_t kResults = ParameterList<P...>::count(Role::kResult);
  using R = std::conditional_t<kResults == 1, Tensor, std::array<Tensor, kResults>>;
  using Type = typename CallOf<R, decltype(std::tuple_cat(std::declval<Given<P>>()...))>::Type;
};
template <class List>
using Call = typename CallOfList<List>::Type;

template <class Forward>
constexpr void check_forward() {
  static_assert(Forward::count(Role::kNone) == 0,
                "forward takes operands (const Tensor&), numbers and results (Tensor&)");
  static_assert(Forward::count(Role::kOperand) > 0, "an op has an operand: a const Tensor&");
  static_assert(Forward::count(Role::kResult) > 0, "an op has a result: a Tensor&");
  static_assert(Forward::count(Role::kOperand) <= 32 && Forward::count(Role::kResult) <= 32);
}
template <class Formula, class Result>
constexpr void check_formula() {
  static_assert(Formula::count(Role::kNone) + Formula::count(Role::kResult) == 0,
                "a formula takes operands (const Tensor&) and numbers");
  static_assert(Formula::count(Role::kOperand) > 0, "an op has an operand: a const Tensor&");
  static_assert(Formula::count(Role::kOperand) <= 32);
  static_assert(std::is_same_v<Result, Tensor>, "a formula returns a Tensor");
}
template <class Infer, class Forward>
constexpr bool infers() {
  size_t k = 0;
  for (Role role : Forward::roles)
    if (role != Role::kResult && (k == Infer::size || Infer::roles[k++] != role)) return false;
  return k == Infer::size;
}
template <class Infer, class Forward>
constexpr void check_infer() {
  static_assert(infers<Infer, Forward>(),
                "infer takes a const Meta& for each operand of forward, and its numbers, in order");
}
/// `Saved`: what the vjp gets before the cotangents.
template <class Vjp, class Saved, size_t kResults>
constexpr bool differentiates() {
  if (Vjp::size != Saved::size + kResults) return false;
  for (size_t i = 0; i < Vjp::size; ++i) {
    const bool number = i < Saved::size && Saved::roles[i] == Role::kNumber;
    if (Vjp::roles[i] != (number ? Role::kNumber : Role::kOperand)) return false;
  }
  return true;
}

// ---- functions without their types

/// What stands for a parameter of type `P`.
template <class P, class V>
decltype(auto) as(V& v) {
  using T = std::remove_cvref_t<P>;
  if constexpr (std::is_arithmetic_v<T>)
    return T(std::is_floating_point_v<T> ? v.real() : v.integer());
  else if constexpr (std::is_pointer_v<std::remove_const_t<V>>)
    return (*v);
  else if constexpr (std::is_same_v<T, Meta> && std::is_same_v<std::remove_const_t<V>, Tensor>)
    return (v.meta());
  else
    return (v);
}

/// Parameter `I`, of type `P`, of a function whose parameters have the roles of `Roles`.
template <class P, class Roles, size_t I, class In>
decltype(auto) argument(std::span<In> in, Numbers numbers, std::span<Tensor> out) {
  constexpr size_t k = Roles::place(I);
  if constexpr (Roles::roles[I] == Role::kOperand)
    return as<P>(in[k]);
  else if constexpr (Roles::roles[I] == Role::kNumber)
    return as<P>(numbers[k]);
  else
    return as<P>(out[k]);
}
template <class F, class In>
decltype(auto) apply_to(const F& f, std::span<In> in, Numbers numbers, std::span<Tensor> out = {}) {
  using Own = typename SignatureOf<F>::Parameters;
  return [&]<size_t... I>(std::index_sequence<I...>)->decltype(auto) {
    return f(argument<typename Own::template At<I>, Own, I>(in, numbers, out)...);
  }
  (std::make_index_sequence<Own::size>());
}

template <class F>
std::function<Metas(MetaSpan, Numbers)> erased_infer(F f) {
  using R = typename SignatureOf<F>::Result;
  static_assert(std::is_convertible_v<R, Meta> || std::is_convertible_v<R, Metas>,
                "infer returns a Meta, or Metas for several results");
  return [f = std::move(f)](MetaSpan in, Numbers numbers) -> Metas {
    if constexpr (std::is_convertible_v<R, Meta>)
      return Metas{apply_to(f, in, numbers)};
    else
      return apply_to(f, in, numbers);
  };
}
template <class F>
std::function<void(std::span<const Tensor>, Numbers, std::span<Tensor>)> erased_forward(F f) {
  return [f = std::move(f)](std::span<const Tensor> in, Numbers numbers, std::span<Tensor> out) {
    apply_to(f, in, numbers, out);
  };
}
template <class F>
std::function<Tensor(std::span<const Tensor>, Numbers)> erased_formula(F f) {
  return [f = std::move(f)](std::span<const Tensor> in, Numbers numbers) -> Tensor {
    return apply_to(f, in, numbers);
  };
}

/// As argument, of a vjp: what `Saved` says, then cotangents.
template <class P, class Saved, size_t I>
decltype(auto) vjp_argument(const VjpArgs& v, Numbers numbers) {
  if constexpr (I >= Saved::size)
    return as<P>(v.cot[I - Saved::size]);
  else
    return argument<P, Saved, I>(v.in, numbers, v.out);
}
template <class Own, class Saved, size_t... I>
constexpr SaveMask reads(std::index_sequence<I...>) {
  SaveMask mask;
  const auto add = [&](Role role, size_t place, bool values) {
    if (values && role == Role::kOperand) mask.inputs |= 1u << place;
    if (values && role == Role::kResult) mask.outputs |= 1u << place;
  };
  (add(Saved::roles[I], Saved::place(I),
       std::is_same_v<std::remove_cvref_t<typename Own::template At<I>>, Tensor>),
   ...);
  return mask;
}
template <class Saved, class F>
void add_vjp(OpParts& parts, F f) {
  using Own = typename SignatureOf<F>::Parameters;
  constexpr size_t kResults = std::max<size_t>(Saved::count(Role::kResult), 1);
  static_assert(differentiates<Own, Saved, kResults>(),
                "a vjp takes what forward takes, in its order, each tensor as const Tensor& or "
                "const Meta&, and then a const Tensor&, the cotangent, for each result");
  parts.saved = reads<Own, Saved>(std::make_index_sequence<Saved::size>());
  parts.vjp = [f = std::move(f)](const VjpArgs& v, Numbers numbers) -> Tensors {
    using R = typename SignatureOf<F>::Result;
    static_assert(std::is_same_v<R, Tensor> || std::is_same_v<R, Tensors>,
                  "a vjp returns a Tensor, or Tensors for several operands");
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return Tensors{f(vjp_argument<typename Own::template At<I>, Saved, I>(v, numbers)...)};
    }
    (std::make_index_sequence<Own::size>());
  };
}

template <class... P>
OpParts parts_of(std::string_view name, ParameterList<P...>) {
  using List = ParameterList<P...>;
  OpParts parts{.name = std::string(name),
                .operands = int(List::count(Role::kOperand)),
                .results = List::count(Role::kResult),
                .numbers = {}};
  const auto add = [&]<class T>(std::type_identity<T>) {
    if constexpr (role_of<T>() == Role::kNumber)
      parts.numbers.push_back(Scalar(std::remove_cvref_t<T>()));
  };
  (add(std::type_identity<P>()), ...);
  return parts;
}

/// An argument of a call.
inline void put(const Tensor& t, SmallVector<Tensor, 4>& in, SmallVector<Scalar, 4>&) {
  in.push_back(t);
}
template <class T>
requires std::is_arithmetic_v<T>
void put(T number, SmallVector<Tensor, 4>&, SmallVector<Scalar, 4>& numbers) {
  numbers.push_back(Scalar(number));
}

}  // namespace tessera::detail
