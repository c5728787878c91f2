#include "compile/compile.h"

#include <list>
#include <unordered_map>
#include <unordered_set>

#include "compile/build.h"
#include "compile/replay.h"
#include "compile/step_recorder.h"
#include "compile/timeline.h"
#include "core/autograd/graph.h"
#include "core/base/log.h"
#include "core/dispatch/sharding.h"

namespace tessera::compiler {
namespace {

// Found again by the text of its graph.
struct Segment {
  std::unique_ptr<Executor> executor;  // null until the graph runs for the second time
  Graph graph;                         // until then
};

// Where a tensor that leaves a run comes from.
struct Source {
  enum Kind : uint8_t { kNone, kOutput, kInput, kExisting } kind = kNone;
  size_t index = 0;  // of outputs or inputs
  Tensor like;       // kExisting: the tensor; kOutput, kInput: its layout, placement, no values
  int64_t offset = 0;
};

struct Slot {
  Ref<const RefCounted> owner;
  const Tensor* seen = nullptr;
  Tensor* changed = nullptr;  // the same place; null when it is only read
  Source after = {};
  bool depends = false;  // on what it held: nothing, or the memory of `before`
  Ref<Storage> before = {};
};

// A call that is known: what it is known by, its graph, and where the results go.
struct Entry {
  std::string key;
  std::vector<std::pair<const bool*, bool>> flags = {};
  std::vector<Slot> slots = {};
  Segment* segment = nullptr;
  std::vector<Tensor> implicit = {};
  std::vector<Source> results = {};
};

// This rank's piece of a sharded tensor; a plain one itself.
const Tensor& piece_of(const Tensor& t) {
  ShardData* shard = shard_data(t);
  return shard ? shard->local : t;
}

std::string layout_text(const Tensor& t) {
  if (!t.defined()) return "none;";
  ShardData* shard = shard_data(t);
  const Tensor& local = piece_of(t);
  return fmt::format("{}{} {} {} {}{};", name_of(local.dtype()), tessera::to_string(local.shape()),
                     tessera::to_string(local.strides()), to_string(local.device()),
                     t.requires_grad(), shard ? " " + shard->placement() : "");
}

// The state of this thread that ops are recorded under.
std::string context_text() {
  const Context& c = context();
  return fmt::format("{} {} {} {} {} {} {} {}", c.enabled, c.forced, c.inference,
                     int(c.default_dtype), static_cast<void*>(c.generator), c.replicate_plain,
                     int(c.communication), c.exact_contraction);
}

// True for a tensor that backward can still be called through.
bool has_history(const Tensor& t) {
  GradMeta* meta = grad_meta(t);
  return meta && meta->producer && !meta->producer->released();
}

bool same_memory(const Tensor& t, const Ref<Storage>& storage) {
  return t.defined() ? piece_of(t).storage() == storage : !storage;
}

bool fits(const Entry& e) {
  for (auto& [flag, value] : e.flags)
    if (*flag != value) return false;
  for (const Slot& s : e.slots)
    if (s.depends && !same_memory(*s.seen, s.before)) return false;
  return true;
}

Tensor give(const Source& s, const Tensors& outputs, std::span<const Tensor> inputs) {
  if (s.kind == Source::kNone) return {};
  if (s.kind == Source::kExisting) return s.like;
  const Tensor& from = s.kind == Source::kOutput ? outputs[s.index] : inputs[s.index];
  const Tensor& local = piece_of(s.like);
  Tensor t(local.meta(), from.storage(), from.offset() + s.offset);
  const ShardingLayer* sharding = sharding_of(s.like);
  return sharding ? sharding->with_local(s.like.meta(), t) : t;
}

// What one finished recording says about replaying it without the program.
class Lesson {
 public:
  Lesson(const StepRecorder& recorder, std::span<const Tensor> inputs)
      : recorder_(recorder), inputs_(inputs), held_(recorder.provided().size()) {
    for (const ImplicitInput& i : recorder.last_graph().implicit)
      implicit_.insert(i.tensor.storage().get());
  }

  /// Why the program has to run at each call; "" when `entry` can take its place.
  std::string learn(const Tensors& results, Entry& entry) {
    if (!recorder_.break_reason().empty()) return recorder_.break_reason();
    if (recorder_.segments() != 1)
      return fmt::format("it was {} graphs instead of one", recorder_.segments());
    for (const Tensor& t : results) {
      if (t.defined() && has_history(t))
        return "a result can still be differentiated; return it detached";
      entry.results.push_back(source_of(t));
    }
    for (const TouchedSlot& s : recorder_.slots())
      if (std::string why = learn_slot(s, entry); !why.empty()) return why;
    for (size_t i = 0; i < held_.size(); ++i)
      if (!held_[i])
        return fmt::format(
            "a tensor made by {} outlives the call; return it, or write it with assign_",
            maker_of(recorder_.last_graph().outputs[i]));
    entry.flags = recorder_.flags();
    for (const ImplicitInput& i : recorder_.last_graph().implicit)
      entry.implicit.push_back(i.tensor);
    return "";
  }

