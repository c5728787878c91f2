#include "core/backend/cuda/memory_ledger.h"

#include <algorithm>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/library.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr size_t kShownHolders = 5;

thread_local const char* label_in_force = "";

// Labels outlive the blocks that carry them, so they are kept; a program has as many as modules.
const char* kept(std::string_view name) {
  if (name.empty()) return "";
  static std::mutex& mutex = *new std::mutex;
  static auto& names = *new std::unordered_set<std::string>;
  std::lock_guard lock(mutex);
  return names.emplace(name).first->c_str();
}

}  // namespace

MemoryLabel::MemoryLabel(std::string_view name)
    : before_(std::exchange(label_in_force, kept(name))) {}
MemoryLabel::~MemoryLabel() { label_in_force = before_; }
const char* MemoryLabel::current() { return label_in_force; }

void MemoryLedger::add(const char* label, size_t bytes) {
  Held& h = held_[label];
  h.bytes += bytes;
  ++h.blocks;
  live_ += int64_t(bytes);
  peak_ = std::max(peak_, live_);
}

void MemoryLedger::remove(const char* label, size_t bytes) {
  Held& h = held_[label];
  TESSERA_ASSERT(h.blocks > 0 && h.bytes >= bytes, "cuda: \"{}\" frees {} bytes and holds {}",
                 label, bytes, h.bytes);
  h.bytes -= bytes;
  --h.blocks;
  live_ -= int64_t(bytes);
}

std::string MemoryLedger::largest_holders() const {
  std::vector<std::pair<const char*, Held>> all(held_.begin(), held_.end());
  std::erase_if(all, [](const auto& h) { return h.second.blocks == 0; });
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.second.bytes != b.second.bytes ? a.second.bytes > b.second.bytes
                                            : std::string_view(a.first) < b.first;
  });
  std::string text;
  for (size_t i = 0; i < std::min(all.size(), kShownHolders); ++i)
    text +=
        fmt::format("{}{} {} in {} block{}", i ? ", " : "",
                    *all[i].first ? all[i].first : "(no label)", bytes_text(all[i].second.bytes),
                    all[i].second.blocks, all[i].second.blocks == 1 ? "" : "s");
  return text.empty() ? "nobody" : text;
}

void raise_out_of_memory(const Shortage& s, const MemoryLedger& ledger) {
  CurrentDevice current(s.device);
  size_t free_bytes = 0, total = 0;
  driver().memory_info(&free_bytes, &total);
  throw UserError(fmt::format(
      "cuda:{}: out of memory: {} requested; {} of {} free on the card{}, {} held by tensors, {} "
      "cached (the largest piece {}); largest holders: {}; use a smaller batch, or more cards",
      s.device, bytes_text(s.requested), bytes_text(free_bytes), bytes_text(total),
      s.limit ? fmt::format(" (TESSERA_CUDA_MEMORY permits {})", bytes_text(s.limit)) : "",
      bytes_text(size_t(ledger.live_bytes())), bytes_text(s.cached), bytes_text(s.largest_cached),
      ledger.largest_holders()));
}

std::string bytes_text(size_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = double(bytes);
  int unit = -1;
  while (value >= 1024 && unit < 3) value /= 1024, ++unit;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace tessera::cuda
