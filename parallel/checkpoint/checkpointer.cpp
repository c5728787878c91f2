#include "parallel/checkpoint/checkpointer.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "collectives/engine.h"
#include "collectives/thread.h"
#include "core/base/log.h"
#include "core/base/parallel.h"
#include "core/base/silence.h"
#include "core/io/hash.h"
#include "parallel/checkpoint/folder.h"
#include "parallel/checkpoint/plan.h"
#include "parallel/checkpoint/rank_file.h"
#include "parallel/checkpoint/snapshot.h"
#include "parallel/checkpoint/verify.h"

namespace tessera::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) {
  return std::chrono::duration<double>(Clock::now() - t).count();
}

double thread_cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

// The size of each write() to a file: large enough for a disk's full speed, small enough that a
// bounded staging buffer soon has room again.
constexpr size_t kWriteBytes = 8 << 20;
constexpr auto kLookAtWriter = std::chrono::milliseconds(100);  // whether it still gets on

Ref<ProcessGroup> own_group(ProcessGroup* group) {
  if (!group) group = &world();
  return group->size() > 1 ? group->split(0, group->rank()) : nullptr;
}

SaveOptions with_timeout(SaveOptions options, ProcessGroup* group) {
  if (options.timeout.count() <= 0) options.timeout = (group ? *group : world()).timeout();
  return options;
}

struct Job {
  int64_t step;
  Extra extra;
  std::vector<io::TensorInfo> tensors;  // in the order of this rank's file
  std::vector<std::string> names;       // of these tensors, without their boxes
  std::vector<Box> boxes;
  uint64_t bytes = 0;
  double blocked_seconds = 0;  // time spent in save()
  Clock::time_point start = Clock::now();
};

}  // namespace

class Checkpointer::Impl {
 public:
  Impl(std::string folder, ProcessGroup* group, const SaveOptions& options);
  ~Impl();

  void prepare(std::span<const Piece> pieces);
  void save(int64_t step, const State& state);
  void wait();
  const std::string& folder() const { return folder_; }
  SaveCost last() const;
  /// True in a forked child: the writer thread, its locks and its peers belong to the parent.
  bool left_behind() const { return detail::forks() != birth_; }
  /// Waits for the writer. If it makes no progress, logs that and returns false.
  bool await_end() noexcept;

 private:
  bool await_writer(std::unique_lock<std::mutex>& lock);
  std::string hangs() const;
  void plan_for(std::span<const Piece> pieces);
  std::unique_ptr<Job> make_job(int64_t step, const State& state) const;
  void begin_snapshot(const State& state);
  void start_writer(std::unique_ptr<Job> job);
  void add_blocked(double seconds);
  // These run on the writer thread.
  void run_writer();
  void write(Job& job);
  std::string write_rank_file(const Job& job, const std::string& temporary);
  void commit(const Job& job, const std::string& temporary,
              const std::vector<std::string>& written);
  void read_back(const Job& job);
  void publish(const Job& job);
  void discard(const Job& job, bool committed);

  const int birth_ = detail::forks();
  std::string folder_;
  SaveOptions options_;
  Ref<ProcessGroup> group_;  // used by the writer thread during a save, else by the caller
  Exchange exchange_;
  std::optional<FolderLock> lock_;  // on rank 0
  std::optional<Plan> plan_;
  Snapshot snapshot_;
  Pages window_;  // holds what is read back

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Job> job_;  // the save in progress
  std::exception_ptr error_;  // of the last save, until it is thrown
  SaveCost last_;             // without held_up_seconds while the snapshot is still that save's
  bool noted_ = false;        // it was logged that files go through the page cache
  bool stop_ = false;
  std::thread writer_;
};

Checkpointer::Checkpointer(std::string folder, ProcessGroup* group, const SaveOptions& options)
    : impl_(std::make_unique<Impl>(std::move(folder), group, options)) {}
Checkpointer::~Checkpointer() {
  if (impl_->left_behind() || !impl_->await_end()) (void)impl_.release();
}
void Checkpointer::prepare(std::span<const Piece> pieces) { impl_->prepare(pieces); }
void Checkpointer::save(int64_t step, const State& state) { impl_->save(step, state); }
void Checkpointer::wait() { impl_->wait(); }
const std::string& Checkpointer::folder() const { return impl_->folder(); }
SaveCost Checkpointer::last() const { return impl_->last(); }

