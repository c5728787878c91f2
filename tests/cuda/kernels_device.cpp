// Loading of the driver and NVRTC for tests of kernels, and main().
#include "tests/cuda/kernels_device.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "core/backend/cuda/library.h"

namespace tessera::cuda::test {
namespace {

void* open(const char* soname) {
  if (void* library = dlopen(soname, RTLD_NOW | RTLD_LOCAL)) return library;
  for (const std::string& folder : library_folders())
    if (void* library = dlopen((folder + "/" + soname).c_str(), RTLD_NOW | RTLD_LOCAL))
      return library;
  return nullptr;
}

const NvrtcFunctions& nvrtc() {
  static const NvrtcFunctions functions = [] {
    void* library = nullptr;
    for (const char* soname : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"})
      if (!library) library = open(soname);
    if (!library) throw std::runtime_error("no libnvrtc.so.13: set TESSERA_CUDA_LIBRARIES");
    NvrtcFunctions f{};
#define FUNCTION(member, symbol, parameters) \
  f.member = reinterpret_cast<decltype(f.member)>(dlsym(library, #symbol));
#include "core/backend/cuda/nvrtc_functions.def"
#undef FUNCTION
    return f;
  }();
  return functions;
}

}  // namespace

Compiled compile(const std::string& text, const std::string& architecture) {
  const NvrtcFunctions& f = nvrtc();
  Compiled r;
  ProgramHandle program = nullptr;
  if (f.create(&program, text.c_str(), "kernels.cu", 0, nullptr, nullptr) != NvrtcResult::kSuccess)
    throw std::runtime_error("nvrtcCreateProgram failed");
  const std::string target = "--gpu-architecture=" + architecture;
  const char* options[] = {target.c_str(), "--std=c++20", "--fmad=false"};
  r.good = f.compile(program, 3, options) == NvrtcResult::kSuccess;
  size_t size = 0;
  f.log_size(program, &size);
  r.log.resize(size);
  f.log(program, r.log.data());
  while (!r.log.empty() && (r.log.back() == '\0' || r.log.back() == '\n')) r.log.pop_back();
  if (r.good) {
    f.cubin_size(program, &size);
    r.cubin.resize(size);
    f.cubin(program, r.cubin.data());
  }
  f.destroy(&program);
  return r;
}

namespace {
std::string g_why;
}
const std::string& Device::why() { return g_why; }

Device* Device::get() {
  static Device* const device = []() -> Device* {
    void* library = open("libcuda.so.1");
    if (!library) {
      g_why = "no libcuda.so.1";
      return nullptr;
    }
    auto* d = new Device;
#define FUNCTION(member, symbol, parameters) \
  d->driver_.member = reinterpret_cast<decltype(d->driver_.member)>(dlsym(library, #symbol));
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION
    const DriverFunctions& f = d->driver_;
    DeviceOrdinal number = 0;
    if (f.init(0) != Result::kSuccess || f.device_get(&number, 0) != Result::kSuccess) {
      g_why = "the driver has no device";
      return nullptr;
    }
    char name[256] = "virtual GPU";
    if (f.device_name) d->check(f.device_name(name, sizeof name, number), "device_name");
    d->name_ = name;
    int major = 0, minor = 0;
    f.device_attribute(&major, DeviceAttribute::kCapabilityMajor, number);
    f.device_attribute(&minor, DeviceAttribute::kCapabilityMinor, number);
    d->architecture_ = "sm_" + std::to_string(major ? major * 10 + minor : 90);
    ContextHandle context = nullptr;
    d->check(f.primary_context_retain(&context, number), "primary_context_retain");
    d->check(f.set_current(context), "set_current");
    if (f.stream_create) d->check(f.stream_create(&d->stream_, 1, 0), "stream_create");
    return d;
  }();
  return device;
}

void Device::check(Result r, const char* what) const {
  if (r == Result::kSuccess) return;
  const char* text = "?";
  if (driver_.error_string) driver_.error_string(r, &text);
  throw std::runtime_error(std::string(what) + ": " + text);
}

FunctionHandle Device::function(const KernelText& text, const std::string& name) {
  const std::string source = compose(text);
  ModuleHandle& module = modules_[source];
  if (!module) {
    Compiled c = compile(source, architecture_);
    if (!c.good || !c.log.empty()) throw std::runtime_error("nvrtc: " + c.log);
    check(driver_.module_load(&module, c.cubin.data()), "module_load");
  }
  FunctionHandle f = nullptr;
  check(driver_.module_function(&f, module, name.c_str()), name.c_str());
  return f;
}

void Device::launch_raw(FunctionHandle f, const Geometry& g, void** parameters) {
  if (g.shared_bytes > 48 * 1024 && driver_.set_function_attribute)
    check(driver_.set_function_attribute(f, FunctionAttribute::kMaxDynamicSharedBytes,
                                         int(g.shared_bytes)),
          "set_function_attribute");
  check(driver_.launch(f, g.grid[0], g.grid[1], g.grid[2], g.block[0], g.block[1], g.block[2],
                       g.shared_bytes, stream_, parameters, nullptr),
        "launch");
}

void Device::synchronize() { check(driver_.stream_synchronize(stream_), "stream_synchronize"); }

}  // namespace tessera::cuda::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
