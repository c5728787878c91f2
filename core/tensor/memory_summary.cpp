#include "core/tensor/memory_summary.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <map>

#include "core/tensor/allocator.h"

namespace tessera {
namespace {

std::string size_text(double bytes) {
  constexpr std::array units = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < units.size(); ++unit) bytes /= 1024;
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, units[unit]);
}

}  // namespace

std::string memory_summary() {
  const MemoryStats stats = cpu_memory_stats();
  std::map<size_t, CachedBlocks> doublings;  // by their largest size; bytes and count of all in it
  CachedBlocks all;
  for (const CachedBlocks& b : cached_cpu_blocks()) {
    const size_t bytes = b.block_bytes * size_t(b.count);
    CachedBlocks& d = doublings[std::bit_ceil(b.block_bytes)];
    d.block_bytes += bytes, d.count += b.count;
    all.block_bytes += bytes, all.count += b.count;
  }
  std::string text = fmt::format(
      "memory of tensors on the CPU\n"
      "  held now      {:>12}\n  held at most  {:>12}\n  from system   {:>12}  in {} requests\n"
      "  cached        {:>12}  in {} blocks\n",
      size_text(double(stats.live_bytes)), size_text(double(stats.peak_bytes)),
      size_text(double(stats.system_bytes)), stats.system_calls, size_text(double(all.block_bytes)),
      all.count);
  for (auto& [largest, d] : doublings)
    text += fmt::format("    of up to {:>9}  {:>12}  in {} blocks\n", size_text(double(largest)),
                        size_text(double(d.block_bytes)), d.count);
  return text;
}

}  // namespace tessera
