#include "compile/run/executor.h"

#include <algorithm>
#include <list>

#include "compile/codegen/fused.h"
#include "compile/ir/as_strided.h"
#include "compile/ir/interpreter.h"
#include "compile/run/arenas.h"
#include "compile/run/captured_steps.h"
#include "compile/run/host_first.h"
#include "compile/run/host_numbers.h"
#include "compile/run/memory_order.h"
#include "compile/run/program.h"
#include "compile/run/step_ranges.h"
#include "compile/run/step_ranks.h"
#include "core/base/profile.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/device_span.h"
#include "core/dispatch/dispatch.h"
#include "core/tensor/allocator.h"
#include "core/tensor/device_runtime.h"

namespace tessera::compiler {
namespace {

// The bytes of the elements of `t` in memory; expanded elements count once.
size_t bytes_of(const Tensor& t) {
  size_t n = size_of(t.dtype());
  for (int d = 0; d < t.ndim(); ++d)
    if (t.strides()[d] != 0 || t.shape()[d] == 0) n *= size_t(t.shape()[d]);
  return t.storage() ? n : 0;
}
size_t bytes_of(std::span<const Tensor> list) {
  size_t n = 0;
  for (const Tensor& t : list) n += bytes_of(t);
  return n;
}

Traffic traffic_of(const Program& program) {
  Traffic traffic;
  for (const Step& s : program.steps)
    if (s.collective)
      ++traffic.collectives, traffic.collective_bytes += std::max(bytes_of(s.in), bytes_of(s.out));
    else
      ++traffic.kernels, traffic.kernel_bytes += bytes_of(s.in) + bytes_of(s.out);
  return traffic;
}

struct BoundInput {
  MemoryId memory = kNoMemory;
  Range reach;
  size_t size = 0;  // bytes of an element
};

}  // namespace

class SharedArena {
 public:
  struct Owned {
    Ref<ProcessGroup> group;
    Device device, beside;
    bool differs;
    Ref<Storage> storage = {};
    Stream last = {};  // of a device: the stream of the last run
  };
  // The arena in the memory that `like` is in.
  Owned& of(const Arena& like) {
    for (Owned& o : owned)
      if (o.group == like.group && o.device == like.device && o.beside == like.beside &&
          o.differs == like.differs)
        return o;
    return owned.emplace_back(like.group, like.device, like.beside, like.differs);
  }
  std::list<Owned> owned;
  // Those whose memories lie in it; the one that has used it last comes first.
  std::list<Executor::Impl*> users;
};
std::shared_ptr<SharedArena> make_shared_arena() { return std::make_shared<SharedArena>(); }

struct Executor::Impl {
  Impl(Graph g, const ExecutorOptions& options)
      : graph(ordered(std::move(g))),
        calls(calls_on_devices(graph)),
        shared(options.arena),
        ranks(options.ranks ? options.ranks : std::make_shared<StepRanks>("a graph")),
        captured(options.tunes) {
    plan_steps();
    for (const ImplicitInput& i : graph.implicit) plan.implicit_bytes += i.tensor.nbytes();
  }

  // Plans the steps under the settings of the calling thread. No collective of an earlier run may
  // be pending.
  void plan_steps() {
    captured.reset();
    program = make_program(graph);
    program.alone = is_alone();
    arenas.clear(), numbers.release_memory();
    program.site = ranks->site();
    for (GroupCalls& c : calls) c.cut = 0;
    arenas_agreed = false;
    outputs.clear();
    inputs.assign(graph.inputs.size(), {});
    implicit.assign(graph.implicit.size(), {});
    plan.output_bytes = 0;
    for (size_t i = 0; i < program.memories.size(); ++i) {
      const Memory& m = program.memories[i];
      if (m.kind == Memory::Kind::kInput || m.kind == Memory::Kind::kImplicit) {
        auto& list = m.kind == Memory::Kind::kInput ? inputs : implicit;
        list[size_t(m.index)] = {MemoryId(i), reach_of(m), size_of(m.views[0].tensor.dtype())};
        writes_inputs |= m.written;
      } else if (m.kind == Memory::Kind::kOutput) {
        outputs.push_back(MemoryId(i));
        plan.output_bytes += m.bytes;
      }
    }
    plan.arena_bytes = program.arena_bytes();
    plan.unplanned_bytes = program.unplanned_bytes;
    plan.eager_nodes = program.eager_steps;
    traffic = traffic_of(program);
  }

