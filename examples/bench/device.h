// Measuring a device other than the CPU, whichever: through its runtime, by its own clock where it
// has one. The table of such a run begins with what the device is, and says so where its times mean
// nothing (the virtual GPU). Invariant: a device's time is between two events on the stream that
// the work is enqueued on; the host's is that of enqueuing, and waits for nothing.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/base/function_ref.h"
#include "core/tensor/device_runtime.h"
#include "examples/bench/cases.h"
#include "examples/bench/commands.h"

namespace tessera::bench {

struct DeviceOptions {
  std::string device = "cpu";
  int64_t kib = 256 << 10;  // of the largest operand
  int64_t edge = 4096;      // of square matrices
};
/// Adds --device, and where `sized` --kib and --edge.
void add_device_options(Subcommand& sub, DeviceOptions& o, bool sized);
/// The device that the options name, which is there; without a number, that of rank
/// `rank` of this node (-1: of this rank). Throws UserError that begins with "bench `command`",
/// also for sizes that cannot be or, on the CPU, are not read.
Device device_for(const std::string& command, const DeviceOptions& o, int rank = -1);

/// "cuda:0: NVIDIA H200, 139.8 GiB, sm_90", and a second line where times mean nothing.
std::string device_text(Device device);
/// The same as fields "device", "description" and, where times mean nothing, "times"; and
/// "libraries", a line for the driver and each library with its version and place.
Json device_json(Device device);

/// Times work that the calling thread enqueues on a device.
class DeviceTimer {
 public:
  explicit DeviceTimer(Device device);
  Device device() const { return device_; }
  /// Whether the device has a clock; else the host's is read, once all is done.
  bool has_clock() const { return has_clock_; }

  struct Cost {
    Stats device, host;  // seconds of one call
  };
  /// batch(n) enqueues n calls. Each sample begins when the device has nothing to do, and makes the
  /// more calls the shorter they are, up to `most_calls`: a device whose queue is full would have
  /// the host wait.
  Cost cost(const Batch& batch, int samples, int64_t most_calls = 256) const;
  /// Seconds of each of `calls` calls of `enqueue` that follow each other, with nobody waiting in
  /// between: where the host is late, the device's idle time counts. Without a clock each is waited
  /// for.
  Stats in_a_row(FunctionRef<void()> enqueue, int calls) const;

 private:
  double seconds_of(const Batch& batch, int64_t calls, double* host) const;
  Device device_;
  DeviceRuntime& runtime_;
  Stream stream_;
  bool has_clock_;
};

/// A rate that was measured, or the bound that others stand beside.
struct Rate {
  std::string what;
  bool arithmetic = false;  // FLOP/s, else bytes/s, read plus written
  double per_second = 0;
};
/// What a device can do at most, as measured: copies and sweeps of large operands, and the fastest
/// product of each dtype.
struct Ceilings {
  std::vector<Rate> rates;
  double memory = 0;                                    // bytes/s
  std::vector<std::pair<DType, double>> products = {};  // FLOP/s
  double product(DType t) const;                        // 0 where there is none
};
/// The rate of each of square_products().
std::vector<Rate> measure_products(const DeviceTimer& timer, int64_t edge, DType dtype,
                                   int samples);
Ceilings measure_ceilings(const DeviceTimer& timer, const DeviceOptions& o, int samples);
Json ceilings_json(const Ceilings& c);

/// Products of square matrices on the default device, in the layouts that a linear layer has.
std::vector<Case> square_products(int64_t edge, DType dtype);

/// A case of `bench kernels`: `dtype` is that of a product's operands.
struct KernelCase {
  const char* family;
  DType dtype;
  Case work;
};
/// Ops by family of kernels, on the default device.
std::vector<KernelCase> kernel_cases(const DeviceOptions& o);

struct DeviceTrainOptions {
  DeviceOptions device;
  WorkloadOptions workload;
  int samples = 0, warmup = 0;
  bool compile = false;
};

Json device_roofline(const DeviceOptions& o);
Json device_ops(const DeviceOptions& o, const std::string& only, int samples);
Json device_kernels(const DeviceOptions& o, const std::string& only, int samples);
Json device_train(const DeviceTrainOptions& o);

}  // namespace tessera::bench
