#include "collectives/shm/engine.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "collectives/reduction.h"
#include "collectives/shm/cpu.h"
#include "collectives/shm/process.h"

namespace tessera::detail {
namespace {

// Below this many bytes a giver's pieces travel with the fingerprint, in the first phase.
constexpr int64_t kInlineBytes = 64 << 10;
// Up to this many bytes every rank reduces everything itself, which saves a phase; between two
// ranks that is never slower.
constexpr int64_t kReduceAloneBytes = 32 << 10;
constexpr int64_t kAlign = 64;
constexpr int64_t kCopyBlock = 16 << 10;

int64_t round_down(int64_t n) { return n / kAlign * kAlign; }

void move_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, size_t(bytes));
}

/// Bytes of a piece of `bytes` inside the window that begins at `begin`.
int64_t inside(int64_t bytes, int64_t begin, int64_t window) {
  return std::clamp<int64_t>(bytes - begin, 0, window);
}

/// The slice of `bytes` that rank r reduces: cut at cache lines.
struct Slice {
  int64_t begin, end;
};
Slice slice_of(int64_t bytes, int r, int size) {
  int64_t lines = (bytes + kAlign - 1) / kAlign;
  return {std::min(bytes, lines * r / size * kAlign),
          std::min(bytes, lines * (r + 1) / size * kAlign)};
}

using Sources = SmallVector<const void*, 16>;

}  // namespace

ShmEngine::ShmEngine(Membership members, std::shared_ptr<Segment> segment, ShmOptions options)
    : members_(std::move(members)),
      segment_(std::move(segment)),
      options_(std::move(options)),
      rank_(members_.rank),
      size_(members_.size),
      me_(segment_->state(rank_)) {
  bool room = size_ <= int(std::thread::hardware_concurrency());
  spins_ = room ? 400 : 4;
  if (options_.processes) {
    me_.pid = getpid();
    me_.started = process_start(getpid());
  }
  // Publishes the fields above; peers look at them after attached() has reached the size.
  segment_->attached().fetch_add(1, std::memory_order_seq_cst);
}

ShmEngine::~ShmEngine() {
  me_.left.store(1, std::memory_order_seq_cst);
  ring_all();
}

/// Writes the facts of a call where peers will look once this rank has posted.
void ShmEngine::publish(const Call& call) {
  const CallRecord& record = call.plan.record;
  bool in_place = options_.read_in_place && !options_.processes && !call.plan.must_stage();
  me_.entries[record.seq & 1] = {record.fingerprint, in_place ? &call.plan.give : nullptr,
                                 in_place ? &call.plan.take : nullptr};
  me_.records[record.seq & 1] = record;
  if (record.ahead) me_.sketches[record.seq & 1] = call.sketch;
  me_.entered.store(record.seq, std::memory_order_release);
}

void ShmEngine::post() {
  me_.posted.store(++phase_, std::memory_order_seq_cst);
  for (int r = 0; r < size_; ++r)
    if (segment_->state(r).sleeping.load(std::memory_order_seq_cst)) ring(r);
}

void ShmEngine::run(Call& call) {
  const Plan& plan = call.plan;
  uint64_t seq = plan.record.seq;
  check_obituary();
  publish(call);
  int pieces = plan.one_for_each ? size_ : 1;
  int64_t window = plan.has_splits() ? 0 : (plan.longest + kAlign - 1) / kAlign * kAlign;
  bool with_first = !plan.has_splits() && window * pieces <= kInlineBytes;
  if (plan.has_splits()) {
    int64_t* splits = segment_->splits(rank_, seq);
    for (int r = 0; r < size_; ++r) {
      splits[r] = plan.give[size_t(r)].bytes;
      splits[size_ + r] = plan.take[size_t(r)].bytes;
    }
  }
  past_caches_ = with_first && tuner_.past_caches(window * pieces);
  ++phase_;  // the phase about to be posted chooses the staging area
  if (with_first) stage(plan, 0, window);
  --phase_;
  post();
  wait_all(call);
  check_calls(call);
  if (with_first) {
    if (plan.kind == CollKind::kAllReduce && size_ > 2 && plan.longest > kReduceAloneBytes)
      reduce_slices(call, 0, window);
    else
      consume(plan, 0, window);
    tuner_.done();
  } else {
    int64_t longest = plan.has_splits() ? agree_on_splits(call) : plan.longest;
    if (all_in_place(seq))
      run_in_place(call, seq);
    else
      run_staged(call, longest);
  }
  me_.finished.store(seq, std::memory_order_release);
}

/// Checks that what is sent is what is expected; returns the longest piece of any rank.
int64_t ShmEngine::agree_on_splits(Call& call) {
  std::vector<int64_t> all;
  for (int r = 0; r < size_; ++r) {
    const int64_t* splits = segment_->splits(r, call.seq());
    all.insert(all.end(), splits, splits + 2 * size_);
  }
  std::vector<int> blame;
  std::string text = compare_splits(all, size_, call.title(members_.group), blame);
  if (!text.empty()) die(call, text, blame);
  return *std::max_element(all.begin(), all.end());
}

