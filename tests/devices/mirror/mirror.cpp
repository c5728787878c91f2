#include "mirror.h"

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include "core/dispatch/other_kernels.h"
#include "core/tensor/device_runtime.h"
#include "memory.h"
#include "schedule.h"

using namespace tessera;

namespace mirror {
namespace {

constexpr int kDevices = 2;
using Clock = std::chrono::steady_clock;

/// The end of what is on a stream, and when the host ran it: the device's clock.
class TimedEvent final : public Event {
 public:
  explicit TimedEvent(const Stream& stream) {
    enqueue(stream, [at = at_] { *at = Clock::now(); });
    end_ = record(stream);
  }
  bool done() const override { return !end_ || end_->done(); }
  void wait() override {
    if (end_) end_->wait();
  }
  Clock::time_point at() const { return *at_; }

 private:
  std::shared_ptr<Clock::time_point> at_ = std::make_shared<Clock::time_point>();
  Ref<Event> end_;
};

class Mirror final : public DeviceRuntime {
 public:
  std::string_view name() const override { return "mirror"; }
  int count() override { return kDevices; }
  std::string describe(int) override { return "kernels of the CPU, run later"; }
  Allocator& host_allocator() override { return pinned(); }
  Allocator& allocator(int index) override { return memory(index); }
  MemoryStats memory_stats(int index) override { return memory(index).stats(); }
  void reset_peak_memory(int index) override { memory(index).reset_peak(); }
  void release_cached_memory(int) override {}
  Stream stream(int index) override { return stream_of_thread({kind(), int8_t(index)}); }
  Stream copy_stream(int index, int turn) override {
    return copy_stream_of_thread({kind(), int8_t(index)}, turn);
  }
  Stream exchange_stream(const Stream& s) override { return mirror::exchange_stream(s); }
  Ref<Event> record(const Stream& s) override { return mirror::record(s); }
  // With MIRROR_CLOCK=0 the device has no clock.
  Ref<Event> record_timed(const Stream& s) override {
    static const char* const clock = std::getenv("MIRROR_CLOCK");
    if (clock && std::string_view(clock) == "0") return nullptr;
    return make_ref<TimedEvent>(s);
  }
  double elapsed_ms(Event& from, Event& to) override {
    from.wait(), to.wait();
    const auto at = [](Event& e) { return static_cast<TimedEvent&>(e).at(); };
    return std::chrono::duration<double, std::milli>(at(to) - at(from)).count();
  }
  std::string why_times_mean_nothing(int) override { return "mirror: " + describe(0); }
  void synchronize(const Stream& s) override { mirror::synchronize(s); }

  bool copy(void* to, Device to_device, const void* from, Device from_device, size_t bytes,
            const Stream& stream) override {
    if (bytes == 0) return false;
    const void* source = from_device.is_cpu() ? from : bytes_at(from);
    void* target = to_device.is_cpu() ? to : bytes_at(to);
    if (from_device.is_cpu() && !pinned().owns(from)) {
      // It is read now: later, the program may have changed it.
      const char* first = static_cast<const char*>(from);
      enqueue(stream, [target, values = std::vector<char>(first, first + bytes)] {
        std::memcpy(target, values.data(), values.size());
      });
      return false;
    }
    enqueue(stream, [=] { std::memcpy(target, source, bytes); });
    return from_device.is_cpu() || to_device.is_cpu();
  }

 private:
  Pinned& pinned() {
    static auto& one = *new Pinned;
    return one;
  }
  Memory& memory(int index) {
    static auto& all = *new std::array<Memory, kDevices>{Memory({kind(), 0}), Memory({kind(), 1})};
    return all[size_t(index)];
  }
};

// That of the table, or the op's own; false where it has neither.
const Kernel& cpu_kernel(const Primitive& prim) {
  const Kernel& kernel = kernel_table().find(DeviceKind::kCPU, prim.id());
  const Kernel* own = kernel ? nullptr : prim.own_kernel(DeviceKind::kCPU);
  return own ? *own : kernel;
}

// What the CPU's kernel gets for `t`: the same elements where the host can reach them. Numbers of
// the host go by value. Nothing keeps memory of the device alive, as no launch does.
Tensor twin_of(const Tensor& t) {
  Meta meta = t.meta();
  meta.device = kCPU;
  if (!t.storage()) return Tensor(meta, nullptr);
  if (t.device().is_cpu()) {
    Tensor number = empty(t.shape(), t.dtype(), kCPU);
    std::memcpy(number.raw(), t.raw_values(), t.nbytes());
    return number;
  }
  Ref<Storage> bytes = make_ref<Storage>(bytes_at(t.storage()->data()), t.storage()->bytes(), kCPU,
                                         Ref<RefCounted>());
  return Tensor(meta, bytes, t.offset());
}
std::vector<Tensor> twins_of(std::span<const Tensor> tensors) {
  std::vector<Tensor> twins;
  for (const Tensor& t : tensors) twins.push_back(twin_of(t));
  return twins;
}

void plan(const Primitive& prim, std::span<const Tensor> in, std::span<Meta> out, Plan& plan) {
  if (auto make = cpu_kernel(prim).plan) make(prim, in, out, plan);
}

void run(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
         Workspace workspace, const Stream& stream) {
  enqueue(stream, [op = PrimRef(&prim), in = twins_of(in), out = twins_of(out),
                   scratch = bytes_at(workspace.data), state = Ref(workspace.state)] {
    cpu_kernel(*op).run(*op, in, out, {scratch, state.get()}, Stream{});
  });
}

// Ops of the library and those of programs alike, whenever they are made.
const Kernel* kernel_of(const Primitive& prim) {
  static const Kernel kernels[] = {
      {plan, run}, {plan, run, true}, {plan, run, false, true}, {plan, run, true, true}};
  const Kernel& cpu = cpu_kernel(prim);
  const bool numbers = prim.traits().kind == OpKind::kPointwise;
  return cpu ? &kernels[size_t(cpu.keeps_plan) + 2 * size_t(numbers)] : nullptr;
}

}  // namespace

Device device(int index) {
  static const DeviceKind kind = register_device(std::make_unique<Mirror>());
  [[maybe_unused]] static const bool has_kernels = (add_other_kernels(kind, kernel_of), true);
  return {kind, int8_t(index)};
}

}  // namespace mirror
