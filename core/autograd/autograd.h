// Reverse-mode differentiation: what programs call. Recording is a layer of the dispatch path above
// sharding. Invariant: a vjp sees global tensors, also where those are sharded.
#pragma once
#include <initializer_list>

#include "core/autograd/graph.h"
#include "core/dispatch/scoped.h"

namespace tessera {

struct BackwardOptions {
  bool retain_graph = false;  // keep what was saved, for another backward
  // Record the backward itself, for second derivatives (implies retain_graph). The gradient that a
  // leaf keeps then refers back to the leaf, a cycle: set_grad({}) frees both; grad() makes none.
  bool create_graph = false;
  // grad() only: no input is computed from another, so nothing above the inputs is visited.
  bool stop_at_inputs = false;
};

/// Adds d(sum of roots . root_grads)/d(leaf) to the grad of every leaf, or hands it to the leaf's
/// sink. An undefined root grad stands for 1, for a root of one element. Throws UserError when a
/// root has no history or its graph was released. May be called while another backward runs, from a
/// hook or a vjp; sinks hear that backward is over when the outermost one is.
void backward(std::span<const Tensor> roots, std::span<const Tensor> root_grads = {},
              BackwardOptions options = {});
inline void backward(const Tensor& root, const Tensor& root_grad = {},
                     BackwardOptions options = {}) {
  backward({&root, 1}, {&root_grad, 1}, options);
}

/// Gradients of the roots with respect to `inputs`, which need not be leaves; leaves keep theirs,
/// and no sink is called. A result is undefined where no root depends on the input.
Tensors grad(std::span<const Tensor> roots, std::span<const Tensor> inputs,
             std::span<const Tensor> root_grads = {}, BackwardOptions options = {});

/// Calls `hook` with each complete gradient of `leaf` before it is added to grad; a defined result
/// of the same shape, dtype and device replaces the gradient. Returns a number for remove_hook.
int add_hook(const Tensor& leaf, GradHook hook);
void remove_hook(const Tensor& leaf, int number);

/// While one lives, ops are recorded or not, as its argument says.
class GradMode {
 public:
  explicit GradMode(bool on);

 private:
  Scoped<LayerMask> enabled_;
};
/// While one lives, nothing is recorded.
class NoGrad {
  GradMode off_{false};
};
using NoGradGuard = NoGrad;  // its name in libtorch
/// While one lives inside a NoGrad, ops are recorded again.
class EnableGrad {
  GradMode on_{true};
};
/// As NoGrad, and results may not be recorded later either: the cheapest way to evaluate a model.
class InferenceMode {
 public:
  InferenceMode();

 private:
  NoGrad off_;
  Scoped<bool> inference_;
};
bool grad_enabled();

/// A function with a derivative of its own. `forward` runs unrecorded and calls save() on each
/// tensor that `vjp` reads. The vjp is written in ordinary ops, so it can be differentiated again
/// through saved inputs. It returns a gradient per input (undefined: zero) of the input's shape; a
/// gradient that the input's shape broadcasts to is summed, one of another float dtype is cast. It
/// may leave out those of inputs that are not wanted().
class CustomFunction : public RefCounted {
 public:
  virtual std::string_view name() const = 0;
  virtual Tensors forward(std::span<const Tensor> in) = 0;  // by ops; for pointers see custom_op.h
  virtual Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) = 0;

 protected:
  void save(const Tensor& t) { saved_.push_back(t); }
  /// Whether input `i` requires a gradient, in forward and in vjp. Gradients of others are dropped.
  bool wanted(size_t i) const { return i >= 64 || (wanted_ >> i & 1); }

 private:
  friend struct AppliedFunction;
  friend Tensors apply_function(Ref<CustomFunction> f, std::span<const Tensor> in);
  std::vector<Tensor> saved_;
  uint64_t wanted_ = 0;  // a bit per input of the call whose forward or vjp runs
};
/// Runs `f` and records its derivative.
Tensors apply_function(Ref<CustomFunction> f, std::span<const Tensor> in);
inline Tensors apply_function(Ref<CustomFunction> f, std::initializer_list<Tensor> in) {
  return apply_function(std::move(f), std::span<const Tensor>(in.begin(), in.size()));
}

}  // namespace tessera
