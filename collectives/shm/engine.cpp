#include "collectives/shm/engine.h"

#include <sched.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "collectives/reduction.h"
#include "collectives/shm/cpu.h"
#include "collectives/shm/process.h"
#include "core/base/boundary.h"
#include "core/base/log.h"

namespace tessera::detail {
namespace {

constexpr int64_t kInlineBytes = Segment::kInlineBytes;
// Up to this many bytes of its peers, every rank reduces all of them itself, which saves a phase.
constexpr int64_t kReduceAloneBytes = Segment::kSwapBytes;
// This many bytes are reduced in place in less time than a sleeping peer takes to wake up.
constexpr int64_t kShortBytes = 16 << 10;
constexpr int64_t kCopyBlock = limit("shm.block") * kLineBytes;

int64_t round_down(int64_t n) { return n / kLineBytes * kLineBytes; }

void move_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, size_t(bytes));
}

/// The number of bytes of a piece of `bytes` in the window that begins at `begin`.
int64_t inside(int64_t bytes, int64_t begin, int64_t window) {
  return std::clamp<int64_t>(bytes - begin, 0, window);
}

double us_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

// The logical CPUs that the calling thread may run on, by its affinity (taskset, a launcher's
// binding, a container's cpuset); all CPUs of the machine where the system does not say.
cpu_set_t usable_cpus() {
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus) == 0) return cpus;
  CPU_ZERO(&cpus);
  for (int i = 0; i < std::min(CPU_SETSIZE, int(std::thread::hardware_concurrency())); ++i)
    CPU_SET(i, &cpus);
  return cpus;
}

using Sources = SmallVector<const void*, 16>;
using Places = SmallVector<void*, 16>;

}  // namespace

ShmEngine::ShmEngine(Membership members, std::shared_ptr<Segment> segment, ShmOptions options)
    : members_(std::move(members)),
      segment_(std::move(segment)),
      options_(std::move(options)),
      rank_(members_.rank),
      size_(members_.size),
      me_(segment_->state(rank_)) {
  entries_.resize(size_t(size_));
  bases_.resize(size_t(size_));
  views_.resize(size_t(size_));
  pool_tried_.resize(size_t(size_));
  if (options_.processes) {
    me_.pid = getpid();
    me_.started = process_start(getpid());
  }
  me_.cpus = usable_cpus();
  // Publishes the fields above; peers look at them after attached() has reached the size.
  segment_->attached().fetch_add(1, std::memory_order_seq_cst);
}

ShmEngine::~ShmEngine() {
  me_.left.store(1, std::memory_order_seq_cst);
  ring_all();
}

Ref<Storage> ShmEngine::allocate(size_t bytes) {
  if (!options_.processes) return Engine::allocate(bytes);
  std::lock_guard lock(pool_mutex_);
  if (!pool_) {
    std::string why;
    pool_ = Pool::make(&why);
    if (!pool_) {
      if (!no_pool_)
        logging::warn("shm: {}; tensors of {} are copied on their way", why, members_.group);
      no_pool_ = true;
      return Engine::allocate(bytes);
    }
    me_.pool = {pool_->descriptor(), pool_->size()};
    published_.store(pool_.get(), std::memory_order_release);
  }
  Ref<Storage> storage = pool_->allocate(bytes);
  return storage ? storage : Engine::allocate(bytes);
}

/// Returns whether peers can reach all memory of this rank that they read, or in an all_reduce
/// write. If so, writes its places for them.
bool ShmEngine::find_places(const Plan& plan, Entry& entry) {
  if (!options_.read_in_place || plan.must_stage()) return false;
  int64_t* places = segment_->places(rank_, turn_);
  const Pool* pool = published_.load(std::memory_order_acquire);
  auto place = [&](const Part& part, int64_t& at) {
    if (!options_.processes)
      at = reinterpret_cast<int64_t>(part.data);
    else
      at = part.bytes == 0 ? 0 : pool ? pool->offset_of(part.data, part.bytes) : -1;
    return !options_.processes || at >= 0;
  };
  for (size_t i = 0; i < plan.give.size(); ++i)
    if (!place(plan.give[i], i == 0 ? entry.place : places[i])) return false;
  if (plan.kind != CollKind::kAllReduce) return true;
  entry.in_place = plan.give[0].data == plan.take[0].data;
  return entry.in_place || place(plan.take[0], places[size_]);
}

std::byte* ShmEngine::given(int r, size_t piece) const {
  const Entry& entry = entries_[size_t(r)];
  return bases_[size_t(r)] + (piece == 0 ? entry.place : segment_->places(r, turn_)[piece]);
}
std::byte* ShmEngine::taken(int r) const {
  const Entry& entry = entries_[size_t(r)];
  return bases_[size_t(r)] + (entry.in_place ? entry.place : segment_->places(r, turn_)[size_]);
}

