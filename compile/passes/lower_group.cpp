#include "compile/passes/lower_group.h"

#include <algorithm>
#include <bit>
#include <map>

#include "compile/codegen/device_kernels.h"
#include "compile/codegen/generate.h"
#include "compile/ir/rewrite.h"
#include "compile/passes/closed_set.h"
#include "compile/passes/loop_order.h"
#include "core/base/boundary.h"
#include "core/ops/create_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::compiler {
namespace {

constexpr size_t kMaxInstrs = limit("fuse.instructions"), kMaxMemories = limit("fuse.operands");

// An operand as the group reads it.
struct Read {
  ValueId root = kNoValue;  // what is loaded, computed in the group, or a number
  DimProducts root_dims;
  int32_t inlined = kNoNode;  // the node that makes it, if it is computed again
  std::vector<Read> in;       // that node's operands
};

class Lowering {
 public:
  Lowering(const Dataflow& flow, std::span<const int32_t> nodes)
      : flow_(flow),
        g_(flow.graph),
        nodes_(nodes),
        made_(nodes.size()),
        computed_(nodes.size(), -1) {}

  std::optional<LoweredGroup> run() {
    if (!on_one_device() || !unify_nodes() || !places_are_free()) return {};
    share_reads();
    if (!number_loops() || !reads_where_it_writes()) return {};
    for (size_t i = 0; i < nodes_.size(); ++i) add_instrs(i);
    add_stores();
    const size_t memories = kernel_.in.size() + kernel_.out.size();
    meet("fuse.instructions", int64_t(body().instrs.size()));
    meet("fuse.operands", int64_t(memories));
    if (kernel_.body.stores.empty() || body().instrs.size() > kMaxInstrs || memories > kMaxMemories)
      return {};
    if (!device().is_cpu() && only_numbers()) return {};
    order_loops(kernel_.body);
    if (body().extents.size() > size_t(kMaxDims) || !one_sweep(body())) return {};
    if (!(device().is_cpu() ? schedulable(body()) : gpu_schedulable(body()))) return {};
    return std::move(kernel_);
  }

 private:
  Body& body() { return kernel_.body; }
  Device device() const { return g_[node(0).out[0]].meta.device; }
  // Whether no operand tells on which device the kernel runs.
  bool only_numbers() const {
    return !kernel_.in.empty() &&
           std::ranges::all_of(kernel_.in, [&](ValueId id) { return is_host_number(g_[id].meta); });
  }
  bool on_one_device() const {
    return std::ranges::all_of(
        nodes_, [&](int32_t k) { return g_[g_.nodes[size_t(k)].out[0]].meta.device == device(); });
  }
  const Node& node(size_t i) const { return g_.nodes[size_t(nodes_[i])]; }
  // The index in the group of a node, or of the node that makes a value; -1 if it is outside.
  int place_of(int32_t k) const {
    auto it = std::ranges::lower_bound(nodes_, k);
    return it != nodes_.end() && *it == k ? int(it - nodes_.begin()) : -1;
  }
  int place_of_producer(ValueId id) const {
    int32_t m = flow_.producer[size_t(id)];
    return m == kNoNode ? -1 : place_of(m);
  }
  bool is_inside(int32_t k) const { return k != kNoNode && place_of(k) >= 0; }
  bool is_computed(ValueId root) const { return place_of_producer(root) >= 0; }

  // ---- loops

  DimProducts products(const OperandLoops& loops, int first) const {
    DimProducts dims;
    for (const DimLoops& dim : loops) {
      Product p;
      for (int f : dim) p.push_back(first + f);
      dims.push_back(p);
    }
    return dims;
  }
  int add_factors(const AxisMap& axes) {
    int first = -1;
    for (const Factor& f : axes.factors) {
      int l = loops_.add(f.extent);
      if (first < 0) first = l;
    }
    return std::max(first, 0);
  }

