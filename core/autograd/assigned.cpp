#include "core/autograd/assigned.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>

#include "core/autograd/autograd.h"
#include "core/autograd/level.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/reshape_axes.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

// The layout of a view over a 1-d tensor of the elements of its memory.
class Region {
 public:
  Region(const Tensor& t, int64_t begin)
      : shape_(t.shape()), strides_(t.strides()), begin_(begin), numel_(t.numel()) {
    find_order();
    if (std::optional<Strides> one = reshape_strides(shape_, strides_, {numel_}))
      step_ = numel_ > 1 ? (*one)[0] : 1;
  }

  /// The elements of `x` [N] that the view shows, in the view's shape.
  Tensor taken(const Tensor& x) const {
    if (dense_) {
      const Tensor mine = narrow(x, 0, begin_, numel_);
      if (std::ranges::is_sorted(order_)) return reshape(mine, shape_);
      Shape s;
      for (int64_t d : order_) s.push_back(shape_[int(d)]);
      Dims back = order_;
      for (int i = 0; i < order_.size(); ++i) back[int(order_[i])] = i;
      return permute(reshape(mine, s), back);
    }
    if (step_ > 0)
      return reshape(slice(x, 0, begin_, begin_ + (numel_ - 1) * step_ + 1, step_), shape_);
    return reshape(index_select(x, 0, positions(x.device())), shape_);
  }
  /// The transpose of taken: zeros [n] with `g` added where the view's elements are.
  Tensor put(const Tensor& g, int64_t n) const {
    const bool turned = dense_ && !std::ranges::is_sorted(order_);
    Tensor flat = reshape(turned ? permute(g, order_) : g, {numel_});
    if (dense_ && numel_ == n) return flat;
    if (dense_ || step_ > 0) return unslice(flat, 0, begin_, dense_ ? 1 : step_, n);
    return scatter_sum(zeros({n}, {g.dtype(), g.device()}), 0, positions(g.device()), flat);
  }
  /// `x` [N] with zeros where the view's elements are.
  Tensor cleared(const Tensor& x) const { return index_fill(x, 0, positions(x.device()), 0); }

 private:
  // Finds whether the elements are without gaps, and which dims vary slowest then.
  void find_order() {
    order_ = Dims::filled(shape_.size(), 0);
    std::iota(order_.begin(), order_.end(), 0);
    std::ranges::stable_sort(
        order_, [&](int64_t a, int64_t b) { return strides_[int(a)] > strides_[int(b)]; });
    int64_t stride = 1;
    for (int i = order_.size(); i-- > 0;) {
      const int d = int(order_[i]);
      dense_ = dense_ && (shape_[d] == 1 || strides_[d] == stride);
      stride *= shape_[d];
    }
  }
  Tensor positions(Device device) const {
    const TensorOptions whole{.dtype = kI64, .device = device};
    if (dense_) return arange(begin_, begin_ + numel_, 1, whole);
    if (step_ > 0) return arange(begin_, begin_ + (numel_ - 1) * step_ + 1, step_, whole);
    Tensor sum;
    for (int d = 0; d < shape_.size(); ++d) {
      Shape s = Dims::filled(shape_.size(), 1);
      s[d] = shape_[d];
      Tensor along = reshape(arange(0, shape_[d], 1, whole) * strides_[d], s);
      sum = sum.defined() ? sum + along : along + begin_;
    }
    return reshape(sum, {numel_});
  }

  Shape shape_;
  Strides strides_;
  int64_t begin_, numel_;
  Dims order_;
  bool dense_ = true;
  int64_t step_ = 0;  // between neighbours in row-major order; 0: it differs
};

// The history, at one level, of a range of elements of a storage: those of the tensor that was
// recorded before the first assignment, or all where none was.
struct Assigned final : RefCounted {
  Ref<Level> level;  // null: outside of function transforms
  DType dtype = kF32;
  int64_t begin = 0, extent = 0;  // the range
  Ref<GradMeta> history;          // null: no assignment yet, and no tensor was recorded
  uint32_t count = 0;             // how many assignments it has
  // Before the first assignment the memory held result `root_output` of node number `root`.
  uint64_t root = 0;
  int root_output = 0;
  uint64_t walk = 0;   // stamp of the nodes that a walk has visited
  Ref<Assigned> next;  // the history at another level
};