/// Writes the facts of a call to where the reports of peers look for them.
void ShmEngine::publish_call(const Call& call) {
  const CallRecord& record = call.plan.record;
  me_.records[turn_ & 1] = record;
  if (record.order) me_.digests[turn_ & 1] = call.digest;
  me_.entered.store(record.seq, std::memory_order_release);
}

void ShmEngine::post() { me_.posted.store(++phase_, std::memory_order_release); }

void ShmEngine::run(Call& call) {
  const Plan& plan = call.plan;
  throw_if_failed();
  ++turn_;
  int pieces = plan.one_for_each ? size_ : 1;
  int64_t window = plan.has_splits() ? 0 : lines_of(plan.longest) * kLineBytes;
  meet("shm.first_phase", lines_of(window * pieces));
  bool small = !plan.has_splits() && window * pieces <= kInlineBytes;
  // How the collective is done if every rank is direct. All ranks compute the same.
  Way way = small ? Way::kStaged : Way::kInPlace;
  trial_ = wakes_dozing_ = false;
  meet("shm.alone", lines_of(plan.longest * (size_ - 1)));
  if (by_slices(plan)) {
    way = options_.way.value_or(places_.way(plan.longest));
    trial_ = !options_.way && places_.tries(plan.longest);
  }
  Entry entry{.fingerprint = plan.record.fingerprint, .verdict = places_.verdict()};
  entry.direct = (way != Way::kStaged || trial_) && find_places(plan, entry);
  trial_ &= entry.direct;
  bool staged = entry.staged = small && !(entry.direct && way != Way::kStaged);
  entry.has_pool = published_.load(std::memory_order_acquire);
  publish_call(call);
  if (plan.has_splits()) {
    int64_t* splits = segment_->splits(rank_, turn_);
    for (int r = 0; r < size_; ++r) {
      splits[r] = plan.give[size_t(r)].bytes;
      splits[size_ + r] = plan.take[size_t(r)].bytes;
    }
  }
  auto start = trial_ ? Clock::now() : Clock::time_point();
  swaps_ = small && !by_slices(plan) && window * pieces <= int64_t(Segment::kSwapBytes);
  past_caches_ = staged && !swaps_ && tuner_.past_caches(window * pieces);
  ++phase_;  // the staging area is that of the phase about to be posted
  if (staged) stage(plan.give, 0, window);
  --phase_;
  double us = trial_ ? us_since(start) : 0;
  // Peers poll the cache line that holds both the entry and the phase, so it is written in one go.
  me_.entries[turn_ & 1] = entries_[size_t(rank_)] = entry;
  post();
  wait_all(call, plan.longest <= kShortBytes && way != Way::kStaged ? Waking::kLater : Waking::kNow,
           Peers::kElsewhere);
  const CallSummary summary = read_entries(plan.record);
  if (!summary.same_call) [[unlikely]]
    report_mismatch(call);
  if (plan.record.order) check_orders(call);
  if (trial_) start = Clock::now();
  places_.adopt(entries_[0].verdict);
  int64_t longest = plan.has_splits() ? agree_on_splits(call) : plan.longest;
  // If all ranks are direct they all have this same way, so none has staged its pieces.
  if (summary.direct && way != Way::kStaged && can_map_pools(call, summary.new_pool))
    run_in_place(call, way);
  else if (summary.staged)
    run_first(call, window);
  else {
    if (longest == 0) wake_peers();  // no phase follows that would do it
    run_staged(call, longest);
  }
  if (trial_ && summary.direct) places_.took(plan.longest, us + us_since(start));
  me_.finished.store(plan.record.seq, std::memory_order_release);
}

bool ShmEngine::by_slices(const Plan& plan) const {
  return plan.kind == CollKind::kAllReduce && plan.longest * (size_ - 1) > kReduceAloneBytes;
}

/// Finishes a call whose pieces all came with the first phase.
void ShmEngine::run_first(Call& call, int64_t window) {
  const Plan& plan = call.plan;
  if (by_slices(plan))
    reduce_slices(call, 0, window);
  else
    consume(plan, 0, window);
  tuner_.done();
}

/// Checks that each rank is sent what it expects; returns the longest piece of all ranks.
int64_t ShmEngine::agree_on_splits(Call& call) {
  std::vector<int64_t> all;
  for (int r = 0; r < size_; ++r) {
    const int64_t* splits = segment_->splits(r, turn_);
    all.insert(all.end(), splits, splits + 2 * size_);
  }
  std::vector<int> blame;
  std::string text = compare_splits(all, size_, call.title(members_.group), blame);
  if (!text.empty()) fail_group(call, text, blame);
  return *std::max_element(all.begin(), all.end());
}

