#include "compile/compile.h"

#include <chrono>
#include <list>
#include <set>
#include <unordered_map>

#include "compile/build.h"
#include "compile/ir/interpreter.h"
#include "compile/record/dynamic_call.h"
#include "compile/record/guards.h"
#include "compile/run/collective_order.h"
#include "compile/run/report.h"
#include "compile/run/step_ranks.h"
#include "core/autograd/graph.h"
#include "core/base/deterministic.h"
#include "core/base/log.h"
#include "core/dispatch/context.h"
#include "core/dispatch/default_device.h"
#include "core/dispatch/sharding.h"
#include "core/tensor/random.h"

namespace tessera::compiler {
namespace {

// A graph that the function ran. It is found again by its printed text.
struct Segment {
  std::unique_ptr<Executor> executor;  // null until the graph runs for the second time
  Graph graph;                         // empty once there is an executor
};

struct KnownCall : RecordedCall {
  Segment* segment = nullptr;
  // Set if the graph serves many sizes; `segment` is then null.
  std::unique_ptr<Executor> sized = nullptr;
  bool order_compared = false;  // ranks have compared its collectives
};

// The groups of the collectives of calls whose arguments have the same types.
struct GroupsOfCalls {
  CallKey key;
  std::vector<GroupCalls> groups = {};
};

struct SizedCalls {
  std::unique_ptr<DynamicCall> dynamic;
  SizedBuilder builder;
  bool counted = false;  // CompileReport::compiled counts it
};

// Adds the state of this thread that affects how ops are recorded.
void add_context(CallKey& key) {
  const Context& c = context();
  const void* generator = default_generator().state().storage().get();
  key.add(uint64_t(c.enabled) | uint64_t(c.forced) << 8 | uint64_t(c.inference) << 16 |
          uint64_t(c.default_dtype) << 24 | uint64_t(c.replicate_plain) << 32 |
          uint64_t(c.communication) << 40 | uint64_t(c.exact_contraction) << 48 |
          uint64_t(c.autocast) << 56);
  key.add(uint64_t(reinterpret_cast<uintptr_t>(generator)));
  const Device device = default_device();
  key.add(uint64_t(device.kind) | uint64_t(uint8_t(device.index)) << 8 |
          uint64_t(deterministic_algorithms()) << 16);
}

void add_layout(CallKey& key, const Tensor& t) {
  if (!t.defined()) return key.add(0);
  const Tensor& local = local_of(t);
  const bool dense = local.is_contiguous();
  key.add(1 | uint64_t(local.dtype()) << 8 | uint64_t(local.ndim()) << 16 |
          uint64_t(grad_meta(t) != nullptr) << 24 | uint64_t(dense) << 25 |
          uint64_t(local.device().kind) << 32 | uint64_t(uint16_t(local.device().index)) << 40);
  for (int64_t n : local.shape()) key.add_extent(n);
  if (!dense)
    for (int64_t n : local.strides()) key.add(uint64_t(n));
  if (const ShardData* shard = shard_data(t)) {
    for (int64_t n : t.shape()) key.add(uint64_t(n));
    key.add(shard->placement());
  }
}

}  // namespace

struct StepCompiler::Impl {
  CompileOptions options;
  CompileReport report;
  std::unordered_map<std::string, Segment> segments;
  GuardedObjects guarded;
  std::list<KnownCall> known;  // the most recently used comes first
  std::list<SizedCalls> dynamic_calls;
  // Describes an implicit input of the last segment that only the function holds.
  std::string host_made;
  const std::shared_ptr<StepRanks> ranks;    // what they agree on, in all graphs
  int64_t first_voters = 0;                  // the call that was the first with collectives
  std::list<GroupsOfCalls> groups_of_calls;  // of those that were recorded; the last comes first

  Impl(CompileOptions o, CallSite site)
      : options(std::move(o)), ranks(std::make_shared<StepRanks>(options.name, site)) {}

