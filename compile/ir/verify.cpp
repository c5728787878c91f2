#include "compile/ir/verify.h"

#include <fmt/format.h>

namespace tessera::compiler {
namespace {

class Verifier {
 public:
  explicit Verifier(const Graph& g)
      : g_(g), defined_(g.values.size()), epoch_(g.values.size()), buffer_epoch_(g.values.size()) {}

  void run() {
    for (ValueId id : g_.inputs) check_input(id, "input");
    for (const ImplicitInput& i : g_.implicit) check_implicit(i);
    for (ValueId id : g_.shapes) {
      define(id, "shape");
      if (g_[id].buffer != kNoBuffer) fail("shape %{} has memory", id);
    }
    for (node_ = 0; node_ < g_.nodes.size(); ++node_) check_node(g_.nodes[node_]);
    for (ValueId id : g_.outputs) check_read(id, "output");
  }

 private:
  template <class... A>
  [[noreturn]] void fail(fmt::format_string<A...> format, A&&... args) const {
    std::string what = fmt::format(format, std::forward<A>(args)...);
    if (node_ < g_.nodes.size())
      throw BugError(fmt::format("verify: node {}: {}, in {}", node_, what,
                                 printable() ? to_string(g_, g_.nodes[node_]) : "(unprintable)"));
    throw BugError(fmt::format("verify: {}", what));
  }
  // Whether the node at fault can be printed: its ids may be out of range.
  bool printable() const {
    for (ValueId id : g_.nodes[node_].out)
      if (!in_range(id)) return false;
    return true;
  }
  bool in_range(ValueId id) const { return id >= 0 && size_t(id) < g_.values.size(); }

  void define(ValueId id, const char* what) {
    if (!in_range(id)) fail("{} %{} is not one of {} values", what, id, g_.values.size());
    if (defined_[size_t(id)]) fail("{} %{} is defined already", what, id);
    defined_[size_t(id)] = true;
    ValueId buffer = g_[id].buffer;
    if (buffer == kNoBuffer) return;
    if (!in_range(buffer) || !defined_[size_t(buffer)])
      fail("{} %{} is in the memory of %{}, which is not defined", what, id, buffer);
    epoch_[size_t(id)] = buffer_epoch_[size_t(buffer)];
  }

  bool stale(ValueId id) const {
    ValueId buffer = g_[id].buffer;
    return buffer != kNoBuffer && epoch_[size_t(id)] != buffer_epoch_[size_t(buffer)];
  }
  void check_read(ValueId id, const char* what) const {
    if (!in_range(id) || !defined_[size_t(id)]) fail("{} %{} is not defined before", what, id);
    if (stale(id)) fail("{} %{} was overwritten before", what, id);
  }

  void check_input(ValueId id, const char* what) {
    define(id, what);
    if (g_[id].buffer != id) fail("{} %{} is in the memory of %{}", what, id, g_[id].buffer);
  }
  void check_implicit(const ImplicitInput& i) {
    check_input(i.id, "implicit input");
    const Value& v = g_[i.id];
    if (!i.tensor.defined() || !i.tensor.storage()) fail("implicit input %{} has no tensor", i.id);
    if (!same_layout(v, {i.tensor.meta(), i.tensor.offset()}))
      fail("implicit input %{} is {}, its tensor {}", i.id, type_text(v.meta), describe(i.tensor));
  }

  void check_node(const Node& n) {
    if (!n.prim) fail("there is no op");
    if (n.scope < 0 || size_t(n.scope) >= g_.scopes.size())
      fail("scope {} is not one of {}", n.scope, g_.scopes.size());
    if (int(n.phase) >= kNumPhases || int(n.role) >= kNumRoles) fail("phase or role is unknown");
    MetaPointers metas;
    for (ValueId id : n.in) {
      if (!in_range(id) || !defined_[size_t(id)]) fail("operand %{} is not defined before", id);
      metas.push_back(&g_[id].meta);
    }
    check_types(n, metas);  // only operands that fit can be asked for their loops
    for (size_t i = 0; i < n.in.size(); ++i)
      if ((stale(n.in[i]) || g_[n.in[i]].buffer == kNoBuffer) && !shape_only(n, metas, i))
        fail("operand %{} {}", n.in[i],
             stale(n.in[i]) ? "was overwritten before" : "has no values, only a shape");
    if (!n.into.empty())
      define_effect(n);
    else if (n.prim->is_view())
      define_views(n);
    else
      for (ValueId id : n.out) define_fresh(id);
  }