  // Ranks that have sizes of their own decide nothing together.
  bool is_alone() const { return shared || !(calls.empty() || ranks->together()); }

  static Graph ordered(Graph g) {
    order_for_memory(g);
    move_host_first(g);
    return g;
  }

  // ---- memory

  Memory& memory(MemoryId m) { return program.memories[size_t(m)]; }

  ~Impl() {
    if (shared) shared->users.remove(this);
  }

  // Blocks that eager steps left in the allocator's cache would fit nothing in the arena, so they
  // are freed first.
  static Ref<Storage> new_arena(const Arena& a) {
    if (a.group && !a.differs && a.bytes) return a.group->allocate(a.bytes, a.device);
    if (a.bytes == 0) return make_ref<Storage>(nullptr, 0, a.device, nullptr);
    if (!a.device.is_cpu()) return make_ref<Storage>(a.bytes, a.device, allocator_of(a.device));
    if (!a.beside.is_cpu())
      return make_ref<Storage>(a.bytes, kCPU, runtime_of(a.beside).host_allocator());
    release_cached_cpu_memory();
    return make_ref<Storage>(a.bytes, kCPU, cpu_arena_allocator());
  }
  Ref<Storage> shared_arena(const Arena& a) {
    Ref<Storage>& storage = shared->of(a).storage;
    if (!fits(a)) storage = new_arena(a);
    return storage;
  }
  bool fits(const Arena& a) const {
    const Ref<Storage>& storage = shared->of(a).storage;
    return storage && storage->bytes() >= a.bytes;
  }

  // Executors that launch graphs keep their memory while others use the arena, so that it stays
  // where the graphs know it: the kMostInTurn that have used it last, as long as it is large
  // enough.
  void take_turn() {
    std::list<Impl*>& users = shared->users;
    if (!users.empty() && users.front() != this) users.front()->end_turn();
    const bool moves =
        !std::ranges::all_of(program.arenas, [&](const Arena& a) { return fits(a); });
    if (!moves) users.remove(this);
    while (users.size() > (moves ? 0 : kMostInTurn - 1)) users.back()->release_memory();
    if (moves)
      for (const Arena& a : program.arenas)
        if (!fits(a)) shared->of(a).storage.reset();
    users.push_front(this);
  }
  void end_turn() {
    finish_last_run();
    release_inputs();
    if (!captured.captures(program)) release_memory();
  }
  // Releases the arenas, and its hold on outputs that the program may still use.
  void release_memory() {
    finish_last_run();
    release_inputs();
    for (Memory& m : program.memories)
      if (m.kind == Memory::Kind::kArena || m.kind == Memory::Kind::kOutput)
        bind(m, make_ref<Storage>(nullptr, m.bytes, m.storage->device(), nullptr), 0);
    arenas.clear();
    captured.reset();
    shared->users.remove(this);
  }

  void take_memory() {
    if (!arenas.empty() && (!shared || shared->users.front() == this)) return;
    if (!std::exchange(arenas_agreed, true)) agree_on_arenas(program);
    if (shared) take_turn();
    std::vector<Ref<Storage>> taken;
    for (const Arena& a : program.arenas) taken.push_back(shared ? shared_arena(a) : new_arena(a));
    if (taken == arenas) return;  // where they were before others' turns
    arenas = std::move(taken);
    captured.reset();
    numbers.take_memory(program);
    for (Memory& m : program.memories) {
      if (m.kind != Memory::Kind::kArena) continue;
      const Ref<Storage>& arena = arenas[size_t(m.arena)];
      void* data = static_cast<char*>(arena->data()) + m.offset;
      bind(m, make_ref<Storage>(data, m.bytes, m.storage->device(), arena), 0);
    }
    for (Step& s : program.steps)
      if (s.scratch != kNoMemory) s.workspace.data = memory(s.scratch).storage->data();
  }

