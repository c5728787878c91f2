// What a kind of device gives: memory, streams, events, copies. Everything above asks these objects
// and names no kind of device. A kind is registered once, when the program starts, by this build or
// by a library outside the tree; its kernels are added by add_kernels (core/dispatch/kernel.h).
// Invariant: only synchronize(), and copies whose comments say so, block the calling thread.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/finding.h"
#include "core/base/function_ref.h"
#include "core/tensor/allocator.h"
#include "core/tensor/event.h"

namespace tessera {

class Tensor;
struct MemoryHolder;
struct Meta;

/// How many blocks of how many threads a kernel has.
struct LaunchSize {
  uint32_t blocks = 1, threads = 1;
};

/// Kernels that a device compiled from a text. An object outlives the work of its kernels.
class DeviceProgram : public RefCounted {
 public:
  /// Enqueues entry `kernel` of the list that the program was made with on `stream`. `parameters`
  /// are the addresses of the values; they have been read when the call returns.
  virtual void launch(size_t kernel, LaunchSize size, const Stream& stream,
                      void* const* parameters) = 0;
};

/// Work that was captured once and is enqueued again by one call. It uses the memory that it was
/// captured with, wherever its values are from by then.
class DeviceGraph : public RefCounted {
 public:
  virtual void launch(const Stream& stream) = 0;
};

/// One kind of device, for all devices of that kind. Calls come from any thread.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  /// "cpu", "cuda": what programs write before the colon.
  virtual std::string_view name() const = 0;
  /// How many devices can be used; 0 where none can.
  virtual int count() = 0;
  /// Why there is none, in one line that says what to do; empty where there are some.
  virtual std::string why_none() { return {}; }
  /// "NVIDIA H200, 139.8 GiB, sm_90".
  virtual std::string describe(int index) = 0;
  /// Whether the host reads and writes the memory through pointers; its kernels have then ended
  /// when they return.
  virtual bool host_addressable() const { return false; }

  /// Memory of the host that copies from and to the devices go to without blocking a thread.
  virtual Allocator& host_allocator() { return cpu_allocator(); }
  /// Whether `p` is such memory, and so a copy from or to it can be captured.
  virtual bool copies_beside(const void* /*p*/) { return false; }
  /// Memory of device `index`. A block is first used on the calling thread's stream.
  virtual Allocator& allocator(int index) = 0;
  virtual MemoryStats memory_stats(int index) = 0;
  /// Sets the peak of memory_stats to what is held now.
  virtual void reset_peak_memory(int index) = 0;
  /// Returns cached blocks to the system or the driver.
  virtual void release_cached_memory(int index) = 0;

  /// The stream on which the calling thread's kernels run on device `index`. Its handle stays valid
  /// until the program ends, since storages that outlive the thread keep it.
  virtual Stream stream(int index) { return {{kind_, int8_t(index)}, nullptr}; }
  /// Another stream of the calling thread on device `index`, for copies that run beside its
  /// kernels. `turn`, 0 to 3, picks one of four: a copy need not wait for one of another turn.
  virtual Stream copy_stream(int index, int /*turn*/) { return stream(index); }
  /// A stream of the calling thread for kernels that run beside those of stream(): 0 or 1. While
  /// the thread captures, one for what it captures.
  virtual Stream side_stream(int index, int turn) { return copy_stream(index, turn); }
  /// Lets stream() of the calling thread return `stream` from now on, one of the thread's own;
  /// returns the stream that it replaces. A device without separate copy streams need not override
  /// it.
  virtual Stream exchange_stream(const Stream& stream) { return stream; }
  /// The end of what has been enqueued on `stream` so far; null where it has ended already, as it
  /// always has on the CPU.
  virtual Ref<Event> record(const Stream& /*stream*/) { return nullptr; }
  /// Enqueues a copy of `bytes` from `from` to `to`, each a pointer into the memory of the device
  /// beside it: the host or a device of this kind. Returns whether the host's side may still be in
  /// use, until what record(stream) then returns; where it is ordinary memory, the call may block
  /// until it has been read or written, and return false.
  virtual bool copy(void* to, Device to_device, const void* from, Device from_device, size_t bytes,
                    const Stream& stream) = 0;
  /// Lets what is enqueued on `stream` from now on come after what has been enqueued on `before` so
  /// far; where that is captured, `stream` is from then on.
  virtual void follow(const Stream& /*stream*/, const Stream& /*before*/) {}
  /// Blocks until what has been enqueued on `stream` has ended; throws what failed there.
  virtual void synchronize(const Stream& /*stream*/) {}