// A node that moves cotangents between a tensor and the elements of its memory.
class LayoutNode : public GradNode {
 public:
  LayoutNode(const Assigned& of, const Tensor& t)
      : of_(&of), extent_(of.extent), region_(t, t.offset() - of.begin) {}
  Tensors vjp(std::span<const Tensor> cot, uint32_t wanted, bool) override {
    TESSERA_CHECK(!released_,
                  "backward: the graph of {} was released by an earlier backward; pass "
                  "retain_graph, or make a new tensor for the values of each step",
                  name());
    return moved(cot[0], wanted);
  }
  void release_saved() override { released_ = true; }
  bool released() const override { return released_; }
  bool is_of(const Assigned& a) const { return of_ == &a; }

 protected:
  virtual Tensors moved(const Tensor& g, uint32_t wanted) const = 0;
  const Assigned* of_;  // compared, never read
  const int64_t extent_;
  const Region region_;

 private:
  bool released_ = false;
};

// Makes the range of elements from the tensor that was recorded first.
class BaseNode final : public LayoutNode {
 public:
  using LayoutNode::LayoutNode;
  std::string_view name() const override { return "assign_ (the memory before)"; }
  Tensors moved(const Tensor& g, uint32_t) const override { return {region_.taken(g)}; }
};
// Makes the range of elements after an assignment from the range before and the value.
class AssignNode final : public LayoutNode {
 public:
  using LayoutNode::LayoutNode;
  std::string_view name() const override { return "assign_"; }
  Tensors moved(const Tensor& g, uint32_t wanted) const override {
    return {wanted & 1 ? region_.cleared(g) : Tensor(), wanted & 2 ? region_.taken(g) : Tensor()};
  }
};
// Makes a tensor, a view, from the range of elements.
class ViewNode final : public LayoutNode {
 public:
  using LayoutNode::LayoutNode;
  std::string_view name() const override { return "assign_ (a view of the memory)"; }
  Tensors moved(const Tensor& g, uint32_t) const override { return {region_.put(g, extent_)}; }
};

const Assigned* first_of(const Storage& s) {
  return static_cast<const Assigned*>(s.assigned().get());
}
Assigned* find(const Storage& s) {
  if (!s.assigned()) return nullptr;
  const Level* level = current_level();
  for (auto* a = static_cast<Assigned*>(s.assigned().get()); a; a = a->next.get())
    if (a->level.get() == level) return a;
  return nullptr;
}

// The tensor from which a chain of recorded views starts.
struct Root {
  const GradMeta* history;
  const Tensor* layout;
  uint64_t number() const { return history->producer ? history->producer->number : 0; }
  // Once a view in the chain was released, the chain's start cannot be told any more.
  bool unknown() const {
    const GradNode* node = history->producer.get();
    return node && node->released() && node->makes_views();
  }
};
Root root_of(const Tensor& t) {
  Root root{grad_meta(t), &t};
  while (const GradNode* node = root.history->producer.get()) {
    const Tensor* viewed = node->viewed();
    if (!viewed || !node->inputs[0]) break;
    root = {node->inputs[0].get(), viewed};
  }
  return root;
}

bool descends_from(const Tensor& t, const Assigned& a) {
  const Root root = root_of(t);
  const auto* node = dynamic_cast<const LayoutNode*>(root.history->producer.get());
  return root.unknown() || (node && node->is_of(a)) ||
         (root.number() == a.root && root.history->output == a.root_output);
}

// The memory whose history `t` would take over; of a sharded tensor, that of this rank's piece.
// Null where it has none.
const Storage* memory_of(const Tensor& t) { return local_of(t).storage().get(); }

