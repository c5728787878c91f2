#include "compile/run/captured_steps.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "collectives/ops.h"
#include "compile/run/range_ranks.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/profile.h"
#include "core/ops/create.h"
#include "core/tensor/ready_lock.h"

namespace tessera::compiler {
namespace {

Memory& memory_of(Program& p, MemoryId m) { return p.memories[size_t(m)]; }

// Collectives that a graph which is being captured has begun, by the memory of their results. Their
// groups keep them in order, also where one needs the result of another.
class PendingCalls {
 public:
  explicit PendingCalls(const Stream& stream) : stream_(stream) {}
  void add(const Step& s, const Ref<Work>& work) {
    for (const Tensor& t : s.out) calls_[t.storage().get()] = work;
  }
  // Lets the steps that follow come after the collective that writes the memory.
  void wait_for(const Storage* result) {
    const auto call = calls_.find(result);
    if (call == calls_.end()) return;
    call->second->wait_on(stream_);
    calls_.erase(call);
  }
  void wait_for_all() {
    while (!calls_.empty()) wait_for(calls_.begin()->first);
  }

 private:
  const Stream stream_;
  std::unordered_map<const Storage*, Ref<Work>> calls_;
};

bool have_collectives(const Program& p) {
  return std::ranges::any_of(p.ranges, &StepRange::collectives);
}

// Whether all ranks that run the range captured it.
bool all_captured(const RangeRanks& ranks, bool here) {
  const Tensor all = from_values<int32_t>({here}, {1});
  ranks.least(all);
  return all.item<int32_t>() == 1;
}

// The host's side is waited for, and noted, around all of the range.
void move(const Step& s, const Stream& stream) {
  const Tensor &from = s.in[0], &to = s.out[0];
  runtime_of(stream.device)
      .copy(to.device_data(), to.device(), from.device_data(), from.device(), from.nbytes(),
            stream);
}

// Notes that what has been enqueued on `stream` reads memory of the host, or writes it.
void note_use(Storage& host, const Stream& stream, bool writes) {
  Ref<Event> last = runtime_of(stream.device).record(stream);
  std::lock_guard lock(ready_lock());
  writes ? host.set_ready(std::move(last)) : host.add_reader(std::move(last));
}

const char* address_of(const Memory& m) {
  const Tensor& t = m.views[0].tensor;
  return static_cast<const char*>(m.storage->data()) + t.offset() * int64_t(size_of(t.dtype()));
}

}  // namespace

void CapturedSteps::reset() {
  places_.clear(), graphs_.clear();
  found_ = graphs_run_ = false;
  runs_ = moves_ = launches_ = 0;
}

// The run goes on, since memories stay bound as they are until it ends, and ranks wait for each
// other in captures that follow.
void CapturedSteps::fail(const std::string& why) {
  if (!std::exchange(failed_, true))
    logging::warn("compile: a step launches its kernels one by one: {}", why);
}

void CapturedSteps::find_places(const Program& program) {
  std::vector<bool> seen(program.memories.size());
  // Ranks capture in the same run, so what lies elsewhere on one of them by chance has memory of
  // its own on all.
  const bool together = have_collectives(program);
  for (const StepRange& range : program.ranges)
    for (const auto& [id, written] : range.touched) {
      const Memory& m = program.memories[size_t(id)];
      const bool input = m.kind == Memory::Kind::kInput;
      const bool output = m.kind == Memory::Kind::kOutput;
      if (m.kind == Memory::Kind::kArena || seen[size_t(id)]) continue;
      seen[size_t(id)] = true;
      const size_t bytes = size_of(m.views[0].tensor.dtype());
      const Device device = m.storage->device();
      places_.push_back(
          {.memory = id,
           .device = device,
           .movable = !device.is_cpu() && (output || !m.written),
           .moves = together && (output || (input && !m.written)),
           .reach = output ? Range{.begin = 0, .size = int64_t(m.bytes / bytes)} : reach_of(m),
           .element_bytes = bytes});
    }
  graphs_.resize(program.ranges.size());
  thread_ = std::this_thread::get_id();
  found_ = true;
}

// Compares addresses with those of the last run, and allocates memory for places that need their
// own from now on. Returns whether graphs have to be captured anew.
bool CapturedSteps::find_moved(const Program& program) {
  bool moved = false;
  for (Place& p : places_) {
    if (p.own) continue;
    const Memory& m = program.memories[size_t(p.memory)];
    TESSERA_CHECK(m.storage->device() == p.device, "an operand is on {}, others are on {}",
                  to_string(m.storage->device()), to_string(p.device));
    const void* address = address_of(m);
    const bool elsewhere = p.address && address != p.address;
    if (elsewhere || p.moves) {
      moved |= elsewhere;
      if (p.movable)
        p.own = make_ref<Storage>(size_t(p.reach.size) * p.element_bytes, p.device,
                                  allocator_of(p.device));
    }
    p.address = address;
  }
  return moved;
}

// Binds the memory to the place's own one, and copies an input there.
void CapturedSteps::stand_in(Program& program, Place& place) {
  Memory& m = memory_of(program, place.memory);
  const Stream stream = stream_of(place.device);
  const size_t bytes = place.own->bytes();
  if (m.kind != Memory::Kind::kOutput && bytes) {
    const int64_t begin = m.views[0].tensor.offset() - m.views[0].offset + place.reach.begin;
    const char* from =
        static_cast<const char*>(m.storage->data()) + begin * int64_t(place.element_bytes);
    m.storage->wait_ready(stream);
    runtime_of(place.device)
        .copy(place.own->data(), place.device, from, place.device, bytes, stream);
    m.storage->used_on(stream, /*writes=*/false);
  }
  place.given = m.storage;
  place.given_base = m.views[0].tensor.offset() - m.views[0].offset;
  bind(m, place.own, -place.reach.begin);
}

RunState CapturedSteps::look(Program& program, bool step_by_step) {
  graphs_run_ = looked_ = moved_ = false, launches_ = 0;
  const bool together = have_collectives(program);
  RunState run{.stage = RunState::kStepByStep};
  if (program.ranges.empty() || gave_up_ || (step_by_step && !together)) return run;
  bool others = found_ && thread_ != std::this_thread::get_id();
  for (size_t r = 0; r < graphs_.size(); ++r)
    others |= graphs_[r].stream.handle && graphs_[r].stream != stream_of(program.ranges[r].device);
  if (others) reset();
  looked_ = true;
  run.moved = moved_ = look_at_places(program);
  run.can = !failed_;
  if (together) run.stage = RunState::kByGraphs + runs_;
  return run;
}

void CapturedSteps::begin_run(Program& program, const RunState& agreed) {
  if (!looked_) return;
  constexpr int kMostMoves = 8;
  const bool moves = agreed.moved && runs_ > 2 && ++moves_ > kMostMoves && 2 * moves_ > runs_;
  if (moves && moved_) fail("memory that it writes is elsewhere at each call");
  gave_up_ = failed_ || moves || !agreed.can;
  if (gave_up_) return;
  if (agreed.moved)
    for (Graphs& g : graphs_) g.one = g.several = nullptr;
  for (Place& p : places_)
    if (p.own) stand_in(program, p);
  graphs_run_ = runs_ > 1;
}

// Returns whether memory has moved, so that graphs have to be captured anew.
bool CapturedSteps::look_at_places(Program& program) {
  if (!found_) find_places(program);
  ++runs_;
  try {
    return find_moved(program);
  } catch (const Error& e) {
    fail(e.what());
    return false;
  }
}

// Enqueues the steps of the range. On one stream, collectives run beside them; on several, steps
// too.
void CapturedSteps::enqueue(const Program& program, const StepRange& range,
                            const StepStreams& streams) {
  PendingCalls pending(stream_of(range.device));
  run_on(streams, range, [&](int i) {
    const Step& s = program.steps[size_t(i)];
    for (MemoryId m : s.waits) pending.wait_for(program.memories[size_t(m)].storage.get());
    if (s.moves) return move(s, stream_of(range.device));
    SubmittedScope submitted;
    s.kernel->run(*s.prim, s.in, s.out, s.workspace, stream_of(range.device));
    for (const Ref<Work>& work : submitted.take()) pending.add(s, work);
  });
  pending.wait_for_all();
}

bool CapturedSteps::capture(const Program& program, const StepRange& range,
                            const StepStreams& streams, Ref<DeviceGraph>& graph) {
  if (!failed_) try {
      graph = runtime_of(range.device).capture(range.device.index, [&] {
        enqueue(program, range, streams);
      });
    } catch (const CommError&) {
      throw;
    } catch (const std::exception& e) {
      fail(e.what());
    }
  // Where the range has collectives, all ranks capture it in the same run, and those that could
  // tell the others.
  if (range.collectives && !all_captured(RangeRanks(program, range), bool(graph))) graph = nullptr;
  return bool(graph);
}

// False where the range could not be captured.
bool CapturedSteps::launch(Program& program, size_t r) {
  const StepRange& range = program.ranges[r];
  Graphs& graphs = graphs_[r];
  const Stream stream = stream_of(range.device);
  if (tunes_ && !graphs.choice) graphs.choice.emplace(program, range);
  using Way = StreamChoice::Way;
  const Way way = graphs.choice ? graphs.choice->next() : Way::kOne;
  const StepStreams streams = way == Way::kOne ? StepStreams() : graphs.choice->streams();
  if (way == Way::kSeveralOneByOne) return enqueue(program, range, streams), true;
  Ref<DeviceGraph>& now = way == Way::kOne ? graphs.one : graphs.several;
  if (!now && !capture(program, range, streams, now)) return false;
  graphs.stream = stream;
  if (graphs.choice) graphs.choice->begins();
  now->launch(stream);
  if (graphs.choice) graphs.choice->ended();
  if (graphs.choice && graphs.choice->is_made())
    (way == Way::kOne ? graphs.several : graphs.one) = nullptr;
  ++launches_;
  return true;
}

bool CapturedSteps::run(Program& program, size_t r) {
  if (!graphs_run_) return false;
  const StepRange& range = program.ranges[r];
  const Stream stream = stream_of(range.device);
  auto storage = [&](MemoryId m) -> Storage& { return *memory_of(program, m).storage; };
  for (int i = range.begin; i < range.end; ++i)
    for (MemoryId m : program.steps[size_t(i)].waits) storage(m).wait_ready(stream);
  for (const auto& [m, written] : range.touched)
    if (written) storage(m).wait_writable(stream);
  ProfileSpan span("captured steps", "kernel");
  if (!launch(program, r)) return false;
  for (const auto& [m, written] : range.touched)
    if (storage(m).device().is_cpu())
      note_use(storage(m), stream, written);
    else
      storage(m).used_on(stream, written);
  for (MemoryId m : range.bumps) storage(m).bump_version();
  return true;
}

void CapturedSteps::end_run(Program& program) {
  if (!found_ && !program.ranges.empty() && !gave_up_) look_at_places(program);
  for (Place& p : places_) {
    if (!p.given) continue;
    Memory& m = memory_of(program, p.memory);
    if (m.kind == Memory::Kind::kOutput && p.own->bytes()) {
      const Stream stream = stream_of(p.device);
      p.given->wait_writable(stream);  // it is this stream's, others may have read it
      runtime_of(p.device).copy(p.given->data(), p.device, p.own->data(), p.device, p.own->bytes(),
                                stream);
      p.given->used_on(stream, /*writes=*/true);  // it may be an earlier run's, on another stream
    }
    bind(m, p.given, p.given_base);
    p.given = nullptr;
  }
  if (gave_up_) reset();
}

}  // namespace tessera::compiler
