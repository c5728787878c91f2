// Everything of nn, for programs.
#pragma once
#include "core/nn/attention.h"        // IWYU pragma: export
#include "core/nn/containers.h"       // IWYU pragma: export
#include "core/nn/conv_layers.h"      // IWYU pragma: export
#include "core/nn/fp8.h"              // IWYU pragma: export
#include "core/nn/functional_call.h"  // IWYU pragma: export
#include "core/nn/init.h"             // IWYU pragma: export
#include "core/nn/layers.h"           // IWYU pragma: export
#include "core/nn/loss.h"             // IWYU pragma: export
#include "core/nn/module.h"           // IWYU pragma: export
#include "core/nn/transformer.h"      // IWYU pragma: export
