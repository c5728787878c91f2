#include "compile/record/trace.h"

#include "collectives/ops.h"
#include "compile/ir/as_strided.h"
#include "compile/ir/verify.h"
#include "core/autograd/graph.h"
#include "core/base/deterministic.h"
#include "core/dispatch/context.h"
#include "core/nn/scope.h"

namespace tessera::compiler {
namespace {

bool same_layout(const Meta& a, int64_t offset_a, const Meta& b, int64_t offset_b) {
  return offset_a == offset_b && a.dtype == b.dtype && a.shape == b.shape && a.strides == b.strides;
}

bool contains(const Range& outer, const Range& inner) {
  if (inner.size == 0) return true;
  return outer.begin <= inner.begin && inner.begin + inner.size <= outer.begin + outer.size;
}

Role role_of(const Primitive& prim, Inputs in) {
  if (prim.is_view()) return Role::kView;
  if (is_collective(prim)) return Role::kCollective;
  return in.empty() ? Role::kConstant : Role::kCompute;
}

}  // namespace

TraceBackend::TraceBackend(const TraceOptions& options, const char* who) : who_(who) {
  begin_graph(options);
}

void TraceBackend::begin_graph(const TraceOptions& options) {
  graph_ = {};
  graph_.deterministic = deterministic_algorithms();
  memory_.clear();
  scopes_ = {{"", 0}};
  scope_of_node_.clear();
  for (const NamedTensor& t : options.names)
    if (t.tensor.defined() && t.tensor.storage()) names_.emplace(t.tensor.storage().get(), t.name);
  for (const Tensor& t : options.inputs) {
    TESSERA_CHECK(t.defined() && t.storage(), "{}: input {} has no values", who_,
                  graph_.inputs.size());
    ValueId id = add_value(t, kNoBuffer);
    graph_.values[size_t(id)].buffer = id;
    graph_.inputs.push_back(id);
    Memory& m = remember(t, id);
    if (++m.inputs == 1) m.input = t;
  }
}

// ---- operands

ValueId TraceBackend::read(const Tensor& t) {
  if (!t.storage()) return shape_of(t.meta());
  auto it = memory_.find(t.storage().get());
  if (it == memory_.end()) return adopt(t);
  if (meets(t)) it->second.version = t.storage()->version();
  check_unchanged(it->second, t);
  for (const Layout& l : it->second.layouts)
    if (same_layout(l.meta, l.offset, t.meta(), t.offset())) return l.id;
  return reach(it->second, t);
}

// Adds a layout of known memory that no recorded op made: the view was made before the trace, or
// before a write.
ValueId TraceBackend::reach(Memory& memory, const Tensor& t) {
  const Layout base = memory.layouts[0];
  const Tensor& input = memory.input;
  TESSERA_CHECK(
      memory.inputs == 0 || (memory.inputs == 1 && contains(extent_of(input.meta(), input.offset()),
                                                            extent_of(t.meta(), t.offset()))),
      "{}: {} shares memory with an input, {}, but is not made from it; pass it as an input "
      "of its own",
      who_, describe(t), describe(input));
  TESSERA_CHECK(t.dtype() == base.meta.dtype, "{}: {} shares memory with a value of {}", who_,
                describe(t), name_of(base.meta.dtype));
  ValueId id = add_value(t, graph_[base.id].buffer);
  Node node{.prim = as_strided(t.shape(), t.strides(), t.offset() - base.offset),
            .in = {base.id},
            .out = {id},
            .phase = context().phase,
            .role = Role::kView,
            .scope = scope_here()};
  graph_.nodes.push_back(std::move(node));
  memory.layouts.push_back({t.meta(), t.offset(), id});
  return id;
}

ValueId TraceBackend::adopt(const Tensor& t) {
  ValueId id = add_value(t, kNoBuffer);
  graph_.values[size_t(id)].buffer = id;
  auto name = names_.find(t.storage().get());
  graph_.implicit.push_back({id, t.detach(), name == names_.end() ? "" : name->second});
  remember(t, id);
  meets(t);
  return id;
}

ValueId TraceBackend::shape_of(const Meta& meta) {
  for (ValueId id : graph_.shapes)
    if (same_layout(graph_[id].meta, 0, meta, 0)) return id;
  graph_.values.push_back({meta, 0, kNoBuffer});
  graph_.shapes.push_back(ValueId(graph_.values.size() - 1));
  return graph_.shapes.back();
}

ValueId TraceBackend::add_value(const Tensor& t, ValueId buffer) {
  graph_.values.push_back({t.meta(), t.offset(), buffer});
  return ValueId(graph_.values.size() - 1);
}

TraceBackend::Memory& TraceBackend::remember(const Tensor& t, ValueId id) {
  Memory& m = memory_[t.storage().get()];
  if (!m.storage) m.storage = t.storage(), m.version = t.storage()->version();
  m.layouts.push_back({t.meta(), t.offset(), id});
  return m;
}

void TraceBackend::check_unchanged(const Memory& memory, const Tensor& t) const {
  TESSERA_CHECK(memory.version == memory.storage->version(),
                "{}: the memory of {} (%{}) was written by something that is not an op; write "
                "with assign_ or a collective of collectives/ops.h",
                who_, describe(t), memory.layouts[0].id);
}

// ---- recording

Node TraceBackend::begin(const PrimRef& prim, Inputs in) {
  Node node{.prim = prim, .phase = context().phase, .role = role_of(*prim, in)};
  for (const Tensor& t : in) node.in.push_back(read(t));
  node.scope = scope_here();
  return node;
}

// Ops of a derivative belong to the module of the op they differentiate, which the number n of the
// autograd node being visited identifies: the op is the first one recorded after its node was made
// (key 2n). The node of a custom function is made after its ops, so there it is the last op before
// the node (the next smaller key).
int32_t TraceBackend::scope_here() {
  int32_t scope = 0;
  if (uint64_t visited = context().grad_node) {
    auto it = scope_of_node_.upper_bound(2 * visited);
    if (it != scope_of_node_.begin()) scope = std::prev(it)->second;
  } else {
    std::string path = nn::Scope::current();
    auto [it, fresh] = scopes_.try_emplace(path, int32_t(graph_.scopes.size()));
    if (fresh) graph_.scopes.push_back(path);
    scope = it->second;
  }
  uint64_t key = 2 * GradNode::last_number();
  if (!scope_of_node_.try_emplace(key, scope).second) scope_of_node_[key + 1] = scope;
  return scope;
}

Tensors TraceBackend::run(const PrimRef& prim, Inputs in) {
  Node node = begin(prim, in);
  Tensors out = execute(prim, in);
  for (const Tensor& t : out) {
    bool known = memory_.contains(t.storage().get());
    TESSERA_ASSERT(known == prim->is_view(),
                   "{}: {} returned {} memory; views share that of operand 0, other ops make "
                   "their own",
                   who_, prim->name(), known ? "known" : "unknown");
    ValueId id = add_value(t, prim->is_view() ? graph_[node.in[0]].buffer : kNoBuffer);
    if (!prim->is_view()) graph_.values[size_t(id)].buffer = id;
    remember(t, id);
    node.out.push_back(id);
  }
  graph_.nodes.push_back(std::move(node));
  if (memory_.size() >= forget_at_) forget_unreachable();
  return out;
}

void TraceBackend::assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) {
  Node node = begin(prim, in);
  for (const Tensor& d : dst) {
    node.into.push_back(read(d));
    TESSERA_CHECK(memory_.at(d.storage().get()).inputs <= 1,
                  "{}: {} is written, but shares memory with another input; clone one of them",
                  who_, describe(d));
  }
  write(dst, prim, in);
  for (size_t i = 0; i < dst.size(); ++i)
    node.out.push_back(add_value(dst[i], graph_[node.into[i]].buffer));
  overwritten(dst, node.out);
  graph_.nodes.push_back(std::move(node));
}

