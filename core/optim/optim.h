// Everything of optim, for programs.
#pragma once
#include "core/optim/adagrad.h"      // IWYU pragma: export
#include "core/optim/adam.h"         // IWYU pragma: export
#include "core/optim/clip.h"         // IWYU pragma: export
#include "core/optim/grad_scaler.h"  // IWYU pragma: export
#include "core/optim/lion.h"         // IWYU pragma: export
#include "core/optim/rmsprop.h"      // IWYU pragma: export
#include "core/optim/schedule.h"     // IWYU pragma: export
#include "core/optim/sgd.h"          // IWYU pragma: export
