// Removes views and copies that change nothing. A view with the layout of its source is that
// source, however many views lie between; a reshape of a reshape becomes one, and so does a permute
// of a permute; expand_like becomes expand, which reads no second operand; a copy is dropped where
// nothing can tell its memory from the source's.
#include "compile/ir/node_writer.h"
#include "compile/ir/rewrite.h"
#include "compile/passes/passes.h"
#include "core/dispatch/target.h"
#include "core/ops/views.h"

namespace tessera::compiler {
namespace {

bool same_place(const Value& a, const Value& b) {
  return a.offset == b.offset && same_layout(a.meta, b.meta);
}

class Cleaner {
 public:
  explicit Cleaner(Graph& g) : g_(g), rewrite_(g), uses_(g) {}

  void run() {
    for (size_t k = 0; k < g_.nodes.size(); ++k) {
      Node& n = g_.nodes[k];
      for (ValueId& id : n.in) id = rewrite_.now(id);
      if (!n.into.empty()) continue;
      if (n.prim->is_view()) {
        if (clean_view(n)) n.prim = {};
      } else if (n.prim->name() == "copy") {
        if (rewrite_.try_alias(n.out[0], n.in[0], int32_t(k))) n.prim = {};
      }
    }
    rewrite_.apply();
  }

 private:
  // The node that made `id`, if it is a view.
  const Node* view_behind(ValueId id) const {
    int32_t m = size_t(id) < uses_.producer.size() ? uses_.producer[size_t(id)] : kNoNode;
    if (m == kNoNode) return nullptr;
    const Node& n = g_.nodes[size_t(m)];
    return n.prim && n.prim->is_view() && n.into.empty() ? &n : nullptr;
  }

  bool clean_view(Node& n) {
    if (n.prim->name() == "expand_like") as_expand(n);
    size_t left = 0;
    for (ValueId id : n.out)
      if (!replace_by_source(id, n.in[0])) ++left;
    if (left == 0) return true;
    if (n.out.size() == 1) shorten(n);
    return false;
  }

  // All values along a chain of views see the same state of the memory, so any of them may replace
  // another.
  bool replace_by_source(ValueId id, ValueId source) {
    for (;;) {
      if (same_place(g_[id], g_[source])) {
        rewrite_.replace(id, source);
        return true;
      }
      const Node* made = view_behind(source);
      if (!made) return false;
      source = rewrite_.now(made->in[0]);
    }
  }

  void as_expand(Node& n) {
    const Meta &from = g_[n.in[0]].meta, &to = g_[n.out[0]].meta;
    if (from.shape == to.shape) return;
    n.in = {ValueId(n.in[0])};
    n.prim = prim_of(from, [&](const Tensor& t) { return expand(t, to.shape); });
  }

  // Turns view(view(x)) into one view of the same kind, where that gives the same layout.
  void shorten(Node& n) {
    if (!n.prim->traits().shows_all) return;
    std::string_view op = n.prim->name();
    for (;;) {
      const Node* inner = view_behind(n.in[0]);
      if (!inner || inner->prim->name() != op) return;
      ValueId source = rewrite_.now(inner->in[0]);
      PrimRef one = direct(op, g_[source], g_[n.out[0]]);
      if (!one) return;
      n.prim = one, n.in[0] = source;
    }
  }

  // Returns the view `op` of `from` that has the layout of `to`; null where there is none.
  static PrimRef direct(std::string_view op, const Value& from, const Value& to) {
    PrimRef prim;
    if (op == "permute") {
      Dims order;
      for (int d = 0; d < to.meta.shape.size(); ++d) {
        int at = 0, n = from.meta.shape.size();
        auto taken = [&](int i) { return std::ranges::count(order, int64_t(i)) > 0; };
        while (at < n && (taken(at) || from.meta.shape[at] != to.meta.shape[d] ||
                          from.meta.strides[at] != to.meta.strides[d]))
          ++at;
        if (at == n) return {};
        order.push_back(at);
      }
      prim = prim_of(from.meta, [&](const Tensor& t) { return permute(t, order); });
    } else if (op == "expand") {
      prim = prim_of(from.meta, [&](const Tensor& t) { return expand(t, to.meta.shape); });
    } else {
      Tensor source(from.meta, nullptr, from.offset);
      EagerScope none;
      std::vector<Node> nodes;
      Graph scratch;
      scratch.values.push_back({from.meta, from.offset, 0});
      NodeWriter writer(scratch, nodes, {});
      reshape(writer.tensor(0), to.meta.shape);
      if (nodes.size() != 1) return {};  // the op would copy
      prim = nodes[0].prim;
    }
    Tensors source{Tensor(from.meta, nullptr, from.offset)};
    Tensor made = prim->view(source)[0];
    return same_place({made.meta(), made.offset()}, to) ? prim : PrimRef();
  }

  Graph& g_;
  Rewrite rewrite_;
  Uses uses_;
};

}  // namespace

void clean_views(Graph& graph) { Cleaner(graph).run(); }

}  // namespace tessera::compiler
