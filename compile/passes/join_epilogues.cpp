// Makes one op of a product and what is computed of its operands or result beside it, on devices
// whose products do that for nothing:
// - the tanh form of GELU behind a product and its bias, where products alone read it (what fuses
//   with it would read it from memory);
// - in backward the derivative of that GELU, and the gradient of the bias, which is a sum of rows;
// - the gradient of a bias beside that of its weight, where the sum would be a kernel of its own;
// - the addition of a weight's gradient to one that is there already, and its cast to f32. Where
//   the weight is a table too, whose rows were looked up, those are added after that.
// GELU is joined in 16 bits alone: how many digits the library's tanh has in f32 is not documented.
// Invariant: only the place of a rounding changes, and the order of sums.
#include <algorithm>

#include "compile/ir/rewrite.h"
#include "compile/passes/closed_set.h"
#include "compile/passes/passes.h"
#include "core/ops/contract_epilogues.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/device_runtime.h"

namespace tessera::compiler {
namespace {

constexpr int64_t kAuxMultiple = 8;  // rows of what GELU keeps are a multiple of so many elements

class EpilogueJoiner {
 public:
  explicit EpilogueJoiner(Graph& g) : g_(g), uses_(g) {}

  void run() {
    for (int32_t k = 0; k < int32_t(g_.nodes.size()); ++k) {
      if (is(g_.nodes[size_t(k)], "gelu_tanh")) join_gelu(k);
      if (is(g_.nodes[size_t(k)], "gelu_tanh_grad")) join_gelu_grad(k);
    }
    // The last first: what a product reads does not fuse any more.
    for (int32_t k = int32_t(g_.nodes.size()); k-- > 0;)
      if (const Node& n = g_.nodes[size_t(k)]; n.prim && n.prim->name() == "add") join_add(k);
    for_each(g_, "sum", [&](int32_t k) { join_sum(k); });
    for_each(g_, "cast", [&](int32_t k) { join_cast(k); });
    Rewrite(g_).apply();
  }

 private:
  const Meta& meta(ValueId id) const { return g_[id].meta; }
  const std::vector<int32_t>& readers(ValueId id) const { return uses_.readers[size_t(id)]; }
  /// The node that makes `id` where it is this op on a device with epilogues; else null.
  Node* maker(ValueId id, std::string_view op) {
    const int32_t k = compiler::maker(g_, uses_, id, op);
    const bool joins = k != kNoNode && runtime_of(meta(id).device).has_epilogues();
    return joins ? &g_.nodes[size_t(k)] : nullptr;
  }
  bool may_be_gelu(ValueId x) const {
    const Meta& m = meta(x);
    return is_floating(m.dtype) && size_of(m.dtype) == 2 && is_contiguous(m.shape, m.strides) &&
           m.shape.back() % kAuxMultiple == 0;
  }
  static bool fuses(const Node& n) {
    return is_elementwise(*n.prim) || as_reduction(*n.prim) || n.prim->name() == "copy";
  }

  // The product keeps its place: the result of GELU is then there earlier.
  void join_gelu(int32_t k) {
    Node& gelu = g_.nodes[size_t(k)];
    Node* product = maker(gelu.in[0], "contract_bias");
    if (!product || !may_be_gelu(gelu.in[0])) return;
    const auto& c = attributes_of<ContractAttributes>(*product->prim);
    const auto is_product = [&](int32_t r) {
      return is(g_.nodes[size_t(r)], "contract") || is(g_.nodes[size_t(r)], "contract_bias");
    };
    if (!may_join_gelu(c) || !same_layout(meta(gelu.in[0]), meta(gelu.out[0])) ||
        !std::ranges::all_of(readers(gelu.out[0]), is_product))
      return;
    product->prim = contract_gelu_op(c);
    product->out = {ValueId(gelu.out[0]), ValueId(gelu.in[0])};
    gelu.prim = {};
  }

  // The product moves to the place of the derivative, where x was made long ago.
  void join_gelu_grad(int32_t k) {
    Node& grad = g_.nodes[size_t(k)];
    const ValueId product = grad.in[0], x = grad.in[1], g = grad.out[0];
    const int32_t at = uses_.producer[size_t(product)];
    Node* from = maker(product, "contract");
    if (!from || !may_be_gelu(x) || !same_layout(meta(x), meta(product)) ||
        !same_layout(meta(x), meta(g)) || uses_.output[size_t(product)] ||
        readers(product).size() != 1 || !operands_unchanged(g_, *from, at, k))
      return;
    const auto& c = attributes_of<ContractAttributes>(*from->prim);
    const uint32_t rows = (1u << (meta(g).shape.size() - 1)) - 1;
    const auto sum = std::ranges::find_if(
        readers(g), [&](int32_t r) { return sums(g_.nodes[size_t(r)], rows); });
    if (!may_join_gelu(c) || sum == readers(g).end()) return;
    Node& sums = g_.nodes[size_t(*sum)];
    grad.prim = contract_gelu_grad_op(c);
    grad.in = {ValueId(from->in[0]), ValueId(from->in[1]), x};
    grad.out = {g, ValueId(sums.out[0])};
    from->prim = sums.prim = {};
  }

