#include "tests/vgpu/support/client.h"

#include <dlfcn.h>

#include <map>
#include <stdexcept>

namespace tessera::cuda {

void PrintTo(Result result, std::ostream* out) {
  switch (result) {
#define RESULT(ours, vendor, value) \
  case Result::ours:                \
    *out << #vendor;                \
    return;
#include "core/backend/cuda/driver_constants.def"
  }
  *out << "CUresult " << static_cast<int>(result);
}
void PrintTo(NvrtcResult result, std::ostream* out) {
  *out << "nvrtcResult " << static_cast<int>(result);
}

namespace blas {
void PrintTo(Status status, std::ostream* out) {
#define STATUS(ours, vendor, value) \
  if (status == Status::ours) {     \
    *out << #vendor;                \
    return;                         \
  }
#include "core/backend/cuda/cublaslt_constants.def"
  *out << "cublasStatus_t " << static_cast<int>(status);
}
}  // namespace blas
namespace dnn {
void PrintTo(Status status, std::ostream* out) {
#define STATUS(ours, vendor, value) \
  if (status == Status::ours) {     \
    *out << #vendor;                \
    return;                         \
  }
#include "core/backend/cuda/cudnn_constants.def"
  *out << "cudnnStatus_t " << static_cast<int>(status);
}
}  // namespace dnn

}  // namespace tessera::cuda
namespace tessera::nccl {
void PrintTo(Result result, std::ostream* out) {
  *out << "ncclResult " << static_cast<int>(result);
}
}  // namespace tessera::nccl

namespace vgpu_test {

namespace {

constexpr const char* kCublasLt = "libcublasLt.so.13";
constexpr const char* kCudnn = "libcudnn.so.9";

void* open_library(const char* name) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(dlerror());
  return library;
}
void* driver_library() {
  static void* library = open_library("libcuda.so.1");
  return library;
}
template <class F>
void find(void* library, const char* name, F& to) {
  to = reinterpret_cast<F>(dlsym(library, name));
  if (!to) throw std::runtime_error(std::string("no ") + name + " in the library");
}

}  // namespace

const Driver& cuda() {
  static const Driver driver = [] {
    Driver d;
#define FUNCTION(member, symbol, parameters) find(driver_library(), #symbol, d.member);
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION
    return d;
  }();
  return driver;
}
const Nvrtc& nvrtc() {
  static const Nvrtc compiler = [] {
    Nvrtc n;
    void* library = open_library("libnvrtc.so.13");
#define FUNCTION(member, symbol, parameters) find(library, #symbol, n.member);
#include "core/backend/cuda/nvrtc_functions.def"
#undef FUNCTION
    return n;
  }();
  return compiler;
}
const Cudnn& cudnn() {
  static const Cudnn all = [] {
    Cudnn d;
    void* library = open_library(kCudnn);
#define FUNCTION(member, symbol, parameters) find(library, #symbol, d.member);
#include "core/backend/cuda/cudnn_functions.def"
#undef FUNCTION
    find(library, "cudnnGetVersion", d.version);
    find(library, "cudnnGetLastErrorString", d.last_error);
    return d;
  }();
  return all;
}
const CublasLt& cublaslt() {
  static const CublasLt all = [] {
    CublasLt l;
    void* library = open_library(kCublasLt);
#define FUNCTION(member, symbol, parameters) find(library, #symbol, l.member);
#include "core/backend/cuda/cublaslt_functions.def"
#undef FUNCTION
    find(library, "cublasLtGetVersion", l.version);
    return l;
  }();
  return all;
}
std::string why_no(const char* soname) {
  if (dlopen(soname, RTLD_NOW | RTLD_LOCAL)) return "";
  const std::string why = dlerror();
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return driver && dlsym(driver, "vgpu_emulation") ? "" : why;
}
std::string why_no_cublaslt() { return why_no(kCublasLt); }
std::string why_no_cudnn() { return why_no(kCudnn); }
std::string why_no_nccl() { return why_no("libnccl.so.2"); }
const tessera::nccl::Functions& nccl() {
  static const tessera::nccl::Functions functions = [] {
    tessera::nccl::Functions f;
    void* library = open_library("libnccl.so.2");
#define FUNCTION(member, symbol, parameters) find(library, #symbol, f.member);
#include "collectives/nccl/functions.def"
#include "collectives/nccl/optional_functions.def"
#undef FUNCTION
    find(library, "ncclGetErrorString", f.error_string);
    return f;
  }();
  return functions;
}
void* virtual_symbol(const char* name) { return dlsym(driver_library(), name); }

