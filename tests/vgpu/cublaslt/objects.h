// What the calls of the virtual libcublasLt share: the objects behind the vendor's handles, and how
// a call is refused. Invariant: each function of cublaslt_functions.def is declared here as the
// table has it, so a definition that differs does not compile.
#pragma once
#include <cstdint>
#include <string>

#include "core/backend/cuda/cublaslt_api.h"

namespace tessera::cuda {

#define FUNCTION(member, symbol, parameters) extern "C" blas::Status symbol parameters;
#include "core/backend/cuda/cublaslt_functions.def"
#undef FUNCTION

namespace blas {

struct HandleObject {
  int device;
};

}  // namespace blas
}  // namespace tessera::cuda

namespace vgpu::blas {

using namespace tessera::cuda;        // NOLINT: the fake is the vendor's side of these names
using namespace tessera::cuda::blas;  // NOLINT

struct LayoutState : LayoutObject {
  int32_t type, order = kOrderColumn;
  uint64_t rows, columns;
  int64_t leading;
  int32_t batch_count = 1;
  int64_t batch_stride = 0;
};
struct ProductState : ProductObject {
  int32_t compute, scale_type, pointer_mode = kPointerModeHost;
  int32_t transpose_a = kAsIs, transpose_b = kAsIs, transpose_c = kAsIs, fill = kFillFull;
  int32_t epilogue = kEpilogueDefault;
  void *bias = nullptr, *aux = nullptr, *scale_a = nullptr, *scale_b = nullptr;
  int64_t bias_batch_stride = 0, aux_leading = 0, aux_batch_stride = 0;
  int32_t aux_type = -1, bias_type = -1;
};
struct PreferenceState : PreferenceObject {
  int32_t search_mode = 0;
  uint64_t workspace_bytes = 0;
  int32_t reductions = kReductionMask;
  int32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D
};

/// Says what is wrong with a call, and returns `status`.
Status refuse(Status status, const char* call, const std::string& why);
/// The status with which VGPU_FAIL=CALL[:NTH[:STATUS]] makes this call fail; else kSuccess.
Status requested(const char* call);
bool is_handle(Handle handle);

}  // namespace vgpu::blas
