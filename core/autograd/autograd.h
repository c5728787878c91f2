// Reverse-mode differentiation over the dispatch path. It sits above sharding, so a vjp sees global
// tensors.
#pragma once
#include <initializer_list>

#include "core/autograd/graph.h"
#include "core/dispatch/scoped.h"

namespace tessera {

struct BackwardOptions {
  bool retain_graph = false;  // keep what was saved, for another backward
  // Record the backward itself, for second derivatives (implies retain_graph). A gradient that a
  // leaf then keeps leads back to the leaf: set_grad({}) frees both, and grad() keeps none.
  bool create_graph = false;
  // grad() only: inputs are independent of each other; nothing above them is visited.
  bool stop_at_inputs = false;
};

/// Accumulates d(sum of roots . root_grads)/d(leaf) into every leaf's grad (or its sink). An
/// undefined root grad stands for 1 and asks for a one-element root. Throws UserError when a root
/// has no history or its graph was released. May be called while another backward runs, from a hook
/// or a vjp; sinks are told that it is over when the outermost one is.
void backward(std::span<const Tensor> roots, std::span<const Tensor> root_grads = {},
              BackwardOptions options = {});
inline void backward(const Tensor& root, const Tensor& root_grad = {},
                     BackwardOptions options = {}) {
  backward({&root, 1}, {&root_grad, 1}, options);
}

/// Gradients of the roots with respect to `inputs`, which need not be leaves; nothing is
/// accumulated, no sink is called. Undefined where an input was not reached.
Tensors grad(std::span<const Tensor> roots, std::span<const Tensor> inputs,
             std::span<const Tensor> root_grads = {}, BackwardOptions options = {});

/// Calls `hook` with each complete gradient of `leaf` before it is accumulated; a defined result
/// replaces it, and must have its shape, dtype and device. Returns a number for remove_hook.
int add_hook(const Tensor& leaf, GradHook hook);
void remove_hook(const Tensor& leaf, int number);

/// Whether ops are recorded while it lives.
class GradMode {
 public:
  explicit GradMode(bool on);

 private:
  Scoped<LayerMask> enabled_;
};
/// Nothing is recorded while it lives.
class NoGrad {
  GradMode off_{false};
};
using NoGradGuard = NoGrad;  // its name in libtorch
/// Records again inside NoGrad.
class EnableGrad {
  GradMode on_{true};
};
/// As NoGrad, and results may never take part in recording later: the cheapest way to evaluate.
class InferenceMode {
 public:
  InferenceMode();

 private:
  NoGrad off_;
  Scoped<bool> inference_;
};
bool grad_enabled();

/// A function with a derivative of its own. `forward` runs unrecorded; what `vjp` needs is kept by
/// save(). The vjp is written in ordinary ops, so it can be differentiated again where saved inputs
/// are involved. It returns a gradient per input (undefined: zero) of the input's shape; one of a
/// shape that the input would broadcast to is summed, one of another float dtype is cast.
class CustomFunction : public RefCounted {
 public:
  virtual std::string_view name() const = 0;
  virtual Tensors forward(std::span<const Tensor> in) = 0;  // by ops; for pointers see custom_op.h
  virtual Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) = 0;

 protected:
  void save(const Tensor& t) { saved_.push_back(t); }

 private:
  friend Tensors apply_function(Ref<CustomFunction> f, std::span<const Tensor> in);
  std::vector<Tensor> saved_;
};
/// Runs `f` and records its derivative.
Tensors apply_function(Ref<CustomFunction> f, std::span<const Tensor> in);
inline Tensors apply_function(Ref<CustomFunction> f, std::initializer_list<Tensor> in) {
  return apply_function(std::move(f), std::span<const Tensor>(in.begin(), in.size()));
}

}  // namespace tessera
