// Modules and launches. A cubin of the virtual NVRTC is a shared object, loaded from memory.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "tests/vgpu/cuda/api.h"

namespace vgpu {

namespace {

constexpr int kOptInBytes = kVgpuDynamicBytes;

// Pinned memory is the host's and the device's; page tables watch over its use.
void touch(const void* at, int bytes, VgpuAccess kind) {
  Gpu& g = gpu();
  if (g.memory.contains(at)) {
    if (g.shadow) g.shadow->touch(at, bytes, kind);
  } else if (!g.pinned.find(at) && reinterpret_cast<uintptr_t>(at) >= 4096) {
    stop(Result::kIllegalAddress, "touches memory that is none of the device's");
  }
}

// The size of a shared object is that of its section headers and what is before them.
size_t image_bytes(const void* image) {
  const auto* e = static_cast<const unsigned char*>(image);
  if (std::memcmp(e, "\177ELF", 4) != 0) return 0;
  uint64_t sections;
  uint16_t size, count, machine;
  std::memcpy(&machine, e + 18, 2);
  std::memcpy(&sections, e + 40, 8), std::memcpy(&size, e + 58, 2), std::memcpy(&count, e + 60, 2);
  constexpr uint16_t kX86 = 62;
  return machine == kX86 ? sections + size_t{size} * count : 0;
}

// The loader takes a path that it has seen for the module that it had then, so that each load names
// its descriptor in a way of its own: the bits of its number as "./" or "/".
void* load(const void* image, size_t bytes) {
  static unsigned loads = 0;
  const int file = memfd_create("cubin", MFD_CLOEXEC);
  void* library = nullptr;
  if (file >= 0 && write(file, image, bytes) == static_cast<ssize_t>(bytes)) {
    std::string path = "/proc/self/fd/";
    ++loads;
    for (int bit = 0; bit < 24; ++bit) path += loads >> bit & 1 ? "./" : "/";
    library = dlopen((path + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (file >= 0) close(file);
  return library;
}

std::string launch_fault(const FunctionObject& f, dim3 blocks, dim3 threads,
                         unsigned dynamic_bytes) {
  const uint64_t in_block = uint64_t{threads.x} * threads.y * threads.z;
  if (in_block == 0 || uint64_t{blocks.x} * blocks.y * blocks.z == 0)
    return "a grid has blocks, and a block has threads";
  if (in_block > 1024 || threads.z > 64)
    return text(in_block) + " threads in a block; at most 1024, and 64 in z";
  if (f.kernel->max_threads && in_block > f.kernel->max_threads)
    return text(in_block) + " threads in a block; __launch_bounds__ allows " +
           text(f.kernel->max_threads);
  if (blocks.x > 2147483647u || blocks.y > 65535 || blocks.z > 65535) return "too many blocks";
  if (dynamic_bytes > static_cast<unsigned>(f.dynamic_bytes))
    return text(dynamic_bytes) + " bytes of dynamic shared memory; cuFuncSetAttribute allows " +
           text(static_cast<uint64_t>(f.dynamic_bytes));
  return "";
}

}  // namespace

std::shared_ptr<KernelCall> make_call(const char* call, Result* result, FunctionHandle f,
                                      dim3 blocks, dim3 threads, unsigned dynamic_bytes,
                                      void** parameters, void** extra) {
  if (!is_handle(f)) {
    *result = refuse(Result::kInvalidHandle, call, "no function, or one of an unloaded module");
    return nullptr;
  }
  std::string why = launch_fault(*f, blocks, threads, dynamic_bytes);
  if (extra) why = "`extra` is not emulated";
  if (!parameters && f->kernel->count) why = "no parameters, the kernel has some";
  if (!why.empty()) {
    *result = refuse(Result::kInvalidValue, call, f->name + ": " + why);
    return nullptr;
  }
  auto made = std::make_shared<KernelCall>();
  *made = {f, blocks, threads, dynamic_bytes, {}, {}, current_context()};
  size_t bytes = 0;
  const auto place = [&](unsigned i) {
    return bytes = (bytes + 15) / 16 * 16, bytes += f->kernel->sizes[i],
           bytes - f->kernel->sizes[i];
  };
  std::vector<size_t> offsets;
  for (unsigned i = 0; i < f->kernel->count; ++i) offsets.push_back(place(i));
  made->bytes.resize(bytes);
  for (unsigned i = 0; i < f->kernel->count; ++i) {
    made->parameters.push_back(made->bytes.data() + offsets[i]);
    std::memcpy(made->parameters[i], parameters[i], f->kernel->sizes[i]);
  }
  made->parameters.push_back(nullptr);
  *result = Result::kSuccess;
  return made;
}

void run_call(const KernelCall& call) {
  Gpu& g = gpu();
  const FunctionObject& f = *call.function;
  std::vector<uintptr_t> pointers;
  for (size_t at = 0; at + 8 <= call.bytes.size(); at += 8) {
    uintptr_t p;
    std::memcpy(&p, call.bytes.data() + at, sizeof(p));
    if (g.memory.contains(p)) pointers.push_back(p);
  }
  const Op& op = *g.running();
  for (uintptr_t p : pointers) {  // what is of another device is found without running
    const Life* block = g.memory.blocks().alive_around(p);
    if (block && !(block->access >> op.device & 1))
      throw OpError(Result::kIllegalAddress,
                    f.name + ": wrong device: memory of device " + std::to_string(block->device) +
                        " is given to a kernel on device " + std::to_string(op.device));
  }
  const auto seed = g.settings.order == Settings::kRandom ? g.draw() | 1 : 0;
  run_blocks({f.kernel, &f.module->module, call.blocks, call.threads, call.dynamic_bytes,
              const_cast<void**>(call.parameters.data()), seed, f.name});
  if (g.shadow) return;
  if (const std::string broken = g.memory.broken_zone(pointers); !broken.empty())
    throw OpError(Result::kIllegalAddress, f.name + ": wrote out of bounds: " + broken);
}

}  // namespace vgpu

namespace tessera::cuda {

using namespace vgpu;

extern "C" {

Result cuModuleLoadData(ModuleHandle* module, const void* image) {
  return in_context(__func__, [&](int device) {
    const size_t bytes = image_bytes(image);
    if (!bytes)
      return refuse(Result::kInvalidImage, "cuModuleLoadData", "not a module of the virtual NVRTC");
    void* library = load(image, bytes);
    if (!library) return refuse(Result::kInvalidImage, "cuModuleLoadData", dlerror());
    auto* open = reinterpret_cast<VgpuModule (*)(const VgpuCalls*)>(dlsym(library, "vgpu_open"));
    if (!open)
      return refuse(Result::kInvalidImage, "cuModuleLoadData", "not a module of the virtual NVRTC");
    auto m = std::make_unique<ModuleObject>();
    m->device = device, m->library = library;
    m->module = open(module_calls(gpu().memory.begin(), Memory::kReserved, &touch));
    if (gpu().shadow && !m->module.checked)
      return refuse(Result::kInvalidImage, "cuModuleLoadData",
                    "VGPU_CHECK=1, and the module was compiled without: compile it again");
    *module = hand_out(std::move(m));
    return Result::kSuccess;
  });
}
Result cuModuleUnload(ModuleHandle module) {
  return in_context(__func__, [&](int) {
    if (!is_handle(module))
      return refuse(Result::kInvalidHandle, "cuModuleUnload", "no module, or unloaded before");
    gpu().drain();
    for (const auto& f : module->functions) handles<FunctionObject>().erase(f.get());
    handles<ModuleObject>().erase(module);
    dlclose(module->library);
    delete module;
    return Result::kSuccess;
  });
}
Result cuModuleGetFunction(FunctionHandle* function, ModuleHandle module, const char* name) {
  return in_context(__func__, [&](int) {
    if (!is_handle(module))
      return refuse(Result::kInvalidHandle, "cuModuleGetFunction", "no module");
    for (const auto& f : module->functions)
      if (f->name == name) return *function = f.get(), Result::kSuccess;
    const auto* kernel = static_cast<const VgpuKernel*>(
        dlsym(module->library, ("vgpu_kernel_" + std::string(name)).c_str()));
    if (!kernel) return Result::kNotFound;
    auto f = std::make_unique<FunctionObject>();
    f->module = module, f->kernel = kernel, f->name = name;
    handles<FunctionObject>().insert(f.get());
    *function = f.get();
    module->functions.push_back(std::move(f));
    return Result::kSuccess;
  });
}

Result cuFuncGetAttribute(int* value, FunctionAttribute attribute, FunctionHandle f) {
  return in_context(__func__, [&](int) {
    if (!is_handle(f)) return refuse(Result::kInvalidHandle, "cuFuncGetAttribute", "no function");
    const VgpuModule& m = f->module->module;
    switch (attribute) {
      case FunctionAttribute::kMaxThreads:
        *value = f->kernel->max_threads ? static_cast<int>(f->kernel->max_threads) : 1024;
        return Result::kSuccess;
      case FunctionAttribute::kSharedBytes:
        if (m.kernels > 1)
          return refuse(Result::kNotSupported, "cuFuncGetAttribute",
                        "static shared memory is known of a module with one kernel");
        *value = static_cast<int>(m.shared_end - m.shared);
        return Result::kSuccess;
      case FunctionAttribute::kConstantBytes:
      case FunctionAttribute::kLocalBytes: *value = 0; return Result::kSuccess;
      case FunctionAttribute::kRegisters: *value = 32; return Result::kSuccess;
      case FunctionAttribute::kMaxDynamicSharedBytes:
        *value = f->dynamic_bytes;
        return Result::kSuccess;
    }
    return refuse(Result::kInvalidValue, "cuFuncGetAttribute", "the attribute is not emulated");
  });
}
Result cuFuncSetAttribute(FunctionHandle f, FunctionAttribute attribute, int value) {
  return in_context(__func__, [&](int) {
    if (!is_handle(f)) return refuse(Result::kInvalidHandle, "cuFuncSetAttribute", "no function");
    if (attribute != FunctionAttribute::kMaxDynamicSharedBytes || value < 0 || value > kOptInBytes)
      return refuse(
          Result::kInvalidValue, "cuFuncSetAttribute",
          "emulated is dynamic shared memory up to " + std::to_string(kOptInBytes) + " bytes");
    f->dynamic_bytes = value;
    return Result::kSuccess;
  });
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, FunctionHandle f, int threads,
                                                   size_t dynamic_bytes) {
  return in_context(__func__, [&](int) {
    if (!is_handle(f) || threads < 1 || threads > 1024) return Result::kInvalidValue;
    constexpr size_t kSharedBytes = 228 << 10, kReserved = 1 << 10;
    const int by_threads = 2048 / ((threads + 31) / 32 * 32);
    const auto by_shared = static_cast<int>(kSharedBytes / (dynamic_bytes + kReserved));
    *blocks = std::min({32, by_threads, by_shared});
    return Result::kSuccess;
  });
}

Result cuLaunchKernel(FunctionHandle f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                      unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                      StreamHandle stream, void** parameters, void** extra) {
  return on_stream(__func__, stream, [&](StreamObject& s) {
    Result r;
    const auto call = make_call("cuLaunchKernel", &r, f, {grid_x, grid_y, grid_z},
                                {block_x, block_y, block_z}, shared_bytes, parameters, extra);
    if (!call) return r;
    if (f->module->device != s.device)
      return refuse(Result::kInvalidHandle, "cuLaunchKernel",
                    f->name + ": wrong device: a function of device " +
                        std::to_string(f->module->device) + " in a stream of device " +
                        std::to_string(s.device));
    const OpRef op = gpu().submit(s, OpKind::kKernel, f->name, [call] { run_call(*call); });
    op->call = call;
    if (s.capture)
      s.capture->nodes.push_back(op);
    else
      gpu().run_some();
    return Result::kSuccess;
  });
}
Result cuLaunchKernelEx(const LaunchConfig* c, FunctionHandle f, void** parameters, void** extra) {
  if (c->num_attributes)
    return refuse(Result::kNotSupported, "cuLaunchKernelEx",
                  "launch attribute " + std::to_string(c->attributes[0].id) + " is not emulated");
  return cuLaunchKernel(f, c->grid_x, c->grid_y, c->grid_z, c->block_x, c->block_y, c->block_z,
                        c->shared_bytes, c->stream, parameters, extra);
}
}

}  // namespace tessera::cuda
