#include "parallel/checkpoint/snapshot.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>

#include "collectives/engine.h"
#include "core/base/boundary.h"
#include "core/base/log.h"
#include "core/base/profile.h"
#include "core/base/silence.h"
#include "core/dispatch/copy.h"
#include "core/tensor/device_runtime.h"

namespace tessera::checkpoint {
namespace {

constexpr size_t kPage = 4096;
// The unit of copying: a thread that waits for a unit being copied waits for this many bytes. The
// buffer is a multiple of it, so that each unit is contiguous there.
constexpr uint64_t kUnitBytes = 1 << 20;
static_assert(kHugePageBytes % kUnitBytes == 0);
// Tensors up to this size are copied before larger ones: what forward overwrites (state of
// generators and norms) is small; what the update overwrites comes later.
constexpr uint64_t kSmallBytes = 64 << 10;

// Copies with streaming stores: the copy is not read soon, the model's lines stay in the caches,
// and the old bytes of the buffer need not be fetched first. The hardware prefetches only within a
// page, so this prefetches itself.
void stream(std::byte* to, const std::byte* from, size_t bytes) {
#ifdef __SSE2__
  constexpr size_t kLine = 64, kVector = 16, kAhead = 4096;
  size_t head = std::min(bytes, size_t(-reinterpret_cast<uintptr_t>(to)) % kLine);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(from + at + kAhead), _MM_HINT_NTA);
    for (size_t v = at; v < at + kLine; v += kVector)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + v),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + v)));
  }
  _mm_sfence();
  std::memcpy(to + at, from + at, bytes - at);
#else
  std::memcpy(to, from, bytes);
#endif
}

// Copies the elements [first, first + count) of `t` in row-major order; `data` is its first
// element.
void gather(std::byte* to, const Meta& t, const std::byte* data, int64_t first, int64_t count) {
  const int last = t.shape.size() - 1;
  const size_t size = size_of(t.dtype);
  Dims index = t.shape;
  for (int d = last; d >= 0; --d) index[d] = first % t.shape[d], first /= t.shape[d];
  while (count > 0) {
    int64_t at = 0, run = std::min(count, t.shape[last] - index[last]);
    for (int d = 0; d <= last; ++d) at += index[d] * t.strides[d];
    for (int64_t i = 0; i < run; ++i, to += size)
      std::memcpy(to, data + (at + i * t.strides[last]) * int64_t(size), size);
    count -= run;
    index[last] += run;
    for (int d = last; d > 0 && index[d] == t.shape[d]; --d) index[d] = 0, ++index[d - 1];
  }
}

}  // namespace

// One save. The events of its tensors hold it, so it may outlive the Snapshot; by then everything
// is copied or given up, and it no longer uses the buffer.
class Snapshot::Copying final : public RefCounted {
 public:
  /// `arrives`: of each tensor, the event that its values come with; null where they are there.
  Copying(std::vector<Tensor> tensors, std::span<const Ref<Event>> arrives, std::byte* buffer,
          uint64_t capacity, Clock::duration patience);

  bool done(size_t source) const { return sources_[source].left.load() == 0 || left_behind(); }
  /// Copies what is left of `source` and returns when it may be overwritten.
  void finish(size_t source);
  void finish_timed(size_t source);
  void finish_all() {
    for (size_t i = 0; i < n_sources_; ++i) finish(i);
  }
  void copy_some();
  std::span<const std::byte> take(size_t most);
  void make_room(size_t bytes);
  void give_up();
  /// Returns when no thread copies any more.
  void wait_for_copies();
  double held_up_seconds() const { return double(held_up_ns_.load()) * 1e-9; }

  // True in a forked child: its memory is its own, and the threads that read or copy are the
  // parent's.
  bool left_behind() const { return detail::forks() != birth_; }

 private:
  struct Source {
    Tensor values;                    // held until it is copied
    const std::byte* data = nullptr;  // its first element
    Ref<Event> arrives;               // the copy from a device; null where there is none
    bool dense = true;
    uint64_t begin = 0;  // offset in the bytes of the list
    size_t first = 0, units = 0;
    std::atomic<uint32_t> left{0};  // units that are not copied yet
  };
  enum State : uint8_t { kWaiting, kBusy, kDone };
  struct Unit {
    uint32_t source = 0, bytes = 0;
    uint64_t at = 0;  // offset in the bytes of the list
    std::atomic<uint8_t> state{kWaiting};
  };

  bool has_room(const Unit& u) const {
    return u.at + u.bytes <= released_.load(std::memory_order_acquire) + capacity_;
  }
  bool claim(Unit& u) {
    uint8_t waiting = kWaiting;
    return has_room(u) && u.state.compare_exchange_strong(waiting, kBusy);
  }
  void copy(Unit& u);
  bool arrived(const Source& s);
  void end(Unit& u);
  void wake();
  template <class F>
  bool wait(F ready);

