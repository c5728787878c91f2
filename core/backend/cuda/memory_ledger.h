// The ledger says which label holds how many bytes of a card. A block is entered under the label
// that is in force on the thread that allocates it (the name of the module that runs, say), and
// leaves under the same. Invariant: the sum over all labels is what is live.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>

#include "core/tensor/allocator.h"

namespace tessera::cuda {

/// Blocks that this thread allocates carry `name` while this lives; the innermost label counts.
class MemoryLabel {
 public:
  explicit MemoryLabel(std::string_view name);
  ~MemoryLabel();
  MemoryLabel(const MemoryLabel&) = delete;
  MemoryLabel& operator=(const MemoryLabel&) = delete;

  /// The label in force; it lives as long as the process. "" outside of any scope.
  static const char* current();

 private:
  const char* before_;
};

/// Not thread-safe: an allocator calls it under its own lock.
class MemoryLedger {
 public:
  void add(const char* label, size_t bytes);
  void remove(const char* label, size_t bytes);
  int64_t live_bytes() const { return live_; }
  int64_t peak_bytes() const { return peak_; }
  void reset_peak() { peak_ = live_; }
  /// "model.h.3.mlp 1.5 GiB in 12 blocks, ...": the five that hold most.
  std::string largest_holders() const;

 private:
  struct Held {
    size_t bytes = 0, blocks = 0;
  };
  std::unordered_map<const char*, Held> held_;
  int64_t live_ = 0, peak_ = 0;
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
