#include "core/backend/cuda/runtime.h"

#include <memory>
#include <mutex>
#include <vector>

#include "core/backend/cuda/caching_allocator.h"
#include "core/backend/cuda/capture.h"
#include "core/backend/cuda/context.h"
#include "core/backend/cuda/copy.h"
#include "core/backend/cuda/cublaslt.h"
#include "core/backend/cuda/cudnn.h"
#include "core/backend/cuda/exact_allocator.h"
#include "core/backend/cuda/findings.h"
#include "core/backend/cuda/launch.h"
#include "core/backend/cuda/library.h"
#include "core/backend/cuda/memory_ledger.h"
#include "core/backend/cuda/pinned.h"
#include "core/backend/cuda/refusals.h"
#include "core/backend/cuda/stream.h"
#include "core/base/env.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

/// A card's allocator, of the kind that TESSERA_CUDA_ALLOCATOR names.
struct Memory {
  std::unique_ptr<CachingAllocator> cached;
  std::unique_ptr<ExactAllocator> exact;

  explicit Memory(int device) {
    const size_t limit = size_t(env::get_int("TESSERA_CUDA_MEMORY", 0, 1, int64_t(1) << 30)) << 20;
    const std::string kind = env::get("TESSERA_CUDA_ALLOCATOR", "cached");
    TESSERA_CHECK(kind == "cached" || kind == "exact",
                  "TESSERA_CUDA_ALLOCATOR=\"{}\": expected cached or exact", kind);
    if (kind == "cached")
      cached = std::make_unique<CachingAllocator>(device, limit);
    else
      exact = std::make_unique<ExactAllocator>(device, limit);
  }
  Allocator& allocator() {
    return cached ? static_cast<Allocator&>(*cached) : static_cast<Allocator&>(*exact);
  }
};

class TextProgram final : public DeviceProgram {
 public:
  TextProgram(const std::string& name, const std::string& text,
              std::span<const std::string> kernels, int index)
      : program_(name, text) {
    for (const std::string& k : kernels) {
      program_.load(k, index);  // errors of the text are thrown here, not at the first launch
      kernels_.push_back(std::make_unique<UntypedKernel>(program_, k));
    }
  }
  void launch(size_t kernel, LaunchSize size, const Stream& stream,
              void* const* parameters) override {
    kernels_[kernel]->launch({{size.blocks, 1, 1}, {size.threads, 1, 1}, 0}, stream,
                             const_cast<void**>(parameters));
  }

 private:
  Program program_;
  std::vector<std::unique_ptr<UntypedKernel>> kernels_;
};

