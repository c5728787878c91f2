// cuDNN, loaded when a convolution or attention first asks for it. It is optional: where it is
// missing, too old, switched off or does not start, Tessera's own kernels compute, and one line
// says why.
#pragma once
#include <string>

#include "core/backend/cuda/cudnn_api.h"
#include "core/backend/cuda/library.h"

namespace tessera::cuda {

namespace dnn {
/// "CUDNN_STATUS_NOT_SUPPORTED", or "status 99".
std::string name_of(Status status);
/// Throws BugError naming `symbol` and the status.
[[noreturn]] void raise(Status status, const char* symbol);
}  // namespace dnn

struct CudnnFunctions {
#define FUNCTION(member, symbol, parameters) \
  detail::FunctionOf<dnn::Status, void parameters>::Type member{#symbol};
#include "core/backend/cuda/cudnn_functions.def"
#undef FUNCTION
  dnn::LastErrorFunction* last_error = nullptr;
  std::string path;
  int version = 0;        // as the library counts: 91900
  bool emulated = false;  // the virtual GPU's (tests/vgpu)
};

/// False where TESSERA_CUDA_LIBRARY_GRAPHS=0.
bool cudnn_is_wanted();
/// The library; null where why_no_cudnn() says why.
const CudnnFunctions* cudnn();
const std::string& why_no_cudnn();

}  // namespace tessera::cuda
