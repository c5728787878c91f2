// Folds constants. A value is uniform when all its elements are one known number: `full`, views of
// it, and pointwise ops on uniform values, which the eager kernels evaluate here so that folding
// changes no bit. Only identities that change no bit are applied: x - 0 and x + -0 are x, but x + 0
// is not for floats, since -0 + 0 is 0.
#include <cmath>
#include <optional>

#include "compile/ir/node_writer.h"
#include "compile/ir/rewrite.h"
#include "compile/passes/closed_set.h"
#include "compile/passes/passes.h"
#include "core/dispatch/target.h"
#include "core/ops/create.h"
#include "core/ops/create_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::compiler {
namespace {

using Uniform = std::optional<Scalar>;

Scalar number_in(const Tensor& t) {
  if (t.dtype() == kBool) return t.item<bool>();
  if (is_floating(t.dtype())) return t.item<double>();
  return t.item<int64_t>();
}

class Folder {
 public:
  explicit Folder(Graph& g) : g_(g), rewrite_(g), uniform_(g.values.size()), uses_(g) {
    memory_ = memory_uses(g);
  }

  void run() {
    for (size_t k = 0; k < g_.nodes.size(); ++k) {
      Node& n = g_.nodes[k];
      for (ValueId& id : n.in) id = rewrite_.now(id);
      if (!n.into.empty()) continue;
      skip_exact_cast(n, int32_t(k));
      if (replace_by_operand(n, int32_t(k)))
        n.prim = {};
      else
        fold(n);
    }
    rewrite_.apply();
  }

 private:
  const Uniform& uniform(ValueId id) const { return uniform_[size_t(id)]; }
  bool constant_memory(ValueId id) const {
    return g_[id].buffer != kNoBuffer && memory_[size_t(g_[id].buffer)].writes.empty();
  }

  void fold(Node& n) {
    if (n.out.size() != 1 || !constant_memory(n.out[0])) return;
    Uniform& result = uniform_[size_t(n.out[0])];
    if (n.prim->name() == "full") {
      result = attributes_of<FullAttributes>(*n.prim).value;
      return;
    }
    if (n.in.empty()) return;
    if (is_transparent_view(*n.prim)) {
      result = uniform(n.in[0]);
      return;
    }
    if (!is_elementwise(*n.prim) || may_trap(*n.prim, g_[n.in[0]].meta.dtype)) return;
    const Meta& to = g_[n.out[0]].meta;
    if (!is_contiguous(to.shape, to.strides)) return;
    Tensors in;
    for (ValueId id : n.in) {
      if (!uniform(id)) return;
      in.push_back(scalar_tensor(*uniform(id), g_[id].meta.dtype));
    }
    EagerScope eager;
    result = number_in(eager_backend().run(n.prim, in)[0]);
    n.prim = prim_of([&] { return full(to.shape, *result, {to.dtype, to.device}); });
    n.in = {}, n.role = Role::kConstant;
  }

  // Replaces a node by the value it was made from: the operand of an identity, or the source of a
  // pair of casts.
  bool replace_by_operand(const Node& n, int32_t at) {
    if (n.out.size() != 1) return false;
    if (n.prim->name() == "cast" && g_[n.in[0]].meta.dtype == g_[n.out[0]].meta.dtype)
      return rewrite_.try_alias(n.out[0], n.in[0], at);
    if (n.in.size() != 2) return false;
    for (size_t other : {size_t(1), size_t(0)})
      if (uniform(n.in[other]) && is_neutral(n, other) &&
          rewrite_.try_alias(n.out[0], n.in[1 - other], at))
        return true;
    return false;
  }

  bool is_neutral(const Node& n, size_t operand) const {
    const Scalar& s = *uniform(n.in[operand]);
    std::string_view op = n.prim->name();
    bool right = operand == 1, real = is_floating(g_[n.in[operand]].meta.dtype);
    double v = s.real();
    if (op == "mul") return v == 1;
    if (op == "div") return right && v == 1;
    if (op == "sub") return right && v == 0 && !std::signbit(v);
    if (op == "add") return v == 0 && (!real || std::signbit(v));
    return false;
  }

  // In cast(cast(x)), lets the outer cast read x where the inner one loses nothing.
  void skip_exact_cast(Node& n, int32_t at) {
    if (n.prim->name() != "cast") return;
    int32_t m = uses_.producer[size_t(n.in[0])];
    if (m == kNoNode || !g_.nodes[size_t(m)].prim) return;
    const Node& inner = g_.nodes[size_t(m)];
    if (inner.prim->name() != "cast" || !inner.into.empty()) return;
    const Meta &from = g_[inner.in[0]].meta, &via = g_[inner.out[0]].meta;
    DType to = g_[n.out[0]].meta.dtype;
    bool widened = is_floating(from.dtype) && is_floating(via.dtype) && is_floating(to) &&
                   size_of(via.dtype) > size_of(from.dtype);
    ValueId buffer = g_[inner.in[0]].buffer;
    if (!widened || !(from.strides == via.strides) || buffer == kNoBuffer) return;
    for (int32_t w : memory_[size_t(buffer)].writes)
      if (w > m && w <= at) return;
    n.in[0] = inner.in[0];
  }

  Graph& g_;
  Rewrite rewrite_;
  std::vector<Uniform> uniform_;
  Uses uses_;
  std::vector<MemoryUse> memory_;
};

}  // namespace

void fold_constants(Graph& graph) { Folder(graph).run(); }

}  // namespace tessera::compiler
