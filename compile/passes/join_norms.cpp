// Makes one op of a convolution and the batch-norm behind it by running moments, with its residual
// and relu, on devices that have such a kernel (conv_norm): what is stored is then normalised, so
// that a pass over the result is saved. batch_norm() gives mul_add(conv, scale, shift) with
//   scale = 1 / sqrt(var + eps) weight, shift = -mean scale + bias,
// of which weight and bias may be missing. Invariant: only the place of roundings changes.
#include <algorithm>

#include "compile/ir/rewrite.h"
#include "compile/passes/passes.h"
#include "core/dispatch/kernel.h"
#include "core/ops/conv_norm.h"
#include "core/ops/create_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::compiler {
namespace {

class NormJoiner {
 public:
  explicit NormJoiner(Graph& g) : g_(g), uses_(g) {}

  void run() {
    bool any = false;
    for_each(g_, "conv", [&](int32_t k) { any = join(k) || any; });
    Rewrite(g_).apply();
    if (any) eliminate_dead_code(g_);  // scales and shifts
  }

 private:
  // A convolution and the nodes behind it, of which each is the only reader of the one before.
  struct Chain {
    std::vector<int32_t> nodes;
    int32_t first;  // node that reads an operand
    ValueId end;    // what the last node makes
    BatchNormAttributes norm = {};
    ValueId mean = kNoValue, var = kNoValue, weight = kNoValue, bias = kNoValue,
            residual = kNoValue;
  };

  const Meta& meta(ValueId id) const { return g_[id].meta; }
  /// The node that makes `id` where it is this op; else null.
  const Node* maker(ValueId id, std::string_view op) const {
    const int32_t k = compiler::maker(g_, uses_, id, op);
    return k != kNoNode ? &g_.nodes[size_t(k)] : nullptr;
  }
  /// maker() of an operand of the chain's norm.
  const Node* maker(ValueId id, std::string_view op, Chain& c) const {
    const Node* n = maker(id, op);
    if (n) c.first = std::min(c.first, uses_.producer[size_t(id)]);
    return n;
  }

  // The joined op takes the place of the last node, where the residual is there.
  bool join(int32_t k) {
    const Node& conv = g_.nodes[size_t(k)];
    const auto& attributes = attributes_of<ConvAttributes>(*conv.prim);
    const Meta y = meta(conv.out[0]);
    const PrimRef alone = conv_norm_op({attributes, {}});
    if (!is_floating(y.dtype) || y.dtype == kF64 ||
        !kernel_table().find(y.device.kind, alone->id()))
      return false;
    Chain c{.nodes = {k}, .first = k, .end = conv.out[0]}, good = c;
    while (absorb_next(c, y))
      if (c.mean != kNoValue && same_layout(meta(c.end), y)) good = c;
    if (good.mean == kNoValue) return false;
    Node joined = conv;
    joined.prim = conv_norm_op({attributes, good.norm});
    for (ValueId id : {good.mean, good.var, good.weight, good.bias, good.residual})
      if (id != kNoValue) joined.in.push_back(id);
    joined.out = {good.end};
    if (!operands_unchanged(g_, joined, good.first, good.nodes.back())) return false;
    for (int32_t n : good.nodes) g_.nodes[size_t(n)].prim = {};
    g_.nodes[size_t(good.nodes.back())] = std::move(joined);
    return true;
  }

  bool absorb_next(Chain& c, const Meta& y) const {
    const auto& readers = uses_.readers[size_t(c.end)];
    if (uses_.output[size_t(c.end)] || readers.size() != 1) return false;
    const Node& n = g_.nodes[size_t(readers[0])];
    if (!n.prim || !n.into.empty() || n.out.size() != 1 || meta(n.out[0]).shape != y.shape ||
        !absorb(c, n, y))
      return false;
    c.nodes.push_back(readers[0]);
    c.end = n.out[0];
    return true;
  }
  bool absorb(Chain& c, const Node& n, const Meta& y) const {
    const std::string_view op = n.prim->name();
    const bool normalised = c.mean != kNoValue;
    if (op == "cast") return meta(n.out[0]).dtype == y.dtype || meta(n.out[0]).dtype == kF32;
    if (op == "mul_add")
      return !normalised && n.in[0] == c.end && n.in[1] != c.end && is_norm(c, n.in[1], n.in[2], y);
    if (!normalised || c.norm.form.relu) return false;
    if (op == "relu") return c.norm.form.relu = true;
    if (op != "add" || c.residual != kNoValue) return false;
    ValueId other = n.in[n.in[0] == c.end ? 1 : 0];
    int32_t read = kNoNode;  // before the chain's end, where the residual is there in another dtype
    if (meta(other).dtype != y.dtype)
      if (const Node* cast = maker(other, "cast"))
        read = uses_.producer[size_t(other)], other = cast->in[0];
    if (other == c.end || !same_layout(meta(other), y)) return false;
    if (read != kNoNode) c.first = std::min(c.first, read);
    c.residual = other;
    return c.norm.form.residual = true;
  }

  // Whether these are a batch-norm's scale and shift beside y; they become the chain's.
  bool is_norm(Chain& c, ValueId scale, ValueId shift, const Meta& y) const {
    const Shape channels{y.shape[1]};
    const auto numbers = [&](ValueId id) {  // [C]; kNoValue: others
      const Node* view = maker(id, "reshape");
      const Shape& s = meta(id).shape;
      const bool beside = view && s.size() == y.shape.size() && s[1] == y.shape[1] &&
                          meta(view->in[0]).shape == channels;
      return beside ? view->in[0] : kNoValue;
    };
    const ValueId a = numbers(scale), b = numbers(shift);
    if (a == kNoValue || b == kNoValue) return false;
    const Node* root = maker(a, "rsqrt", c);
    if (const Node* weighted = root ? nullptr : maker(a, "mul", c)) {
      root = maker(weighted->in[0], "rsqrt", c);
      c.weight = weighted->in[1];
    }
    const Node* above = root ? maker(root->in[0], "add", c) : nullptr;
    const Node* eps = above ? maker(above->in[1], "full") : nullptr;
    const Node* moved = maker(b, "mul", c);
    if (const Node* added = moved ? nullptr : maker(b, "add", c)) {
      moved = maker(added->in[0], "mul", c);
      c.bias = added->in[1];
    }
    const Node* negative = moved && moved->in[1] == a ? maker(moved->in[0], "neg", c) : nullptr;
    if (!eps || !negative) return false;
    c.var = above->in[0], c.mean = negative->in[0];
    for (ValueId id : {c.mean, c.var, c.weight, c.bias})
      if (id != kNoValue && (meta(id).shape != channels || meta(id).dtype != kF32)) return false;
    c.norm.eps = attributes_of<FullAttributes>(*eps->prim).value.real();
    c.norm.form.weight = c.weight != kNoValue, c.norm.form.bias = c.bias != kNoValue;
    return true;
  }

  Graph& g_;
  Uses uses_;
};

}  // namespace

void join_norms(Graph& graph) {
  if (!graph.deterministic) NormJoiner(graph).run();
}

}  // namespace tessera::compiler
