#include "core/backend/cuda/context.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "core/backend/cuda/library.h"
#include "core/base/error.h"
#include "core/tensor/device_runtime.h"

namespace tessera::cuda {
namespace {

struct Card {
  DeviceOrdinal ordinal = 0;
  Properties properties;
  std::once_flag retained;
  std::atomic<ContextHandle> context = nullptr;
};

size_t attribute(DeviceAttribute which, DeviceOrdinal device) {
  int value = 0;
  driver().device_attribute(&value, which, device);
  return size_t(value);
}

std::string uuid_of(DeviceOrdinal device) {
  Uuid uuid{};
  driver().device_uuid(&uuid, device);
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", unsigned(static_cast<unsigned char>(uuid.bytes[i])));
  }
  return text;
}

Properties properties_of(DeviceOrdinal device) {
  Properties p;
  char text[256] = {};
  driver().device_name(text, sizeof text, device);
  p.name = text;
  p.uuid = uuid_of(device);
  driver().device_pci_bus_id(text, sizeof text, device);
  p.pci_bus_id = text;
  driver().device_total_memory(&p.total_bytes, device);
  p.major = int(attribute(DeviceAttribute::kCapabilityMajor, device));
  p.minor = int(attribute(DeviceAttribute::kCapabilityMinor, device));
  p.multiprocessors = int(attribute(DeviceAttribute::kMultiprocessors, device));
  p.warp_size = int(attribute(DeviceAttribute::kWarpSize, device));
  p.threads_per_multiprocessor =
      int(attribute(DeviceAttribute::kMaxThreadsPerMultiprocessor, device));
  p.shared_bytes_per_block = attribute(DeviceAttribute::kSharedBytesPerBlockOptIn, device);
  p.l2_bytes = attribute(DeviceAttribute::kL2Bytes, device);
  p.virtual_memory = attribute(DeviceAttribute::kVirtualMemory, device) != 0;
  return p;
}

// Never destroyed: when static objects are, the driver may be gone already.
std::vector<std::unique_ptr<Card>>& cards() {
  static auto& all = *new std::vector<std::unique_ptr<Card>>([] {
    std::vector<std::unique_ptr<Card>> found;
    if (!why_no_driver().empty()) return found;
    int count = 0;
    driver().device_count(&count);
    for (int i = 0; i < count; ++i) {
      auto card = std::make_unique<Card>();
      driver().device_get(&card->ordinal, i);
      card->properties = properties_of(card->ordinal);
      found.push_back(std::move(card));
    }
    return found;
  }());
  return all;
}

Card& card(int device) {
  auto& all = cards();
  TESSERA_CHECK(device >= 0 && size_t(device) < all.size(), "cuda: there is no card {}: {}", device,
                all.empty()
                    ? why_no_driver()
                    : fmt::format("this machine has {} (0 to {})", all.size(), all.size() - 1));
  return *all[size_t(device)];
}

}  // namespace

std::string Properties::architecture() const { return fmt::format("sm_{}{}", major, minor); }

Device device_of(int index) {
  static std::atomic<int> registered = -1;
  int kind = registered.load(std::memory_order_relaxed);
  if (kind < 0) [[unlikely]] {
    const auto found = find_device_kind("cuda");
    TESSERA_ASSERT(found, "cuda: register_cuda() was not called");
    registered.store(kind = int(*found), std::memory_order_relaxed);
  }
  return {DeviceKind(kind), int8_t(index)};
}

int device_count() { return int(cards().size()); }

const Properties& properties(int device) { return card(device).properties; }

std::string identity(int device) {
  const Properties& p = properties(device);
  return fmt::format("{}, {}, {} multiprocessors, driver {}", p.name, p.architecture(),
                     p.multiprocessors, driver().version);
}

ContextHandle context_of(int device) {
  Card& c = card(device);
  ContextHandle context = c.context.load(std::memory_order_acquire);
  if (!context) [[unlikely]] {
    std::call_once(c.retained, [&] {
      driver().primary_context_retain(&context, c.ordinal);
      c.context.store(context, std::memory_order_release);
    });
    context = c.context.load(std::memory_order_acquire);
  }
  return context;
}

int device_at_hand() {
  const auto& all = cards();
  if (all.empty()) return 0;
  ContextHandle current = nullptr;
  driver().get_current(&current);
  const auto first = [&](auto&& wanted) {
    return std::ranges::find_if(
        all, [&](const auto& c) { return wanted(c->context.load(std::memory_order_acquire)); });
  };
  auto found = first([&](ContextHandle c) { return c && c == current; });
  if (found == all.end()) found = first([](ContextHandle c) { return c != nullptr; });
  return found == all.end() ? 0 : int(found - all.begin());
}

bool can_access_peer(int device, int peer) {
  int can = 0;
  driver().can_access_peer(&can, card(device).ordinal, card(peer).ordinal);
  return can != 0;
}

CurrentDevice::CurrentDevice(int device) {
  const ContextHandle wanted = context_of(device);
  driver().get_current(&before_);
  if (before_ != wanted) driver().set_current(wanted);
  changed_ = before_ && before_ != wanted;
}

CurrentDevice::~CurrentDevice() {
  // A failure here repeats one that a call in between has thrown.
  if (changed_) driver().set_current.result(before_);
}

}  // namespace tessera::cuda
