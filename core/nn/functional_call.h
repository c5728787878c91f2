// Calls a module as a function of its parameters, for function transforms: per-sample gradients of
// a model are one line.
//
//   auto loss = [&](const std::vector<Tensor>& w, const Tensor& x, const Tensor& y) {
//     return nn::functional_call(*model, w, [&] { return nn::cross_entropy((*model)(x), y); });
//   };
//   auto each = vmap(grad(loss), {.in_dims = {std::nullopt, 0, 0}})(model->parameters(), x, y);
//
// Parameters that require grad are recorded for a later backward() besides; a NoGrad around the
// transform saves that memory.
#pragma once
#include <vector>

#include "core/nn/module.h"

namespace tessera::nn {

/// While it lives, the module's slots hold other tensors; ties hold the same one. No slot may be
/// written meanwhile.
class Substituted {
 public:
  /// `params` in the order of module.parameters(), of their shapes and dtypes. Throws ShapeError.
  Substituted(Module& module, std::span<const Tensor> params);
  /// Parameters and buffers by name; others stay. Throws UserError for names that are not there.
  Substituted(Module& module, std::span<const NamedTensor> tensors);
  ~Substituted();
  Substituted(const Substituted&) = delete;
  Substituted& operator=(const Substituted&) = delete;

 private:
  void put(const std::vector<Slot>& slots, const Tensor& old, const Tensor& now,
           std::string_view name);
  Module& module_;
  std::vector<std::pair<Tensor*, Tensor>> before_;
};

/// Calls `body` while the parameters of `module` are `params` (a list of tensors in the order of
/// parameters(), or named tensors), and returns what it returns.
template <class Params, class F>
requires std::is_invocable_v<F&>
auto functional_call(Module& module, const Params& params, F&& body) {
  Substituted scope(module, params);
  return body();
}
/// module(x) with other parameters.
template <class Params>
Tensor functional_call(Module& module, const Params& params, const Tensor& x) {
  Substituted scope(module, params);
  return module(x);
}

}  // namespace tessera::nn
