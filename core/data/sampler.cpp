#include "core/data/sampler.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/data/permutation.h"

namespace tessera::data {

DistributedSampler::DistributedSampler(const SamplerOptions& options) : options_(options) {
  SamplerOptions& o = options_;
  TESSERA_CHECK(o.world_size >= 1 && o.rank >= 0 && o.rank < o.world_size,
                "sampler: rank {} of {} does not exist; ranks are in [0, world size)", o.rank,
                o.world_size);
  TESSERA_CHECK(o.dataset_size >= 0 && o.dataset_size <= int64_t(1) << 62,
                "sampler: dataset size {} is out of range", o.dataset_size);
  TESSERA_CHECK(
      o.repeat || o.dataset_size > 0,
      "sampler: one pass over an endless dataset never ends; give its size, or say .repeat = "
      "true");
  if (o.micro_batches == 0) o.micro_batches = o.world_size;
  TESSERA_CHECK(o.micro_batches > 0 && o.micro_batches <= 1 << 30 && o.micro_batch_size > 0 &&
                    o.micro_batch_size <= 1 << 30,
                "sampler: {} micro-batches of {} samples; both must be in [1, 2^30]",
                o.micro_batches, o.micro_batch_size);
  TESSERA_CHECK(
      o.micro_batches % o.world_size == 0,
      "sampler: {} micro-batches cannot be dealt to {} ranks evenly; use a multiple of {}",
      o.micro_batches, o.world_size, o.world_size);
  TESSERA_CHECK(!o.repeat || !o.drop_last,
                "sampler: passes that repeat have no last step to drop; choose one of both");
  TESSERA_CHECK(!o.drop_last || o.dataset_size >= samples_per_step(),
                "sampler: drop_last leaves no step of a pass over {} samples: one takes {} "
                "(micro-batches of {}: {}, ranks: {}); use smaller batches or .drop_last = false",
                o.dataset_size, samples_per_step(), o.micro_batch_size, o.micro_batches,
                o.world_size);
  per_rank_ = o.micro_batches / o.world_size;
  seek(0);
}

Sample DistributedSampler::sample(int64_t number) const {
  int64_t n = options_.dataset_size;
  if (n == 0) return {number, number};
  int64_t epoch = number / n, position = number % n;
  return {number,
          options_.shuffle ? permute(position, n, options_.seed, uint64_t(epoch)) : position};
}

int64_t DistributedSampler::pass_end() const {
  TESSERA_CHECK(!options_.repeat, "sampler: passes repeat, so there is no last");
  return pass_end_;
}

// Ends the pass where too few samples remain for another step.
void DistributedSampler::finish_pass() {
  if (options_.repeat) return;
  const int64_t least = options_.drop_last ? samples_per_step() : 1;
  if (pass_end_ - cursor_ >= least) return;
  cursor_ = pass_end_;
  finished_ = true;
}

std::vector<Sample> DistributedSampler::next() {
  TESSERA_CHECK(!done(),
                "sampler: all {} samples of the pass were taken; seek(cursor()) begins the next",
                options_.dataset_size);
  int64_t leaf = dealt_leaf(options_.deal, options_.rank, options_.world_size, per_rank_, k_);
  int64_t begin = cursor_ + leaf * options_.micro_batch_size;
  std::vector<Sample> out;
  out.reserve(size_t(options_.micro_batch_size));
  for (int64_t i = 0; i < options_.micro_batch_size; ++i)
    if (options_.repeat || begin + i < pass_end_) out.push_back(sample(begin + i));
  if (++k_ == per_rank_) {
    k_ = 0;
    cursor_ += samples_per_step();
    finish_pass();
  }
  return out;
}

void DistributedSampler::seek(int64_t cursor) {
  TESSERA_CHECK(cursor >= 0 && cursor <= int64_t(1) << 62,
                "sampler: cursor {} is negative or beyond 2^62; is the checkpoint damaged?",
                cursor);
  cursor_ = cursor;
  k_ = 0;
  finished_ = false;
  if (options_.repeat) return;
  const int64_t n = options_.dataset_size;
  pass_end_ = std::min(cursor - cursor % n, INT64_MAX - n) + n;
  finish_pass();
}

}  // namespace tessera::data
