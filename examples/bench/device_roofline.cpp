// bench roofline --device: what a device can do at most, as measured: copies between it and the
// host, sweeps of its memory, products by dtype.
#include <fmt/core.h>

#include <algorithm>

#include "core/autograd/autograd.h"
#include "core/base/error.h"
#include "core/dispatch/default_device.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/views.h"
#include "examples/bench/device.h"

namespace tessera::bench {
namespace {

/// Memory of an allocator, for as long as this lives.
class Block {
 public:
  Block(Allocator& allocator, size_t bytes)
      : allocator_(allocator), bytes_(bytes), at_(allocator.allocate(bytes)) {}
  ~Block() { allocator_.deallocate(at_, bytes_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  void* at() const { return at_; }

 private:
  Allocator& allocator_;
  size_t bytes_;
  void* at_;
};

// A copy of `bytes` by the runtime, at its best.
double copy_seconds(const DeviceTimer& timer, Device to, Device from, Allocator& host, size_t bytes,
                    int samples) {
  DeviceRuntime& runtime = runtime_of(timer.device());
  Allocator& own = runtime.allocator(timer.device().index);
  const Stream stream = runtime.stream(timer.device().index);
  Block target(to.is_cpu() ? host : own, bytes), source(from.is_cpu() ? host : own, bytes);
  for (const auto& [block, device] : {std::pair(&target, to), std::pair(&source, from)})
    if (device.is_cpu()) std::fill_n(static_cast<char*>(block->at()), bytes, char(1));
  const auto copy = [&](int64_t calls) {
    for (int64_t i = 0; i < calls; ++i)
      runtime.copy(target.at(), to, source.at(), from, bytes, stream);
  };
  const DeviceTimer::Cost cost = timer.cost(copy, samples, 16);
  runtime.synchronize(stream);  // before the blocks are freed
  return cost.device.min;
}

template <class F>
Batch repeat(F once) {
  return [once](int64_t n) {
    for (int64_t i = 0; i < n; ++i) keep(once().defined());
  };
}

}  // namespace

std::vector<Case> square_products(int64_t edge, DType dtype) {
  const std::string size = fmt::format("{} {}^3", name_of(dtype), edge);
  const double n = double(edge), flops = 2 * n * n * n, bytes = 3 * n * n * double(size_of(dtype));
  const auto make = [&](const char* spec, const char* what) {
    return Case{fmt::format("matmul {}, {}", size, what),
                [=] {
                  Tensor a = randn({edge, edge}, {dtype}), b = randn({edge, edge}, {dtype});
                  return repeat([=] { return contract(spec, a, b); });
                },
                bytes, flops};
  };
  return {make("mk,nk->mn", "as a linear layer forward (b transposed)"),
          make("mn,nk->mk", "as its gradient by the input"),
          make("mn,mk->nk", "as its gradient by the weight (a transposed)")};
}

std::vector<Rate> measure_products(const DeviceTimer& timer, int64_t edge, DType dtype,
                                   int samples) {
  DeviceScope on_device(timer.device());
  NoGrad off;
  std::vector<Rate> rates;
  for (const Case& product : square_products(edge, dtype))
    rates.push_back({product.name, true,
                     product.flops / timer.cost(product.prepare(), samples, 16).device.min});
  return rates;
}

Ceilings measure_ceilings(const DeviceTimer& timer, const DeviceOptions& o, int samples) {
  const Device device = timer.device();
  DeviceScope on_device(device);
  NoGrad off;
  Ceilings c;
  const size_t bytes = size_t(o.kib) << 10;
  const auto add = [&](std::string what, double moved, double seconds) {
    c.rates.push_back({std::move(what), false, moved / seconds});
    c.memory = std::max(c.memory, moved / seconds);
  };
  add("copy by the runtime", 2 * double(bytes),
      copy_seconds(timer, device, device, cpu_allocator(), bytes, samples));
  {
    const int64_t n = int64_t(bytes / sizeof(float));
    const Tensor x = rand({n}), y = rand({n}), s = scalar_tensor(0.5, kF32);
    const auto sweep = [&](const char* what, double moved, const Batch& batch) {
      add(what, moved * double(n) * sizeof(float), timer.cost(batch, samples).device.min);
    };
    sweep("scale, a = s b", 2, repeat([=] { return x * 0.5; }));
    sweep("add, a = b + c", 3, repeat([=] { return x + y; }));
    sweep("triad, a = b + s (c - b)", 3, repeat([=] { return lerp(x, y, s); }));
  }
  for (DType t : {kF32, kBF16, kF16}) {
    double best = 0;
    for (const Rate& rate : measure_products(timer, o.edge, t, samples)) {
      c.rates.push_back(rate);
      best = std::max(best, rate.per_second);
    }
    c.products.emplace_back(t, best);
  }
  return c;
}

Json device_roofline(const DeviceOptions& o) {
  const Device device = device_for("roofline", o);
  const DeviceTimer timer(device);
  const size_t bytes = size_t(o.kib) << 10;
  fmt::print("{}{}; best of {} runs, operands of {}\n", device_text(device),
             timer.has_clock() ? "by the device's clock" : "by the host's clock", kSamples,
             bytes_text(int64_t(bytes)));
  DeviceRuntime& runtime = runtime_of(device);
  Ceilings c;
  const bool pins = &runtime.host_allocator() != &cpu_allocator();
  const auto between = [&](const char* what, Device to, Device from, Allocator& host) {
    const double seconds = copy_seconds(timer, to, from, host, bytes, kSamples);
    c.rates.push_back({what, false, double(bytes) / seconds});
  };
  if (pins) {
    between("host to device", device, kCPU, runtime.host_allocator());
    between("device to host", kCPU, device, runtime.host_allocator());
  }
  const char* ordinary[] = {"host to device, ordinary memory", "device to host, ordinary memory"};
  between(ordinary[0], device, kCPU, cpu_allocator());
  between(ordinary[1], kCPU, device, cpu_allocator());
  const Ceilings more = measure_ceilings(timer, o, kSamples);
  c.rates.insert(c.rates.end(), more.rates.begin(), more.rates.end());
  for (const Rate& r : c.rates)
    fmt::print("{:<72} {:>10.1f} {}\n", r.what, r.per_second * (r.arithmetic ? 1e-12 : 1e-9),
               r.arithmetic ? "TFLOP/s" : "GB/s");
  fmt::print("copies between host and device count their bytes once, others read plus written\n");
  Json j = device_json(device);
  j["clock"] = timer.has_clock() ? "device" : "host";
  j["operand_bytes"] = bytes;
  j["rows"] = ceilings_json(c);
  return j;
}

}  // namespace tessera::bench
