// The part of cuDNN's backend API (libcudnn) that Tessera uses, declared by Tessera itself, so that
// a build without a toolkit contains it. The functions are the rows of cudnn_functions.def.
// Invariant: each row and constant agrees with the vendor's header; tests/cuda/vendor_headers.cpp
// proves it where that is.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/backend/cuda/driver_api.h"

namespace tessera::cuda::dnn {

enum class Status : int {
#define STATUS(name, vendor, value) name = value,
#include "core/backend/cuda/cudnn_constants.def"
};
#define CONSTANT(name, vendor, value) inline constexpr int name = value;
#include "core/backend/cuda/cudnn_constants.def"

// What the library hands out.
using Handle = struct HandleObject*;
using Descriptor = void*;

/// cudnnGetVersion: 91900 of 9.19.0.
using VersionFunction = size_t();
/// cudnnGetLastErrorString: what the calling thread's last failed call has to say.
using LastErrorFunction = void(char* message, size_t bytes);

}  // namespace tessera::cuda::dnn
