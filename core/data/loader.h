// A loader reads batches ahead of time: worker threads read while the model computes. The calling
// thread decides what is read (only it asks the sampler and allocates, so that freed memory returns
// to its allocator's caches); workers fill batches, at most `prefetch` of them ahead. Invariant:
// the sequence of batches, and of the errors among them, is the sampler's, however many batches are
// read ahead and by however many workers.
#pragma once
#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>

#include "core/data/dataset.h"
#include "core/data/sampler.h"

namespace tessera::data {

/// How batches are read.
struct LoaderOptions {
  int prefetch = 2;             // batches read ahead; 0: no threads, next() reads itself
  int workers = 1;              // threads that read; several share the rows of a batch
  int64_t timeout_ms = 60'000;  // how long next() waits for one batch that threads read
  // Where next() delivers batches. Those of another device than the CPU are read into memory that
  // it copies from, and the copy of the next batch runs beside the kernels of this one; the host
  // waits for neither.
  Device device = kCPU;
};

/// The options of a loader without a sampler: for a program of one rank, or of ranks that all read
/// the same. parallel::distributed_loader takes them too.
struct DataLoaderOptions {
  int64_t batch_size = 1;
  bool shuffle = false;    // each pass in an order of its own
  uint64_t seed = 0;       // for those orders
  bool drop_last = false;  // leaves out a last batch that is short
  bool repeat = false;     // pass after pass without end
  // As in LoaderOptions:
  int prefetch = LoaderOptions().prefetch;
  int workers = LoaderOptions().workers;
  int64_t timeout_ms = LoaderOptions().timeout_ms;
  Device device = LoaderOptions().device;

  /// Those of the sampler, for a dataset of `dataset_size` items, and those of the loader.
  SamplerOptions sampling(int64_t dataset_size) const {
    return {.dataset_size = dataset_size,
            .micro_batch_size = batch_size,
            .seed = seed,
            .shuffle = shuffle,
            .repeat = repeat,
            .drop_last = drop_last};
  }
  LoaderOptions reading() const {
    return {.prefetch = prefetch, .workers = workers, .timeout_ms = timeout_ms, .device = device};
  }
};

/// One batch per micro-batch of this rank. A range-for is one pass, and each begins the next:
///
///   data::DataLoader loader(dataset, {.batch_size = 64, .shuffle = true});
///   for (int epoch = 0; epoch < 10; ++epoch)
///     for (data::Batch& batch : loader) ...
class DataLoader {
 public:
  DataLoader(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options = {});
  /// Throws UserError when the sampler's dataset_size is not the dataset's.
  DataLoader(std::shared_ptr<const Dataset> dataset, DistributedSampler sampler,
             LoaderOptions options = {});
  DataLoader(DataLoader&&) noexcept;
  /// Drops what is not read yet and waits for the samples that are being read, at most timeout_ms.
  /// A thread that is stuck for longer is abandoned; what it reads and fills stays alive.
  ~DataLoader();

  /// The next batch, waiting for it; nothing after the last micro-batch of a sampler that does not
  /// repeat, until seek(cursor()) begins the next pass. A short pass may end with batches of fewer
  /// rows or none. What reading threw is rethrown here, once its batch is due; the loader stays
  /// failed until seek(). A wait of 10 s is logged, one of timeout_ms throws UserError. Batches for
  /// a device are used by the thread that calls this.
  std::optional<Batch> next();
  /// Where to resume after the batches delivered so far (not those read ahead). A loop over the
  /// loader was delivered those that its body was given, so what is saved after `break` goes on
  /// with the batch after the one that the body was at.
  int64_t cursor() const { return cursor_; }
  /// Drops what was read ahead and continues at the step that begins at `cursor`.
  void seek(int64_t cursor);
  const DistributedSampler& sampler() const { return sampler_; }

  /// An input iterator. It takes a batch from the loader when it is dereferenced, not when it is
  /// incremented: a loop that ends in between leaves that batch for the next.
  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    explicit Iterator(DataLoader& loader) : loader_(&loader) {}
    Batch& operator*() const {
      if (!batch_) batch_ = loader_->next();
      return *batch_;
    }
    Batch* operator->() const { return &**this; }
    Iterator& operator++() {
      if (!batch_) loader_->next();  // it was not looked at
      batch_.reset();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return !batch_ && !loader_->has_next(); }

   private:
    DataLoader* loader_;
    mutable std::optional<Batch> batch_;
  };
  /// Starts the next pass; where no batch was taken since construction or seek(), starts at that
  /// position. Where passes repeat, goes on at the current position without end.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

 private:
  struct Job;
  struct Workers;
  bool has_next() const;
  void enqueue();
  void wait_for(Workers& workers, const Job& job) const;
  void complete(Job& job);
  Batch uploaded(Batch batch, bool collated);
  void upload_next();
  void end_workers();
  std::shared_ptr<const Dataset> dataset_;
  DistributedSampler sampler_;
  LoaderOptions options_;
  int64_t cursor_ = 0;
  bool began_ = false;                // next() was called since seek()
  int turn_ = 0;                      // of the device's copy streams
  std::shared_ptr<Workers> workers_;  // its threads share it
};

}  // namespace tessera::data
