// Everything of the core that a training program writes with. Library code includes what it uses
// instead.
#pragma once
#include "core/autograd/autocast.h"      // IWYU pragma: export
#include "core/autograd/autograd.h"      // IWYU pragma: export
#include "core/autograd/custom_op.h"     // IWYU pragma: export
#include "core/autograd/recompute.h"     // IWYU pragma: export
#include "core/autograd/transforms.h"    // IWYU pragma: export
#include "core/base/deterministic.h"     // IWYU pragma: export
#include "core/base/matmul_precision.h"  // IWYU pragma: export
#include "core/data/compose.h"           // IWYU pragma: export
#include "core/data/loader.h"            // IWYU pragma: export
#include "core/nn/nn.h"                  // IWYU pragma: export
#include "core/ops/compose.h"            // IWYU pragma: export
#include "core/ops/contract.h"           // IWYU pragma: export
#include "core/ops/create.h"             // IWYU pragma: export
#include "core/ops/einsum.h"             // IWYU pragma: export
#include "core/ops/fused.h"              // IWYU pragma: export
#include "core/ops/indexing.h"           // IWYU pragma: export
#include "core/ops/interpolate.h"        // IWYU pragma: export
#include "core/ops/layout.h"             // IWYU pragma: export
#include "core/ops/linalg.h"             // IWYU pragma: export
#include "core/ops/losses.h"             // IWYU pragma: export
#include "core/ops/pointwise.h"          // IWYU pragma: export
#include "core/ops/products.h"           // IWYU pragma: export
#include "core/ops/random.h"             // IWYU pragma: export
#include "core/ops/reduce.h"             // IWYU pragma: export
#include "core/ops/scaled_matmul.h"      // IWYU pragma: export
#include "core/ops/scan.h"               // IWYU pragma: export
#include "core/ops/sort.h"               // IWYU pragma: export
#include "core/ops/sparse.h"             // IWYU pragma: export
#include "core/ops/statistics.h"         // IWYU pragma: export
#include "core/ops/update.h"             // IWYU pragma: export
#include "core/ops/views.h"              // IWYU pragma: export
#include "core/optim/optim.h"            // IWYU pragma: export
