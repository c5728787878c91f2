#include "parallel/checkpoint/checkpointer.h"

#include <time.h>

#include <algorithm>

#include "collectives/thread.h"
#include "core/base/log.h"
#include "core/base/parallel.h"
#include "core/io/hash.h"
#include "parallel/checkpoint/rank_file.h"
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

// Each write() of a file: large enough for a disk's full speed, small enough for a bounded staging
// buffer to have room again soon.
constexpr size_t kWriteBytes = 8 << 20;

Ref<ProcessGroup> own_group(ProcessGroup* group) {
  return group && group->size() > 1 ? group->split(0, group->rank()) : nullptr;
}

}  // namespace

struct Checkpointer::Job {
  int64_t step;
  Extra extra;
  std::vector<io::TensorInfo> tensors;  // of this rank's file, in its order
  std::vector<std::string> names;       // of the same, without their boxes
  std::vector<Box> boxes;
  uint64_t bytes = 0;
  double blocked_seconds = 0;
  Clock::time_point start = Clock::now();
};

Checkpointer::Checkpointer(std::string folder, ProcessGroup* group, const SaveOptions& options)
    : folder_(std::move(folder)),
      options_(options),
      group_(own_group(group)),
      exchange_(group_.get(), options.timeout),
      staging_(options.staging_bytes) {
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

Checkpointer::~Checkpointer() {
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
    log::error("the last save failed: {}", e.what());
  }
}

SaveCost Checkpointer::last() const {
  std::lock_guard lock(mutex_);
  return last_;
}

void Checkpointer::wait() {
  std::unique_lock lock(mutex_);
  bool done = changed_.wait_for(lock, options_.timeout, [&] { return !job_; });
  if (!done)
    throw CommError(fmt::format("checkpoint: the save of step {} into {} is not done after {} s; "
                                "the disk is too slow or hangs",
                                job_->step, io::quote(folder_), options_.timeout.count() / 1000),
                    group_ ? group_->name() : "", 0, {exchange_.rank()});
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Checkpointer::plan_for(std::span<const Piece> pieces) {
  std::string description;
  exchange_.together([&] { description = describe_pieces(pieces); });
  if (!exchange_.any(!plan_ || plan_->description != description)) return;
  plan_ = make_plan(exchange_, std::move(description), pieces);
  try {
    exchange_.together([&] { staging_.reserve(plan_->bytes); });
  } catch (...) {
    plan_.reset();  // the next save asks again, on all ranks
    throw;
  }
}

void Checkpointer::prepare(std::span<const Piece> pieces) {
  wait();
  plan_for(pieces);
}

void Checkpointer::save(int64_t step, const State& state) {
  wait();
  auto start = Clock::now();
  TESSERA_CHECK(step >= 0, "checkpoint: step {} is negative", step);
  plan_for(state.pieces);
  staging_.restart();
  auto job = std::make_unique<Job>();
  job->step = step;
  job->extra = state.extra;
  job->bytes = plan_->bytes;
  job->start = start;
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
  // What fits is copied first: the writer would take memory bandwidth from the copy. What does not
  // fit needs the writer to make room.
  bool fits = plan_->bytes <= staging_.capacity();
  if (!fits) start_writer(std::move(job));
  try {
    stage(step, state, start + options_.timeout);
  } catch (...) {
    staging_.producer_gave_up();
    if (fits) start_writer(std::move(job));  // which tells the other ranks
    throw;
  }
  double blocked = seconds_since(start);
  if (fits) {
    job->blocked_seconds = blocked;
    start_writer(std::move(job));
  } else {
    std::lock_guard lock(mutex_);
    (job_ ? job_->blocked_seconds : last_.blocked_seconds) = blocked;
  }
  if (!options_.async) wait();
}

void Checkpointer::stage(int64_t step, const State& state, Staging::Clock::time_point deadline) {
  for (size_t i : plan_->mine) {
    const Piece& p = state.pieces[i];
    Tensor dense = io::dense_values(p.values, "checkpoint", p.name);
    if (!staging_.put(dense.raw(), dense.nbytes(), deadline))
      throw CommError(fmt::format("checkpoint: the writer of step {} freed none of {} bytes of "
                                  "staging in {} s; the disk is too slow or hangs",
                                  step, staging_.capacity(), options_.timeout.count() / 1000),
                      group_ ? group_->name() : "", 0, {exchange_.rank()});
  }
}

void Checkpointer::start_writer(std::unique_ptr<Job> job) {
  std::lock_guard lock(mutex_);
  job_ = std::move(job);
  changed_.notify_all();
}

// ---- the writer thread

void Checkpointer::run_writer() {
  set_num_threads(1);
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || job_; });
      if (!job_) return;
    }
    std::exception_ptr error;
    double cpu = thread_cpu_seconds();
    try {
      write(*job_);
    } catch (...) {
      error = std::current_exception();
      staging_.writer_gave_up();
    }
    std::lock_guard lock(mutex_);
    last_ = {job_->step, job_->bytes, job_->blocked_seconds, seconds_since(job_->start),
             thread_cpu_seconds() - cpu};
    error_ = std::move(error);  // the only reference: who waits also destroys
    job_ = nullptr;
    changed_.notify_all();
  }
}