Checkpointer::Impl::Impl(std::string folder, ProcessGroup* group, const SaveOptions& options)
    : folder_(std::move(folder)),
      options_(with_timeout(options, group)),
      group_(own_group(group)),
      exchange_(group_.get(), options_.timeout, "saving into " + io::quote(folder_)),
      snapshot_(options.staging_bytes) {
  exchange_.together([&] {
    window_ = Pages(kWindowBytes);
    TESSERA_CHECK(!folder_.empty(), "checkpoint: the folder has no name");
    TESSERA_CHECK(options_.block_bytes >= 1 && options_.keep >= 0,
                  "checkpoint: blocks of {} bytes, keep {}", options_.block_bytes, options_.keep);
    if (exchange_.rank() != 0) return;
    make_folders(folder_);
    lock_.emplace(folder_);
  });
  writer_ = detail::start_thread("checkpoint", [this] { run_writer(); });
}

Checkpointer::Impl::~Impl() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  writer_.join();
  if (!error_) return;
  try {
    std::rethrow_exception(error_);
  } catch (const std::exception& e) {
    logging::error("the last save failed: {}", e.what());
  }
}

SaveCost Checkpointer::Impl::last() const {
  std::lock_guard lock(mutex_);
  SaveCost cost = last_;
  if (!job_) cost.held_up_seconds = snapshot_.held_up_seconds();
  cost.blocked_seconds += cost.held_up_seconds;
  return cost;
}

/// Waits until no save is in progress; false if the writer makes no progress on its files. Its
/// waits for peers have deadlines of their own.
bool Checkpointer::Impl::await_writer(std::unique_lock<std::mutex>& lock) {
  Silence silence(options_.timeout);
  while (!changed_.wait_for(lock, std::min(kLookAtWriter, options_.timeout / 4),
                            [&] { return !job_; })) {
    const auto still = exchange_.still_since();
    if (silence.over())
      logging::warn("checkpoint: has waited {:.3g} s for the save of step {} into {}{}",
                    silence.waited(), job_->step, io::quote(folder_),
                    still == Clock::time_point()
                        ? ", which waits for other ranks"
                        : fmt::format(", which last got on {:.3g} s ago", seconds_since(still)));
    if (still != Clock::time_point() && Clock::now() - still > options_.timeout) return false;
  }
  return true;
}

std::string Checkpointer::Impl::hangs() const {
  return fmt::format(
      "checkpoint: the save of step {} into {} has not got on for {:.3g} s; the disk "
      "hangs, or is too slow for this deadline (TESSERA_TIMEOUT)",
      job_->step, io::quote(folder_), double(options_.timeout.count()) / 1000);
}

