#include "core/backend/cuda/launch.h"

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/cubins.h"
#include "core/backend/cuda/library.h"
#include "core/backend/cuda/refusals.h"
#include "core/backend/cuda/stream.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

// Limits of all cards from compute capability 3 on.
constexpr unsigned kMostX = 0x7fffffff, kMostYZ = 65535, kMostBlockZ = 64;

size_t attribute(FunctionAttribute which, FunctionHandle function) {
  int value = 0;
  driver().function_attribute(&value, which, function);
  return size_t(value);
}

void check(const Geometry& g, const LoadedKernel& k) {
  const auto& [x, y, z] = g.grid;
  TESSERA_ASSERT(x && y && z && x <= kMostX && y <= kMostYZ && z <= kMostYZ,
                 "cuda: kernel {} is launched with {} x {} x {} blocks; a grid has 1 to 2^31 - 1 "
                 "along x, 1 to {} along y and z",
                 k.name, x, y, z, kMostYZ);
  const auto& [bx, by, bz] = g.block;
  // Each factor first: the product may exceed 64 bits.
  TESSERA_ASSERT(bx && by && bz && bx <= k.most_threads && by <= k.most_threads &&
                     bz <= kMostBlockZ && uint64_t(bx) * by * bz <= k.most_threads,
                 "cuda: kernel {} is launched with blocks of {} x {} x {} threads; it runs in "
                 "blocks of 1 to {}, at most {} along z",
                 k.name, bx, by, bz, k.most_threads, kMostBlockZ);
}

}  // namespace

Program::~Program() {
  for (auto& [device, card] : cards_) {
    if (!card.module) continue;
    // Fails only after an error that is thrown elsewhere, or when the driver is gone already.
    CurrentDevice current(device);
    driver().module_unload.result(card.module);
  }
}

LoadedKernel& Program::load(const std::string& kernel, int device) {
  CurrentDevice current(device);
  std::lock_guard lock(mutex_);
  OnCard& card = cards_[device];
  if (!card.module) {
    const std::string cubin = cubins().get(name_, text_, properties(device).architecture());
    const Result r = driver().module_load.result(&card.module, cubin.data());
    if (r != Result::kSuccess) raise(r, fmt::format("cuModuleLoadData of {}", name_).c_str());
  }
  const auto found = card.kernels.find(kernel);
  if (found != card.kernels.end()) return found->second;
  FunctionHandle function = nullptr;
  const Result r = driver().module_function.result(&function, card.module, kernel.c_str());
  TESSERA_ASSERT(r != Result::kNotFound, "cuda: the text {} has no kernel {}", name_, kernel);
  if (r != Result::kSuccess) raise(r, fmt::format("cuModuleGetFunction of {}", kernel).c_str());
  LoadedKernel& loaded = card.kernels[kernel];
  loaded.name = kernel;
  loaded.function = function;
  loaded.most_threads = uint32_t(attribute(FunctionAttribute::kMaxThreads, function));
  loaded.granted_dynamic_bytes = attribute(FunctionAttribute::kMaxDynamicSharedBytes, function);
  return loaded;
}

LoadedKernel& UntypedKernel::loaded(int device) {
  if (device >= kRemembered) return program_.load(name_, device);
  LoadedKernel* kernel = loaded_[device].load(std::memory_order_acquire);
  if (!kernel) [[unlikely]] {
    kernel = &program_.load(name_, device);
    loaded_[device].store(kernel, std::memory_order_release);
  }
  return *kernel;
}

FunctionFacts UntypedKernel::facts(int device) {
  CurrentDevice current(device);
  const FunctionHandle f = loaded(device).function;
  return {int(attribute(FunctionAttribute::kRegisters, f)),
          attribute(FunctionAttribute::kLocalBytes, f),
          attribute(FunctionAttribute::kSharedBytes, f),
          uint32_t(attribute(FunctionAttribute::kMaxThreads, f))};
}

// Beyond 48 KiB the driver wants to be told that a kernel knows how much a card has.
void UntypedKernel::grant_dynamic_bytes(LoadedKernel& k, size_t bytes, int device) {
  static std::mutex one_at_a_time;  // what is granted only grows
  std::lock_guard lock(one_at_a_time);
  if (bytes <= k.granted_dynamic_bytes.load(std::memory_order_relaxed)) return;
  const Result r = driver().set_function_attribute.result(
      k.function, FunctionAttribute::kMaxDynamicSharedBytes, int(bytes));
  TESSERA_ASSERT(r == Result::kSuccess,
                 "cuda: kernel {} is launched with {} bytes of shared memory beside its own; the "
                 "card has {} for a block",
                 k.name, bytes, properties(device).shared_bytes_per_block);
  k.granted_dynamic_bytes.store(bytes, std::memory_order_relaxed);
}

int UntypedKernel::blocks_per_multiprocessor(int device, uint32_t threads, size_t dynamic_bytes) {
  CurrentDevice current(device);
  int blocks = 0;
  driver().occupancy(&blocks, loaded(device).function, int(threads), dynamic_bytes);
  return blocks;
}

void UntypedKernel::launch(const Geometry& g, const Stream& stream, void** parameters) {
  const int device = stream.device.index;
  LoadedKernel& k = loaded(device);
  check(g, k);
  CurrentDevice current(device);
  if (g.shared_bytes > k.granted_dynamic_bytes.load(std::memory_order_relaxed)) [[unlikely]]
    grant_dynamic_bytes(k, g.shared_bytes, device);
  const Result r =
      driver().launch.result(k.function, g.grid[0], g.grid[1], g.grid[2], g.block[0], g.block[1],
                             g.block[2], g.shared_bytes, handle_of(stream), parameters, nullptr);
  if (r != Result::kSuccess) [[unlikely]]
    raise(r, fmt::format("cuLaunchKernel of {}", k.name).c_str());
  if (synchronous()) [[unlikely]] {
    note_host_wait();
    const Result ended = driver().stream_synchronize.result(handle_of(stream));
    if (ended != Result::kSuccess) raise(ended, fmt::format("kernel {}", k.name).c_str());
  }
}

}  // namespace tessera::cuda