  // Lets a run on another stream than the last one's come after it: values that share bytes of the
  // arena have events of their own, and numbers of the host none.
  void order_streams() {
    const auto order = [](Device device, Stream& last) {
      const Stream now = stream_of(device);
      if (last.handle && last != now)
        if (const Ref<Event> e = runtime_of(device).record(last)) e->wait_on(now);
      last = now;
    };
    for (const Arena& a : program.arenas)
      if (!a.device.is_cpu()) order(a.device, shared ? shared->of(a).last : last_stream(a.device));
    for (const Program::NumberBlock& b : program.blocks) order(b.device, last_stream(b.device));
  }
  Stream& last_stream(Device device) {
    for (auto& [d, stream] : last_streams)
      if (d == device) return stream;
    return last_streams.emplace_back(device, Stream{}).second;
  }

  // Gives outputs new memory, except where the program no longer holds what the last run returned.
  void renew_outputs() {
    for (MemoryId id : outputs) {
      Memory& m = memory(id);
      const Device device = m.storage->device();
      if (!m.storage->data() || m.storage->use_count() != m.views.size() + 1)
        bind(m, make_ref<Storage>(m.bytes, device, allocator_of(device)), 0);
      else if (device.is_cpu())
        m.storage->set_ready(nullptr);
    }
  }

  void bind_input(const BoundInput& in, const Tensor& given, const char* kind, size_t number) {
    Memory& m = memory(in.memory);
    const Ref<Storage>& storage = given.storage();
    if (m.storage == storage && m.views[0].tensor.offset() == given.offset() + m.views[0].offset)
      return;
    TESSERA_CHECK(storage, "executor: {} {}, {}, has no values", kind, number, describe(given));
    int64_t begin = given.offset() + in.reach.begin, end = begin + in.reach.size;
    TESSERA_CHECK_AS(ShapeError, begin >= 0 && size_t(end) * in.size <= storage->bytes(),
                     "executor: the graph looks at elements {} to {} of the memory of {} {}, {}, "
                     "which has {} bytes; pass the tensor that it is a view of",
                     begin, end, kind, number, describe(given), storage->bytes());
    bind(m, storage, given.offset());
  }

  void bind_inputs(std::span<const Tensor> given, std::span<const Tensor> given_implicit) {
    check_inputs("executor", graph, given);
    TESSERA_CHECK_AS(ShapeError, given_implicit.empty() || given_implicit.size() == implicit.size(),
                     "executor: {} tensors for {} implicit inputs", given_implicit.size(),
                     implicit.size());
    for (size_t i = 0; i < given.size(); ++i) bind_input(inputs[i], given[i], "input", i);
    for (size_t i = 0; i < implicit.size(); ++i) {
      const Tensor& own = graph.implicit[i].tensor;
      const Tensor& t = given_implicit.empty() ? own : given_implicit[i];
      TESSERA_CHECK_AS(
          ShapeError,
          t.is_same(own) || (t.shape() == own.shape() && t.strides() == own.strides() &&
                             t.dtype() == own.dtype() && t.device() == own.device()),
          "executor: implicit input {} is {}, the graph was traced with {}", i, describe(t),
          describe(own));
      bind_input(implicit[i], t, "implicit input", i);
    }
    if (writes_inputs && (!given.empty() || !given_implicit.empty())) check_written_apart();
  }

  // Throws if an input that the graph writes shares memory with another input: the steps were
  // ordered and planned in place on the assumption that it does not.
  void check_written_apart() {
    owners.clear();
    for (auto* list : {&inputs, &implicit})
      for (const BoundInput& in : *list) owners.push_back(in.memory);
    auto storage = [&](MemoryId m) { return memory(m).storage.get(); };
    std::sort(owners.begin(), owners.end(),
              [&](MemoryId a, MemoryId b) { return storage(a) < storage(b); });
    for (size_t i = 1; i < owners.size(); ++i) {
      const Memory &a = memory(owners[i - 1]), &b = memory(owners[i]);
      TESSERA_CHECK(a.storage != b.storage || !(a.written || b.written),
                    "executor: {} is written, but shares memory with another input; clone one of "
                    "them",
                    describe((a.written ? a : b).views[0].tensor));
    }
  }