void Checkpointer::Impl::wait() {
  std::unique_lock lock(mutex_);
  if (!await_writer(lock))
    throw CommError(hangs(), group_ ? group_->name() : "", 0, {exchange_.rank()});
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

bool Checkpointer::Impl::await_end() noexcept {
  std::unique_lock lock(mutex_);
  if (await_writer(lock)) return true;
  logging::error("{}", hangs());
  return false;
}

void Checkpointer::Impl::plan_for(std::span<const Piece> pieces) {
  std::string description;
  exchange_.together([&] { description = describe_pieces(pieces); });
  if (!exchange_.any(!plan_ || plan_->description != description)) return;
  plan_ = make_plan(exchange_, std::move(description), pieces);
  try {
    exchange_.together([&] { snapshot_.reserve(plan_->bytes); });
  } catch (...) {
    plan_.reset();  // the next save plans again, on all ranks
    throw;
  }
}

void Checkpointer::Impl::prepare(std::span<const Piece> pieces) {
  wait();
  exchange_.together([&] {
    if (exchange_.rank() == 0) io::AtomicFile(folder_ + "/" + kLatestName, "checkpoint");
  });
  plan_for(pieces);
}

void Checkpointer::Impl::save(int64_t step, const State& state) {
  auto start = Clock::now();
  wait();
  TESSERA_CHECK(step >= 0 && step <= kMaxStep, "checkpoint: step {} is negative or beyond 2^62",
                step);
  plan_for(state.pieces);
  {
    std::lock_guard lock(mutex_);
    last_.held_up_seconds = snapshot_.held_up_seconds();  // the next snapshot restarts the count
  }
  std::unique_ptr<Job> job = make_job(step, state);
  try {
    begin_snapshot(state);
  } catch (...) {
    snapshot_.begin({}, options_.timeout);
    snapshot_.give_up();
    start_writer(std::move(job));  // it tells the other ranks
    throw;
  }
  start_writer(std::move(job));
  if (!options_.lazy || !options_.async) snapshot_.copy_all();
  add_blocked(seconds_since(start));
  if (!options_.async) wait();
}

std::unique_ptr<Job> Checkpointer::Impl::make_job(int64_t step, const State& state) const {
  auto job = std::make_unique<Job>();
  job->step = step;
  job->extra = state.extra;
  job->bytes = plan_->bytes;
  for (size_t i : plan_->mine) {
    const Piece& p = state.pieces[i];
    bool is_whole = p.values.shape() == p.global;
    job->tensors.push_back({.name = is_whole ? p.name : p.name + to_string(p.box()),
                            .dtype = p.values.dtype(),
                            .shape = p.values.shape(),
                            .bytes = p.values.nbytes()});
    job->names.push_back(p.name);
    job->boxes.push_back(p.box());
  }
  return job;
}

void Checkpointer::Impl::begin_snapshot(const State& state) {
  std::vector<Tensor> values;
  for (size_t i : plan_->mine) values.push_back(state.pieces[i].values.detach());
  snapshot_.begin(std::move(values), options_.timeout);
}

void Checkpointer::Impl::start_writer(std::unique_ptr<Job> job) {
  std::lock_guard lock(mutex_);
  job_ = std::move(job);
  changed_.notify_all();
}

void Checkpointer::Impl::add_blocked(double seconds) {
  std::lock_guard lock(mutex_);
  (job_ ? job_->blocked_seconds : last_.blocked_seconds) += seconds;
}

// ---- the writer thread

void Checkpointer::Impl::run_writer() {
  set_num_threads(1);
  // On a core shared with training, the writer must not preempt training when it wakes up (by
  // save() or by the disk). This is not essential, so a refusal is ignored.
  sched_param priority{};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &priority);
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || job_; });
      if (!job_) return;
    }
    std::exception_ptr error;
    double cpu = thread_cpu_seconds();
    try {
      snapshot_.copy_some();  // copying comes before waits for a disk or for peers
      write(*job_);
    } catch (...) {
      error = std::current_exception();
      snapshot_.give_up();
    }
    std::lock_guard lock(mutex_);
    last_ = {.step = job_->step,
             .bytes = job_->bytes,
             .blocked_seconds = job_->blocked_seconds,
             .seconds = seconds_since(job_->start),
             .writer_cpu_seconds = thread_cpu_seconds() - cpu};
    error_ = std::move(error);  // the only reference: the thread that waits destroys it, too
    job_ = nullptr;
    changed_.notify_all();
  }
}

void Checkpointer::Impl::write(Job& job) {
  std::string temporary = folder_ + "/" + temporary_name(job.step);
  bool root = exchange_.rank() == 0, committed = false;
  try {
    exchange_.together([&] {
      if (!root) return;
      remove_leftovers(folder_);
      const auto last = newest(folder_);
      mend_latest(folder_, last);
      if (last)
        TESSERA_CHECK(job.step > last->step,
                      "checkpoint: {} holds step {} already and saves go forward; step {} belongs "
                      "into another folder",
                      io::quote(folder_), last->step, job.step);
      make_folder(temporary);
    });
    std::string written;
    exchange_.together([&] { written = write_rank_file(job, temporary); });
    std::vector<std::string> all = exchange_.gather(written);
    exchange_.together([&] {
      if (root) commit(job, temporary, all);
    });
    committed = true;
    exchange_.together([&] { read_back(job); });
    exchange_.together([&] {
      if (root) publish(job);
    });
  } catch (const UserError&) {
    if (root) exchange_.at_work([&] { discard(job, committed); });
    throw;
  }
}

std::string Checkpointer::Impl::write_rank_file(const Job& job, const std::string& temporary) {
  RankFile file(temporary + "/" + rank_file_name(exchange_.rank(), exchange_.size()), job.tensors,
                {{"format", "pt"}, {"step", std::to_string(job.step)}}, options_.block_bytes);
  for (uint64_t left = job.bytes; left > 0;) {
    std::span<const std::byte> bytes = snapshot_.take(std::min<uint64_t>(left, kWriteBytes));
    TESSERA_CHECK(
        !bytes.empty(),
        "checkpoint: step {} was given up: its tensors could not be read, or a write to "
        "one of them waited for {:.3g} s while none of {} bytes of staging came free; the disk "
        "hangs, or is too slow for this deadline (TESSERA_TIMEOUT)",
        job.step, double(options_.timeout.count()) / 1000, snapshot_.capacity());
    file.write(bytes.data(), bytes.size());
    got_on();
    snapshot_.release(bytes.size());
    left -= bytes.size();
  }
  WrittenFile done = file.finish();
  if (!done.note.empty() && exchange_.rank() == 0 && !std::exchange(noted_, true))
    logging::warn("checkpoint: {}; saves take longer and more processor time", done.note);
  Packer out;
  out.put(done.entry.name);
  out.put(done.entry.bytes);
  out.put(done.entry.header_bytes);
  out.put(done.entry.header);
  for (size_t i = 0; i < job.tensors.size(); ++i) {
    out.put(job.names[i]);
    out.put(job.boxes[i]);
    out.put(done.offsets[i]);
    out.put(uint64_t(done.blocks[i].size()));
    for (const Digest& d : done.blocks[i]) out.put(d);
  }
  return out.take();
}

