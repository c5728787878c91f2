// Whether a function that Tessera declares may be called where the vendor's has another
// declaration: handles and enumerations have names of their own on both sides. Invariant: what a
// struct consists of is compared elsewhere; here are sizes and alignments.
#pragma once
#include <type_traits>

namespace tessera::cuda {

template <class T>
concept Complete = requires {
  sizeof(T);
};

/// Whether a caller may pass A where the callee reads B.
template <class A, class B>
constexpr bool agree() {
  if constexpr (std::is_function_v<A> || std::is_function_v<B>) {
    return std::is_same_v<A, B>;
  } else if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
    using To = std::remove_pointer_t<A>;
    using Theirs = std::remove_pointer_t<B>;
    return std::is_const_v<To> == std::is_const_v<Theirs> &&
           agree<std::remove_const_t<To>, std::remove_const_t<Theirs>>();
  } else if constexpr (std::is_void_v<A> || std::is_void_v<B> || !Complete<A> || !Complete<B>) {
    return std::is_void_v<A> == std::is_void_v<B> && Complete<A> == Complete<B>;
  } else if constexpr (std::is_class_v<A>) {
    return std::is_class_v<B> && sizeof(A) == sizeof(B) && alignof(A) == alignof(B);
  } else if constexpr (std::is_floating_point_v<A>) {
    return std::is_same_v<A, B>;
  } else {
    return (std::is_integral_v<A> || std::is_enum_v<A>)&&(
               std::is_integral_v<B> || std::is_enum_v<B>)&&sizeof(A) == sizeof(B);
  }
}

/// Whether two functions have as many parameters, and those agree, and what they return.
template <class A, class B>
constexpr bool kSameFunction = false;
template <class A, class... As, class B, class... Bs>
requires(sizeof...(As) ==
         sizeof...(Bs)) constexpr bool kSameFunction<A(As...), B(Bs...)> = agree<A, B>() &&
                                                                           (agree<As, Bs>() && ...);

}  // namespace tessera::cuda