 private:
  Source source_of(const Tensor& t) {
    if (!t.defined()) return {};
    const Tensor& local = piece_of(t);
    auto& provided = recorder_.provided();
    for (size_t i = 0; i < provided.size(); ++i)
      if (provided[i] == local.storage()) {
        held_[i] = true;
        return {Source::kOutput, i, without_values(t.detach()), local.offset()};
      }
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i].storage() == local.storage())
        return {Source::kInput, i, without_values(t.detach()),
                local.offset() - inputs_[i].offset()};
    return {Source::kExisting, 0, t, 0};
  }

  std::string learn_slot(const TouchedSlot& s, Entry& entry) {
    Slot slot{.owner = s.owner, .seen = s.seen, .changed = s.changed, .depends = s.depends};
    if (s.before.defined()) slot.before = piece_of(s.before).storage();
    bool read = slot.before && implicit_.contains(slot.before.get());
    if (read && s.changed && !same_memory(s.after, slot.before))
      return "gradients accumulate over calls; call zero_grad inside of the step";
    slot.depends |= read;
    if (s.changed) slot.after = source_of(s.after);
    entry.slots.push_back(std::move(slot));
    return "";
  }

  std::string maker_of(ValueId id) const {
    const Graph& g = recorder_.last_graph();
    for (const Node& n : g.nodes)
      for (ValueId out : n.out)
        if (g[out].buffer == g[id].buffer)
          return fmt::format("{} ({})", n.prim->name(), g.scopes[size_t(n.scope)]);
    return "the call";
  }

  const StepRecorder& recorder_;
  std::span<const Tensor> inputs_;
  std::vector<bool> held_;
  std::unordered_set<const Storage*> implicit_;
};

}  // namespace

struct StepCompiler::Impl {
  CompileOptions options;
  CompileReport report;
  std::unordered_map<std::string, Segment> segments;
  std::list<Entry> entries;  // the one used last comes first
  std::string host_made;     // in the last segment: an implicit input that nobody else holds

  explicit Impl(CompileOptions o) : options(std::move(o)) {}

  Tensors call(std::span<const Tensor> given, std::string_view given_key,
               FunctionRef<Tensors()> body) {
    if (context().backend) return body();  // part of what another one records
    ++report.calls;
    std::string key = std::string(given_key) + context_text();
    Tensors inputs;
    for (const Tensor& t : given) {
      key += layout_text(t);
      if (t.defined()) inputs.push_back(piece_of(t).detach());
    }
    if (const Tensor& samples = context().samples; samples.defined()) {
      key += layout_text(samples);
      inputs.push_back(samples.detach());
    }
    for (auto e = entries.begin(); e != entries.end(); ++e)
      if (e->key == key && fits(*e)) {
        entries.splice(entries.begin(), entries, e);
        return replay_entry(*e, inputs);
      }
    return record(key, inputs, body);
  }

  Tensors replay_entry(Entry& entry, std::span<const Tensor> inputs) {
    ++report.replays;
    Tensors outputs = executor_of(*entry.segment).run(inputs, entry.implicit), results;
    for (const Source& s : entry.results) results.push_back(give(s, outputs, inputs));
    for (const Slot& s : entry.slots)
      if (s.changed) *s.changed = give(s.after, outputs, inputs);
    return results;
  }

  Tensors record(const std::string& key, std::span<const Tensor> inputs,
                 FunctionRef<Tensors()> body) {
    ++report.recordings;
    if (segments.size() >= kMaxSegments) {
      log::info("compile: {} has had {} graphs; it starts over", options.name, segments.size());
      entries.clear(), segments.clear();
    }
    Tensors results;
    StepRecorder recorder({.inputs = {inputs.begin(), inputs.end()}, .names = options.names},
                          [this](Graph graph, std::span<const Tensor> in) {
                            return run_segment(std::move(graph), in);
                          });
    results = body();
    recorder.finish();
    Entry entry{.key = key};
    std::string why = Lesson(recorder, inputs).learn(results, entry);
    if (why.empty()) why = host_made;
    if (why.empty()) {
      entry.segment = &segments.at(to_string(recorder.last_graph()));
      entries.push_front(std::move(entry));
    } else if (why != report.why_not) {
      log::info("compile: {} runs its function at each call: {}", options.name, why);
    }
    report.why_not = why;
    return results;
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
          build(std::exchange(segment.graph, {}), options, ++report.compiled));
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

Tensors StepCompiler::call(std::span<const Tensor> inputs, std::string_view key,
                           FunctionRef<Tensors()> body) {
  return impl_->call(inputs, key, body);
}
const CompileReport& StepCompiler::report() const { return impl_->report; }
std::string StepCompiler::graph_report() const {
  const auto& entries = impl_->entries;
  bool ran = !entries.empty() && entries.front().segment->executor;
  return ran ? compiler::report(*entries.front().segment->executor) : "";
}

}  // namespace tessera::compiler