  /// Whether compile() takes kernels as texts of CUDA C++ without includes.
  virtual bool compiles_cuda() const { return false; }
  /// The entry points `kernels` of `text`, which are extern "C", for device `index`. `name` stands
  /// in errors. Throws UserError with the compiler's log where the text does not compile, and where
  /// there is no compiler.
  virtual Ref<DeviceProgram> compile(const std::string& name, const std::string& text,
                                     std::span<const std::string> kernels, int index);

  /// Whether capture() may be called.
  virtual bool captures() { return false; }
  /// Calls `enqueue`, during which the calling thread's stream on device `index` records what it is
  /// given and runs nothing, and returns what was recorded, to be launched on the stream that the
  /// thread has otherwise. `enqueue` runs kernels, and neither waits for the device nor lets its
  /// stream wait: whoever launches the graph waits for what it reads and writes. Memory that
  /// `enqueue` frees is the graph's until that dies. Throws what `enqueue` throws.
  virtual Ref<DeviceGraph> capture(int index, FunctionRef<void()> enqueue);
  /// Whether products do more in the time of the product alone: add a bias, apply GELU and so on.
  /// The compiler then makes one op of them (core/ops/contract_epilogues.h).
  virtual bool has_epilogues() { return false; }

  // What tools ask for. A kind without these has no lane in profiles, and no accounts.

  /// As record, of an event whose time on the device elapsed_ms() knows; null for a kind without a
  /// clock, as the CPU.
  virtual Ref<Event> record_timed(const Stream& /*stream*/) { return nullptr; }
  /// Milliseconds on the device from one event of record_timed to another of the same device; waits
  /// for both. Throws BugError for a kind without a clock.
  virtual double elapsed_ms(Event& from, Event& to);
  /// Why times that are measured there say nothing about a device of this kind, as "virtual GPU:
  /// kernels run on this CPU"; empty where they do.
  virtual std::string why_times_mean_nothing(int /*index*/) { return {}; }
  /// All that times which were measured on device `index` depend on: its name and what it has, the
  /// version of its driver.
  virtual std::string identity(int index) { return describe(index); }
  /// What a user should know of the machine: drivers, libraries and devices with their versions and
  /// where they are, or why one is missing and what to do. The default has a line for each device,
  /// or why_none().
  virtual std::vector<Finding> findings();
  /// Says whose the block of device `index` at `p` is from now on (memory_label.h), where the
  /// allocator keeps accounts; other addresses are none of its business.
  virtual void set_memory_holder(int /*index*/, void* /*p*/, const MemoryHolder& /*holder*/) {}
  /// How many blocks the allocator has handed out; -1: nobody counts them.
  virtual int64_t allocations(int /*index*/) { return -1; }

  DeviceKind kind() const { return kind_; }

 private:
  friend DeviceKind register_device(std::unique_ptr<DeviceRuntime> runtime);
  DeviceKind kind_ = DeviceKind::kCPU;
};

/// Registers the kinds of this build beside the CPU and kMeta, when a kind is first asked for by
/// name or all are; defined in core/backend/register.cpp, the one place that names them.
void register_devices();
/// Adds a kind of device and returns its number. Not to be called while other threads use devices.
/// Throws UserError where the name is taken or kMaxDeviceKinds are registered.
DeviceKind register_device(std::unique_ptr<DeviceRuntime> runtime);
/// Throws BugError for a kind that was not registered.
DeviceRuntime& runtime_of(DeviceKind kind);
inline DeviceRuntime& runtime_of(Device d) { return runtime_of(d.kind); }
std::optional<DeviceKind> find_device_kind(std::string_view name);
/// Every kind, the CPU first.
std::vector<DeviceKind> device_kinds();

/// Throws UserError where `d` is not there, with the reason; `what` is the op that asks.
void check_device(Device d, std::string_view what);
/// The stream on which the calling thread's kernels run on `d`.
inline Stream stream_of(Device d) { return d.is_cpu() ? Stream{} : runtime_of(d).stream(d.index); }
inline Allocator& allocator_of(Device d) {
  return d.is_cpu() ? cpu_allocator() : runtime_of(d).allocator(d.index);
}
/// While one lives, kernels and copies of the calling thread on the device of `stream` run there,
/// and memory that it allocates there has it as its home stream. Scopes nest.
class StreamScope {
 public:
  explicit StreamScope(const Stream& stream)
      : old_(runtime_of(stream.device).exchange_stream(stream)) {}
  ~StreamScope() { runtime_of(old_.device).exchange_stream(old_); }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  Stream old_;
};

/// As empty(meta), in memory of `allocator`, which is one of the meta's device.
Tensor empty_in(const Meta& meta, Allocator& allocator);

/// Statistics of the memory of `d`.
MemoryStats memory_stats(Device d);

}  // namespace tessera
