#include "core/backend/cuda/memory_ledger.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/library.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr size_t kShownHolders = 5;

}  // namespace

void MemoryLedger::add(const MemoryHolder& holder, size_t bytes) {
  Held& h = held_[&holder];
  h.bytes += bytes;
  ++h.blocks, ++allocations_;
  live_ += int64_t(bytes);
  peak_ = std::max(peak_, live_);
}

void MemoryLedger::remove(const MemoryHolder& holder, size_t bytes) {
  Held& h = held_[&holder];
  TESSERA_ASSERT(h.blocks > 0 && h.bytes >= bytes, "cuda: \"{}\" frees {} bytes and holds {}",
                 holder.text(), bytes, h.bytes);
  h.bytes -= bytes;
  --h.blocks;
  live_ -= int64_t(bytes);
}

void MemoryLedger::move(const MemoryHolder& from, const MemoryHolder& to, size_t bytes) {
  if (&from == &to) return;
  Held &before = held_[&from], &now = held_[&to];
  before.bytes -= bytes, --before.blocks;
  now.bytes += bytes, ++now.blocks;
}

std::string MemoryLedger::uses() const {
  std::array<std::pair<size_t, MemoryUse>, kNumMemoryUses> sums{};
  for (int u = 0; u < kNumMemoryUses; ++u) sums[size_t(u)].second = MemoryUse(u);
  for (const auto& [holder, held] : held_) sums[size_t(holder->use)].first += held.bytes;
  std::ranges::stable_sort(sums, std::greater<>(), [](const auto& s) { return s.first; });
  std::string text;
  for (const auto& [bytes, use] : sums)
    if (bytes)
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name_of(use), bytes_text(bytes));
  return text.empty() ? "nothing" : text;
}

std::string MemoryLedger::largest_holders() const {
  std::vector<std::pair<const MemoryHolder*, Held>> all(held_.begin(), held_.end());
  std::erase_if(all, [](const auto& h) { return h.second.blocks == 0; });
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.second.bytes != b.second.bytes ? a.second.bytes > b.second.bytes
                                            : a.first->text() < b.first->text();
  });
  std::string text;
  for (size_t i = 0; i < std::min(all.size(), kShownHolders); ++i)
    text += fmt::format("{}{} {} in {} block{}", i ? ", " : "", all[i].first->text(),
                        bytes_text(all[i].second.bytes), all[i].second.blocks,
                        all[i].second.blocks == 1 ? "" : "s");
  return text.empty() ? "nobody" : text;
}

void raise_out_of_memory(const Shortage& s, const MemoryLedger& ledger) {
  CurrentDevice current(s.device);
  size_t free_bytes = 0, total = 0;
  driver().memory_info(&free_bytes, &total);
  const MemoryHolder& asking = MemoryLabel::holder();
  const bool known = asking.use != MemoryUse::kOther || !asking.of.empty();
  throw UserError(fmt::format(
      "cuda:{}: out of memory: {} requested{}; {} of {} free on the card{}, {} held by tensors "
      "({}), "
      "{} cached (the largest piece {}); largest holders: {}; use a smaller batch, or more cards",
      s.device, bytes_text(s.requested), known ? " for " + asking.text() : "",
      bytes_text(free_bytes), bytes_text(total),
      s.limit ? fmt::format(" (TESSERA_CUDA_MEMORY permits {})", bytes_text(s.limit)) : "",
      bytes_text(size_t(ledger.live_bytes())), ledger.uses(), bytes_text(s.cached),
      bytes_text(s.largest_cached), ledger.largest_holders()));
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
