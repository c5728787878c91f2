#include "core/data/loader.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "core/base/error.h"

namespace tessera::data {

struct DataLoader::Job {
  std::vector<Sample> samples;
  Batch batch;
  bool done = false;
  std::exception_ptr error;

  void run(const Dataset& dataset, const std::atomic<bool>& stop) {
    try {
      for (size_t row = 0; row < samples.size() && !stop.load(std::memory_order_relaxed); ++row)
        dataset.read(samples[row], int64_t(row), batch);
    } catch (...) {
      error = std::current_exception();
    }
  }
};

// Jobs in the order of their batches; the front is the next to be delivered, `started` of them
// belong to the thread.
struct DataLoader::Worker {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::unique_ptr<Job>> jobs;
  size_t started = 0;
  std::atomic<bool> stop{false};
  std::exception_ptr failed;  // sticky: what the last delivered job threw
  std::thread thread;

  void start(std::shared_ptr<const Dataset> dataset) {
    thread = std::thread([this, dataset = std::move(dataset)] {
      pthread_setname_np(pthread_self(), "tessera-data");
      std::unique_lock lock(mutex);
      while (true) {
        changed.wait(lock, [&] { return stop || started < jobs.size(); });
        if (stop) return;
        Job& job = *jobs[started++];
        lock.unlock();
        job.run(*dataset, stop);
        lock.lock();
        job.done = true;
        changed.notify_all();
      }
    });
  }
  // Ends the thread after the sample in hand; its dataset may be slow, not stuck.
  void finish() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
    jobs.clear();
    started = 0;
  }
  ~Worker() { finish(); }
};

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, DistributedSampler sampler,
                       LoaderOptions options)
    : dataset_(std::move(dataset)), sampler_(std::move(sampler)), options_(options) {
  TESSERA_CHECK(sampler_.options().dataset_size == dataset_->size(),
                "loader: the sampler deals {} items, the dataset has {} (0: endless); give the "
                "sampler the dataset's size",
                sampler_.options().dataset_size, dataset_->size());
  TESSERA_CHECK(options_.prefetch >= 0 && options_.prefetch <= 1024 && options_.timeout_ms > 0,
                "loader: prefetch {} and timeout {} ms are out of range; use 0 to 1024 batches and "
                "a positive time",
                options_.prefetch, options_.timeout_ms);
  seek(sampler_.cursor());
}

DataLoader::DataLoader(DataLoader&&) noexcept = default;
DataLoader::~DataLoader() = default;

void DataLoader::seek(int64_t cursor) {
  worker_.reset();
  sampler_.seek(cursor);
  cursor_ = cursor;
  worker_ = std::make_unique<Worker>();
  for (int i = 0; i < options_.prefetch; ++i) enqueue();
  if (options_.prefetch > 0) worker_->start(dataset_);
}

void DataLoader::enqueue() {
  if (sampler_.done()) return;
  auto job = std::make_unique<Job>();
  job->samples = sampler_.next();
  job->batch = dataset_->allocate(int64_t(job->samples.size()));
  job->batch.cursor = sampler_.cursor();
  int64_t* numbers = job->batch.sample_numbers.data<int64_t>();
  for (size_t i = 0; i < job->samples.size(); ++i) numbers[i] = job->samples[i].number;
  {
    std::lock_guard lock(worker_->mutex);
    worker_->jobs.push_back(std::move(job));
  }
  worker_->changed.notify_all();
}

std::optional<Batch> DataLoader::next() {
  Worker& w = *worker_;
  if (w.failed) std::rethrow_exception(w.failed);
  enqueue();  // before waiting: the worker never idles for lack of a request
  std::unique_ptr<Job> job;
  {
    std::unique_lock lock(w.mutex);
    if (w.jobs.empty()) return std::nullopt;
    Job& front = *w.jobs.front();
    if (options_.prefetch == 0) {
      front.run(*dataset_, w.stop);
    } else {
      bool ready = w.changed.wait_for(lock, std::chrono::milliseconds(options_.timeout_ms),
                                      [&] { return front.done; });
      TESSERA_CHECK(ready,
                    "loader: the batch from sample {} on was not read within {} ms; is the storage "
                    "stalled? (raise the "
                    "loader's timeout_ms if it is only slow)",
                    front.samples.empty() ? -1 : front.samples[0].number, options_.timeout_ms);
      --w.started;
    }
    job = std::move(w.jobs.front());
    w.jobs.pop_front();
  }
  if (job->error) {
    w.failed = job->error;
    std::rethrow_exception(job->error);
  }
  cursor_ = job->batch.cursor;
  return std::move(job->batch);
}

}  // namespace tessera::data