// The graph has the op itself, not the ops of a decomposition that run inside it.
Tensors TraceBackend::execute(const PrimRef& prim, Inputs in) {
  EagerScope eager;
  return eager_backend().run(prim, in);
}

void TraceBackend::write(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) {
  EagerScope eager;
  eager_backend().assign(dst, prim, in);
}

// From here on, only what was written is known of the memory of `dst`.
void TraceBackend::overwritten(std::span<const Tensor> dst, const ValueIds& out) {
  for (const Tensor& d : dst) {
    Memory& m = memory_.at(d.storage().get());
    m.layouts.clear();
    m.version = m.storage->version();
  }
  for (size_t i = 0; i < dst.size(); ++i)
    memory_.at(dst[i].storage().get()).layouts.push_back({dst[i].meta(), dst[i].offset(), out[i]});
}

void TraceBackend::notice(const HostEvent& event) {
  if (const auto* leaves = std::get_if<events::LeavesOps>(&event))
    throw UserError(
        fmt::format("{}: {} while a step is recorded, which only ops are part of; use those of "
                    "collectives/ops.h, or do it outside of the step",
                    who_, leaves->what()));
}

// Forgets memory that only this table holds: no op can use it again. A recipe that goes with it may
// have held other memory.
void TraceBackend::forget_unreachable() {
  const auto held_here = [](const auto& m) { return m.second.storage->use_count() == 1; };
  while (std::erase_if(memory_, held_here) > 0) continue;
  forget_at_ = std::max<size_t>(256, 2 * memory_.size());
}

Graph TraceBackend::finish(std::span<const Tensor> tensors) {
  for (const Tensor& t : tensors) graph_.outputs.push_back(read(t));
  memory_.clear();
  return std::move(graph_);
}

// ---- the recording of a thread

Trace::Trace(TraceOptions options) : options_(std::move(options)), backend_(options_) {
  TESSERA_CHECK(!context().backend,
                "trace: this thread runs another backend already; traces do not nest");
  recording_.emplace(backend_.target());
}
Trace::~Trace() = default;

Graph Trace::finish(std::span<const Tensor> tensors) {
  TESSERA_CHECK(recording_, "trace: finished twice");
  Graph graph = backend_.finish(tensors);
  recording_.reset();
  verify(graph);
  return graph;
}

}  // namespace tessera::compiler
