// Classifying images with a residual network.
#pragma once
#include "examples/train/task.h"

namespace tessera::train {

/// --model resnetN on --data images:, cifar10:, idx: or synthetic.
Task make_image_task(const Options& options);

}  // namespace tessera::train
