#include "compile/compile.h"

#include <list>
#include <unordered_map>

#include "compile/build.h"
#include "compile/lesson.h"
#include "compile/replay.h"
#include "compile/report.h"
#include "core/autograd/graph.h"
#include "core/base/log.h"
#include "core/dispatch/sharding.h"
#include "core/tensor/random.h"

namespace tessera::compiler {
namespace {

// Found again by the text of its graph.
struct Segment {
  std::unique_ptr<Executor> executor;  // null until the graph runs for the second time
  Graph graph;                         // until then
};

struct KnownCall : Entry {
  Segment* segment = nullptr;
};

// The state of this thread that ops are recorded under.
void add_context(CallKey& key) {
  const Context& c = context();
  const void* generator = default_generator().state().storage().get();
  key.add(uint64_t(c.enabled) | uint64_t(c.forced) << 8 | uint64_t(c.inference) << 16 |
          uint64_t(c.default_dtype) << 24 | uint64_t(c.replicate_plain) << 32 |
          uint64_t(c.communication) << 40 | uint64_t(c.exact_contraction) << 48);
  key.add(uint64_t(reinterpret_cast<uintptr_t>(generator)));
}

void add_layout(CallKey& key, const Tensor& t) {
  if (!t.defined()) return key.add(0);
  const Tensor& local = piece_of(t);
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
  Keeper keeper;
  std::list<KnownCall> known;  // the one used last comes first
  std::string host_made;       // in the last segment: an implicit input that nobody else holds

  explicit Impl(CompileOptions o) : options(std::move(o)) {}

  StepResults call(std::span<const Tensor> given, const CallKey& given_key,
                   FunctionRef<StepResults()> body) {
    if (context().backend) return body();  // part of what another one records
    ++report.calls;
    CallKey key = given_key;
    add_context(key);
    Tensors inputs;
    bool detached = true;
    auto add = [&](const Tensor& t) {
      add_layout(key, t);
      if (!t.defined()) return;
      detached &= grad_meta(t) == nullptr;
      const Tensor& local = piece_of(t);
      for (size_t i = 0; i < inputs.size(); ++i)  // which share memory, and where
        if (inputs[i].storage() == local.storage())
          key.add(i + 1), key.add(uint64_t(local.offset() - inputs[i].offset()));
      inputs.push_back(local.detach());
    };
    for (const Tensor& t : given) add(t);
    if (context().samples.defined()) add(context().samples);
    for (auto e = known.begin(); e != known.end(); ++e)
      if (e->confirmed && e->key == key && fits(*e, inputs)) {
        if (e != known.begin()) known.splice(known.begin(), known, e);
        return replay_known(*e, inputs);
      }
    return record(key, given, inputs, detached, body);
  }

  StepResults replay_known(KnownCall& call, std::span<const Tensor> inputs) {
    ++report.replays;
    report.why_not.clear();
    Tensors outputs = executor_of(*call.segment).run(inputs, call.implicit);
    StepResults results{.tensors = {}, .key = {}, .like = call.like};
    for (const Source& s : call.results) results.tensors.push_back(give(s, outputs, inputs));
    for (const EntrySlot& s : call.slots)
      if (s.changed) *s.changed = give(s.after, outputs, inputs);
    for (const EntrySetting& s : call.settings)
      if (s.changed) *s.changed = s.after;
    return results;
  }

  StepResults record(const CallKey& key, std::span<const Tensor> given,
                     std::span<const Tensor> inputs, bool detached,
                     FunctionRef<StepResults()> body) {
    ++report.recordings;
    if (segments.size() >= kMaxSegments) {
      log::info("compile: {} has had {} graphs; it starts over", options.name, segments.size());
      known.clear(), segments.clear(), keeper.clear();
    }
    Tensors arguments(given.begin(), given.end());
    if (context().samples.defined()) arguments.push_back(context().samples);
    StepResults results;
    StepRecorder recorder(
        {.inputs = {inputs.begin(), inputs.end()}, .names = options.names},
        [this](Graph graph, std::span<const Tensor> in) {
          return run_segment(std::move(graph), in);
        },
        arguments);
    results = body();
    recorder.finish();
    KnownCall call;
    call.key = key;
    std::string why = learn(recorder, inputs, results.tensors, keeper, call);
    if (why.empty()) why = host_made;
    if (why.empty() && !detached) why = "an argument requires gradients; pass it detached";
    if (why.empty()) {
      call.segment = &segments.at(to_string(recorder.last_graph()));
      call.returned = results.key;
      call.like = results.like;
      for (const Tensor& t : inputs) call.inputs.push_back(t.storage());
      remember(std::move(call));
    } else if (why != report.why_not) {
      log::info("compile: {} runs its function at each call: {}", options.name, why);
    }
    report.why_not = why;
    return results;
  }

  // Beside what is known of other keys, and of this key under other settings.
  void remember(KnownCall call) {
    call.any.assign(call.inputs.size(), false);
    for (auto e = known.begin(); e != known.end();) {
      bool same = e->key == call.key && e->settings == call.settings;
      if (!same && may_fit(*e)) {
        ++e;
        continue;
      }
      if (same && e->segment == call.segment && agree(*e, call)) {
        call.confirmed = true;
        for (size_t i = 0; i < call.inputs.size(); ++i)
          call.any[i] = e->any[i] || e->inputs[i] != call.inputs[i];
      }
      e = known.erase(e);
    }
    known.push_front(std::move(call));
  }

  // A graph that is met for the first time may never come again (state made in the first step, a
  // length of its own), so it is interpreted.
  Tensors run_segment(Graph graph, std::span<const Tensor> inputs) {
    ++report.segments;
    host_made.clear();
    for (const ImplicitInput& i : graph.implicit)
      if (i.tensor.storage()->use_count() <= 2)  // the graph's and the recorder's
        host_made = fmt::format(
            "%{} ({}) was made inside of it from values of the program, which may be others at the "
            "next call; pass it as an argument",
            i.id, describe(i.tensor));
    auto [found, fresh] = segments.try_emplace(to_string(graph));
    Segment& segment = found->second;
    if (fresh) {
      segment.graph = graph;
      return compiler::replay(graph, inputs);
    }
    std::vector<Tensor> implicit;
    for (const ImplicitInput& i : graph.implicit) implicit.push_back(i.tensor);
    return executor_of(segment).run(inputs, implicit);
  }

  Executor& executor_of(Segment& segment) {
    if (!segment.executor)
      segment.executor = std::make_unique<Executor>(
          build(std::exchange(segment.graph, {}), options, ++report.compiled, &report.unoptimised));
    return *segment.executor;
  }

  // Of graphs that are remembered, each with its memory: programs whose types never repeat start
  // over rather than grow.
  static constexpr size_t kMaxSegments = 64;
};

StepCompiler::StepCompiler(CompileOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}
StepCompiler::~StepCompiler() = default;
StepCompiler::StepCompiler(StepCompiler&&) noexcept = default;

StepResults StepCompiler::call(std::span<const Tensor> inputs, const CallKey& key,
                               FunctionRef<StepResults()> body) {
  return impl_->call(inputs, key, body);
}
const CompileReport& StepCompiler::report() const { return impl_->report; }
std::string StepCompiler::graph_report() const {
  const auto& known = impl_->known;
  bool ran = !known.empty() && known.front().segment->executor;
  return ran ? compiler::report(*known.front().segment->executor) : "";
}

}  // namespace tessera::compiler