  static bool sums(const Node& n, uint32_t mask) {
    if (!is(n, "sum")) return false;
    const auto& a = attributes_of<ReduceAttributes>(*n.prim);
    return a.keepdim && a.mask == mask;
  }

  bool is_read_once(ValueId id) const {
    return readers(id).size() == 1 && !uses_.output[size_t(id)];
  }
  /// The node of backward that makes `id`, a product which may become a wide one and has no other
  /// reader; kNoNode where there is none.
  int32_t gradient_at(ValueId id) {
    const Node* n = maker(id, "contract");
    const bool good = n && n->phase == Phase::kBackward && is_read_once(id) &&
                      is_floating(meta(id).dtype) && meta(id).dtype != kF64 &&
                      may_be_wide(attributes_of<ContractAttributes>(*n->prim));
    return good ? uses_.producer[size_t(id)] : kNoNode;
  }
  /// The 16-bit value of which `id` is the cast to f32, where that is read once; else `id`.
  ValueId before_cast(ValueId id) const {
    const int32_t k = compiler::maker(g_, uses_, id, "cast");
    if (k == kNoNode || !is_read_once(id)) return id;
    const ValueId from = g_.nodes[size_t(k)].in[0];
    return meta(id).dtype == kF32 && size_of(meta(from).dtype) == 2 ? from : id;
  }

  // The sum takes the place of the product, before which its other term is there; but one that goes
  // into memory (a bucket of gradients) stays, and the product moves.
  void join_add(int32_t k) {
    for (size_t i : {size_t(0), size_t(1)}) {
      const ValueId gradient = g_.nodes[size_t(k)].in[i], term = g_.nodes[size_t(k)].in[1 - i];
      if (join_add(k, gradient, term) || join_tied(k, gradient, term)) return;
    }
  }
  // The gradient of a tied table, a product to which rows were added (compile/passes/
  // accumulate.cpp), is added to `term`: the product adds instead, and then the rows are added.
  bool join_tied(int32_t k, ValueId gradient, ValueId term) {
    const int32_t at = uses_.producer[size_t(gradient)];
    Node& add = g_.nodes[size_t(k)];
    if (!maker(gradient, "add_embedding_grad") || !is_read_once(gradient) || !add.into.empty() ||
        !same_layout(meta(add.out[0]), meta(gradient)))
      return false;
    Node rows = g_.nodes[size_t(at)];
    const ValueId dense = rows.in[0], sum = add.out[0];
    const int32_t product = adder(dense, term);
    if (product == kNoNode || !is_read_once(dense) || !same_layout(meta(dense), meta(term)) ||
        uses_.producer[size_t(term)] >= product || !operands_unchanged(g_, rows, at, k))
      return false;
    Node joined = adding(product, dense, term);
    joined.out = {dense};
    g_.nodes[size_t(product)] = std::move(joined);
    g_.nodes[size_t(at)].prim = {};
    rows.out = {sum};
    add = std::move(rows);
    return true;
  }
  bool join_add(int32_t k, ValueId gradient, ValueId term) {
    Node& add = g_.nodes[size_t(k)];
    const bool effect = !add.into.empty();
    const int32_t at = adder(gradient, term);
    if (at == kNoNode || !same_layout(meta(add.out[0]), meta(term))) return false;
    if (effect ? !operands_unchanged(g_, g_.nodes[size_t(at)], at, k)
               : uses_.producer[size_t(term)] >= at || is_read_by_what_fuses(add.out[0], k))
      return false;
    const Node from = adding(at, gradient, term);
    Node joined = effect ? add : from;
    joined.prim = from.prim, joined.in = from.in, joined.out = add.out;
    add.prim = g_.nodes[size_t(at)].prim = {};
    g_.nodes[size_t(effect ? k : at)] = std::move(joined);
    return true;
  }
  /// The product behind `gradient`, or behind the cast that makes it, if it may add `term`; kNoNode
  /// where there is none.
  int32_t adder(ValueId gradient, ValueId term) {
    const ValueId product = before_cast(gradient);
    const Meta& t = meta(term);
    const bool fits = term != gradient && t.device == meta(product).device &&
                      t.dtype == meta(gradient).dtype && t.shape == meta(product).shape &&
                      is_contiguous(t.shape, t.strides) && g_[term].buffer != kNoBuffer;
    return fits ? gradient_at(product) : kNoNode;
  }
  /// The node that is the product at `at` and adds `term`; a cast behind it is left out.
  Node adding(int32_t at, ValueId gradient, ValueId term) {
    const Node& from = g_.nodes[size_t(at)];
    Node joined = from;
    joined.prim = contract_add_op(attributes_of<ContractAttributes>(*from.prim));
    joined.in = {ValueId(from.in[0]), ValueId(from.in[1]), term};
    if (from.out[0] != gradient) g_.nodes[size_t(uses_.producer[size_t(gradient)])].prim = {};
    return joined;
  }

