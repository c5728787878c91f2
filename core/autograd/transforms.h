// Function transforms: they turn a function of tensors into another one, and nest in any order.
//
//   auto g = grad(f);                                  Tensor dx = g(x);
//   auto [loss, dw] = value_and_grad(f)(w, x);         // dw has the type of w: a tensor, or a list
//   auto per_sample = vmap(grad(f), {.in_dims = {std::nullopt, 0, 0}})(w, x, y);
//   auto [y, pullback] = vjp(f, x);                    Tensor dx = pullback(dy);
//   auto [y, dy] = jvp(f, x, dx);
//   Tensor j = jacrev(f)(x), j2 = jacfwd(f)(x), h = hessian(f)(x);
//
// Arguments and results are trees (tree.h): tensors, vectors, tuples of them. grad<1>(f)
// differentiates by argument 1, grad<0, 2>(f) gives a tuple. A tensor that the function takes from
// outside, such as a parameter of a module, is a constant to the transform; nn::functional_call
// turns parameters into arguments.
//
// Functions should be pure. A transform runs its function on wrappers, which may not be kept after
// it returns. Values may be read (item) except under vmap, where a tensor stands for a batch.
// Under vmap, assign_ of a batched value needs a batched destination. NoGrad inside a
// function makes constants for every transform around it, as detach() does; NoGrad around a
// transform does not stop it, but saves the memory of recording for an outer backward.
//
// Levels are JAX's and functorch's: Frostig, Johnson, Leary 2018; Horace He, Richard Zou 2021.
#pragma once
#include "core/autograd/level.h"
#include "core/autograd/transforms_core.h"
#include "core/autograd/tree.h"

namespace tessera {
namespace transforms {

template <class... A>
using Values = std::tuple<std::decay_t<A>...>;

/// Runs `f` on the structure of `like` with other tensors; keeps the structure of its result.
template <class F, class... A>
auto call(const F& f, const Values<A...>& like, std::span<const Tensor> tensors) {
  return std::apply([&](const auto&... x) { return f(x...); }, tree::unflatten(like, tensors));
}

// Bit i: tensor i belongs to one of the arguments `Arg` (to the first where none is named).
template <size_t... Arg, class... T>
std::vector<bool> chosen(const std::tuple<T...>& args) {
  std::vector<bool> mask;
  size_t i = 0;
  auto add = [&](const auto& x) {
    const bool on = sizeof...(Arg) == 0 ? i == 0 : ((i == Arg) || ...);
    mask.resize(mask.size() + tree::flatten(x).size(), on);
    ++i;
  };
  std::apply([&](const T&... x) { (add(x), ...); }, args);
  return mask;
}

// The arguments `Arg` of `args`: one by itself, several as a tuple.
template <size_t... Arg, class T>
auto picked(const T& args) {
  if constexpr (sizeof...(Arg) == 0)
    return std::get<0>(args);
  else if constexpr (sizeof...(Arg) == 1)
    return std::get<Arg...>(args);
  else
    return std::tuple{std::get<Arg>(args)...};
}

template <class T>
struct IsPair : std::false_type {};
template <class B>
struct IsPair<std::pair<Tensor, B>> : std::true_type {};

template <class T>
struct IsTuple : std::false_type {};
template <class... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};

/// The linear map that vjp returns; may be called any number of times, under other transforms too,
/// by one thread at a time.
template <class Out, class In>
class Pullback {
 public:
  Pullback(Recording recording, Out out, In in)
      : recording_(std::move(recording)), out_(std::move(out)), in_(std::move(in)) {}
  /// Cotangents of the arguments from those of the result, which are shaped like it.
  In operator()(const Out& cotangents) const {
    return tree::unflatten(in_, recording_.pullback(tree::flatten(cotangents)));
  }

 private:
  Recording recording_;
  Out out_;
  In in_;
};

}  // namespace transforms

/// g(args) = (f(args), df/d(args Arg...)). f returns a float tensor of one element, or a pair of it
/// and anything else, which g returns too. A gradient has the structure of its argument, and is
/// zero where f does not depend on that or it holds integers.
template <size_t... Arg, class F>
auto value_and_grad(F f) {
  return [f = std::move(f)](const auto&... args) {
    using namespace transforms;
    using Out = std::decay_t<decltype(f(args...))>;
    static_assert(std::is_same_v<Out, Tensor> || IsPair<Out>::value,
                  "grad: f returns a tensor, or std::pair of it and what else it returns");
    const Values<decltype(args)...> like(args...);
    std::optional<Out> out;
    auto body = [&](std::span<const Tensor> in) {
      out.emplace(call<F, decltype(args)...>(f, like, in));
      return tree::flatten(*out);
    };
    ValueAndGrad r = value_and_grad_of(body, tree::flatten(like), chosen<Arg...>(like));
    auto gradients = picked<Arg...>(tree::unflatten(like, r.gradients));
    return std::pair{tree::unflatten(*out, r.values), std::move(gradients)};
  };
}

/// g(args) = df/d(args Arg...), or a pair of it and what f returns beside its value.
template <size_t... Arg, class F>
requires(!std::is_convertible_v<F, std::span<const Tensor>>) auto grad(F f) {
  return [both = value_and_grad<Arg...>(std::move(f))](const auto&... args) {
    auto [value, gradients] = both(args...);
    if constexpr (transforms::IsPair<decltype(value)>::value)
      return std::pair{std::move(gradients), std::move(value.second)};
    else
      return std::move(gradients);
  };
}

