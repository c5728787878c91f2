// The part of cuBLASLt (libcublasLt) that Tessera uses, declared by Tessera itself, so that a build
// without a toolkit contains it. The functions are the rows of cublaslt_functions.def. Invariant:
// each row, constant and struct agrees with the vendor's header; tests/cuda/vendor_headers.cpp
// proves it where that is.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/backend/cuda/driver_api.h"

namespace tessera::cuda::blas {

enum class Status : int {
#define STATUS(name, vendor, value) name = value,
#include "core/backend/cuda/cublaslt_constants.def"
};
#define CONSTANT(name, vendor, value) inline constexpr int name = value;
#include "core/backend/cuda/cublaslt_constants.def"

// What the library hands out. Callers read and write these by functions alone.
using Handle = struct HandleObject*;
struct LayoutObject {
  uint64_t data[8];
};
using Layout = LayoutObject*;
struct ProductObject {
  uint64_t data[32];
};
using Product = ProductObject*;
struct PreferenceObject {
  uint64_t data[8];
};
using Preference = PreferenceObject*;

/// How a product is computed. The bytes may be kept, and serve the same version of the library.
struct Algorithm {
  uint64_t data[8];
};
struct Suggestion {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

/// cublasLtGetVersion: 130100 of 13.1.0.
using VersionFunction = size_t();

}  // namespace tessera::cuda::blas