void check(Result result, const char* what) {
  if (result == Result::kSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + testing::PrintToString(result));
}

Compiled compile(const std::string& source, std::vector<const char*> options,
                 const std::string& name) {
  Compiled c{};
  ProgramHandle program;
  c.result = nvrtc().create(&program, source.c_str(), name.c_str(), 0, nullptr, nullptr);
  if (c.result != NvrtcResult::kSuccess) return c;
  c.result = nvrtc().compile(program, static_cast<int>(options.size()), options.data());
  size_t bytes = 0;
  if (nvrtc().log_size(program, &bytes) == NvrtcResult::kSuccess && bytes) {
    c.log.resize(bytes);
    nvrtc().log(program, c.log.data());
    c.log.resize(bytes - 1);
  }
  if (c.result == NvrtcResult::kSuccess &&
      nvrtc().cubin_size(program, &bytes) == NvrtcResult::kSuccess) {
    c.cubin.resize(bytes);
    nvrtc().cubin(program, c.cubin.data());
  }
  nvrtc().destroy(&program);
  return c;
}
std::string cubin(const std::string& source) {
  int major = 0, minor = 0;
  check(cuda().device_attribute(&major, DeviceAttribute::kCapabilityMajor, 0), "attribute");
  check(cuda().device_attribute(&minor, DeviceAttribute::kCapabilityMinor, 0), "attribute");
  const std::string arch = "--gpu-architecture=sm_" + std::to_string(major * 10 + minor);
  Compiled c = compile(source, {arch.c_str(), "--std=c++20", "--fmad=false"});
  if (c.result != NvrtcResult::kSuccess) throw std::runtime_error("nvrtc: " + c.log);
  return std::move(c.cubin);
}

ContextHandle context_of(int device) {
  static std::map<int, ContextHandle> all;
  ContextHandle& context = all[device];
  if (!context) check(cuda().primary_context_retain(&context, device), "primary context");
  return context;
}
void start() {
  check(cuda().init(0), "cuInit");
  check(cuda().set_current(context_of(0)), "set current");
}
int device_count() {
  int count = 0;
  check(cuda().device_count(&count), "device count");
  return count;
}

StreamHandle new_stream() {
  StreamHandle stream;
  check(cuda().stream_create(&stream, kStreamNonBlocking, 0), "stream");
  return stream;
}
EventHandle new_event(int flags) {
  EventHandle event;
  check(cuda().event_create(&event, static_cast<unsigned>(flags)), "event");
  return event;
}
DevicePtr allocate(size_t bytes) {
  DevicePtr p;
  check(cuda().memory_allocate(&p, bytes), "allocate");
  return p;
}
Result try_launch(FunctionHandle f, unsigned grid, unsigned x, unsigned y, unsigned z,
                  unsigned shared, StreamHandle stream, std::vector<void*> parameters) {
  return cuda().launch(f, grid, 1, 1, x, y, z, shared, stream, parameters.data(), nullptr);
}
void launch(FunctionHandle f, unsigned grid, unsigned block, unsigned shared, StreamHandle stream,
            std::vector<void*> parameters) {
  check(try_launch(f, grid, block, 1, 1, shared, stream, std::move(parameters)), "launch");
}

Module Module::of_image(const std::string& image) {
  Module module;
  check(cuda().module_load(&module.handle, image.data()), "module");
  return module;
}
FunctionHandle Module::operator[](const char* name) const {
  FunctionHandle f;
  check(cuda().module_function(&f, handle, name), name);
  return f;
}

}  // namespace vgpu_test
