// Everything that a training program includes: #include <tessera/tessera.h>, in Tessera's own build
// and where it is installed. A program links what it uses of it: tessera::core, tessera::dist
// (collectives, dtensor, parallel), tessera::compile.
#pragma once
#include "collectives/ops.h"                     // IWYU pragma: export
#include "collectives/process_group.h"           // IWYU pragma: export
#include "compile/compile.h"                     // IWYU pragma: export
#include "core/core.h"                           // IWYU pragma: export
#include "core/io/safetensors.h"                 // IWYU pragma: export
#include "dtensor/dtensor.h"                     // IWYU pragma: export
#include "parallel/checkpoint/checkpointer.h"    // IWYU pragma: export
#include "parallel/checkpoint/training_state.h"  // IWYU pragma: export
#include "parallel/ddp.h"                        // IWYU pragma: export
#include "parallel/fsdp.h"                       // IWYU pragma: export
#include "parallel/pipeline.h"                   // IWYU pragma: export
#include "parallel/sampler.h"                    // IWYU pragma: export
#include "parallel/sync_batch_norm.h"            // IWYU pragma: export
#include "parallel/tensor_parallel.h"            // IWYU pragma: export
