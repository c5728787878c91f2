#include "compile/compile.h"

#include <list>
#include <unordered_map>
#include <unordered_set>

#include "compile/build.h"
#include "compile/replay.h"
#include "compile/report.h"
#include "compile/step_recorder.h"
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
  bool depends = false;  // on what it held: `before`
  Tensor before = {};
};

// A call that is known: what it is known by, its graph, and where the results go. Two recordings
// make one: what differs between them (a tensor made from values of the program, an argument that
// is also reached in another way) is not the graph's to replay.
struct Entry {
  std::string key;
  bool confirmed = false;                 // by a second recording
  std::vector<Ref<Storage>> inputs = {};  // of the last recording
  std::vector<bool> any = {};             // which inputs may be other memory than those
  std::string returned = {};              // besides tensors
  std::any like = {};
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
  const void* generator = default_generator().state().storage().get();
  return fmt::format("{} {} {} {} {} {} {} {}", c.enabled, c.forced, c.inference,
                     int(c.default_dtype), generator, c.replicate_plain, int(c.communication),
                     c.exact_contraction);
}

bool is_leaf(const Tensor& t) {
  GradMeta* meta = grad_meta(t);
  return meta && !meta->producer;
}

// True for a tensor that backward can still be called through.
bool has_history(const Tensor& t) {
  GradMeta* meta = grad_meta(t);
  return meta && meta->producer && !meta->producer->released();
}

bool same_place(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  const Tensor &x = piece_of(a), &y = piece_of(b);
  return x.storage() == y.storage() && x.offset() == y.offset() && x.shape() == y.shape() &&
         x.strides() == y.strides() && x.dtype() == y.dtype();
}

bool fits(const Entry& e) {
  for (auto& [flag, value] : e.flags)
    if (*flag != value) return false;
  for (const Slot& s : e.slots)
    if (s.owner->use_count() == 1 || (s.depends && !same_place(*s.seen, s.before))) return false;
  return true;
}

bool fits(const Entry& e, std::span<const Tensor> inputs) {
  for (size_t i = 0; i < inputs.size(); ++i)
    if (!e.any[i] && inputs[i].storage() != e.inputs[i]) return false;
  return fits(e);
}

bool agree(const Source& a, const Source& b) {
  if (a.kind != b.kind || a.index != b.index || a.offset != b.offset) return false;
  return a.kind == Source::kNone || same_place(a.like, b.like);
}

// True when two recordings of one key say the same.
bool agree(const Entry& a, const Entry& b) {
  if (a.segment != b.segment || a.flags != b.flags || a.returned != b.returned) return false;
  if (a.slots.size() != b.slots.size() || a.results.size() != b.results.size()) return false;
  for (size_t i = 0; i < a.implicit.size(); ++i)  // as many: the graphs are equal
    if (!same_place(a.implicit[i], b.implicit[i])) return false;
  for (size_t i = 0; i < a.results.size(); ++i)
    if (!agree(a.results[i], b.results[i])) return false;
  for (size_t i = 0; i < a.slots.size(); ++i) {
    const Slot &s = a.slots[i], &t = b.slots[i];
    if (s.owner != t.owner || s.changed != t.changed || !agree(s.after, t.after)) return false;
  }
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
      entry.results.push_back(source_of(t));
      bool made = entry.results.back().kind == Source::kOutput;
      if (t.defined() && (has_history(t) || (made && is_leaf(t))))
        return "a result can still be differentiated; return it detached";
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
    slot.before = s.before;
    bool read = s.before.defined() && implicit_.contains(piece_of(s.before).storage().get());
    if (read && s.changed && !same_place(s.after, s.before))
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

  StepResults call(std::span<const Tensor> given, std::string_view given_key,
                   FunctionRef<StepResults()> body) {
    if (context().backend) return body();  // part of what another one records
    ++report.calls;
    std::string key = std::string(given_key) + context_text();
    Tensors inputs;
    bool detached = true;
    auto add = [&](const Tensor& t) {
      key += layout_text(t);
      if (!t.defined()) return;
      detached &= grad_meta(t) == nullptr;
      Tensor local = piece_of(t).detach();
      for (size_t i = 0; i < inputs.size(); ++i)  // which share memory, and where
        if (inputs[i].storage() == local.storage())
          key += fmt::format("={}+{};", i, local.offset() - inputs[i].offset());
      inputs.push_back(std::move(local));
    };
    for (const Tensor& t : given) add(t);
    if (context().samples.defined()) add(context().samples);
    for (auto e = entries.begin(); e != entries.end(); ++e)
      if (e->confirmed && e->key == key && fits(*e, inputs)) {
        entries.splice(entries.begin(), entries, e);
        return replay_entry(*e, inputs);
      }
    return record(key, inputs, detached, body);
  }

  StepResults replay_entry(Entry& entry, std::span<const Tensor> inputs) {
    ++report.replays;
    report.why_not.clear();
    Tensors outputs = executor_of(*entry.segment).run(inputs, entry.implicit);
    StepResults results{.tensors = {}, .key = entry.returned, .like = entry.like};
    for (const Source& s : entry.results) results.tensors.push_back(give(s, outputs, inputs));
    for (const Slot& s : entry.slots)
      if (s.changed) *s.changed = give(s.after, outputs, inputs);
    return results;
  }

  StepResults record(const std::string& key, std::span<const Tensor> inputs, bool detached,
                     FunctionRef<StepResults()> body) {
    ++report.recordings;
    if (segments.size() >= kMaxSegments) {
      log::info("compile: {} has had {} graphs; it starts over", options.name, segments.size());
      entries.clear(), segments.clear();
    }
    StepResults results;
    StepRecorder recorder({.inputs = {inputs.begin(), inputs.end()}, .names = options.names},
                          [this](Graph graph, std::span<const Tensor> in) {
                            return run_segment(std::move(graph), in);
                          });
    results = body();
    recorder.finish();
    Entry entry{.key = key};
    std::string why = Lesson(recorder, inputs).learn(results.tensors, entry);
    if (why.empty()) why = host_made;
    if (why.empty() && !detached) why = "an argument requires gradients; pass it detached";
    if (why.empty()) {
      entry.segment = &segments.at(to_string(recorder.last_graph()));
      entry.returned = results.key;
      entry.like = results.like;
      for (const Tensor& t : inputs) entry.inputs.push_back(t.storage());
      remember(std::move(entry));
    } else if (why != report.why_not) {
      log::info("compile: {} runs its function at each call: {}", options.name, why);
    }
    report.why_not = why;
    return results;
  }

  // Beside what is known of other keys, and of this key with other flags.
  void remember(Entry entry) {
    entry.any.assign(entry.inputs.size(), false);
    for (auto e = entries.begin(); e != entries.end();) {
      if (e->key != entry.key || e->flags != entry.flags) {
        ++e;
        continue;
      }
      if (agree(*e, entry)) {
        entry.confirmed = true;
        for (size_t i = 0; i < entry.inputs.size(); ++i)
          entry.any[i] = e->any[i] || e->inputs[i] != entry.inputs[i];
      }
      e = entries.erase(e);
    }
    entries.push_front(std::move(entry));
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

StepResults StepCompiler::call(std::span<const Tensor> inputs, std::string_view key,
                               FunctionRef<StepResults()> body) {
  return impl_->call(inputs, key, body);
}
const CompileReport& StepCompiler::report() const { return impl_->report; }
std::string StepCompiler::graph_report() const {
  const auto& entries = impl_->entries;
  bool ran = !entries.empty() && entries.front().segment->executor;
  return ran ? compiler::report(*entries.front().segment->executor) : "";
}

}  // namespace tessera::compiler
