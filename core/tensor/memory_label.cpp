#include "core/tensor/memory_label.h"

#include <map>
#include <mutex>

#include "core/tensor/device_runtime.h"
#include "core/tensor/tensor.h"

namespace tessera {

std::string_view name_of(MemoryUse use) {
  constexpr std::string_view names[] = {"other", "parameters", "activations", "gradients",
                                        "optimizer state"};
  static_assert(std::size(names) == kNumMemoryUses);
  return names[int(use)];
}

std::string MemoryHolder::text() const {
  if (use == MemoryUse::kOther) return of.empty() ? "(no label)" : of;
  return std::string(name_of(use)) + (of.empty() ? "" : " of " + of);
}

// Holders outlive the blocks that name them, so they are kept; a program has as many as modules and
// parameters.
const MemoryHolder& memory_holder(MemoryUse use, std::string_view of) {
  static std::mutex& mutex = *new std::mutex;
  using Holders = std::map<std::string, MemoryHolder, std::less<>>;
  static auto* const all = new Holders[kNumMemoryUses];
  std::lock_guard lock(mutex);
  Holders& known = all[int(use)];
  auto found = known.find(of);
  if (found == known.end())
    found = known.emplace(std::string(of), MemoryHolder{use, std::string(of)}).first;
  return found->second;
}

const MemoryHolder& MemoryLabel::holder() {
  constinit thread_local const MemoryHolder* last = nullptr;
  const Frame& now = in_force();
  if (!last || last->use != now.use || last->of != now.of) last = &memory_holder(now.use, now.of);
  return *last;
}

void set_memory_holder(const Tensor& t, MemoryUse use, std::string_view of) {
  if (t.device().is_cpu() || t.device().is_meta() || !t.storage()) return;
  if (void* p = t.storage()->data())
    runtime_of(t.device()).set_memory_holder(t.device().index, p, memory_holder(use, of));
}

}  // namespace tessera