class CudaRuntime final : public DeviceRuntime {
 public:
  std::string_view name() const override { return "cuda"; }
  int count() override { return device_count(); }
  std::string why_none() override { return why_no_driver(); }
  std::string describe(int index) override {
    const Properties& p = properties(index);
    return fmt::format("{}, {}, {}", p.name, bytes_text(p.total_bytes), p.architecture());
  }
  std::string why_times_mean_nothing(int index) override {
    const bool made_up = properties(index).name.find("virtual GPU") != std::string::npos;
    return made_up ? "virtual GPU: kernels run on this CPU, to be tested" : "";
  }
  std::string identity(int index) override {
    return fmt::format("{}, cuBLASLt {}, cuDNN {}", cuda::identity(index),
                       cublaslt() ? cublaslt()->version : 0, cudnn() ? cudnn()->version : 0);
  }
  std::vector<Finding> findings() override { return cuda::findings(); }
  Allocator& host_allocator() override { return pinned_allocator(); }
  Allocator& allocator(int index) override { return memory(index).allocator(); }
  MemoryStats memory_stats(int index) override {
    Memory& m = memory(index);
    return m.cached ? m.cached->stats() : m.exact->stats();
  }
  void reset_peak_memory(int index) override {
    Memory& m = memory(index);
    m.cached ? m.cached->reset_peak() : m.exact->reset_peak();
  }
  void set_memory_holder(int index, void* p, const MemoryHolder& holder) override {
    Memory& m = memory(index);
    m.cached ? m.cached->set_holder(p, holder) : m.exact->set_holder(p, holder);
  }
  int64_t allocations(int index) override {
    Memory& m = memory(index);
    return m.cached ? m.cached->allocations() : m.exact->allocations();
  }
  void count_outside(int index, const MemoryHolder& holder, size_t bytes, bool held) {
    Memory& m = memory(index);
    m.cached ? m.cached->count_outside(holder, bytes, held)
             : m.exact->count_outside(holder, bytes, held);
  }
  void release_cached_memory(int index) override {
    if (Memory& m = memory(index); m.cached) m.cached->release_cached();
  }
  Stream stream(int index) override { return compute_stream(index); }
  Stream copy_stream(int index, int turn) override { return cuda::copy_stream(index, turn); }
  Stream side_stream(int index, int turn) override {
    return is_capturing() ? capture_stream(index, CaptureUse::kSide + turn)
                          : cuda::copy_stream(index, turn);
  }
  Stream exchange_stream(const Stream& stream) override { return exchange_compute_stream(stream); }
  // Nothing waits for a place in a graph: what was freed there is the graph's.
  Ref<Event> record(const Stream& s) override {
    return is_captured(s) ? nullptr : make_ref<StreamEvent>(s);
  }
  void follow(const Stream& stream, const Stream& before) override {
    if (is_captured(before)) note_captured(stream);
    make_ref<StreamEvent>(before)->wait_on(stream);
  }
  Ref<Event> record_timed(const Stream& stream) override {
    return make_ref<StreamEvent>(stream, StreamEvent::Timing::kOn);
  }
  double elapsed_ms(Event& from, Event& to) override {
    return cuda::elapsed_ms(static_cast<StreamEvent&>(from), static_cast<StreamEvent&>(to));
  }
  bool copies_beside(const void* p) override { return pinned_allocator().owns(p); }
  bool copy(void* to, Device to_device, const void* from, Device from_device, size_t bytes,
            const Stream& stream) override {
    cuda::copy(to, to_device, from, from_device, bytes, stream);
    if (!to_device.is_cpu() && !from_device.is_cpu()) return false;
    if (pinned_allocator().owns(to_device.is_cpu() ? to : from)) return true;
    // With ordinary memory the driver is done with the host's side when the call returns.
    note_host_wait();
    if (to_device.is_cpu()) raise_refusals(stream);
    return false;
  }
  void synchronize(const Stream& stream) override { cuda::synchronize(stream); }
  bool has_epilogues() override { return cublaslt() != nullptr; }
  bool compiles_cuda() const override { return true; }
  Ref<DeviceProgram> compile(const std::string& name, const std::string& text,
                             std::span<const std::string> kernels, int index) override {
    return make_ref<TextProgram>(name, text, kernels, index);
  }
  // With a wait behind each kernel nothing can be captured.
  bool captures() override { return !synchronous(); }
  Ref<DeviceGraph> capture(int index, FunctionRef<void()> enqueue) override {
    return cuda::capture(index, enqueue);
  }

 private:
  struct Slot {
    std::once_flag made;
    std::unique_ptr<Memory> memory;
  };
  Memory& memory(int index) {
    context_of(index);  // throws where there is no such card
    Slot& slot = slots_[size_t(index)];
    std::call_once(slot.made, [&] { slot.memory = std::make_unique<Memory>(index); });
    return *slot.memory;
  }
  Slot slots_[128];  // by what fits Device::index
};

}  // namespace

void count_outside(int device, const MemoryHolder& holder, size_t bytes, bool held) {
  DeviceRuntime& runtime = runtime_of(register_cuda());
  static_cast<CudaRuntime&>(runtime).count_outside(device, holder, bytes, held);
}

DeviceKind register_cuda() {
  static const DeviceKind kind = register_device(std::make_unique<CudaRuntime>());
  return kind;
}

}  // namespace tessera::cuda
