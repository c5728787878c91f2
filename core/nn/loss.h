// Losses, under the names that a model's author looks for here; they are ops (core/ops/losses.h).
#pragma once
#include "core/ops/losses.h"

namespace tessera::nn {

using tessera::binary_cross_entropy;
using tessera::binary_cross_entropy_with_logits;
using tessera::cross_entropy;
using tessera::huber_loss;
using tessera::kl_div;
using tessera::l1_loss;
using tessera::mse_loss;
using tessera::nll_loss;
using tessera::smooth_l1_loss;

}  // namespace tessera::nn
