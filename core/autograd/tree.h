// Arguments and results of functions as lists of tensors: a tensor, a vector, array, pair or tuple
// of such, or a named tensor. Anything else (a number, an option) has no tensors and is passed on
// as it is. Invariant: rebuild gives back the structure of its model with the tensors that leaves()
// listed, in the same order.
#pragma once
#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "core/tensor/named_tensor.h"

namespace tessera::tree {

using List = std::vector<Tensor>;

template <class T>
struct Tree {
  static void leaves(const T&, List&) {}
  static T rebuild(const T& like, const Tensor*&) { return like; }
};
template <class T>
void leaves(const T& t, List& out) {
  Tree<T>::leaves(t, out);
}
template <class T>
T rebuild(const T& like, const Tensor*& next) {
  return Tree<T>::rebuild(like, next);
}

template <>
struct Tree<Tensor> {
  static void leaves(const Tensor& t, List& out) { out.push_back(t); }
  static Tensor rebuild(const Tensor&, const Tensor*& next) { return *next++; }
};
template <>
struct Tree<NamedTensor> {
  static void leaves(const NamedTensor& t, List& out) { out.push_back(t.tensor); }
  static NamedTensor rebuild(const NamedTensor& like, const Tensor*& next) {
    return {like.name, *next++};
  }
};

// Lists of equal elements.
template <class C>
struct Sequence {
  static void leaves(const C& list, List& out) {
    for (const auto& t : list) tree::leaves(t, out);
  }
  static C rebuild(const C& like, const Tensor*& next) {
    C list = like;
    for (auto& t : list) t = tree::rebuild(t, next);
    return list;
  }
};
template <class T>
struct Tree<std::vector<T>> : Sequence<std::vector<T>> {};
template <class T, size_t N>
struct Tree<std::array<T, N>> : Sequence<std::array<T, N>> {};
template <class T, size_t N>
struct Tree<SmallVector<T, N>> : Sequence<SmallVector<T, N>> {};

template <class... T>
struct Tree<std::tuple<T...>> {
  static void leaves(const std::tuple<T...>& t, List& out) {
    std::apply([&](const T&... x) { (tree::leaves(x, out), ...); }, t);
  }
  // Braces: left to right.
  static std::tuple<T...> rebuild(const std::tuple<T...>& like, const Tensor*& next) {
    return std::apply([&](const T&... x) { return std::tuple<T...>{tree::rebuild(x, next)...}; },
                      like);
  }
};
template <class A, class B>
struct Tree<std::pair<A, B>> {
  static void leaves(const std::pair<A, B>& t, List& out) {
    tree::leaves(t.first, out), tree::leaves(t.second, out);
  }
  static std::pair<A, B> rebuild(const std::pair<A, B>& like, const Tensor*& next) {
    A first = tree::rebuild(like.first, next);
    return {std::move(first), tree::rebuild(like.second, next)};
  }
};

/// All tensors of `t`, in order.
template <class T>
List flatten(const T& t) {
  List out;
  leaves(t, out);
  return out;
}
/// The structure of `like` with other tensors.
template <class T>
T unflatten(const T& like, std::span<const Tensor> tensors) {
  const Tensor* next = tensors.data();
  return rebuild(like, next);
}

}  // namespace tessera::tree
