// The registry, and the two kinds that are always there: the CPU, and kMeta, whose tensors have no
// memory.
#include "core/tensor/device_runtime.h"

#include <array>
#include <charconv>
#include <cstring>
#include <thread>

#include "core/base/error.h"

namespace tessera {
namespace {

class CpuRuntime final : public DeviceRuntime {
 public:
  std::string_view name() const override { return "cpu"; }
  int count() override { return 1; }
  std::string describe(int) override {
    return fmt::format("CPU, {} hardware threads", std::thread::hardware_concurrency());
  }
  bool host_addressable() const override { return true; }
  Allocator& allocator(int) override { return cpu_allocator(); }
  MemoryStats memory_stats(int) override { return cpu_memory_stats(); }
  void reset_peak_memory(int) override { reset_peak_cpu_memory(); }
  void release_cached_memory(int) override { release_cached_cpu_memory(); }
  bool copy(void* to, Device, const void* from, Device, size_t bytes, const Stream&) override {
    if (bytes) std::memcpy(to, from, bytes);
    return false;
  }
};

class NoMemory final : public DeviceRuntime {
 public:
  std::string_view name() const override { return "meta"; }
  int count() override { return 1; }
  std::string describe(int) override { return "shapes without values"; }
  // There is nothing to read: pointers are null.
  bool host_addressable() const override { return true; }
  Allocator& allocator(int) override { return cpu_allocator(); }
  MemoryStats memory_stats(int) override { return {}; }
  void reset_peak_memory(int) override {}
  void release_cached_memory(int) override {}
  bool copy(void*, Device, const void*, Device, size_t, const Stream&) override {
    throw BugError("device: a copy of values from or to kMeta");
  }
};

struct Registry {
  std::array<std::unique_ptr<DeviceRuntime>, kMaxDeviceKinds> runtimes;
  int size = 0;
  Registry() {
    runtimes[size_t(DeviceKind::kCPU)] = std::make_unique<CpuRuntime>();
    runtimes[size_t(DeviceKind::kMeta)] = std::make_unique<NoMemory>();
    size = 2;
  }
};
// Never destroyed: storages that end later than static objects still ask for their allocator.
Registry& registry() {
  static Registry& all = *new Registry;
  return all;
}

// With those of this build.
Registry& whole_registry() {
  static const bool registered = (register_devices(), true);
  (void)registered;
  return registry();
}

std::optional<DeviceKind> find_in(const Registry& all, std::string_view name) {
  for (int i = 0; i < all.size; ++i)
    if (all.runtimes[size_t(i)]->name() == name) return DeviceKind(i);
  return {};
}

}  // namespace

double DeviceRuntime::elapsed_ms(Event&, Event&) {
  throw BugError(fmt::format("device: {} has no clock, and its events no times", name()));
}

std::vector<Finding> DeviceRuntime::findings() {
  if (count() == 0)
    return {{Finding::Level::kAdvice, fmt::format("{}: no device", name()), why_none()}};
  std::vector<Finding> all;
  for (int i = 0; i < count(); ++i)
    all.push_back({Finding::Level::kGood,
                   fmt::format("{}: {}", to_string(Device{kind(), int8_t(i)}), describe(i)), ""});
  return all;
}

DeviceKind register_device(std::unique_ptr<DeviceRuntime> runtime) {
  Registry& all = registry();
  TESSERA_CHECK(!find_in(all, runtime->name()),
                "register_device: \"{}\" is registered already; choose another name",
                runtime->name());
  TESSERA_CHECK(all.size < kMaxDeviceKinds,
                "register_device: no number is left for \"{}\"; {} kinds are registered",
                runtime->name(), all.size);
  runtime->kind_ = DeviceKind(all.size);
  all.runtimes[size_t(all.size++)] = std::move(runtime);
  return DeviceKind(all.size - 1);
}

DeviceRuntime& runtime_of(DeviceKind kind) {
  Registry& all = registry();
  TESSERA_ASSERT(int(kind) < all.size, "device: kind {} is not registered", int(kind));
  return *all.runtimes[size_t(kind)];
}

std::vector<DeviceKind> device_kinds() {
  std::vector<DeviceKind> kinds;
  for (int i = 0; i < whole_registry().size; ++i) kinds.push_back(DeviceKind(i));
  return kinds;
}

std::optional<DeviceKind> find_device_kind(std::string_view name) {
  return find_in(whole_registry(), name);
}

Ref<DeviceProgram> DeviceRuntime::compile(const std::string& name, const std::string&,
                                          std::span<const std::string>, int) {
  throw BugError(fmt::format("{}: {} compiles no texts of kernels", name, this->name()));
}

Ref<DeviceGraph> DeviceRuntime::capture(int, FunctionRef<void()>) {
  throw BugError(fmt::format("capture: {} captures no work", name()));
}

void check_device(Device d, std::string_view what) {
  DeviceRuntime& runtime = runtime_of(d);
  const int count = runtime.count();
  TESSERA_CHECK(count > 0, "{}: {} cannot be used: {}", what, to_string(d), runtime.why_none());
  TESSERA_CHECK(d.index >= 0 && d.index < count, "{}: there is no {}; {} has {}", what,
                to_string(d), runtime.name(),
                count == 1 ? "one device, of index 0" : fmt::format("devices 0 to {}", count - 1));
}

MemoryStats memory_stats(Device d) { return runtime_of(d).memory_stats(d.index); }

std::string to_string(Device d) {
  const std::string_view name = runtime_of(d).name();
  return d.is_cpu() || d.is_meta() ? std::string(name) : fmt::format("{}:{}", name, int(d.index));
}

Device parse_device(const std::string& text) {
  const size_t colon = std::min(text.find(':'), text.size());
  const auto kind = find_device_kind(std::string_view(text).substr(0, colon));
  int index = colon == text.size() ? 0 : -1;
  if (colon < text.size()) {
    const char* end = text.data() + text.size();
    auto [last, error] = std::from_chars(text.data() + colon + 1, end, index);
    if (error != std::errc() || last != end || index > 127) index = -1;
  }
  const bool numbered = kind && *kind != DeviceKind::kCPU && *kind != DeviceKind::kMeta;
  if (!kind || index < 0 || (colon < text.size() && !numbered)) {
    std::string names;
    for (DeviceKind k : device_kinds())
      names += (names.empty() ? "" : ", ") + std::string(runtime_of(k).name());
    throw UserError(fmt::format(
        "device: \"{}\" is not a device of this build; it has {} (NAME:N is the N-th of a kind)",
        text, names));
  }
  return {*kind, int8_t(index)};
}

}  // namespace tessera
