// How the tests of the virtual GPU use a driver, an NVRTC, a cuBLASLt and a cuDNN: those that the
// loader finds, real or virtual, by the tables of core/backend/cuda and by nothing else. Invariant:
// nothing here knows which of them it is.
#pragma once
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "collectives/nccl/api.h"
#include "core/backend/cuda/cublaslt_api.h"
#include "core/backend/cuda/cudnn_api.h"
#include "core/backend/cuda/driver_api.h"

namespace tessera::cuda {
void PrintTo(Result result, std::ostream* out);
void PrintTo(NvrtcResult result, std::ostream* out);
namespace blas {
void PrintTo(Status status, std::ostream* out);
}
namespace dnn {
void PrintTo(Status status, std::ostream* out);
}
}  // namespace tessera::cuda
namespace tessera::nccl {
struct Functions {
#define FUNCTION(member, symbol, parameters) Result(*member) parameters;
#include "collectives/nccl/functions.def"
#include "collectives/nccl/optional_functions.def"
#undef FUNCTION
  const char* (*error_string)(Result);
};
void PrintTo(Result result, std::ostream* out);
}  // namespace tessera::nccl

namespace vgpu_test {

using namespace tessera::cuda;  // NOLINT: the tests speak the driver's language

struct Driver {
#define FUNCTION(member, symbol, parameters) Result(*member) parameters;
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION
};
struct Nvrtc {
#define FUNCTION(member, symbol, parameters) NvrtcResult(*member) parameters;
#include "core/backend/cuda/nvrtc_functions.def"
#undef FUNCTION
};
struct CublasLt {
#define FUNCTION(member, symbol, parameters) blas::Status(*member) parameters;
#include "core/backend/cuda/cublaslt_functions.def"
#undef FUNCTION
  blas::VersionFunction* version;
};
struct Cudnn {
#define FUNCTION(member, symbol, parameters) dnn::Status(*member) parameters;
#include "core/backend/cuda/cudnn_functions.def"
#undef FUNCTION
  dnn::VersionFunction* version;
  dnn::LastErrorFunction* last_error;
};
/// Loaded by the first call; throws with the loader's words.
const Driver& cuda();
const Nvrtc& nvrtc();
const CublasLt& cublaslt();
const Cudnn& cudnn();
/// Why statements about the library cannot be asked, or "": a machine with a card may lack it, the
/// virtual GPU may not.
std::string why_no_cublaslt();
std::string why_no_cudnn();
std::string why_no_nccl();
const tessera::nccl::Functions& nccl();
/// A function that only the virtual driver has.
void* virtual_symbol(const char* name);

/// Throws with the name of the error and `what`.
void check(Result result, const char* what);

struct Compiled {
  NvrtcResult result;
  std::string cubin, log;
};
Compiled compile(const std::string& source, std::vector<const char*> options = {},
                 const std::string& name = "kernels.cu");
/// A cubin for the device 0; throws with the log.
std::string cubin(const std::string& source);

/// The driver is up and device 0 is current.
void start();
ContextHandle context_of(int device);
int device_count();

StreamHandle new_stream();
EventHandle new_event(int flags = kEventDisableTiming);
DevicePtr allocate(size_t bytes);
void launch(FunctionHandle f, unsigned grid, unsigned block, unsigned shared, StreamHandle stream,
            std::vector<void*> parameters);
/// What a launch of these dimensions returns.
Result try_launch(FunctionHandle f, unsigned grid, unsigned x, unsigned y, unsigned z,
                  unsigned shared, StreamHandle stream, std::vector<void*> parameters);
template <class... A>
void run(FunctionHandle f, unsigned grid, unsigned block, unsigned shared, StreamHandle stream,
         A... arguments) {
  launch(f, grid, block, shared, stream, {&arguments...});
}
template <class T>
DevicePtr upload(const std::vector<T>& values, StreamHandle stream) {
  const DevicePtr p = allocate(values.size() * sizeof(T));
  check(cuda().copy_to_device(p, values.data(), values.size() * sizeof(T), stream), "upload");
  check(cuda().stream_synchronize(stream), "upload");
  return p;
}
template <class T>
std::vector<T> download(DevicePtr p, size_t count, StreamHandle stream) {
  std::vector<T> values(count);
  check(cuda().copy_to_host(values.data(), p, count * sizeof(T), stream), "download");
  check(cuda().stream_synchronize(stream), "download");
  return values;
}

struct Module {
  ModuleHandle handle = nullptr;
  Module() = default;
  explicit Module(const std::string& source) : Module(of_image(cubin(source))) {}
  static Module of_image(const std::string& image);
  FunctionHandle operator[](const char* name) const;
};

}  // namespace vgpu_test
