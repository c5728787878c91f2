// cuBLASLt, loaded when a product first asks for it. It is optional: where it is missing, too old,
// switched off or does not start, Tessera's own kernels compute products, and one line says why.
#pragma once
#include <string>

#include "core/backend/cuda/cublaslt_api.h"
#include "core/backend/cuda/library.h"

namespace tessera::cuda {

namespace blas {
/// "CUBLAS_STATUS_NOT_SUPPORTED", or "status 99".
std::string name_of(Status status);
/// Throws BugError naming `symbol` and the status.
[[noreturn]] void raise(Status status, const char* symbol);
}  // namespace blas

struct CublasLtFunctions {
#define FUNCTION(member, symbol, parameters) \
  detail::FunctionOf<blas::Status, void parameters>::Type member{#symbol};
#include "core/backend/cuda/cublaslt_functions.def"
#undef FUNCTION
  std::string path;
  int version = 0;  // as the library counts: 130100
};

/// False where TESSERA_CUDA_LIBRARY_PRODUCTS=0.
bool cublaslt_is_wanted();
/// The library; null where why_no_cublaslt() says why.
const CublasLtFunctions* cublaslt();
const std::string& why_no_cublaslt();

}  // namespace tessera::cuda