  // Looks through transparent views to find what `id` with dims `dims` is. Returns false if loops
  // do not fit, or if a view that loops do not pass through leads into the group.
  bool resolve(ValueId id, DimProducts dims, Read& read) {
    for (;;) {
      // A view of the host that is a number is passed by value; what it is a view of is not.
      if (!device().is_cpu() && is_host_number(g_[id].meta)) break;
      int32_t m = flow_.producer[size_t(id)];
      if (m == kNoNode || flow_.kind[size_t(m)] != NodeKind::kTransparent) break;
      const AxisMap& axes = flow_.axes[size_t(m)];
      int first = add_factors(axes);
      if (!loops_.unify(products(axes.out[0], first), dims)) return false;
      dims = products(axes.in[0], first);
      id = g_.nodes[size_t(m)].in[0];
    }
    read.root = id, read.root_dims = dims;
    if (int i = place_of_producer(id); i >= 0) return loops_.unify(made_[size_t(i)], dims);
    if (int32_t m = flow_.producer[size_t(id)]; flow_.is_inlined(m, nodes_[0]))
      return inline_node(m, read);
    return !is_inside(flow_.source(id));
  }

  bool inline_node(int32_t m, Read& read) {
    const Node& n = g_.nodes[size_t(m)];
    const AxisMap& axes = flow_.axes[size_t(m)];
    int first = add_factors(axes);
    spans_.push_back({first, axes.factors.size()});
    if (!loops_.unify(products(axes.out[0], first), read.root_dims)) return false;
    read.inlined = m;
    read.in.resize(n.in.size());
    for (size_t k = 0; k < n.in.size(); ++k)
      if (!resolve(n.in[k], products(axes.in[k], first), read.in[k])) return false;
    return true;
  }

  bool unify_nodes() {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const Node& n = node(i);
      const AxisMap& axes = flow_.axes[size_t(nodes_[i])];
      first_.push_back(add_factors(axes));
      spans_.push_back({first_[i], axes.factors.size()});
      reads_.emplace_back();
      for (size_t k = 0; k < n.in.size(); ++k) {
        Read read;
        if (!resolve(n.in[k], products(axes.in[k], first_[i]), read)) return false;
        reads_[i].push_back(read);
      }
      made_[i] = products(axes.out[0], first_[i]);
    }
    return distinct(loops_);
  }

  static Product range(int first, size_t count) {
    Product p;
    for (size_t f = 0; f < count; ++f) p.push_back(first + int(f));
    return p;
  }

  // False if unification made one loop of two loops of the same node.
  bool distinct(const Loops& loops) const {
    for (auto [first, count] : spans_) {
      Product l = loops.leaves(range(first, count));
      std::sort(l.begin(), l.end());
      if (std::adjacent_find(l.begin(), l.end()) != l.end()) return false;
    }
    return true;
  }

  // Unifies the loops of nodes that read the same memory, where they fit.
  void share_reads() {
    std::map<ValueId, const Read*> first_read;
    for_loads([&](const Read& read) {
      auto [it, fresh] = first_read.try_emplace(read.root, &read);
      if (fresh) return;
      Loops trial = loops_;
      if (trial.unify(it->second->root_dims, read.root_dims) && distinct(trial))
        loops_ = std::move(trial);
    });
  }

  // Calls visit(read) for each operand that is neither computed in the group nor a number.
  template <class F>
  void for_loads(F visit) const {
    auto walk = [&](const Read& read, auto&& self) -> void {
      for (const Read& r : read.in) self(r, self);
      if (read.inlined == kNoNode && !is_computed(read.root)) visit(read);
    };
    for (const auto& list : reads_)
      for (const Read& read : list) walk(read, walk);
  }

