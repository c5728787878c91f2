// Where the CPU memory of tensors is, as a text: what is held, what the allocator keeps for later.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// Freed blocks of one size, waiting for their next use.
struct CachedBlocks {
  size_t block_bytes = 0;
  int64_t count = 0;
};
/// The blocks of the lists that all threads share and of the calling thread's own, by ascending
/// size. What other threads cache (each up to 64 small blocks of a size) is not seen.
std::vector<CachedBlocks> cached_cpu_blocks();

/// A table of several lines: bytes held now and at most, taken from the system, and what is cached,
/// by doublings of the block's size.
std::string memory_summary();

}  // namespace tessera
