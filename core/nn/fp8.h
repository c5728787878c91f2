// Linear layers that multiply in eight bits, forward and backward, while weights, gradients and all
// other ops keep their dtypes (Micikevicius et al. 2022, arXiv:2209.05433). With x [M, K], weight w
// [N, K] and the cotangent dy [M, N], each quantised as q(t) = round(t / s(t)):
//
//   y  = q(x) q(w)^T s(x) s(w) + bias    x and w in E4M3: 3 bits of mantissa, up to 448
//   dx = q(dy) q(w) s(dy) s(w)           dy in E5M2: 2 bits of mantissa, up to 57344
//   dw = q(dy)^T q(x) s(dy) s(x)         the gradient of the bias sums dy itself
//
// Sums are in f32; y has the dtype that autocast gives products, dx that of x and dw that of w.
// s(t) is one f32 of a whole tensor, on its device (with m, 448 or 57344, of the format):
//
//   current scaling:  s(t) = max(amax |t| / m, 2^-126)
//   delayed scaling:  the same of the largest amax |t| of the last `history` steps. Values beyond
//                     are clamped. Without a step yet, current scaling.
//
// Invariant: where t has an infinity or a NaN, every result is NaN; the history leaves such steps
// out. Tensors over a mesh are scaled as a whole; where they are cut, that costs an all-reduce of
// one number. Under ddp and fully_shard each rank scales its own activations.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/nn/module.h"

namespace tessera::nn {

enum class Fp8Recipe : uint8_t { kCurrent, kDelayed };

struct Fp8Options {
  Fp8Recipe recipe = Fp8Recipe::kCurrent;
  int64_t history = 16;                // steps that delayed scaling looks back
  std::vector<std::string> skip = {};  // layers that stay: paths, or their last parts ("lm_head")
  bool skip_unfit = false;  // so do those with a width that is no multiple of 16; else an error
};

/// What convert_to_fp8 did: paths of layers.
struct Fp8Layers {
  std::vector<std::string> converted, left;
};

/// Lets every Linear of `model` multiply in eight bits from now on. Delayed scaling gives each of
/// them the buffers fp8_amax_history [3, history], of x, w and dy, which is part of state(), and
/// fp8_amax [3], of this step; so call it before an optimizer, a wrapper or a checkpoint sees the
/// model, and update_fp8_scales() after each step. Throws UserError for a width that is no multiple
/// of 16 (cards multiply no others), for a name in `skip` that no layer has, and where a layer is
/// in eight bits already.
Fp8Layers convert_to_fp8(Module& model, const Fp8Options& options = {});

/// Moves the histories of delayed scaling on by one step; without them does nothing.
/// `max_over_ranks`, where ranks train one model, turns the magnitudes that this rank has seen,
/// [layers, 3], into the largest of all ranks (parallel/fp8.h has it).
void update_fp8_scales(Module& model,
                       const std::function<Tensor(const Tensor&)>& max_over_ranks = {});

/// Empties the histories, as init() does: for a model whose weights alone are loaded.
void reset_fp8_scales(Module& model);
/// True for the name of such a history in state(). Files of weights lack them.
bool is_fp8_history(std::string_view name);

}  // namespace tessera::nn