  // True if the memory that the group writes is made outside of it and written only once.
  bool places_are_free() const {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (node(i).into.empty()) continue;
      if (is_inside(flow_.source(node(i).into[0]))) return false;
      for (size_t j = 0; j < i; ++j)
        if (!node(j).into.empty() && g_[node(j).into[0]].buffer == g_[node(i).into[0]].buffer)
          return false;
    }
    return true;
  }

  // True if the group reads memory that it writes only at the element it writes there.
  bool reads_where_it_writes() const {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (node(i).into.empty()) continue;
      const Value& to = g_[node(i).into[0]];
      Access written = access(to.meta, made_[i]);
      bool apart = false;
      for_loads([&](const Read& r) {
        const Value& from = g_[r.root];
        apart = apart || (from.buffer == to.buffer &&
                          (from.offset != to.offset ||
                           !(access(from.meta, r.root_dims).strides == written.strides)));
      });
      if (apart) return false;
    }
    return true;
  }

  // Numbers the loops that are left; returns false if no node runs over all of them.
  bool number_loops() {
    LoopMask all = 0, largest = 0;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      LoopMask mask = 0;
      for (int l : loops_.leaves(range(first_[i], flow_.axes[size_t(nodes_[i])].factors.size()))) {
        auto [it, fresh] = index_.try_emplace(l, int(index_.size()));
        if (fresh) body().extents.push_back(loops_.extent(l));
        if (it->second >= 32) return false;
        mask |= LoopMask(1) << it->second;
      }
      all |= mask;
      if (std::popcount(mask) > std::popcount(largest)) largest = mask;
    }
    return all == largest;
  }

  LoopMask mask_of(const Product& p) const {
    LoopMask mask = 0;
    for (int l : loops_.leaves(p)) mask |= LoopMask(1) << index_.at(l);
    return mask;
  }
  Access access(const Meta& meta, const DimProducts& dims) const {
    Access a{meta.dtype, SmallVector<int64_t, 6>(index_.size(), 0)};
    for (size_t d = 0; d < dims.size(); ++d) {
      int64_t stride = meta.strides[int(d)];
      Product p = loops_.leaves(dims[d]);
      for (size_t i = p.size(); i-- > 0;) {
        a.strides[size_t(index_.at(p[i]))] = stride;
        stride *= loops_.extent(p[i]);
      }
    }
    return a;
  }

  // ---- instructions

  InstrId add(Instr instr) {
    if (instr.kind == InstrKind::kPointwise || instr.kind == InstrKind::kCast)
      for (InstrId id : instr.in) instr.loops |= body().instrs[size_t(id)].loops;
    body().instrs.push_back(std::move(instr));
    return InstrId(body().instrs.size() - 1);
  }
  DType type_of(InstrId id) const { return kernel_.body.instrs[size_t(id)].dtype; }
  InstrId pointwise(std::string op, SmallVector<InstrId, 3> in, DType dtype) {
    return add({.kind = InstrKind::kPointwise, .dtype = dtype, .in = in, .op = std::move(op)});
  }
  InstrId constant(Scalar value, DType dtype) {
    if (is_floating(dtype)) value = Scalar(value.real());
    return add({.kind = InstrKind::kConstant, .dtype = dtype, .value = value});
  }
  InstrId cast(InstrId x, DType dtype) {
    if (type_of(x) == dtype) return x;
    return add({.kind = InstrKind::kCast, .dtype = dtype, .in = {x}});
  }

  InstrId value_of(const Read& read) {
    if (int i = place_of_producer(read.root); i >= 0) return computed_[size_t(i)];
    if (auto it = numbers_.find(read.root); it != numbers_.end()) return it->second;
    if (read.inlined != kNoNode) return again(read);
    int32_t m = flow_.producer[size_t(read.root)];
    if (m != kNoNode && flow_.kind[size_t(m)] == NodeKind::kNumber)
      return number(*g_.nodes[size_t(m)].prim, read);
    return load(read);
  }

  // Computes a node that also belongs to another kernel, once for each way in which its dims are
  // loops.
  InstrId again(const Read& read) {
    SmallVector<int64_t, 6> place = access(g_[read.root].meta, read.root_dims).strides;
    for (auto& [root, seen, id] : again_)
      if (root == read.root && seen == place) return id;
    SmallVector<InstrId, 3> in;
    for (const Read& r : read.in) in.push_back(value_of(r));
    InstrId id = elementwise(g_.nodes[size_t(read.inlined)], in);
    again_.push_back({read.root, place, id});
    return id;
  }

  InstrId load(const Read& read) {
    Access a = access(g_[read.root].meta, read.root_dims);
    for (size_t i = 0; i < loads_.size(); ++i)
      if (loads_[i].first == read.root &&
          body().operands[size_t(body().instrs[size_t(loads_[i].second)].operand)].strides ==
              a.strides)
        return loads_[i].second;
    LoopMask loops = 0;
    for (size_t l = 0; l < a.strides.size(); ++l)
      if (a.strides[l] != 0) loops |= LoopMask(1) << l;
    body().operands.push_back(a);
    kernel_.in.push_back(read.root);
    InstrId id = add({.kind = InstrKind::kLoad,
                      .dtype = a.dtype,
                      .loops = loops,
                      .operand = int(body().operands.size()) - 1});
    loads_.emplace_back(read.root, id);
    return id;
  }

  // `full` and `arange` are computed where they are read.
  InstrId number(const Primitive& prim, const Read& read) {
    if (prim.name() == "full") {
      const auto& full = attributes_of<FullAttributes>(prim);
      return numbers_[read.root] = constant(full.value, full.dtype);
    }
    const auto& range = attributes_of<ArangeAttributes>(prim);
    InstrId at = position(loops_.leaves(read.root_dims[0]));
    bool real = range.begin.kind() == kF64 || range.step.kind() == kF64;
    DType t = real ? kF64 : kI64;
    at = cast(at, t);
    if (range.step.real() != 1) at = pointwise("mul", {at, constant(range.step, t)}, t);
    if (real || range.begin.integer() != 0)
      at = pointwise("add", {constant(range.begin, t), at}, t);
    return cast(at, range.dtype);
  }

  // Computes the index along a dim from those of its loops.
  InstrId position(const Product& loops) {
    InstrId at = -1;
    for (int l : loops) {
      InstrId index = add({.kind = InstrKind::kIndex,
                           .dtype = kI64,
                           .loops = LoopMask(1) << index_.at(l),
                           .loop = index_.at(l)});
      if (at >= 0) {
        InstrId outer = pointwise("mul", {at, constant(loops_.extent(l), kI64)}, kI64);
        index = pointwise("add", {outer, index}, kI64);
      }
      at = index;
    }
    return at >= 0 ? at : constant(int64_t(0), kI64);
  }

  void add_instrs(size_t i) {
    SmallVector<InstrId, 3> in;
    for (const Read& read : reads_[i]) in.push_back(value_of(read));
    const Node& n = node(i);
    computed_[i] = as_reduction(*n.prim) ? reduction(i, in[0], type_of(n)) : elementwise(n, in);
  }

  DType type_of(const Node& n) const { return g_[n.out[0]].meta.dtype; }
  InstrId elementwise(const Node& n, const SmallVector<InstrId, 3>& in) {
    if (n.prim->name() == "copy") return in[0];
    if (n.prim->name() == "cast") return cast(in[0], type_of(n));
    return pointwise(std::string(n.prim->name()), in, type_of(n));
  }

  InstrId reduction(size_t i, InstrId x, DType dtype) {
    const AxisMap& axes = flow_.axes[size_t(nodes_[i])];
    LoopMask from = 0, to = 0;
    for (const Product& p : products(axes.in[0], first_[i])) from |= mask_of(p);
    for (const Product& p : products(axes.out[0], first_[i])) to |= mask_of(p);
    if ((from & ~to) == 0) return cast(x, dtype);  // the reduced dims have extent 1
    return add({.kind = InstrKind::kReduce,
                .dtype = dtype,
                .in = {x},
                .loops = kernel_.body.instrs[size_t(x)].loops & to,
                .reduce = as_reduction(*node(i).prim)->kind,
                .reduced = from & ~to});
  }

  void add_stores() {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const Node& n = node(i);
      ValueId id = n.out[0];
      bool read_outside = flow_.is_output[size_t(id)] || !n.into.empty();
      for (int32_t reader : flow_.readers[size_t(id)])
        read_outside = read_outside || !is_inside(reader);
      if (!read_outside) continue;
      body().stores.push_back({computed_[i], access(g_[id].meta, made_[i])});
      kernel_.out.push_back(id);
      kernel_.into.push_back(n.into.empty() ? kNoValue : n.into[0]);
    }
    bool pure = std::ranges::all_of(kernel_.into, [](ValueId v) { return v == kNoValue; });
    if (pure) kernel_.into = {};
  }

  const Dataflow& flow_;
  const Graph& g_;
  std::span<const int32_t> nodes_;
  Loops loops_;
  struct Span {
    int first;
    size_t count;
  };
  struct Again {
    ValueId root;
    SmallVector<int64_t, 6> place;
    InstrId id;
  };
  std::vector<int> first_;                // by place in the group: its first loop in spans_
  std::vector<Span> spans_;               // factors of one node each, inlined ones included
  std::vector<std::vector<Read>> reads_;  // likewise, by operand
  std::vector<DimProducts> made_;         // likewise: its result
  std::map<int, int> index_;              // by leaf: loop of the body
  std::vector<InstrId> computed_;         // by place in the group
  std::map<ValueId, InstrId> numbers_;
  std::vector<std::pair<ValueId, InstrId>> loads_;
  std::vector<Again> again_;
  LoweredGroup kernel_;
};

}  // namespace

std::optional<LoweredGroup> lower_group(const Dataflow& flow, std::span<const int32_t> nodes) {
  return Lowering(flow, nodes).run();
}

}  // namespace tessera::compiler
