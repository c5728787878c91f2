// The ledger says who holds how many bytes of a card. A block is entered under the label that is in
// force on the thread that allocates it (core/tensor/memory_label.h), and is removed under the same
// one, whatever label is in force by then. Invariant: the sum over all holders is what is live.
#pragma once
#include <cstddef>
#include <string>
#include <unordered_map>

#include "core/tensor/allocator.h"
#include "core/tensor/memory_label.h"

namespace tessera::cuda {

/// Not thread-safe: an allocator calls it under its own lock.
class MemoryLedger {
 public:
  void add(const MemoryHolder& holder, size_t bytes);
  void remove(const MemoryHolder& holder, size_t bytes);
  /// Lets what `from` holds of one block be `to`'s.
  void move(const MemoryHolder& from, const MemoryHolder& to, size_t bytes);
  /// How many blocks were entered.
  int64_t allocations() const { return allocations_; }
  int64_t live_bytes() const { return live_; }
  int64_t peak_bytes() const { return peak_; }
  void reset_peak() { peak_ = live_; }
  /// "activations of h.3.mlp 1.5 GiB in 12 blocks, ...": the five that hold most.
  std::string largest_holders() const;
  /// "activations 3.1 GiB, parameters 474.7 MiB": what all of a use hold, most first.
  std::string uses() const;

 private:
  struct Held {
    size_t bytes = 0, blocks = 0;
  };
  std::unordered_map<const MemoryHolder*, Held> held_;
  int64_t live_ = 0, peak_ = 0, allocations_ = 0;
};

/// What an out-of-memory error says. Bytes; `cached`: mapped and not in use.
struct Shortage {
  int device;
  size_t requested, cached, largest_cached;
  size_t limit;  // of TESSERA_CUDA_MEMORY; 0: none
};
[[noreturn]] void raise_out_of_memory(const Shortage& shortage, const MemoryLedger& ledger);

/// "1.5 GiB"
std::string bytes_text(size_t bytes);

}  // namespace tessera::cuda