  using MetaPointers = SmallVector<const Meta*, 8>;
  // True if the op reads only the shape of operand i, not its values.
  static bool shape_only(const Node& n, const MetaPointers& metas, size_t i) {
    return i < 32 && (n.prim->axes(metas).shape_only >> i & 1);
  }

  void check_types(const Node& n, const MetaPointers& metas) const {
    Metas inferred;
    try {
      inferred = n.prim->infer(metas);
    } catch (const Error& e) {
      fail("operands do not fit ({})", e.what());
    }
    if (inferred.size() != n.out.size())
      fail("{} results, infer gives {}", n.out.size(), inferred.size());
    for (size_t i = 0; i < n.out.size(); ++i) {
      if (!in_range(n.out[i]))
        fail("result %{} is not one of {} values", n.out[i], g_.values.size());
      const Meta& m = g_[n.out[i]].meta;
      if (m.shape != inferred[i].shape || m.dtype != inferred[i].dtype ||
          m.device != inferred[i].device)
        fail("result %{} is {}, infer gives {}", n.out[i], type_text(m), type_text(inferred[i]));
    }
  }

  void define_fresh(ValueId id) {
    define(id, "result");
    if (g_[id].buffer != id)
      fail("result %{} of an op that makes its memory is in that of %{}", id, g_[id].buffer);
  }

  // Views only change metadata, so running one on tensors without memory gives its layout.
  void define_views(const Node& n) {
    Tensors shapes;
    for (ValueId id : n.in) shapes.push_back(Tensor(g_[id].meta, nullptr, g_[id].offset));
    Tensors views = n.prim->view(shapes);
    for (size_t i = 0; i < n.out.size(); ++i) {
      const Value& v = g_[n.out[i]];
      if (v.buffer != g_[n.in[0]].buffer)
        fail("view %{} is in the memory of %{}, its operand in that of %{}", n.out[i], v.buffer,
             g_[n.in[0]].buffer);
      if (!same_layout(v, {views[i].meta(), views[i].offset()}))
        fail("view %{} has strides {} and offset {}, the op gives {} and {}", n.out[i],
             tessera::to_string(v.meta.strides), v.offset, tessera::to_string(views[i].strides()),
             views[i].offset());
      define(n.out[i], "result");
    }
  }

  void define_effect(const Node& n) {
    if (n.into.size() != n.out.size())
      fail("{} results go into {} places", n.out.size(), n.into.size());
    for (size_t i = 0; i < n.out.size(); ++i) {
      if (n.into[i] == kNoValue) continue;
      check_read(n.into[i], "destination");
      const Value &to = g_[n.into[i]], &v = g_[n.out[i]];
      if (to.buffer == kNoBuffer) fail("destination %{} has no values, only a shape", n.into[i]);
      if (v.buffer != to.buffer || !same_layout(v, to))
        fail("result %{} is not where its destination %{} is", n.out[i], n.into[i]);
    }
    for (ValueId id : n.into)
      if (id != kNoValue) ++buffer_epoch_[size_t(g_[id].buffer)];
    for (size_t i = 0; i < n.out.size(); ++i)
      n.into[i] == kNoValue ? define_fresh(n.out[i]) : define(n.out[i], "result");
  }

  static bool same_layout(const Value& a, const Value& b) {
    return a.offset == b.offset && a.meta.dtype == b.meta.dtype && a.meta.shape == b.meta.shape &&
           a.meta.strides == b.meta.strides && a.meta.device == b.meta.device;
  }
  static std::string type_text(const Meta& m) {
    return fmt::format("{}{}", name_of(m.dtype), tessera::to_string(m.shape));
  }

  const Graph& g_;
  size_t node_ = size_t(-1);  // none: inputs; past the end: outputs
  std::vector<bool> defined_;
  std::vector<uint32_t> epoch_;         // by value: how often its memory was written before
  std::vector<uint32_t> buffer_epoch_;  // by buffer: how often it was written so far
};

}  // namespace

void verify(const Graph& graph) { Verifier(graph).run(); }

}  // namespace tessera::compiler