  StepResults call(std::span<const Tensor> given, const CallKey& given_key,
                   FunctionRef<StepResults()> body) {
    if (context().backend) return body();  // an outer recording includes this call
    ++report.calls;
    CallKey key = given_key;
    add_context(key);
    Tensors inputs;
    bool detached = true;
    auto add = [&](const Tensor& t) {
      if (t.defined()) bring_up_to_date({&t, 1});
      add_layout(key, t);
      if (!t.defined()) return;
      detached &= grad_meta(t) == nullptr;
      const Tensor& local = local_of(t);
      // The key says which inputs share memory, and where.
      for (size_t i = 0; i < inputs.size(); ++i)
        if (inputs[i].storage() == local.storage())
          key.add(i + 1), key.add(uint64_t(local.offset() - inputs[i].offset()));
      inputs.push_back(local.detach());
    };
    for (const Tensor& t : given) add(t);
    if (context().samples.defined()) add(context().samples);
    for (auto e = known.begin(); e != known.end(); ++e)
      if (e->entry.confirmed && e->entry.key == key && guards_hold(e->entry, inputs)) {
        if (e != known.begin()) known.splice(known.begin(), known, e);
        return replay_known(*e, inputs);
      }
    for (SizedCalls& f : dynamic_calls)
      if (f.dynamic->confirmed && plan_size(f, key, inputs))
        return replay_known(known.front(), inputs);
    return record(key, given, inputs, detached, body);
  }

  StepResults replay_known(KnownCall& known_call, std::span<const Tensor> inputs) {
    ++report.replays;
    report.why_not.clear();
    ranks->expect({});
    const CachedCall& call = known_call.entry;
    Executor& executor = known_call.sized ? *known_call.sized : executor_of(*known_call.segment);
    std::optional<CallOrderScope> call_order;
    if (!std::exchange(known_call.order_compared, true))
      call_order.emplace(collective_orders(executor.graph()));
    Tensors outputs = executor.run(inputs, call.implicit);
    report.device_graphs = executor.device_graphs();
    StepResults results{.tensors = {}, .key = {}, .like = call.like};
    for (const Source& s : call.results) results.tensors.push_back(give(s, outputs, inputs));
    for (const CachedSlot& s : call.slots)
      if (s.changed) *s.changed = give(s.after, outputs, inputs);
    for (const CachedSetting& s : call.settings)
      if (s.changed) *s.changed = s.after;
    return results;
  }

  StepResults record(const CallKey& key, std::span<const Tensor> given,
                     std::span<const Tensor> inputs, bool detached,
                     FunctionRef<StepResults()> body) {
    ++report.recordings;
    if (segments.size() >= kMaxSegments) {
      logging::info("compile: {} has had {} graphs; it starts over", options.name, segments.size());
      known.clear(), dynamic_calls.clear(), segments.clear(), guarded.clear();
    }
    Tensors arguments(given.begin(), given.end());
    if (context().samples.defined()) arguments.push_back(context().samples);
    ranks->expect(groups_of(key).groups);
    StepResults results;
    StepRecorder recorder(
        {.inputs = {inputs.begin(), inputs.end()}, .names = options.names},
        [this](Graph graph, std::span<const Tensor> in) {
          return run_segment(std::move(graph), in);
        },
        arguments);
    results = body();
    recorder.finish();
    KnownCall known_call;
    CachedCall& call = known_call.entry;
    call.key = key;
    std::string why = make_guards(recorder, inputs, results.tensors, guarded, call);
    if (why.empty()) why = host_made;
    if (why.empty() && !detached) why = "an argument requires gradients; pass it detached";
    if (why.empty()) {
      known_call.segment = &segments.at(to_string(recorder.last_graph()));
      known_call.graph = std::make_shared<const Graph>(recorder.last_graph());
      call.returned = results.key;
      call.like = results.like;
      for (const Tensor& t : inputs) call.inputs.push_back(t.storage());
      remember(std::move(known_call));
      if (options.dynamic && !known.front().entry.confirmed) learn_size();
    } else if (why != report.why_not) {
      logging::info("compile: {} runs its function at each call: {}", options.name, why);
    }
    report.why_not = why;
    release_unused();
    return results;
  }

  // Those of the calls before that differ from `key` in sizes alone, in front.
  GroupsOfCalls& groups_of(const CallKey& key) {
    auto at = std::ranges::find_if(groups_of_calls,
                                   [&](const GroupsOfCalls& g) { return g.key.same_kind(key); });
    if (at == groups_of_calls.end()) at = groups_of_calls.insert(at, {.key = key});
    groups_of_calls.splice(groups_of_calls.begin(), groups_of_calls, at);
    if (groups_of_calls.size() > kMaxSegments) groups_of_calls.pop_back();
    return groups_of_calls.front();
  }