  const int birth_ = detail::forks();
  std::byte* const buffer_;
  const uint64_t capacity_;
  const Clock::duration patience_;
  uint64_t bytes_ = 0;
  size_t n_sources_ = 0, n_units_ = 0;
  std::unique_ptr<Source[]> sources_;
  std::unique_ptr<Unit[]> units_;
  std::vector<uint32_t> order_;  // units in the order in which copy_some takes them
  size_t next_ = 0;              // index into order_
  std::exception_ptr failed_;    // of the thread that takes: with what a copy from a device failed

  std::atomic<uint64_t> released_{0};
  std::atomic<size_t> unfinished_{0};  // number of units
  std::atomic<bool> gave_up_{false};
  std::atomic<int> waiting_{0};  // number of threads
  std::atomic<int64_t> held_up_ns_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

namespace {

// The event that writers of one tensor wait for.
template <class Copying>
class Copied final : public Event {
 public:
  Copied(Ref<Copying> copying, size_t source) : copying_(std::move(copying)), source_(source) {}
  bool done() const override { return copying_->done(source_); }
  void wait() override { copying_->finish_timed(source_); }

 private:
  Ref<Copying> copying_;
  size_t source_;
};

}  // namespace

Snapshot::Copying::Copying(std::vector<Tensor> tensors, std::span<const Ref<Event>> arrives,
                           std::byte* buffer, uint64_t capacity, Clock::duration patience)
    : buffer_(buffer), capacity_(capacity), patience_(patience), n_sources_(tensors.size()) {
  auto cells = [](uint64_t begin, uint64_t end) {
    return begin == end ? 0 : (end - 1) / kUnitBytes - begin / kUnitBytes + 1;
  };
  sources_ = std::make_unique<Source[]>(n_sources_);
  for (size_t i = 0; i < n_sources_; ++i) {
    Source& s = sources_[i];
    s.values = std::move(tensors[i]);
    s.arrives = arrives[i];
    s.data =
        static_cast<const std::byte*>(s.arrives ? s.values.device_data() : s.values.raw_values());
    s.dense = s.values.is_contiguous();
    s.begin = bytes_, s.first = n_units_;
    TESSERA_ASSERT(s.dense || s.begin % size_of(s.values.dtype()) == 0,
                   "snapshot: {} begins within an element; wide elements come first",
                   describe(s.values));
    bytes_ += s.values.nbytes();
    s.units = cells(s.begin, bytes_);
    s.left = uint32_t(s.units);
    n_units_ += s.units;
    if (s.units == 0) s.values = {};
  }
  unfinished_ = n_units_;
  units_ = std::make_unique<Unit[]>(n_units_);
  for (size_t i = 0; i < n_sources_; ++i) {
    uint64_t at = sources_[i].begin, end = i + 1 < n_sources_ ? sources_[i + 1].begin : bytes_;
    for (size_t u = sources_[i].first; at < end; ++u) {
      uint64_t next = std::min(end, (at / kUnitBytes + 1) * kUnitBytes);
      units_[u].source = uint32_t(i), units_[u].at = at, units_[u].bytes = uint32_t(next - at);
      at = next;
    }
  }
  // If not everything fits into the buffer, units are copied in the order in which the disk takes
  // them.
  for (bool small : {true, false})
    for (size_t u = 0; u < n_units_; ++u) {
      const Tensor& t = sources_[units_[u].source].values;
      bool first = bytes_ > capacity_ || t.nbytes() <= kSmallBytes;
      if (first == small) order_.push_back(uint32_t(u));
    }
}

void Snapshot::Copying::copy(Unit& u) {
  const Source& s = sources_[u.source];
  std::byte* to = buffer_ + u.at % capacity_;
  if (s.dense) {
    stream(to, s.data + (u.at - s.begin), u.bytes);
  } else {
    int64_t size = int64_t(size_of(s.values.dtype()));
    gather(to, s.values.meta(), s.data, int64_t(u.at - s.begin) / size, int64_t(u.bytes) / size);
  }
  end(u);
}

void Snapshot::Copying::end(Unit& u) {
  Source& s = sources_[u.source];
  u.state.store(kDone);
  if (s.left.fetch_sub(1) == 1) s.values = {};
  unfinished_.fetch_sub(1);
  if (waiting_.load() > 0) wake();
}

void Snapshot::Copying::wake() {
  { std::lock_guard lock(mutex_); }  // a thread that has just found nothing is in wait() now
  changed_.notify_all();
}

// Returns false when `ready` did not hold within the patience.
template <class F>
bool Snapshot::Copying::wait(F ready) {
  std::unique_lock lock(mutex_);
  waiting_.fetch_add(1);
  const auto silent = Silence::first(patience_);
  bool in_time = changed_.wait_for(lock, silent, ready);
  if (!in_time) {
    logging::warn(
        "checkpoint: a tensor that is being saved is to be written to, and has waited {:.3g} s for "
        "the disk to take what is staged",
        std::chrono::duration<double>(silent).count());
    in_time = changed_.wait_for(lock, patience_ - silent, ready);
  }
  waiting_.fetch_sub(1);
  return in_time;
}

void Snapshot::Copying::finish(size_t source) {
  Source& s = sources_[source];
  if (s.arrives) s.arrives->wait();  // it may throw, so before a unit is claimed
  while (!done(source)) {
    uint64_t released = released_.load();
    parallel_for("snapshot.units", int64_t(s.units), 1, [&](int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end; ++u)
        if (Unit& unit = units_[s.first + size_t(u)]; claim(unit)) copy(unit);
    });
    // Other threads are finishing their units, or the disk has to make room.
    if (!wait([&] { return done(source) || released_.load() != released; })) give_up();
  }
}

