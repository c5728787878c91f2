#include "compile/run/side_streams.h"

#include <algorithm>
#include <array>
#include <optional>
#include <unordered_map>

#include "core/tensor/device_runtime.h"

namespace tessera::compiler {
namespace {

constexpr int kStreams = 3;  // the compute stream, and two of the thread's copy streams

// Bytes that a step reads or writes: of an arena, or of a memory of its own.
struct Access {
  const void* of;
  size_t begin, end;
  bool writes;
  bool conflicts(const Access& o) const {
    return of == o.of && begin < o.end && o.begin < end && (writes || o.writes);
  }
};

class Spreading {
 public:
  explicit Spreading(const Program& p) : p_(p) {
    for (size_t m = 0; m < p.memories.size(); ++m)
      ids_.emplace(p.memories[m].storage.get(), MemoryId(m));
  }

  StepStreams of(const StepRange& range) {
    StepStreams streams;
    for (int i = range.begin; i < range.end; ++i) {
      const Step& s = p_.steps[size_t(i)];
      accesses_.push_back(accesses(s));
      std::vector<Access>& own = accesses_.back();
      if (s.collective) moved_.insert(moved_.end(), own.begin(), own.end());
      if (waits(s)) own.insert(own.end(), moved_.begin(), moved_.end());
      streams.places.push_back(place(i - range.begin, s.collective || waits(s)));
      streams.count = std::max(streams.count, streams.places.back().stream + 1);
    }
    if (streams.count == 1) streams.places.clear();
    return streams;
  }

 private:
  // A collective uses its memory on a stream of its group, until a step waits for it; those before
  // it have then ended too, perhaps.
  bool waits(const Step& s) const {
    return std::ranges::any_of(
        s.waits, [&](MemoryId m) { return std::ranges::find(p_.results, m) != p_.results.end(); });
  }

  Access access(MemoryId id, bool writes) const {
    const Memory& m = p_.memories[size_t(id)];
    if (m.kind == Memory::Kind::kArena)
      return {&p_.arenas[size_t(m.arena)], m.offset, m.offset + m.bytes, writes};
    return {&m, 0, SIZE_MAX, writes};
  }
  std::vector<Access> accesses(const Step& s) const {
    std::vector<Access> list;
    for (const Tensor& t : s.in)
      if (t.storage()) list.push_back(access(ids_.at(t.storage().get()), false));
    for (const Tensor& t : s.out) list.push_back(access(ids_.at(t.storage().get()), true));
    for (MemoryId m : s.waits) list.push_back(access(m, true));
    if (s.scratch != kNoMemory) list.push_back(access(s.scratch, true));
    return list;
  }
  bool conflict(int a, int b) const {
    for (const Access& x : accesses_[size_t(a)])
      for (const Access& y : accesses_[size_t(b)])
        if (x.conflicts(y)) return true;
    return false;
  }

  StepStreams::Place place(int now, bool here) {
    // The latest step of each stream that this one depends on.
    std::array<int, kStreams> needs;
    needs.fill(-1);
    for (int t = 0; t < kStreams; ++t)
      for (size_t k = on_[size_t(t)].size(); k-- > 0 && needs[size_t(t)] < 0;)
        if (const int step = on_[size_t(t)][k]; conflict(step, now)) needs[size_t(t)] = step;
    const int chosen = here ? 0 : choose(needs);
    Stream& s = streams_[size_t(chosen)];
    StepStreams::Place result{.stream = uint8_t(chosen)};
    for (int t = 0; t < kStreams; ++t) {
      const bool begins = t == 0 && chosen != 0 && !s.begun;
      if (t == chosen || (!begins && needs[size_t(t)] <= s.seen[size_t(t)])) continue;
      result.follows |= uint8_t(1 << t);
      s.seen[size_t(t)] = streams_[size_t(t)].last;
    }
    s.begun = true, s.last = now;
    on_[size_t(chosen)].push_back(now);
    return result;
  }

  int choose(const std::array<int, kStreams>& needs) const {
    int best = -1;
    for (int t = 0; t < kStreams; ++t)
      if (needs[size_t(t)] >= 0 && needs[size_t(t)] == streams_[size_t(t)].last &&
          (best < 0 || needs[size_t(t)] > needs[size_t(best)]))
        best = t;
    if (best >= 0) return best;
    for (int t = 0; t < kStreams; ++t)
      if (best < 0 || streams_[size_t(t)].last < streams_[size_t(best)].last) best = t;
    return best;
  }

  struct Stream {
    int last = -1;  // step
    bool begun = false;
    std::array<int, kStreams> seen = {-1, -1, -1};  // the last steps of others that it has followed
  };
  const Program& p_;
  std::unordered_map<const Storage*, MemoryId> ids_;
  std::vector<std::vector<Access>> accesses_;  // by step
  std::vector<Access> moved_;                  // of the collectives so far
  std::array<std::vector<int>, kStreams> on_;  // steps by stream
  std::array<Stream, kStreams> streams_;
};

}  // namespace

StepStreams spread(const Program& p, const StepRange& range) { return Spreading(p).of(range); }

void run_on(const StepStreams& streams, const StepRange& range, FunctionRef<void(int)> run) {
  DeviceRuntime& runtime = runtime_of(range.device);
  std::array<Stream, kStreams> all;
  all[0] = stream_of(range.device);
  for (int t = 1; t < streams.count; ++t)
    all[size_t(t)] = runtime.copy_stream(range.device.index, t - 1);
  for (int i = range.begin; i < range.end; ++i) {
    const StepStreams::Place place =
        streams.places.empty() ? StepStreams::Place{} : streams.places[size_t(i - range.begin)];
    const Stream& stream = all[place.stream];
    for (int t = 0; t < streams.count; ++t)
      if (place.follows >> t & 1) runtime.follow(stream, all[size_t(t)]);
    std::optional<StreamScope> scope;
    if (place.stream) scope.emplace(stream);
    run(i);
  }
  for (int t = 1; t < streams.count; ++t) runtime.follow(all[0], all[size_t(t)]);
}

}  // namespace tessera::compiler