  // Releases objects that no entry refers to, such as arguments of former calls.
  void release_unused() {
    std::vector<const CachedCall*> entries;
    for (const KnownCall& e : known) entries.push_back(&e.entry);
    for (const SizedCalls& f : dynamic_calls)
      entries.push_back(&f.dynamic->entry()), entries.push_back(&f.dynamic->other_entry());
    guarded.keep_only(entries);
  }

  // Adds a call to those known. Calls with other keys stay, and calls with this key under other
  // settings.
  void remember(KnownCall known_call) {
    CachedCall& call = known_call.entry;
    call.any.assign(call.inputs.size(), false);
    for (auto e = known.begin(); e != known.end();) {
      const CachedCall& other = e->entry;
      bool same = other.key == call.key && other.settings == call.settings;
      if (!same && guards_may_hold(other)) {
        ++e;
        continue;
      }
      if (same && e->segment == known_call.segment && same_guards(other, call)) {
        call.confirmed = true;
        for (size_t i = 0; i < call.inputs.size(); ++i)
          call.any[i] = other.any[i] || other.inputs[i] != call.inputs[i];
      }
      e = known.erase(e);
    }
    known.push_front(std::move(known_call));
  }

  // ---- calls that differ in one size

  // Compares the call that was recorded last with those that differ from it in one size.
  void learn_size() {
    const KnownCall& call = known.front();
    for (auto f = dynamic_calls.begin(); f != dynamic_calls.end(); ++f) {
      std::optional<int64_t> size = f->dynamic->size_of(call.entry.key);
      if (!size || !(f->dynamic->entry().settings == call.entry.settings)) continue;
      if (f->dynamic->confirmed && f->dynamic->covers(*size)) continue;
      std::string why = f->dynamic->compare(*size, call);
      if (!why.empty())
        dynamic_calls.erase(f), report_static(why);
      else
        f->dynamic->confirm(*size), forget_last();
      return;
    }
    for (auto e = std::next(known.begin()); e != known.end(); ++e) {
      if (e->sized) continue;
      std::string why;
      if (auto dynamic = DynamicCall::unify(*e, call, &why)) {
        if (dynamic_calls.size() >= kMaxDynamicCalls) dynamic_calls.pop_front();
        dynamic_calls.push_back(
            {.dynamic = std::move(dynamic), .builder = SizedBuilder(options, ranks)});
        return;
      }
      if (!why.empty()) return report_static(why);
    }
  }
  // Forgets the call that was recorded last: a DynamicCall serves it now.
  void forget_last() {
    auto segment =
        std::ranges::find_if(segments, [&](auto& s) { return &s.second == known.front().segment; });
    bool alone = std::ranges::none_of(
        known, [&](auto& e) { return &e != &known.front() && e.segment == known.front().segment; });
    if (alone && segment != segments.end()) segments.erase(segment), known.pop_front();
  }
  void report_static(const std::string& why) {
    if (report.why_static.empty())
      logging::info("compile: {} has a graph for each size: {}", options.name, why);
    report.why_static = why;
  }

  // Plans the call at a new size and puts it in front of those that are known. Returns false if its
  // graph does not take the size; the program then runs.
  bool plan_size(SizedCalls& f, const CallKey& key, std::span<const Tensor> inputs) {
    std::optional<int64_t> size = f.dynamic->size_of(key);
    if (!size || !(options.beyond_recorded || f.dynamic->covers(*size)) ||
        !guards_hold(f.dynamic->entry()))
      return false;
    auto begin = std::chrono::steady_clock::now();
    try {
      KnownCall call{f.dynamic->at(*size, key)};
      call.entry.confirmed = true;
      if (!guards_hold(call.entry, inputs)) return false;
      int before = f.builder.compilations();
      call.sized = std::make_unique<Executor>(
          f.builder.build(*call.graph, [&] { return probes(*f.dynamic, *size); }));
      report.size_compilations += f.builder.compilations() - before;
      known.push_front(std::move(call));
    } catch (const Error& e) {
      report_static(e.what());
      return false;
    }
    std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    if (!std::exchange(f.counted, true)) ++report.compiled;
    ++report.sizes, report.sizes_ms += took.count(), report.compile_s += took.count() / 1000;
    forget_sizes();
    return true;
  }

