// A sampler says which samples a rank reads. There is one endless sequence of global sample numbers
// 0, 1, 2, ...; a step takes the next micro_batches * micro_batch_size of them, cut into logical
// micro-batches (leaves of the tree over which gradients are summed), and deals the leaves to ranks
// as the parallel plan asks. Invariant: the item of a sample number depends only on seed and
// dataset, and the sample numbers of a leaf only on the cursor, so any world size has the same
// steps.
#pragma once
#include <cstdint>
#include <vector>

namespace tessera::data {

/// In which order a plan sums gradients over ranks and over the micro-batches of a rank.
enum class Deal {
  kAccumulateThenReduce,  // DDP: rank r holds leaves r*K + k
  kReduceThenAccumulate,  // FSDP: rank r holds leaves k*R + r
};

/// The leaf that rank `rank` of `world_size` computes as its `k`-th of `per_rank`. Under either
/// deal, summing as the plan does is the same balanced tree over leaves, if both numbers are powers
/// of two.
constexpr int64_t dealt_leaf(Deal deal, int64_t rank, int64_t world_size, int64_t per_rank,
                             int64_t k) {
  return deal == Deal::kAccumulateThenReduce ? rank * per_rank + k : k * world_size + rank;
}

struct Sample {
  // Position in the global sequence; never repeats, so randomness is keyed by it.
  int64_t number = 0;
  int64_t index = 0;  // item of the dataset; equals `number` where the dataset is endless
  bool operator==(const Sample&) const = default;
};

struct SamplerOptions {
  int64_t dataset_size = 0;      // items; 0: endless, items are drawn by number
  int64_t micro_batches = 0;     // logical micro-batches of a step, over all ranks; 0: one per rank
  int64_t micro_batch_size = 1;  // samples of one
  // parallel::distributed_sampler fills these two from a group or mesh.
  int rank = 0;        // coordinate on the data-parallel axes
  int world_size = 1;  // extent of the data-parallel axes
  uint64_t seed = 0;
  bool shuffle = true;     // each pass over the dataset in an order of its own
  bool repeat = false;     // pass after pass without end; false: one pass. Its last micro-batches
                           // may be short or empty; all ranks have the same number of them
  bool drop_last = false;  // leaves out the last step of the pass where too few samples remain
  Deal deal = Deal::kAccumulateThenReduce;
};

class DistributedSampler {
 public:
  /// Throws UserError for options out of range, when micro_batches is no multiple of world_size,
  /// and when drop_last would leave a pass without a step.
  explicit DistributedSampler(const SamplerOptions& options);

  const SamplerOptions& options() const { return options_; }
  int64_t micro_batches_per_rank() const { return per_rank_; }
  int64_t samples_per_step() const { return options_.micro_batches * options_.micro_batch_size; }

  /// Samples of this rank's next micro-batch. Throws UserError when done().
  std::vector<Sample> next();
  /// True when repeat is false and all steps of the pass have been taken. The cursor is then where
  /// the next pass begins, in an order of its own: seek(cursor()).
  bool done() const { return finished_; }

  /// The whole state: the sample number at which the current step begins (the next step, once all
  /// micro-batches of one were taken). It means the same on any world size, with any number or size
  /// of micro-batches.
  int64_t cursor() const { return cursor_; }
  /// Continues at the step that begins at sample number `cursor`, in the pass that has it.
  void seek(int64_t cursor);
  /// The sample number behind the last of this pass. Throws UserError where passes repeat.
  int64_t pass_end() const;

  /// The sample of this number, with its item.
  Sample sample(int64_t number) const;

 private:
  void finish_pass();
  SamplerOptions options_;
  int64_t per_rank_ = 1;
  int64_t cursor_ = 0;
  int64_t k_ = 0;  // micro-batches of this step already taken by this rank
  int64_t pass_end_ = 0;
  bool finished_ = false;
};

}  // namespace tessera::data