void follow(const Tensor& t) {
  if (!t.defined() || t.impl()->detached || !memory_of(t)) return;
  const Assigned* a = find(*memory_of(t));
  if (!a || !a->history || t.numel() == 0) return;
  const GradMeta* own = grad_meta(t);
  if (own && (!own->producer || own->seen == a->count)) return;
  const int64_t begin = t.offset() - a->begin, end = begin + reach_of(t.shape(), t.strides());
  if (!t.is_sharded() && (end <= 0 || begin >= a->extent)) return;
  if (const Level* level = current_level()) {
    TESSERA_CHECK(level->mine(t),
                  "assign_: {} comes from outside of the function transform that is running, in "
                  "which a recorded value was assigned to its memory; pass it to the function as "
                  "an argument, or clone it there",
                  describe(t));
  } else if (wrapped(t)) {
    return;
  }
  const bool view = own ? descends_from(t, *a) : a->root == 0;
  TESSERA_CHECK(view && begin >= 0 && end <= a->extent && t.dtype() == a->dtype && !t.is_sharded(),
                "assign_: {} shares memory with a tensor that recorded values were assigned to, "
                "and is no view "
                "of it; clone one of them before",
                describe(t));
  auto node = make_ref<ViewNode>(*a, t);
  node->add_input(a->history.get());
  attach_grad_meta(t, std::move(node), 0);
}

// Throws UserError unless an assignment to `d` can be recorded.
void check_destination(const Tensor& d, const Level* level) {
  const std::string what = describe(d);
  TESSERA_CHECK(!level || level->mine(d),
                "assign_: a value that is recorded in the function transform that is running is "
                "assigned to {}, which comes from outside of it; return the value instead",
                what);
  TESSERA_CHECK(!innermost(d).is_sharded(),
                "assign_: to and from sharded tensors it is not recorded, {} is one; make a new "
                "tensor (where, cat, stack or index_put), or detach() what is recorded",
                what);
  TESSERA_CHECK(d.storage(),
                "assign_: {} is a sample of a vmap; what the function itself differentiates is not "
                "recorded in it there, make a new tensor (where, cat, stack or index_put)",
                what);
  TESSERA_CHECK(!d.impl()->inference,
                "assign_: {} was made in inference mode; clone it outside to assign recorded "
                "values to it",
                what);
  TESSERA_CHECK(!d.impl()->detached,
                "assign_: {} shares the memory of the tensor that it was detached from; clone() it "
                "to assign recorded values to it",
                what);
  if (!grad_meta(d)) return;
  const Root root = root_of(d);
  TESSERA_CHECK(root.history->producer,
                "assign_: a leaf that requires grad is changed in place: {}{}; open a NoGrad scope "
                "around the update of a parameter, or compute a new tensor (x = x + y; where, cat, "
                "stack or index_put for a part of it)",
                root.history == grad_meta(d) ? "" : "a view of it, ", what);
  TESSERA_CHECK(!root.unknown(),
                "assign_: the graph of the view {} was released by an earlier backward; make the "
                "view again",
                what);
}

uint64_t next_walk() {
  static std::atomic<uint64_t> walk{0};  // only compared for equality, so its order does not matter
  return ++walk;
}

// The history of the memory of `d`, which is created where there is none.
Assigned& history_of(const Tensor& d) {
  Storage& storage = *d.storage();
  if (Assigned* a = find(storage)) return *a;
  auto a = make_ref<Assigned>();
  a->level = Ref<Level>(current_level());
  a->dtype = d.dtype();
  a->extent = int64_t(storage.bytes() / size_of(d.dtype()));
  a->walk = next_walk();
  if (grad_meta(d)) {
    const Root root = root_of(d);
    a->begin = root.layout->offset();
    a->extent = reach_of(root.layout->shape(), root.layout->strides());
    a->root = root.number(), a->root_output = root.history->output;
    auto node = make_ref<BaseNode>(*a, *root.layout);
    node->add_input(const_cast<GradMeta*>(root.history));
    a->history = make_ref<GradMeta>();
    a->history->producer = std::move(node);
  }
  // Histories at levels of transforms that have returned are dropped: no tensor there is left.
  Ref<Assigned> others(const_cast<Assigned*>(first_of(storage)));
  while (others) {
    Ref<Assigned> next = others->next;
    if (!others->level || others->level->in_use()) {
      others->next = a->next;
      a->next = others;
    }
    others = next;
  }
  storage.set_assigned(a);
  return *a;
}

