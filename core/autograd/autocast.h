// Mixed precision by op: while an Autocast lives, ops that are fast and safe in 16 bits (products,
// convolutions, attention) compute in its dtype, and ops that lose digits there (softmax, norms,
// losses, exp, powers, sums) in f32; every other op (batch_norm too) computes in what its operands
// are, and operands of two dtypes meet in the wider one. Parameters stay f32, and so do their
// gradients: a cast is an op, with a derivative. Which op is what, it states itself (Precision in
// core/primitive/traits.h), as PyTorch has it; functions that are made of others (mean, norm, the
// losses of losses.h) follow from what they are made of, or say a precision for the whole of it
// (core/dispatch/precision.h). Invariant: it looks at the forward pass only; backward and updates
// run on the dtypes that forward chose.
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
  bool enabled = true;        // false: within an outer scope, ops compute in what they are given
  bool cache_weights = true;  // a parameter is cast once for each of its values; the outermost
                              // scope's counts
};

/// Scopes nest; the innermost counts. A parameter (a leaf that requires grad) is cast once as long
/// as the outermost scope lives and nobody writes to it, so open a scope for one step's forward
/// pass, not for a whole program: casts take memory.
class Autocast {
 public:
  /// `dtype`: bf16 or f16; f32 is the same as {.enabled = false}. Throws UserError for others.
  explicit Autocast(DType dtype = kBF16, AutocastOptions options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  std::unique_ptr<CastCache> own_;  // of the outermost
  Scoped<LayerMask> forced_;
  Scoped<DType> dtype_;
  Scoped<CastCache*> casts_;
};

/// True where ops may find their operands cast by autocast: forward, within a scope of it.
bool autocast_on();

/// The entry of layer_functions.
Tensors autocast_layer(const PrimRef& prim, Inputs in);

}  // namespace tessera
