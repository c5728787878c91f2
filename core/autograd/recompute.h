// Activation recomputation: backward does not keep what a part of the forward pass computed, but
// runs that part again when it needs the values.
//
//   Tensor y = recompute(block, x);                           // keeps x and y, nothing in between
//   Tensor y = recompute(keeping_products(), block, x);       // keeps results of products besides
//
// While the function runs, each result of an op is marked with a recipe (core/tensor/storage.h),
// and a node that saves the result keeps the recipe in place of the values. The first recipe that
// is read runs the function again, from its inputs and under the same settings (autocast, sample
// numbers, the generator's state), and brings back all values that backward still needs. Invariant:
// both runs call the same ops, so results and gradients have the same bits as without it; a
// function that calls other ops the second time is refused. Chen et al. 2016, "Training Deep Nets
// with Sublinear Memory Cost"; keeping some results: Korthikanti et al. 2022.
//
// The function may read tensors from outside (parameters), which must have the same values when
// backward comes. It may assign_ to tensors outside (running statistics): the second run leaves
// that out. A value computed from a tensor that the function then overwrote cannot be brought
// back, and an error says so. The function may read values (item, nonzero, masked_select) and
// branch on them: they are computed again too. Results of ops made above the core (collectives)
// are kept. A recompute inside another one is part of the outer one; inside a function transform it
// keeps its values.
#pragma once
#include <functional>
#include <optional>

#include "core/autograd/tree.h"
#include "core/base/function_ref.h"

namespace tessera {

struct RecomputeOptions {
  /// Says of an op whether its results are kept; without it, all are computed again.
  std::function<bool(const Primitive& op)> keep = {};
};
/// Keeps results of products, convolutions and attention, which take most of the time; the rest is
/// computed again.
RecomputeOptions keeping_products();

namespace recomputation {

using List = std::vector<Tensor>;
using Function = std::function<List(std::span<const Tensor>)>;
List run(const RecomputeOptions& options, Function f, const List& in);

/// True on a thread that runs a function for the second time.
bool running_again();

/// Ops that run while one lives are no part of the function that is computed again. A wrapper that
/// gathers parameters uses it, since it gathers in the second run too, maybe by other ops.
class Apart {
 public:
  Apart();
  ~Apart();
  Apart(const Apart&) = delete;
  Apart& operator=(const Apart&) = delete;

 private:
  void* region_;
};

}  // namespace recomputation

/// f(args...), computed again in backward. `f` is copied; what it refers to must live until then.
/// Arguments and results are trees (tree.h).
template <class F, class... A>
requires std::is_invocable_v<const F&, const A&...>
auto recompute(const RecomputeOptions& options, F f, const A&... args) {
  using Out = std::decay_t<decltype(f(args...))>;
  const std::tuple<A...> like(args...);
  std::optional<Out> out;
  auto body = [f = std::move(f), like, out = &out,
               again = false](std::span<const Tensor> in) mutable {
    Out result = std::apply([&](const auto&... x) { return f(x...); }, tree::unflatten(like, in));
    tree::List leaves = tree::flatten(result);
    if (!again) out->emplace(std::move(result));  // the first run ends before recompute() does
    again = true;
    return leaves;
  };
  tree::List results = recomputation::run(options, std::move(body), tree::flatten(like));
  return tree::unflatten(*out, results);
}
template <class F, class... A>
requires std::is_invocable_v<const F&, const A&...>
auto recompute(F f, const A&... args) {
  return recompute(RecomputeOptions{}, std::move(f), args...);
}

}  // namespace tessera
