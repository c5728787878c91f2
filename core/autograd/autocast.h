// Mixed precision by op: while an Autocast lives, ops that are fast and safe in 16 bits (products,
// convolutions, attention) compute in its dtype, and ops that lose digits there (softmax, norms,
// losses, exp, powers, sums) in f32; every other op (batch_norm too) computes in the dtype of its
// operands, the wider one where two differ. Parameters and their gradients stay f32, since a cast
// is an op with a derivative. Each op states its Precision (core/primitive/traits.h), which is the
// one that PyTorch gives it. A function made of several ops (mean, norm, the losses of losses.h)
// gets the precisions of those, or states one for all of it (core/dispatch/precision.h). Invariant:
// autocast acts in the forward pass only; backward and updates run in the dtypes that forward
// chose.
//
//   {
//     Autocast scope(kBF16);
//     loss = model->loss(ids, targets);  // 0-d f32
//   }
//   loss.backward();
//
// Micikevicius et al. 2018, "Mixed Precision Training". fp16 needs a scaled loss besides:
// optim::GradScaler. bf16 does not.
#pragma once
#include <memory>

#include "core/dispatch/scoped.h"
#include "core/primitive/primitive.h"

namespace tessera {

class CastCache;

struct AutocastOptions {
  bool enabled = true;        // false: inside an outer scope, ops compute in their operands' dtypes
  bool cache_weights = true;  // a parameter is cast once for each of its values; only the outermost
                              // scope's is read
};

/// Scopes nest, and the innermost one is in force. A parameter (a leaf that requires grad) is cast
/// once while the outermost scope lives, unless its values change. The casts take memory, so open a
/// scope around the forward pass of a step, not around a whole program.
class Autocast {
 public:
  /// `dtype`: bf16 or f16; f32 is the same as {.enabled = false}. Throws UserError for others.
  explicit Autocast(DType dtype = kBF16, AutocastOptions options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  std::unique_ptr<CastCache> own_;  // in the outermost scope only
  Scoped<LayerMask> forced_;
  Scoped<DType> dtype_;
  Scoped<CastCache*> casts_;
};

/// True in the forward pass inside an Autocast scope, where ops may find their operands cast.
bool autocast_on();

/// The entry of layer_functions.
Tensors autocast_layer(const PrimRef& prim, Inputs in);

}  // namespace tessera