  // Releases the inputs, so that none is kept between runs, except if a collective still reads one.
  void release_inputs() {
    if (!unfinished.empty()) return;
    for (const BoundInput& in : inputs) bind(memory(in.memory), nullptr, 0);
  }

  // ---- running

  Tensors run(std::span<const Tensor> given, std::span<const Tensor> given_implicit) {
    EagerScope eager;
    Scoped<LayerMask> below_all_layers(context().enabled, 0);
    finish_last_run();
    if (!(program.settings == PlanSettings::of_thread()) || program.alone != is_alone())
      plan_steps();
    // Before its first run ranks also compare arenas, so they agree before that to plan at all.
    const bool first = !arenas_agreed;
    if ((first || shared) && ranks->together()) {
      ranks->agree(calls, {.stage = shared ? RunState::kSized : RunState::kFirst});
      if (program.alone != is_alone()) plan_steps();
    }
    prepare(given, given_implicit);
    RunState run = captured.look(program, /*step_by_step=*/current_profile() != nullptr);
    if (!first && !shared && ranks->together()) {
      run = ranks->agree(calls, run);
      if (program.alone != is_alone()) {
        plan_steps();
        prepare(given, given_implicit);
        run = captured.look(program, /*step_by_step=*/true);
      }
    }
    try {
      captured.begin_run(program, run);
      run_steps();
      if (!program.ranges_found) note_ranges();
      captured.end_run(program);
    } catch (...) {
      captured.reset();
      abandon_run();
      throw;
    }
    Tensors results = collect_outputs();
    for (MemoryId m : program.unfinished)
      if (const Ref<Event>& e = memory(m).storage->ready()) unfinished.push_back(e);
    release_inputs();
    return results;
  }

  void prepare(std::span<const Tensor> given, std::span<const Tensor> given_implicit) {
    take_memory();
    order_streams();
    bind_inputs(given, given_implicit);
    renew_outputs();
  }

  void note_ranges() {
    find_ranges(program), numbers.forget_values();
    for (GroupCalls& c : calls) c.cut = hash_of_cuts(program, *c.group, c.device);
  }

  void run_steps() {
    const bool profiled = current_profile() != nullptr;
    const int count = int(program.steps.size());
    size_t range = 0, copies = 0;
    for (int i = 0; i < count;) {
      for (; copies < program.copies.size() && program.copies[copies].before == i; ++copies)
        numbers.copy(program, copies);
      if (range < program.ranges.size() && program.ranges[range].begin == i)
        if (captured.run(program, range++)) {
          i = program.ranges[range - 1].end;
          continue;
        }
      const Step& s = program.steps[size_t(i++)];
      profiled ? run_profiled(s) : run_step(s);
    }
  }

  void run_step(const Step& s) {
    if (!s.device.is_cpu() || s.out[0].device() != s.device) [[unlikely]]
      return run_on_device(s);
    for (MemoryId m : s.waits) memory(m).storage->wait_ready();
    // A collective waits for its operands itself. Memory that is written may be read outside of the
    // graph: a checkpoint may be copying state, a collective of the program may read an input.
    if (!s.collective)
      for (const Tensor& t : s.out) t.storage()->wait_writable();
    if (s.kernel) [[likely]]
      s.kernel->run(*s.prim, s.in, s.out, s.workspace, Stream{});
    else
      run_decomposed(s);
    for (MemoryId m : s.bumps) memory(m).storage->bump_version();
  }

  // The same where streams wait and the host does not. A transfer between devices waits for its
  // operand and its result itself, and notes what it uses.
  void run_on_device(const Step& s) {
    const Stream stream = stream_of(s.device);
    DeviceSpan lane(name_of(s), stream);
    const bool transfers = s.out[0].device() != s.device;
    for (MemoryId m : s.waits) memory(m).storage->wait_ready(stream);
    if (!s.collective && !transfers) {
      for (const Tensor& t : s.in)
        if (t.storage()) t.storage()->wait_ready(stream);
      for (const Tensor& t : s.out) t.storage()->wait_writable(stream);
    }
    if (s.kernel) [[likely]]
      s.kernel->run(*s.prim, s.in, s.out, s.workspace, stream);
    else
      run_decomposed(s);
    if (!s.collective && !transfers) {
      for (const Tensor& t : s.in)
        if (t.storage()) t.storage()->used_on(stream, /*writes=*/false);
      for (const Tensor& t : s.out) t.storage()->used_on(stream, /*writes=*/true);
    }
    for (MemoryId m : s.bumps) memory(m).storage->bump_version();
  }

