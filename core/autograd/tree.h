// Arguments and results of functions as lists of tensors. A tree is a tensor, a named tensor, a
// vector, array, map, optional, pair or tuple of trees, or a struct that names its members (Members
// below). Numbers, enums and text hold no tensors and are passed on as they are; any other type
// does not compile, since its tensors would silently be constants. Invariant: rebuild gives the
// structure of its model, with new tensors in the order in which visit() met the old ones.
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
  template <class V>
  static void visit(const T& t, V& v) {
    if constexpr (!std::is_empty_v<T>) v.value(t);
  }
  static T rebuild(const T& like, const Tensor*&) { return like; }
};
/// Shows `v` the parts of `t`, in order: v.tensor(Tensor), v.value(number, enum or text) and,
/// before the elements of a container, v.size(how many).
template <class T, class V>
void visit(const T& t, V& v) {
  Tree<T>::visit(t, v);
}
template <class T>
T rebuild(const T& like, const Tensor*& next) {
  return Tree<T>::rebuild(like, next);
}

template <>
struct Tree<Tensor> {
  template <class V>
  static void visit(const Tensor& t, V& v) {
    v.tensor(t);
  }
  static Tensor rebuild(const Tensor&, const Tensor*& next) { return *next++; }
};
template <>
struct Tree<NamedTensor> {
  template <class V>
  static void visit(const NamedTensor& t, V& v) {
    v.value(t.name), v.tensor(t.tensor);
  }
  static NamedTensor rebuild(const NamedTensor& like, const Tensor*& next) {
    return {like.name, *next++};
  }
};

template <class T>
struct Tree<std::optional<T>> {
  template <class V>
  static void visit(const std::optional<T>& t, V& v) {
    v.size(size_t(t.has_value()));
    if (t) tree::visit(*t, v);
  }
  static std::optional<T> rebuild(const std::optional<T>& like, const Tensor*& next) {
    return like ? std::optional<T>(tree::rebuild(*like, next)) : std::nullopt;
  }
};
template <class K, class T>
struct Tree<std::map<K, T>> {
  template <class V>
  static void visit(const std::map<K, T>& t, V& v) {
    v.size(t.size());
    for (const auto& [key, value] : t) v.value(key), tree::visit(value, v);
  }
  static std::map<K, T> rebuild(const std::map<K, T>& like, const Tensor*& next) {
    std::map<K, T> t = like;
    for (auto& [key, value] : t) value = tree::rebuild(value, next);
    return t;
  }
};

/// The Tree of a struct: its members that hold tensors or may differ between values.
template <class S, auto... members>
struct Members {
  template <class V>
  static void visit(const S& s, V& v) {
    (tree::visit(s.*members, v), ...);
  }
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

// The Tree of a container of equal elements.
template <class C>
struct Sequence {
  template <class V>
  static void visit(const C& list, V& v) {
    v.size(list.size());
    for (const auto& t : list) tree::visit(t, v);
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
  template <class V>
  static void visit(const std::tuple<T...>& t, V& v) {
    std::apply([&](const T&... x) { (tree::visit(x, v), ...); }, t);
  }
  // Braces, because they evaluate left to right.
  static std::tuple<T...> rebuild(const std::tuple<T...>& like, const Tensor*& next) {
    return std::apply([&](const T&... x) { return std::tuple<T...>{tree::rebuild(x, next)...}; },
                      like);
  }
};
template <class A, class B>
struct Tree<std::pair<A, B>> {
  template <class V>
  static void visit(const std::pair<A, B>& t, V& v) {
    tree::visit(t.first, v), tree::visit(t.second, v);
  }
  static std::pair<A, B> rebuild(const std::pair<A, B>& like, const Tensor*& next) {
    A first = tree::rebuild(like.first, next);
    return {std::move(first), tree::rebuild(like.second, next)};
  }
};

struct Leaves {
  List list = {};
  void tensor(const Tensor& t) { list.push_back(t); }
  template <class T>
  void value(const T&) {}
  void size(size_t) {}
};
/// All tensors of `t`, in order.
template <class T>
List flatten(const T& t) {
  Leaves leaves;
  visit(t, leaves);
  return std::move(leaves.list);
}
/// The structure of `like` with other tensors.
template <class T>
T unflatten(const T& like, std::span<const Tensor> tensors) {
  const Tensor* next = tensors.data();
  return rebuild(like, next);
}

}  // namespace tessera::tree