/// f(args) and the map (Pullback) from cotangents of the result to those of the arguments, a tuple
/// where there are several.
template <class F, class... A>
auto vjp(F f, const A&... args) {
  using namespace transforms;
  using Out = std::decay_t<decltype(f(args...))>;
  const Values<A...> like(args...);
  std::optional<Out> out;
  auto body = [&](std::span<const Tensor> in) {
    out.emplace(call<F, A...>(f, like, in));
    return tree::flatten(*out);
  };
  tree::List in = tree::flatten(like);
  Recording recording = record(body, in, std::vector<bool>(in.size(), true));
  Out value = tree::unflatten(*out, recording.results());
  if constexpr (sizeof...(A) == 1)
    return std::pair{value, Pullback(std::move(recording), value, std::get<0>(like))};
  else
    return std::pair{value, Pullback(std::move(recording), value, like)};
}

/// f(primals) and its derivative in the direction of `tangents`, which are shaped like them. A
/// tuple holds several arguments: jvp(f, std::tuple{x, y}, std::tuple{dx, dy}). Forward mode is
/// reverse mode twice: the pullback is linear in its cotangents, and its transpose is the
/// derivative. That costs a forward, a recorded backward and the backward of that, two to three
/// times as much as rules for tangents; it is right for every op whose vjp can be differentiated by
/// its cotangents. Townsend 2017, "A new trick for calculating Jacobian vector products".
template <class F, class In>
auto jvp(F f, const In& primals, const In& tangents) {
  using namespace transforms;
  auto run = [&](const In& in) {
    if constexpr (IsTuple<In>::value)
      return std::apply(f, in);
    else
      return f(in);
  };
  using Out = std::decay_t<decltype(run(primals))>;
  std::optional<Out> out;
  auto body = [&](std::span<const Tensor> in) {
    out.emplace(run(tree::unflatten(primals, in)));
    return tree::flatten(*out);
  };
  ValuesAndTangents r = jvp_of(body, tree::flatten(primals), tree::flatten(tangents));
  return std::pair{tree::unflatten(*out, r.values), tree::unflatten(*out, r.tangents)};
}

/// Which dim of an argument holds the batch; nullopt: the argument is the same for every sample.
using BatchDim = std::optional<int64_t>;

struct VmapOptions {
  std::vector<BatchDim> in_dims = {};  // one for each argument; none given: dim 0 of all
  std::vector<int64_t> out_dims = {};  // one for each tensor of the result, or for all; none: 0
  Randomness randomness = Randomness::kError;
};

/// g(args): f on every sample of a batch at once. f sees arguments without their batch dim; results
/// get it back at out_dims. The in_dim of a list holds for each of its tensors; a batch may
/// have no samples. Each op runs once on the whole batch (core/autograd/batching.h); the few ops
/// that cannot run sample by sample, which is logged.
template <class F>
auto vmap(F f, VmapOptions options = {}) {
  return [f = std::move(f), options = std::move(options)](const auto&... args) {
    using namespace transforms;
    using Out = std::decay_t<decltype(f(args...))>;
    const Values<decltype(args)...> like(args...);
    std::optional<Out> out;
    auto body = [&](std::span<const Tensor> in) {
      out.emplace(call<F, decltype(args)...>(f, like, in));
      return tree::flatten(*out);
    };
    std::vector<size_t> leaves{tree::flatten(args).size()...};
    tree::List results = vmap_of(body, tree::flatten(like),
                                 {options.in_dims, leaves, options.out_dims, options.randomness});
    return tree::unflatten(*out, results);
  };
}

namespace transforms {

template <size_t Arg, class F>
auto jacobian(Mode mode, F f) {
  return [mode, f = std::move(f)](const auto&... args) {
    const Values<decltype(args)...> like(args...);
    auto body = [&](std::span<const Tensor> in) {
      return tree::flatten(call<F, decltype(args)...>(f, like, in));
    };
    List by_leaf = jacobians(mode, body, tree::flatten(like), chosen<Arg>(like));
    return std::get<Arg>(tree::unflatten(like, by_leaf));
  };
}

}  // namespace transforms

/// Jacobians of f, which returns one float tensor y, by argument Arg, a tensor x or a list of them:
/// [y's dims.., x's dims..], of y's dtype. jacrev runs one batched backward with a sample for each
/// element of y; jacfwd one batched forward derivative with a sample for each element of x.
template <size_t Arg = 0, class F>
auto jacrev(F f) {
  return transforms::jacobian<Arg>(transforms::Mode::kReverse, std::move(f));
}
template <size_t Arg = 0, class F>
auto jacfwd(F f) {
  return transforms::jacobian<Arg>(transforms::Mode::kForward, std::move(f));
}
/// Second derivatives of f, which returns a tensor y (0-d, as a rule), by its argument Arg, a
/// tensor x: [y's dims.., x's dims.., x's dims..]. Forward over reverse.
template <size_t Arg = 0, class F>
auto hessian(F f) {
  return jacfwd<Arg>(jacrev<Arg>(std::move(f)));
}

}  // namespace tessera