  void run_decomposed(const Step& s) {
    const PrimRef& prim = graph.nodes[size_t(s.node)].prim;
    Tensors in(s.in.begin(), s.in.end()), results = eager_backend().run(prim, in);
    for (size_t i = 0; i < results.size(); ++i) copy_values(s.out[i], results[i]);
  }

  static std::string_view name_of(const Step& s) {
    const Fused* fused = as_fused(*s.prim);
    return fused ? std::string_view(fused->name) : s.prim->name();
  }

  void run_profiled(const Step& s) {
    // The text is made before the span begins: for a large kernel this takes as long as a small
    // kernel.
    std::string detail = to_string(graph, graph.nodes[size_t(s.node)]);
    ProfileSpan span(name_of(s), s.collective ? "op" : "kernel");
    span.set_detail(std::move(detail));
    run_step(s);
  }

  // Waits until nothing of the last run is pending, so that arenas and outputs may be written
  // again.
  void finish_last_run() {
    for (const Ref<Event>& e : std::exchange(unfinished, {})) {
      try {
        e->wait();
      } catch (...) {  // the result carries the error and throws it when it is read
      }
    }
    for (MemoryId m : program.results)
      if (memory(m).kind == Memory::Kind::kArena) memory(m).storage->set_ready(nullptr);
  }

  // Waits for pending collectives after an error, since they may still read and write the
  // executor's memory.
  void abandon_run() {
    for (MemoryId id : program.results) {
      Memory& m = memory(id);
      try {
        m.storage->wait_ready();
      } catch (...) {  // the first error is the one to report
      }
      if (m.kind == Memory::Kind::kArena || m.kind == Memory::Kind::kOutput)
        m.storage->set_ready(nullptr);
    }
    release_inputs();
  }

  Tensors collect_outputs() {
    Tensors results;
    for (const Tensor& t : program.outputs) {
      results.push_back(t.detach());
      results.back().impl()->inference = context().inference;
    }
    return results;
  }

  static constexpr size_t kMostInTurn = 8;
  Graph graph;
  std::vector<GroupCalls> calls;
  Program program;
  MemoryPlan plan;
  Traffic traffic;
  bool arenas_agreed = false;
  std::vector<BoundInput> inputs, implicit;
  std::vector<MemoryId> outputs;  // memories of kind kOutput
  bool writes_inputs = false;
  const std::shared_ptr<SharedArena> shared;  // null: the arenas are its own
  const std::shared_ptr<StepRanks> ranks;
  std::vector<Ref<Storage>> arenas;                   // as in the program; empty: not allocated
  std::list<std::pair<Device, Stream>> last_streams;  // by device: of the last run
  std::vector<Ref<Event>> unfinished;  // collectives of the last run that nothing waited for
  std::vector<MemoryId> owners;        // reused by check_written_apart
  HostNumbers numbers;
  CapturedSteps captured;
};

Executor::Executor(Graph graph, const ExecutorOptions& options)
    : impl_(std::make_unique<Impl>(std::move(graph), options)) {}
Executor::~Executor() = default;
Executor::Executor(Executor&&) noexcept = default;

Tensors Executor::run(std::span<const Tensor> inputs, std::span<const Tensor> implicit) {
  return impl_->run(inputs, implicit);
}
const Graph& Executor::graph() const { return impl_->graph; }
const MemoryPlan& Executor::memory() const { return impl_->plan; }
const Traffic& Executor::traffic() const { return impl_->traffic; }
int Executor::device_graphs() const { return impl_->captured.launches(); }

}  // namespace tessera::compiler