void Snapshot::Copying::finish_timed(size_t source) {
  if (done(source)) return;
  ProfileSpan span("checkpoint", "wait");
  auto start = Clock::now();
  finish(source);
  held_up_ns_ += std::chrono::nanoseconds(Clock::now() - start).count();
}

void Snapshot::Copying::copy_some() {
  for (; next_ < order_.size(); ++next_) {
    Unit& u = units_[order_[next_]];
    if (!has_room(u)) return;
    if (!arrived(sources_[u.source])) return give_up();
    if (claim(u)) copy(u);
  }
}

// Waits for the copy from a device; false where it failed.
bool Snapshot::Copying::arrived(const Source& s) {
  if (!s.arrives) return true;
  try {
    s.arrives->wait();
    return true;
  } catch (...) {
    failed_ = std::current_exception();
    return false;
  }
}

std::span<const std::byte> Snapshot::Copying::take(size_t most) {
  uint64_t at = released_.load();
  uint64_t bytes = std::min({uint64_t(most), capacity_ - at % capacity_, bytes_ - at});
  copy_some();
  // Units are sorted by their offset in the list.
  auto* first = std::partition_point(units_.get(), units_.get() + n_units_,
                                     [&](const Unit& u) { return u.at + u.bytes <= at; });
  auto copied = [&] {
    for (auto* u = first; u != units_.get() + n_units_ && u->at < at + bytes; ++u)
      if (u->state.load() != kDone) return false;
    return true;
  };
  if (!copied() && !wait(copied)) give_up();
  if (failed_) std::rethrow_exception(failed_);
  if (gave_up_.load()) return {};
  return {buffer_ + at % capacity_, size_t(bytes)};
}

void Snapshot::Copying::make_room(size_t bytes) {
  released_.fetch_add(bytes);
  wake();
}

void Snapshot::Copying::give_up() {
  gave_up_.store(true);
  for (size_t u = 0; u < n_units_; ++u) {
    uint8_t waiting = kWaiting;
    if (units_[u].state.compare_exchange_strong(waiting, kBusy)) end(units_[u]);
  }
}

void Snapshot::Copying::wait_for_copies() {
  std::unique_lock lock(mutex_);
  waiting_.fetch_add(1);
  changed_.wait(lock, [&] { return unfinished_.load() == 0; });
  waiting_.fetch_sub(1);
}

// ---- Snapshot

Snapshot::Snapshot(size_t limit) : limit_(limit) {}

Snapshot::~Snapshot() {
  if (copying_ && !copying_->left_behind()) give_up();
}

void Snapshot::reserve(size_t bytes) {
  size_t want = limit_ ? std::min(bytes, limit_) : bytes;
  want = (want + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  if (want <= capacity()) return;
  pages_ = {};  // freed before the new pages are taken
  pages_ = Pages(want);
  constexpr auto kEach = int64_t(kHugePageBytes / kPage);
  parallel_for("snapshot.pages", int64_t(want / kHugePageBytes), 1,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin * kEach; i < end * kEach; ++i)
                   pages_.data()[size_t(i) * kPage] = std::byte(0);
               });
}

void Snapshot::begin(std::vector<Tensor> tensors, Clock::duration patience) {
  // Values of a device are read by a copy that is enqueued now; a kernel that overwrites them waits
  // for it on the device.
  std::vector<Ref<Storage>> storages(tensors.size());
  std::vector<Ref<Event>> arrives(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Device device = tensors[i].device();
    DeviceRuntime& runtime = runtime_of(device);
    if (runtime.host_addressable()) {
      storages[i] = tensors[i].storage();
      continue;
    }
    StreamScope beside(runtime.copy_stream(device.index, 2));  // a loader has turns 0 and 1
    tensors[i] = transferred(tensors[i], kCPU);
    arrives[i] = tensors[i].storage()->ready();
  }
  copying_ =
      make_ref<Copying>(std::move(tensors), arrives, pages_.data(), pages_.bytes(), patience);
  for (size_t i = 0; i < storages.size(); ++i)
    if (storages[i]) storages[i]->add_reader(make_ref<Copied<Copying>>(copying_, i));
}

void Snapshot::copy_all() { copying_->finish_all(); }
void Snapshot::copy_some() { copying_->copy_some(); }
std::span<const std::byte> Snapshot::take(size_t most) { return copying_->take(most); }
void Snapshot::release(size_t bytes) { copying_->make_room(bytes); }
void Snapshot::give_up() {
  copying_->give_up();
  copying_->wait_for_copies();
}
double Snapshot::held_up_seconds() const { return copying_ ? copying_->held_up_seconds() : 0; }

}  // namespace tessera::checkpoint