bool ShmEngine::all_in_place(uint64_t seq) {
  for (int r = 0; r < size_; ++r)
    if (!segment_->state(r).entries[seq & 1].give) return false;
  return true;
}

/// Copies bytes [begin, begin + window) of every piece into the staging area of this phase.
void ShmEngine::stage(const Plan& plan, int64_t begin, int64_t window) {
  std::byte* to = segment_->stage(rank_, int(phase_ & 1));
  for (const Part& piece : plan.give) {
    int64_t bytes = inside(piece.bytes, begin, window);
    if (bytes > 0 && past_caches_)
      stream_copy(to, piece.data + begin, size_t(bytes));
    else
      move_bytes(to, piece.data + begin, bytes);
    to += window;
  }
}

/// Takes the same bytes from all givers' staging areas.
void ShmEngine::consume(const Plan& plan, int64_t begin, int64_t window) {
  if (!plan.takes) return;
  int parity = int(phase_ & 1);
  int64_t offset = plan.piece() * window;
  int first = plan.giver < 0 ? 0 : plan.giver, last = plan.giver < 0 ? size_ : plan.giver + 1;
  if (plan.reduces) {
    Sources sources;
    for (int r = first; r < last; ++r) sources.push_back(segment_->stage(r, parity) + offset);
    int64_t bytes = inside(plan.take[0].bytes, begin, window);
    reduce_tree(plan.op, plan.dtype, plan.take[0].data + begin, sources,
                bytes / int64_t(size_of(plan.dtype)));
    return;
  }
  for (int r = first; r < last; ++r) {
    const Part& to = plan.take[size_t(r - first)];
    move_bytes(to.data + begin, segment_->stage(r, parity) + offset,
               inside(to.bytes, begin, window));
  }
}

/// all_reduce of a staged window: each rank reduces a slice, one more phase brings all together.
void ShmEngine::reduce_slices(Call& call, int64_t begin, int64_t window) {
  const Plan& plan = call.plan;
  int64_t bytes = inside(plan.take[0].bytes, begin, window);
  Slice mine = slice_of(bytes, rank_, size_);
  Sources sources;
  for (int r = 0; r < size_; ++r)
    sources.push_back(segment_->stage(r, int(phase_ & 1)) + mine.begin);
  reduce_tree(plan.op, plan.dtype, segment_->result() + mine.begin, sources,
              (mine.end - mine.begin) / int64_t(size_of(plan.dtype)));
  post();
  wait_all(call);
  move_bytes(plan.take[0].data + begin, segment_->result(), bytes);
}

/// Moves pieces of up to `longest` bytes through the staging areas, window by window.
void ShmEngine::run_staged(Call& call, int64_t longest) {
  const Plan& plan = call.plan;
  int64_t area = int64_t(segment_->options().stage_bytes);
  int64_t window = round_down(plan.one_for_each ? area / size_ : area);
  bool slices = plan.kind == CollKind::kAllReduce && size_ > 2;
  int pieces = plan.one_for_each ? size_ : 1;
  for (int64_t begin = 0; begin < longest; begin += window) {
    past_caches_ = tuner_.past_caches(std::min(window, longest - begin) * pieces);
    ++phase_;
    stage(plan, begin, window);
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

/// Ranks that can see each other's tensors read them where they are; a last phase keeps everybody
/// from changing them meanwhile.
void ShmEngine::run_in_place(Call& call, uint64_t seq) {
  const Plan& plan = call.plan;
  if (plan.kind != CollKind::kAllReduce) {
    take_in_place(plan, seq);
  } else {
    Slice mine = slice_of(plan.take[0].bytes, rank_, size_);
    for (int64_t at = mine.begin; at < mine.end; at += kCopyBlock) {
      int64_t bytes = std::min(kCopyBlock, mine.end - at);
      Sources sources;
      for (int r = 0; r < size_; ++r)
        sources.push_back((*segment_->state(r).entries[seq & 1].give)[0].data + at);
      std::byte* result = plan.take[0].data + at;
      reduce_tree(plan.op, plan.dtype, result, sources, bytes / int64_t(size_of(plan.dtype)));
      for (int r = 0; r < size_; ++r)
        move_bytes((*segment_->state(r).entries[seq & 1].take)[0].data + at, result, bytes);
    }
  }
  post();
  wait_all(call);
}

void ShmEngine::take_in_place(const Plan& plan, uint64_t seq) {
  if (!plan.takes) return;
  size_t piece = size_t(plan.piece());
  int first = plan.giver < 0 ? 0 : plan.giver, last = plan.giver < 0 ? size_ : plan.giver + 1;
  Sources sources;
  for (int r = first; r < last; ++r) {
    const std::byte* from = (*segment_->state(r).entries[seq & 1].give)[piece].data;
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
