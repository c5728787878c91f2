// A dataset turns samples into rows of a batch. Invariant: read() is a pure function of the sample,
// so a batch is the same whoever assembles it, when, and on how many ranks.
#pragma once
#include <cstdint>

#include "core/data/sampler.h"
#include "core/tensor/tensor.h"

namespace tessera::data {

/// What a training step consumes. Language models: inputs and targets i64 [B, T], targets[b, t]
/// follows inputs[b, t].
struct Batch {
  Tensor inputs, targets;
  Tensor sample_numbers = {};  // i64 [B]: keys of randomness (dropout); from the loader
  int64_t cursor = 0;  // where sampling resumes after this batch (DistributedSampler::cursor)
  int64_t rows() const { return sample_numbers.size(0); }
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  /// Items; 0 for a dataset that is endless (items are drawn by number).
  virtual int64_t size() const = 0;
  /// Uninitialised inputs and targets of `rows` samples.
  virtual Batch allocate(int64_t rows) const = 0;
  /// Writes the sample into row `row`. Thread-safe. Throws UserError when its data are bad.
  virtual void read(const Sample& sample, int64_t row, const Batch& to) const = 0;
};

}  // namespace tessera::data