/// Copies the entries of a call that all ranks have posted. They are read once, because their cache
/// lines move away as soon as a faster peer posts its next phase. This rank's own entry is taken
/// from entries_, since its line may still be on the way back from peers that polled it.
ShmEngine::CallSummary ShmEngine::read_entries(const CallRecord& mine) {
  CallSummary summary;
  for (int r = 0; r < size_; ++r) {
    Entry& e = entries_[size_t(r)];
    if (r != rank_) e = segment_->state(r).entries[turn_ & 1];
    summary.same_call &= e.fingerprint == mine.fingerprint;
    summary.direct &= e.direct;
    summary.staged &= e.staged;
    summary.new_pool |= e.has_pool && !pool_tried_[size_t(r)];
  }
  return summary;
}

/// Returns whether all ranks can map each other's pools.
bool ShmEngine::can_map_pools(Call& call, bool new_pool) {
  if (!options_.processes) return true;
  if (unreachable_) return false;
  return !new_pool || map_pools(call);
}

/// Maps pools that this group has not used before; false when some rank cannot. All ranks do this
/// in the same calls, since all read the same entries.
bool ShmEngine::map_pools(Call& call) {
  bool reached = true;
  for (int r = 0; r < size_; ++r) {
    if (pool_tried_[size_t(r)] || !entries_[size_t(r)].has_pool) continue;
    pool_tried_[size_t(r)] = 1;
    if (r == rank_) {
      bases_[size_t(r)] = pool_->data();
      continue;
    }
    const RankState& s = segment_->state(r);
    std::string why;
    views_[size_t(r)] = PoolView(s.pid, s.pool.descriptor, s.pool.bytes, &why);
    bases_[size_t(r)] = views_[size_t(r)].data();
    if (bases_[size_t(r)]) continue;
    reached = false;
    logging::warn("shm: memory of {} is out of reach, {}; tensors of {} are copied on their way",
                  name_of_rank(r), why, members_.group);
  }
  me_.reaches.store(reached, std::memory_order_relaxed);
  post();
  wait_all(call);
  for (int r = 0; r < size_; ++r)
    if (!segment_->state(r).reaches.load(std::memory_order_relaxed)) unreachable_ = true;
  return !unreachable_;
}

/// Copies bytes [begin, begin + window) of every piece into the staging area of this phase.
void ShmEngine::stage(const Parts& give, int64_t begin, int64_t window) {
  std::byte* to = area(rank_);
  for (const Part& piece : give) {
    int64_t bytes = inside(piece.bytes, begin, window);
    if (bytes > 0 && past_caches_)
      stream_copy(to, piece.data + begin, size_t(bytes));
    else
      move_bytes(to, piece.data + begin, bytes);
    to += window;
  }
}

/// Copies or reduces the same bytes from all givers' staging areas.
void ShmEngine::consume(const Plan& plan, int64_t begin, int64_t window) {
  if (!plan.takes) return;
  int64_t offset = plan.piece() * window;
  int first = plan.giver < 0 ? 0 : plan.giver, last = plan.giver < 0 ? size_ : plan.giver + 1;
  // This rank reads its own pieces where they are: its staging area may have moved to a peer's
  // cache.
  const bool own_in_place = !plan.must_stage();
  auto given_by = [&](int r) -> const std::byte* {
    if (r == rank_ && own_in_place) return plan.give[size_t(plan.piece())].data + begin;
    return area(r) + offset;
  };
  if (swaps_)
    for (int r = first; r < last; ++r)
      if (r != rank_) prefetch(area(r) + offset, size_t(window));
  if (plan.reduces) {
    Sources sources;
    for (int r = first; r < last; ++r) sources.push_back(given_by(r));
    int64_t bytes = inside(plan.take[0].bytes, begin, window);
    reduce_tree(plan.op, plan.dtype, plan.take[0].data + begin, sources,
                bytes / int64_t(size_of(plan.dtype)));
    return;
  }
  for (int r = first; r < last; ++r) {
    const Part& to = plan.take[size_t(r - first)];
    move_bytes(to.data + begin, given_by(r), inside(to.bytes, begin, window));
  }
}