// Results of `prim` on `in`, recorded; an operand that is saved and written is cloned first.
Tensors results_of(const PrimRef& prim, std::span<const Tensor> dst, Inputs in) {
  if (prim.get() == copy_primitive().get()) return {in[0]};
  TESSERA_CHECK(
      prim->differentiable(),
      "{}: {} requires grad, and the update is not recorded; open a NoGrad scope around it",
      prim->name(), describe(dst[0]));
  for (size_t i = 0; i < in.size() && i < 32; ++i)
    if (prim->saved().inputs >> i & 1)
      for (const Tensor& d : dst)
        if (in[i].storage() == d.storage()) in[i] = clone(in[i]);
  // Results take the dtype of the destination, so autocast has no say.
  Scoped<LayerMask> as_given(context().enabled,
                             LayerMask(context().enabled & ~bit(Layer::kAutocast)));
  return dispatch(prim, in);
}

// Frees saved values that were overwritten, which no vjp can use any more. It is also needed
// because the history of a storage must not own the storage.
void let_go_of_overwritten(const Assigned& a) {
  std::vector<Ref<GradNode>> nodes{a.history->producer};
  while (!nodes.empty()) {
    Ref<GradNode> node = std::move(nodes.back());
    nodes.pop_back();
    if (std::exchange(node->walked, a.walk) == a.walk) continue;
    node->let_go_of_overwritten(nodes);
    for (const Ref<GradMeta>& in : node->inputs)
      if (in && in->producer) nodes.push_back(in->producer);
  }
}

void record(Assigned& a, const Tensor& d, const Tensor& value) {
  auto node = make_ref<AssignNode>(a, d);
  node->add_input(d.numel() == a.extent ? nullptr : a.history.get());
  node->add_input(grad_meta(value));
  a.history = make_ref<GradMeta>();
  a.history->producer = std::move(node);
  ++a.count;
  if (d.storage()->was_saved()) let_go_of_overwritten(a);
}

}  // namespace

int64_t reach_of(const Shape& shape, const Strides& strides) {
  int64_t reach = 1;
  for (int d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0) return 0;
    reach += (shape[d] - 1) * strides[d];
  }
  return reach;
}

uint32_t assignments_to(const Tensor& t) {
  const Assigned* a = memory_of(t) ? find(*memory_of(t)) : nullptr;
  return a ? a->count : 0;
}

void append_histories(const Storage& storage, std::vector<Ref<GradNode>>& nodes) {
  for (const Assigned* a = first_of(storage); a; a = a->next.get())
    if (a->history) nodes.push_back(a->history->producer);
}

void follow_assignments(std::span<const Tensor> tensors) {
  for (const Tensor& t : tensors) follow(t);
}

bool assign_recorded(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) {
  Level* level = current_level();
  SmallVector<Tensor, 4> operands;
  bool recorded = false;
  for (const Tensor& t : in) {
    operands.push_back(level ? level->adopt(t) : t);
    recorded |= grad_meta(operands.back()) != nullptr;
  }
  for (const Tensor& d : dst) recorded |= grad_meta(d) && (!level || level->mine(d));
  if (!recorded) return false;
  for (const Tensor& d : dst) check_destination(d, level);
  Tensors values = results_of(prim, dst, operands);
  for (size_t i = 0; i < dst.size(); ++i) {
    const Tensor &d = dst[i], &value = values[i];
    TESSERA_CHECK(!value.is_sharded(),
                  "assign_: to and from sharded tensors it is not recorded, {} is one; make a new "
                  "tensor (where, cat, stack or index_put), or detach() what is recorded",
                  describe(value));
    const bool floats = is_differentiable(d.dtype()) && d.numel() > 0;
    Assigned* a = floats ? &history_of(d) : nullptr;
    Context& c = context();
    (c.backend ? *c.backend : eager_backend())
        .assign({&d, 1}, copy_primitive(), tessera::operands(Tensor(value)));
    if (a) record(*a, d, value);
  }
  return true;
}

}  // namespace tessera
