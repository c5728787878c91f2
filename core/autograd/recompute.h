// Activation recomputation: what a part of the forward pass computed is not kept for backward but
// computed again when backward comes there.
//
//   Tensor y = recompute(block, x);                           // keeps x and y, nothing in between
//   Tensor y = recompute(keeping_products(), block, x);       // keeps results of products besides
//
// While the function runs, each result of an op is marked with a recipe (core/tensor/storage.h),
// and what saves it for backward keeps the recipe instead of the values. The first recipe that is
// asked for runs the function again, from its inputs and under the same settings (autocast, sample
// numbers, the generator's state), and brings back all that is still wanted. Invariant: the
// function runs the same ops each time, so results and gradients have the same bits as without; one
// that does not is refused. Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost";
// keeping some results: Korthikanti et al. 2022.
//
// The function may read tensors from outside (parameters): they must have the same values when
// backward comes. assign_ in it writes once: the second run leaves out writes to what is outside
// (running statistics); a value that was computed from what the function then overwrote cannot be
// brought back, and that is said. Values may be read (item, nonzero, masked_select), and what the
// function does may depend on them: they are computed again too. What ops made above the core
// return (collectives) stays. A function within another is part of that one; so is one within a
// function transform, which keeps its values.
#pragma once
#include <functional>
#include <optional>

#include "core/autograd/tree.h"
#include "core/base/function_ref.h"

namespace tessera {

struct RecomputeOptions {
  /// Ops whose results stay; none given: all are computed again.
  std::function<bool(const Primitive& op)> keep = {};
};
/// Keeps results of products, convolutions and attention, which take most of the time, and computes
/// the rest again.
RecomputeOptions keeping_products();

namespace recomputation {

using List = std::vector<Tensor>;
using Function = std::function<List(std::span<const Tensor>)>;
List run(const RecomputeOptions& options, Function f, const List& in);

/// True while a function runs for the second time.
bool running_again();

/// Ops run while it lives are no part of a function that is to be computed again: those of a
/// wrapper that brings parameters and does so at the second run too, perhaps otherwise.
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
/// Arguments and results are trees.
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
