// Arguments and results of functions as lists of tensors: a tensor, a vector, array, map, optional,
// pair or tuple of such, a named tensor, or a struct of tensors that says so. Numbers, enums and
// text have none and are passed on as they are; any other type does not compile, since its tensors
// would be constants. Invariant: rebuild gives back the structure of its model with the tensors
// that leaves() listed, in the same order.
#pragma once
#include <array>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/ops/batch_norm.h"
#include "core/ops/linalg.h"
#include "core/ops/sort.h"
#include "core/tensor/named_tensor.h"

namespace tessera::tree {

using List = std::vector<Tensor>;

template <class T>
struct Tree {
  static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_empty_v<T> ||
                    std::is_convertible_v<T, std::string_view>,
                "no tree of tensors: give a struct one by `template <> struct tessera::tree::"
                "Tree<S> : Members<S, &S::a, &S::b> {};`");
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

template <class T>
struct Tree<std::optional<T>> {
  static void leaves(const std::optional<T>& t, List& out) {
    if (t) tree::leaves(*t, out);
  }
  static std::optional<T> rebuild(const std::optional<T>& like, const Tensor*& next) {
    return like ? std::optional<T>(tree::rebuild(*like, next)) : std::nullopt;
  }
};
template <class K, class T>
struct Tree<std::map<K, T>> {
  static void leaves(const std::map<K, T>& t, List& out) {
    for (const auto& [key, value] : t) tree::leaves(value, out);
  }
  static std::map<K, T> rebuild(const std::map<K, T>& like, const Tensor*& next) {
    std::map<K, T> t = like;
    for (auto& [key, value] : t) value = tree::rebuild(value, next);
    return t;
  }
};

/// For structs: the members that are trees.
template <class S, auto... members>
struct Members {
  static void leaves(const S& s, List& out) { (tree::leaves(s.*members, out), ...); }
  static S rebuild(const S& like, const Tensor*& next) {
    S s = like;
    ((s.*members = tree::rebuild(like.*members, next)), ...);
    return s;
  }
};
template <>
struct Tree<linalg::QR> : Members<linalg::QR, &linalg::QR::q, &linalg::QR::r> {};
template <>
struct Tree<linalg::SVD>
    : Members<linalg::SVD, &linalg::SVD::u, &linalg::SVD::s, &linalg::SVD::vh> {};
template <>
struct Tree<ValuesAndIndices>
    : Members<ValuesAndIndices, &ValuesAndIndices::values, &ValuesAndIndices::indices> {};
template <>
struct Tree<BatchMoments>
    : Members<BatchMoments, &BatchMoments::y, &BatchMoments::mean, &BatchMoments::var> {};

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
