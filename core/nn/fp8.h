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
//   powers of two:    2^ceil(log2 s(t)) in place of s(t), as torchao's round_scales_to_power_of_2
//                     rounds 1 / s(t) down. Dividing and multiplying by it rounds nothing, so what
//                     E4M3 or E5M2 holds after scaling is kept as it is; up to half of the
//                     format's range is left unused.
//
// Invariant: where t has an infinity or a NaN, every result is NaN; the history leaves such steps
// out. Tensors over a mesh are scaled as a whole; where they are cut, that costs an all-reduce of
// one number. Under ddp and fully_shard each rank scales its own activations. A gradient that no
// input or weight requires is not computed, nor is what it needs kept for backward.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/nn/module.h"

namespace tessera::nn {

class Linear;

enum class Fp8Recipe : uint8_t { kCurrent, kDelayed };

struct Fp8Options {
  Fp8Recipe recipe = Fp8Recipe::kCurrent;
  int64_t history = 16;                // steps that delayed scaling looks back
  std::vector<std::string> skip = {};  // layers that stay: paths, or their last parts ("lm_head")
  bool skip_unfit = false;  // so do those with a width that is no multiple of 16; else an error
  bool power_of_two_scales = false;
  bool gather_in_eight_bits = false;  // fully_shard moves q(w) in place of w: Fp8Weight below
};

/// What convert_to_fp8 did: paths of layers.
struct Fp8Layers {
  std::vector<std::string> converted, left;
};

/// Lets every Linear of `model` multiply in eight bits from now on. Delayed scaling gives each of
/// them the buffers fp8_amax_history [3, history], of x, w and dy, which is part of state(), and
/// fp8_amax [3], of this step; so call it before an optimizer, a wrapper or a checkpoint sees the
/// model, and update_fp8_scales() after each step. Throws UserError for a width that is no multiple
/// of 16 (cards multiply no others without copies), for a name in `skip` that no layer has, and
/// where a layer is in eight bits already.
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

/// The weight w of a layer in eight bits, for a wrapper whose ranks have pieces of it
/// (Fp8Options::gather_in_eight_bits): they agree on amax |w|, each quantises its piece, and the
/// layer multiplies by what they exchange, which has the bits of q(w).
class Fp8Weight {
 public:
  virtual ~Fp8Weight() = default;
  /// s(w) [], f32, from amax |w| [], f32, in which a NaN counts as an infinity.
  virtual Tensor scale_of(const Tensor& amax) const = 0;
  /// Counts what changes scale_of(): the steps of a history.
  virtual uint32_t version() const = 0;
  /// q(piece) of a piece of w, in E4M3.
  virtual Tensor quantised(const Tensor& piece, const Tensor& scale) const = 0;
  /// Lets `weight`, of which nothing but its shape, dtype and history is read, stand for the weight
  /// whose q(w), s(w) and amax |w| these are, when it is in the layer's slot. An undefined `weight`
  /// ends that.
  virtual void stand_in(const Tensor& weight, const Tensor& values, const Tensor& scale,
                        const Tensor& amax) = 0;
};
/// Null where the weight is to be moved as it is.
std::shared_ptr<Fp8Weight> fp8_weight_to_gather(const Linear& layer);

}  // namespace tessera::nn
