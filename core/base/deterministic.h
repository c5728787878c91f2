// Deterministic mode of the calling thread: the bits of a result depend on the operands alone, not
// on how many threads computed it. Our own kernels are always deterministic: they cut sums by the
// problem's size, in an order that timing does not change, and no kernel adds atomically, not even
// scatter_sum and index_add with duplicates; collectives sum by rank, whichever way the bytes take.
// Only oneDNN's products and convolutions may split a sum by threads; in this mode each of its
// calls gets one thread (core/backend/cpu/onednn.h), while our kernels keep theirs. So every op has
// a deterministic form and nothing is refused. Bits still differ between instruction sets.
#pragma once

namespace tessera {

/// Sets the mode for ops of the calling thread from now on.
void use_deterministic_algorithms(bool on);
bool deterministic_algorithms();

/// The mode within a scope.
class DeterministicScope {
 public:
  explicit DeterministicScope(bool on = true) : old_(deterministic_algorithms()) {
    use_deterministic_algorithms(on);
  }
  ~DeterministicScope() { use_deterministic_algorithms(old_); }
  DeterministicScope(const DeterministicScope&) = delete;
  DeterministicScope& operator=(const DeterministicScope&) = delete;

 private:
  bool old_;
};

}  // namespace tessera