  // A cast that is alone is left out: the product is in f32 at once.
  void join_cast(int32_t k) {
    Node& cast = g_.nodes[size_t(k)];
    const int32_t at = gradient_at(cast.in[0]);
    const Meta &from = meta(cast.in[0]), &to = meta(cast.out[0]);
    if (at == kNoNode || size_of(from.dtype) != 2 || to.dtype != kF32 ||
        from.strides != to.strides || is_read_by_what_fuses(cast.out[0], k))
      return;
    Node& product = g_.nodes[size_t(at)];
    product.prim = contract_wide_op(attributes_of<ContractAttributes>(*product.prim));
    product.out = {ValueId(cast.out[0])};
    cast.prim = {};
  }

  // The product moves to the place of the sum, if that is earlier.
  void join_sum(int32_t k) {
    const ValueId g = g_.nodes[size_t(k)].in[0];
    if (!is_floating(meta(g).dtype) || meta(g).dtype == kF64 || is_near_what_fuses(g, k)) return;
    for (int32_t r : readers(g))
      for (bool of_b : {false, true})
        if (Node& n = g_.nodes[size_t(r)]; is(n, "contract") && n.in[of_b] == g)
          if (join_sum(k, r, of_b)) return;
  }
  bool join_sum(int32_t k, int32_t at, bool of_b) {
    Node &sum = g_.nodes[size_t(k)], &product = g_.nodes[size_t(at)];
    const ContractSumsAttributes c{attributes_of<ContractAttributes>(*product.prim), of_b};
    uint32_t mask = 0;
    for (size_t d = 0; d < c.summed().size(); ++d)
      mask |= uint32_t(c.out.find(c.summed()[d]) == std::string::npos) << d;
    const int32_t place = std::min(k, at);
    if (!may_sum_operand(c) || !sums(sum, mask) || !maker(product.out[0], "contract") ||
        uses_.producer[size_t(product.in[!of_b])] >= place)
      return false;
    Node joined = product;
    joined.prim = contract_sums_op(c);
    joined.out.push_back(sum.out[0]);
    sum.prim = product.prim = {};
    g_.nodes[size_t(place)] = std::move(joined);
    return true;
  }

  /// Whether a node that fuses and is not `k` reads `id`, or a view of it.
  bool is_read_by_what_fuses(ValueId id, int32_t k) const {
    return std::ranges::any_of(readers(id), [&](int32_t r) {
      const Node& n = g_.nodes[size_t(r)];
      if (!n.prim || r == k) return false;
      return is_transparent_view(*n.prim) ? is_read_by_what_fuses(n.out[0], k) : fuses(n);
    });
  }
  // Whether the sum of `id` in node `k` would be part of a kernel that is needed anyway.
  bool is_near_what_fuses(ValueId id, int32_t k) const {
    const auto fuses_at = [&](int32_t n) {
      return n != kNoNode && n != k && g_.nodes[size_t(n)].prim && fuses(g_.nodes[size_t(n)]);
    };
    if (is_read_by_what_fuses(id, k)) return true;
    int32_t from = uses_.producer[size_t(id)];
    const auto is_view = [&](const Node& n) { return n.prim && is_transparent_view(*n.prim); };
    while (from != kNoNode && is_view(g_.nodes[size_t(from)]))
      from = uses_.producer[size_t(g_.nodes[size_t(from)].in[0])];
    return fuses_at(from);
  }

  Graph& g_;
  Uses uses_;
};

}  // namespace

void join_epilogues(Graph& graph) {
  if (!graph.deterministic) EpilogueJoiner(graph).run();
}

}  // namespace tessera::compiler
