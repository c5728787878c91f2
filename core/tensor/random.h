// Randomness is a pure function of (key, index): Philox (philox.h). A Generator deals keys; each op
// that draws takes one key as an operand and indexes it by the GLOBAL element, or by (sample
// number, element in the sample) inside a SampleScope (core/ops/random.h), so values do not depend
// on how many ranks there are or which rank computes them.
#pragma once
#include "core/tensor/tensor.h"

namespace tessera {

/// Deals keys. Its state (i64 [2]: seed, number of the next key) is a storage updated by assign_,
/// so a trace sees the update and a checkpoint saves it.
class Generator {
 public:
  explicit Generator(uint64_t seed = 0);
  void seed(uint64_t seed);
  /// Continues from key number `next`; a training step sets it so that the keys of a step do not
  /// depend on the past.
  void seek(uint64_t next);
  /// The same with the number in a tensor, i64 [], for steps that are recorded.
  void seek(const Tensor& next);
  /// Returns a key, i64 [2], and moves the state on by one.
  Tensor next_key();
  const Tensor& state() const { return state_; }
  /// Moves the state to `device`, where keys are dealt from then on; state() is another tensor
  /// then. On the CPU, keys go by value into kernels of other devices. A graph that is replayed on
  /// a device needs them there.
  void to(Device device);

 private:
  Tensor state_;
};

/// The generator of the calling thread: context().generator, or one seeded 0 of its own, so threads
/// that never call manual_seed draw the same numbers.
Generator& default_generator();
/// Seeds default_generator().
void manual_seed(uint64_t seed);

}  // namespace tessera
