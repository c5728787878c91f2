#include "core/data/loader.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/silence.h"
#include "core/dispatch/copy.h"
#include "core/ops/create.h"
#include "core/tensor/device_runtime.h"

namespace tessera::data {

// A batch to fill. Rows are handed out in order; of several errors the one of the first row counts.
struct DataLoader::Job {
  std::vector<Sample> samples;
  Batch batch;
  size_t handed_out = 0, finished = 0;  // rows
  size_t error_row = 0;
  std::exception_ptr error;
  bool complete = false;  // the batch is as next() delivers it

  bool done() const { return finished == samples.size(); }
  // Reads rows [begin, end), which no other thread has. Returns null, or what reading the first
  // bad row threw.
  std::exception_ptr read(const Dataset& dataset, size_t begin, size_t end,
                          const std::atomic<bool>& stop) const {
    try {
      for (size_t row = begin; row < end && !stop.load(std::memory_order_relaxed); ++row)
        dataset.read(samples[row], int64_t(row), batch);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  void finish(size_t begin, size_t end, std::exception_ptr thrown) {
    finished += end - begin;
    if (!thrown) return;
    finished += samples.size() - handed_out;  // the rest is not needed
    handed_out = samples.size();
    if (error && error_row < begin) return;
    error = std::move(thrown);
    error_row = begin;
  }
};

// Jobs in the order of their batches; the front is the next to be delivered.
struct DataLoader::Workers {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::unique_ptr<Job>> jobs;
  std::atomic<bool> stop{false};
  std::exception_ptr failed;  // sticky: what the last delivered job threw
  bool stuck = false;         // the next batch was not read in time: no end waits for its readers
  std::vector<std::thread> threads;
  int working = 0;  // of these

  static void start(const std::shared_ptr<Workers>& self, std::shared_ptr<const Dataset> dataset,
                    int count) {
    self->working = count;
    for (int i = 0; i < count; ++i)
      self->threads.emplace_back([self, dataset, count] {
        pthread_setname_np(pthread_self(), "tessera-data");
        self->work(*dataset, size_t(count));
        std::lock_guard lock(self->mutex);
        --self->working;
        self->changed.notify_all();
      });
  }
  Job* first_open() {
    auto at = std::ranges::find_if(jobs, [](auto& j) { return j->handed_out < j->samples.size(); });
    return at == jobs.end() ? nullptr : at->get();
  }
  void work(const Dataset& dataset, size_t count) {
    std::unique_lock lock(mutex);
    while (true) {
      Job* job = nullptr;
      changed.wait(lock, [&] { return stop || (job = first_open()); });
      if (stop) return;
      // Shares are small, so that all workers end together.
      const size_t rows = job->samples.size(), share = count == 1 ? rows : rows / (4 * count) + 1;
      const size_t begin = job->handed_out, end = std::min(rows, begin + share);
      job->handed_out = end;
      lock.unlock();
      std::exception_ptr thrown = job->read(dataset, begin, end, stop);
      lock.lock();
      job->finish(begin, end, std::move(thrown));
      if (job->done()) changed.notify_all();
    }
  }
  // Ends the threads after the samples that they are reading; threads that take longer than
  // `timeout` are left behind.
  void end(std::chrono::milliseconds timeout) {
    bool ended = false;
    {
      std::unique_lock lock(mutex);
      stop = true;
      changed.notify_all();
      if (stuck) timeout = std::chrono::milliseconds(0);
      ended = changed.wait_for(lock, timeout, [&] { return working == 0; });
    }
    for (std::thread& t : threads)
      if (ended)
        t.join();
      else
        t.detach();
  }
};

// Every tensor of a batch; those that it lacks are undefined.
template <class F>
static void for_each_tensor(Batch& batch, F f) {
  for (Tensor* t : {&batch.inputs, &batch.targets, &batch.sample_numbers})
    if (t->defined()) f(*t);
  for (NamedTensor& t : batch.extra) f(t.tensor);
}

// Lets rows that are not read yet be read into memory that `device` copies from. Views of larger
// memory stay as they are.
static void allocate_for(Device device, Batch& batch) {
  Allocator& host = runtime_of(device).host_allocator();
  for_each_tensor(batch, [&](Tensor& t) {
    if (t.uniquely_owned() && t.offset() == 0 && t.storage()->bytes() == t.nbytes())
      t = empty_in(t.meta(), host);
  });
}

static int64_t size_of(const std::shared_ptr<const Dataset>& dataset) {
  TESSERA_CHECK(dataset, "loader: the dataset is null");
  return dataset->size();
}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, DataLoaderOptions o)
    : DataLoader(dataset, DistributedSampler(o.sampling(size_of(dataset))), o.reading()) {}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, DistributedSampler sampler,
                       LoaderOptions options)
    : dataset_(std::move(dataset)), sampler_(std::move(sampler)), options_(options) {
  TESSERA_CHECK(sampler_.options().dataset_size == size_of(dataset_),
                "loader: the sampler deals {} items, the dataset has {} (0: endless); give the "
                "sampler the dataset's size",
                sampler_.options().dataset_size, dataset_->size());
  TESSERA_CHECK(options_.prefetch >= 0 && options_.prefetch <= 1024 && options_.timeout_ms > 0,
                "loader: prefetch {} and timeout {} ms are out of range; use 0 to 1024 batches and "
                "a positive time",
                options_.prefetch, options_.timeout_ms);
  check_device(options_.device, "loader");
  TESSERA_CHECK(options_.workers >= 1 && options_.workers <= 1024,
                "loader: {} workers are out of range; use 1 to 1024", options_.workers);
  seek(sampler_.cursor());
}

DataLoader::DataLoader(DataLoader&&) noexcept = default;
DataLoader::~DataLoader() { end_workers(); }

void DataLoader::end_workers() {
  if (workers_) workers_->end(std::chrono::milliseconds(options_.timeout_ms));
  workers_.reset();
}

void DataLoader::seek(int64_t cursor) {
  end_workers();
  sampler_.seek(cursor);
  cursor_ = sampler_.cursor();  // behind a rest of the pass that is too short for a step
  began_ = false;
  workers_ = std::make_shared<Workers>();
  for (int i = 0; i < options_.prefetch; ++i) enqueue();
  if (options_.prefetch > 0) Workers::start(workers_, dataset_, options_.workers);
}

void DataLoader::enqueue() {
  if (sampler_.done()) return;
  auto job = std::make_unique<Job>();
  job->samples = sampler_.next();
  job->batch = dataset_->allocate(int64_t(job->samples.size()));
  job->batch.cursor = sampler_.cursor();
  job->batch.sample_numbers = empty({int64_t(job->samples.size())}, kI64);
  if (!options_.device.is_cpu()) allocate_for(options_.device, job->batch);
  int64_t* numbers = job->batch.sample_numbers.data<int64_t>();
  for (size_t i = 0; i < job->samples.size(); ++i) numbers[i] = job->samples[i].number;
  {
    std::lock_guard lock(workers_->mutex);
    workers_->jobs.push_back(std::move(job));
  }
  workers_->changed.notify_all();
}

// Waits until the front job is read.
void DataLoader::wait_for(Workers& w, const Job& job) const {
  const std::chrono::milliseconds timeout(options_.timeout_ms);
  const auto deadline = Silence::Clock::now() + timeout;
  Silence silence(timeout);
  const int64_t first = job.samples.empty() ? -1 : job.samples[0].number;
  std::unique_lock lock(w.mutex);
  while (
      !w.changed.wait_until(lock, std::min(deadline, silence.end()), [&] { return job.done(); })) {
    w.stuck = Silence::Clock::now() >= deadline;
    TESSERA_CHECK(!w.stuck,
                  "loader: the batch from sample {} on was not read within {} ms; is the storage "
                  "stalled? (raise the timeout if it is only slow)",
                  first, options_.timeout_ms);
    if (silence.over())
      logging::warn("loader: has waited {:.0f} s for the batch from sample {} on", silence.waited(),
                    first);
  }
  w.stuck = false;  // it was only slow
}

DataLoader::Iterator DataLoader::begin() {
  if (began_ && !sampler_.options().repeat) seek(sampler_.pass_end());
  return Iterator(*this);
}

// An error that stays is what comes next.
bool DataLoader::has_next() const {
  return workers_->failed || !workers_->jobs.empty() || !sampler_.done();
}

std::optional<Batch> DataLoader::next() {
  began_ = true;
  Workers& w = *workers_;
  if (w.failed) std::rethrow_exception(w.failed);
  enqueue();  // before waiting: workers never idle for lack of a request
  std::unique_ptr<Job> job;
  if (w.jobs.empty()) return std::nullopt;  // this thread alone adds jobs and takes them away
  Job& front = *w.jobs.front();
  if (options_.prefetch == 0)
    front.error = front.read(*dataset_, 0, front.samples.size(), w.stop);
  else
    wait_for(w, front);
  {
    std::lock_guard lock(w.mutex);
    job = std::move(w.jobs.front());
    w.jobs.pop_front();
  }
  complete(*job);
  if (job->error) {
    w.failed = job->error;
    std::rethrow_exception(job->error);
  }
  if (!options_.device.is_cpu()) upload_next();
  cursor_ = job->batch.cursor;
  return std::move(job->batch);
}

// Makes of a batch whose rows are read what next() delivers.
void DataLoader::complete(Job& job) {
  if (job.complete || job.error) return;
  try {
    const bool collates = bool(job.batch.items);
    job.batch = dataset_->finish(std::move(job.batch));
    if (!options_.device.is_cpu()) job.batch = uploaded(std::move(job.batch), collates);
    job.complete = true;
  } catch (...) {
    job.error = std::current_exception();
  }
}

// The batch on the device, copied there beside the kernels of the calling thread. `collated`: its
// tensors are in ordinary memory.
Batch DataLoader::uploaded(Batch batch, bool collated) {
  DeviceRuntime& runtime = runtime_of(options_.device);
  if (collated)
    for_each_tensor(batch, [&](Tensor& t) {
      if (!t.device().is_cpu()) return;
      const Tensor values = std::move(t);
      t = empty_in(Meta::contiguous(values.shape(), values.dtype(), kCPU),
                   runtime.host_allocator());
      copy_values(t, values);
    });
  StreamScope beside(runtime.copy_stream(options_.device.index, turn_));
  turn_ = 1 - turn_;
  return batch.to(options_.device);
}

// Starts the copy of the next batch where it is read already.
void DataLoader::upload_next() {
  Job* next = nullptr;
  {
    std::lock_guard lock(workers_->mutex);
    if (!workers_->jobs.empty()) next = workers_->jobs.front().get();
    if (!next || !next->done()) return;
  }
  complete(*next);
}

}  // namespace tessera::data