void Checkpointer::Impl::commit(const Job& job, const std::string& temporary,
                                const std::vector<std::string>& written) {
  Manifest m{.step = job.step,
             .world_size = exchange_.size(),
             .block_bytes = options_.block_bytes,
             .extra = job.extra,
             .files = {},
             .tensors = plan_->tensors,
             .hash = {}};
  for (const std::string& text : written) {
    Unpacker in(text);
    auto file = uint32_t(m.files.size());
    FileEntry& entry = m.files.emplace_back();
    entry.name = in.get_text();
    entry.bytes = in.get<uint64_t>();
    entry.header_bytes = in.get<uint64_t>();
    entry.header = in.get<Digest>();
    while (!in.done()) {
      std::string name = in.get_text();
      auto tensor = std::ranges::lower_bound(m.tensors, name, {}, &TensorEntry::name);
      TESSERA_ASSERT(tensor != m.tensors.end() && tensor->name == name, "{} is in no plan", name);
      Chunk& c = tensor->chunks.emplace_back();
      c.file = file;
      c.box = in.get<Box>();
      c.offset = in.get<uint64_t>();
      for (auto n = in.get<uint64_t>(); n > 0; --n) c.blocks.push_back(in.get<Digest>());
    }
  }
  std::string text = print_manifest(m);
  check_manifest(m, "checkpoint: the new manifest");
  TESSERA_CHECK(text.size() <= kMaxManifestBytes,
                "checkpoint: the manifest would have {} bytes, at most {} are allowed; use larger "
                "blocks",
                text.size(), kMaxManifestBytes);
  write_new_file(temporary + "/" + kManifestName, text);
  sync_folder(temporary);
  // A folder of this step may exist that `latest` does not name: a job ended before it wrote that.
  auto steps = saved_steps(folder_);
  if (std::ranges::binary_search(steps, job.step)) remove_step(folder_, job.step);
  rename_folder(temporary, folder_ + "/" + step_name(job.step));
  sync_folder(folder_);
}

void Checkpointer::Impl::read_back(const Job& job) {
  std::string folder = folder_ + "/" + step_name(job.step);
  Manifest m = read_manifest(folder);
  TESSERA_CHECK(m.step == job.step && m.files.size() == size_t(exchange_.size()),
                "checkpoint: {} reads back as step {} of {} files, step {} of {} was written",
                io::quote(folder), m.step, m.files.size(), job.step, exchange_.size());
  Verified v;
  verify_file(folder, m, size_t(exchange_.rank()), window_, v);
  TESSERA_CHECK(v.findings.empty(), "checkpoint: step {} reads back wrong: {}; older saves stay",
                job.step, to_string(v.findings[0]));
}

void Checkpointer::Impl::publish(const Job& job) {
  std::string folder = folder_ + "/" + step_name(job.step);
  write_latest(folder_, {job.step, read_manifest(folder).hash});
  if (options_.keep == 0) return;
  std::vector<int64_t> steps = saved_steps(folder_);
  std::erase_if(steps, [&](int64_t s) { return s > job.step; });
  for (size_t i = 0; i + size_t(options_.keep) < steps.size(); ++i) {
    try {
      remove_step(folder_, steps[i]);
    } catch (const UserError& e) {  // the new step is safe; only the old one was not removed
      logging::warn("{}", e.what());
    }
  }
}

// Frees the space of a failed save, unless `latest` names it.
void Checkpointer::Impl::discard(const Job& job, bool committed) {
  try {
    auto steps = saved_steps(folder_);
    bool named = false;  // `latest` names it: only what comes after the swap failed
    try {
      named = read_latest(folder_).step == job.step;
    } catch (const UserError&) {  // before the first save there is none
    }
    if (committed && !named && std::ranges::binary_search(steps, job.step))
      remove_step(folder_, job.step);
  } catch (const UserError& e) {
    logging::warn("{}", e.what());
  }
  std::string trouble = remove_temporary(folder_ + "/" + temporary_name(job.step));
  if (!trouble.empty()) logging::warn("checkpoint: {}", trouble);
}

}  // namespace tessera::checkpoint
