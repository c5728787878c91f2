// Everything of optim, for programs.
#pragma once
#include "core/optim/clip.h"         // IWYU pragma: export
#include "core/optim/elementwise.h"  // IWYU pragma: export
#include "core/optim/grad_scaler.h"  // IWYU pragma: export
#include "core/optim/optimizers.h"   // IWYU pragma: export
#include "core/optim/schedule.h"     // IWYU pragma: export