  // Returns the graph at sizes around those seen, so that one compilation serves them all.
  static std::vector<Graph> probes(const DynamicCall& dynamic, int64_t size) {
    std::set<int64_t> sizes{dynamic.size_a(), dynamic.size_b(), size + 1};
    int64_t most = 4 * std::max({dynamic.size_a(), dynamic.size_b(), size});
    int64_t least = std::min({dynamic.size_a(), dynamic.size_b(), size}) / 4;
    for (int64_t n = std::max<int64_t>(2, least); n <= most; n *= 2) sizes.insert(n);
    std::vector<Graph> graphs;
    for (int64_t n : sizes) {
      try {
        graphs.push_back(dynamic.graph_at(n));
      } catch (const Error&) {  // the graph does not take this size
      }
    }
    return graphs;
  }

  // Forgets planned sizes but for the most recently used.
  void forget_sizes() {
    int sized = 0;
    for (const KnownCall& e : known) sized += e.sized != nullptr;
    for (auto e = known.end(); sized > kMaxSizes && e != known.begin();)
      if ((--e)->sized) e = known.erase(e), --sized;
  }

  // Runs a graph. The first time it is interpreted, since it may never come again (state that the
  // first step makes, a sequence of unusual length); from the second time on it is compiled.
  Tensors run_segment(Graph graph, std::span<const Tensor> inputs) {
    ++report.segments;
    host_made.clear();
    for (const ImplicitInput& i : graph.implicit)
      if (i.tensor.storage()->use_count() <= 2)  // only the graph and the recorder hold it
        host_made = fmt::format(
            "%{} ({}) was made inside of it from values of the program, which may be others at the "
            "next call; pass it as an argument",
            i.id, describe(i.tensor));
    const std::vector<GroupCalls> calls = calls_on_devices(graph);
    for (const GroupCalls& c : calls) add_calls(groups_of_calls.front().groups, c.group, c.device);
    auto [found, fresh] = segments.try_emplace(to_string(graph));
    Segment& segment = found->second;
    if (fresh) {
      segment.graph = graph;
      // In the first call that has any, groups may not have decided yet who moves their tensors.
      if (!calls.empty() && first_voters == 0) first_voters = report.calls;
      if (report.calls > first_voters && ranks->together())
        ranks->agree(calls, {.stage = RunState::kInterpreted});
      return compiler::interpret(graph, inputs);
    }
    std::vector<Tensor> implicit;
    for (const ImplicitInput& i : graph.implicit) implicit.push_back(i.tensor);
    return executor_of(segment).run(inputs, implicit);
  }

  Executor& executor_of(Segment& segment) {
    if (!segment.executor) {
      const auto begin = std::chrono::steady_clock::now();
      segment.executor = std::make_unique<Executor>(
          build(segment.graph, options, ++report.compiled, &report.unoptimised, {}, ranks));
      segment.graph = {};
      report.compile_s +=
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    return *segment.executor;
  }

  // The most graphs that are remembered, each with memory of its own. A program whose types never
  // repeat starts over instead of growing.
  static constexpr size_t kMaxSegments = 64;
  static constexpr size_t kMaxDynamicCalls = 8;
  static constexpr int kMaxSizes = 128;  // each has an executor; they share one arena
};

StepCompiler::StepCompiler(CompileOptions options, std::source_location site)
    : impl_(std::make_unique<Impl>(std::move(options), site)) {}
StepCompiler::~StepCompiler() = default;
StepCompiler::StepCompiler(StepCompiler&&) noexcept = default;

StepResults StepCompiler::call(std::span<const Tensor> inputs, const CallKey& key,
                               FunctionRef<StepResults()> body) {
  return impl_->call(inputs, key, body);
}
const CompileReport& StepCompiler::report() const { return impl_->report; }
std::string StepCompiler::graph_report() const {
  if (impl_->known.empty()) return "";
  const KnownCall& last = impl_->known.front();
  const Executor* ran = last.sized ? last.sized.get() : last.segment->executor.get();
  return ran ? compiler::report(*ran) : "";
}

}  // namespace tessera::compiler