void Checkpointer::write(Job& job) {
  std::string temporary = folder_ + "/" + temporary_name(job.step);
  bool root = exchange_.rank() == 0, committed = false;
  try {
    exchange_.together([&] {
      if (!root) return;
      remove_leftovers(folder_);
      if (auto last = newest(folder_))
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
    if (root) discard(job, committed);
    throw;
  }
}

std::string Checkpointer::write_rank_file(const Job& job, const std::string& temporary) {
  RankFile file(temporary + "/" + rank_file_name(exchange_.rank(), exchange_.size()), job.tensors,
                {{"format", "pt"}, {"step", std::to_string(job.step)}}, options_.block_bytes);
  for (uint64_t left = job.bytes; left > 0;) {
    std::span<const std::byte> bytes = staging_.take(std::min<uint64_t>(left, kWriteBytes));
    TESSERA_CHECK(!bytes.empty(), "checkpoint: step {} was given up while it was copied", job.step);
    file.write(bytes.data(), bytes.size());
    staging_.release(bytes.size());
    left -= bytes.size();
  }
  WrittenFile done = file.finish();
  if (!done.note.empty() && exchange_.rank() == 0 && !std::exchange(noted_, true))
    log::warn("checkpoint: {}; saves take longer and more processor time", done.note);
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

void Checkpointer::commit(const Job& job, const std::string& temporary,
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
  // A folder of this step that `latest` does not name: a job ended before it could.
  auto steps = saved_steps(folder_);
  if (std::ranges::binary_search(steps, job.step)) remove_step(folder_, job.step);
  rename_folder(temporary, folder_ + "/" + step_name(job.step));
  sync_folder(folder_);
}

void Checkpointer::read_back(const Job& job) {
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

void Checkpointer::publish(const Job& job) {
  std::string folder = folder_ + "/" + step_name(job.step);
  write_latest(folder_, {job.step, read_manifest(folder).hash});
  if (options_.keep == 0) return;
  std::vector<int64_t> steps = saved_steps(folder_);
  std::erase_if(steps, [&](int64_t s) { return s > job.step; });
  for (size_t i = 0; i + size_t(options_.keep) < steps.size(); ++i) {
    try {
      remove_step(folder_, steps[i]);
    } catch (const UserError& e) {  // the new step is safe; the old one is only in the way
      log::warn("{}", e.what());
    }
  }
}

// Gives the space of a failed save back. What `latest` names is left alone.
void Checkpointer::discard(const Job& job, bool committed) {
  try {
    auto steps = saved_steps(folder_);
    bool named = false;  // by `latest`: then only what came after the swap failed
    try {
      named = read_latest(folder_).step == job.step;
    } catch (const UserError&) {  // the first save has none
    }
    if (committed && !named && std::ranges::binary_search(steps, job.step))
      remove_step(folder_, job.step);
  } catch (const UserError& e) {
    log::warn("{}", e.what());
  }
  std::string trouble = remove_temporary(folder_ + "/" + temporary_name(job.step));
  if (!trouble.empty()) log::warn("checkpoint: {}", trouble);
}

}  // namespace tessera::checkpoint
