// A dataset turns samples into rows of a batch. Invariant: read() is a pure function of the sample,
// so a batch is the same whichever thread or rank assembles it, and when.
#pragma once
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/data/sampler.h"
#include "core/tensor/named_tensor.h"

namespace tessera::data {

/// A sample as tensors of any number and shapes, by name.
using Item = std::vector<NamedTensor>;

/// What a training step consumes. Language models: inputs and targets i64 [B, T], targets[b, t]
/// follows inputs[b, t].
struct Batch {
  Tensor inputs, targets;
  Tensor sample_numbers = {};  // i64 [B]: keys of randomness (dropout); from the loader
  int64_t cursor = 0;  // where sampling resumes after this batch (DistributedSampler::cursor)
  std::vector<NamedTensor> extra = {};            // what else samples have: masks, lengths, weights
  std::shared_ptr<std::vector<Item>> items = {};  // what is still to be collated; see finish()
  int64_t rows() const { return sample_numbers.size(0); }
  /// The batch with its tensors on `device`, as Tensor::to copies them.
  Batch to(Device device) const;
  /// "inputs", "targets" or an extra one; throws UserError for a name that the batch does not have.
  const Tensor& operator[](std::string_view name) const;
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  /// The number of items; 0 for an endless dataset, which makes items from sample numbers.
  virtual int64_t size() const = 0;
  /// Uninitialised inputs and targets of `rows` samples.
  virtual Batch allocate(int64_t rows) const = 0;
  /// Writes the sample into row `row`. Thread-safe. Throws UserError when its data are bad.
  virtual void read(const Sample& sample, int64_t row, const Batch& to) const = 0;
  /// Makes the batch that the loader delivers from one with all rows read.
  virtual Batch finish(Batch read) const { return read; }
};

}  // namespace tessera::data