/// Does an all_reduce of a staged window: each rank reduces a slice and writes it to all staging
/// areas; one phase later, every rank takes the slices of the others from there.
void ShmEngine::reduce_slices(Call& call, int64_t begin, int64_t window) {
  const Plan& plan = call.plan;
  std::byte* out = plan.take[0].data + begin;
  int64_t bytes = inside(plan.take[0].bytes, begin, window);
  Slice mine = slice_of(bytes, rank_, size_);
  const int parity = int(phase_ & 1);
  meet("shm.block", lines_of(mine.end - mine.begin));
  for (int64_t at = mine.begin; at < mine.end; at += kCopyBlock) {
    int64_t part = std::min(kCopyBlock, mine.end - at);
    Sources sources;
    for (int r = 0; r < size_; ++r) sources.push_back(segment_->stage(r, parity) + at);
    reduce_tree(plan.op, plan.dtype, out + at, sources, part / int64_t(size_of(plan.dtype)));
    for (int r = 0; r < size_; ++r)
      if (r != rank_) move_bytes(segment_->stage(r, parity) + at, out + at, part);
  }
  post();
  wait_all(call);
  for (int r = 0; r < size_; ++r) {
    Slice theirs = slice_of(bytes, r, size_);
    if (r != rank_)
      move_bytes(out + theirs.begin, segment_->stage(rank_, parity) + theirs.begin,
                 theirs.end - theirs.begin);
  }
}

/// Moves pieces of up to `longest` bytes through the staging areas, window by window.
void ShmEngine::run_staged(Call& call, int64_t longest) {
  const Plan& plan = call.plan;
  int64_t room = int64_t(segment_->options().stage_bytes);
  int64_t window = round_down(plan.one_for_each ? room / size_ : room);
  bool slices = plan.kind == CollKind::kAllReduce;
  meet("shm.window", lines_of(longest), window / kLineBytes);
  swaps_ = false;
  int pieces = plan.one_for_each ? size_ : 1;
  // Used where results of one window would overwrite pieces of the next.
  std::vector<std::byte> copy;
  const Parts give = window < longest && plan.must_stage() ? copied(plan.give, copy) : plan.give;
  for (int64_t begin = 0; begin < longest; begin += window) {
    past_caches_ = tuner_.past_caches(std::min(window, longest - begin) * pieces);
    ++phase_;
    stage(give, begin, window);
    --phase_;
    post();
    wait_all(call);
    if (slices)
      reduce_slices(call, begin, window);
    else
      consume(plan, begin, window);
    tuner_.done();
  }
}

/// Reads tensors where they lie. A last phase ensures that no rank changes its tensor before all
/// have read it.
void ShmEngine::run_in_place(Call& call, Way way) {
  if (call.plan.kind == CollKind::kAllReduce)
    reduce_in_place(call.plan, way);
  else
    take_in_place(call.plan);
  post();
  wait_all(call);
}

/// Reduces this rank's slice and writes it to the results of all ranks.
void ShmEngine::reduce_in_place(const Plan& plan, Way way) {
  alignas(kLineBytes) std::byte block[kCopyBlock];
  Slice mine = slice_of(plan.take[0].bytes, rank_, size_);
  meet("shm.block", lines_of(mine.end - mine.begin));
  for (int64_t at = mine.begin; at < mine.end; at += kCopyBlock) {
    int64_t bytes = std::min(kCopyBlock, mine.end - at);
    int64_t count = bytes / int64_t(size_of(plan.dtype));
    Sources sources;
    for (int r = 0; r < size_; ++r) sources.push_back(given(r, 0) + at);
    if (way == Way::kInPlace) {
      Places to{plan.take[0].data + at};
      for (int r = 0; r < size_; ++r)
        if (r != rank_) to.push_back(taken(r) + at);
      reduce_tree(plan.op, plan.dtype, std::span<void* const>(to), sources, count);
      continue;
    }
    reduce_tree(plan.op, plan.dtype, block, sources, count);
    for (int r = 0; r < size_; ++r) {
      std::byte* to = taken(r) + at;
      bool aligned = reinterpret_cast<uintptr_t>(to) % kLineBytes == 0;
      if (r != rank_ && aligned)
        stream_copy(to, block, size_t(bytes));
      else
        move_bytes(to, block, bytes);
    }
  }
}

void ShmEngine::take_in_place(const Plan& plan) {
  if (!plan.takes) return;
  size_t piece = size_t(plan.piece());
  int first = plan.giver < 0 ? 0 : plan.giver, last = plan.giver < 0 ? size_ : plan.giver + 1;
  Sources sources;
  for (int r = first; r < last; ++r) {
    const std::byte* from = given(r, piece);
    if (plan.reduces)
      sources.push_back(from);
    else
      move_bytes(plan.take[size_t(r - first)].data, from, plan.take[size_t(r - first)].bytes);
  }
  if (plan.reduces)
    reduce_tree(plan.op, plan.dtype, plan.take[0].data, sources,
                plan.take[0].bytes / int64_t(size_of(plan.dtype)));
}

}  // namespace tessera::detail
