// The autograd layer: runs an op in the layers below and, if an input requires grad, records a node
// for it.
#include <algorithm>

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/autograd/level.h"
#include "core/dispatch/backward_owners.h"
#include "core/dispatch/context.h"
#include "core/dispatch/sharding.h"

namespace tessera {
namespace {

class PrimitiveNode final : public GradNode {
 public:
  explicit PrimitiveNode(const PrimRef& prim) : prim_(prim) {}
  static void* operator new(size_t bytes) { return pool_allocate(bytes); }
  static void operator delete(void* p, size_t bytes) { pool_deallocate(p, bytes); }

  void save_inputs(std::span<const Tensor> in) {
    SaveMask mask = prim_->saved();
    for (size_t i = 0; i < in.size(); ++i)
      in_.push_back(i < 32 && mask.inputs >> i & 1 ? SavedTensor::input(in[i])
                                                   : SavedTensor::shape_only(in[i]));
  }
  void save_outputs(std::span<const Tensor> out) {
    SaveMask mask = prim_->saved();
    for (size_t i = 0; i < out.size(); ++i)
      out_.push_back(i < 32 && mask.outputs >> i & 1 ? SavedTensor::result(out[i], int(i))
                                                     : SavedTensor::shape_only(out[i]));
  }

  Tensors vjp(std::span<const Tensor> cot, uint32_t wanted, bool last) override {
    TESSERA_CHECK(
        !released_,
        "backward: the graph of {} was released by an earlier backward; pass retain_graph",
        prim_->name());
    Ref<GradNode> self(this);
    SmallVector<Tensor, 4> in, out;
    for (size_t i = 0; i < in_.size(); ++i)
      in.push_back(in_[i].unpack(prim_->name(), "input", i, self));
    for (size_t i = 0; i < out_.size(); ++i)
      out.push_back(out_[i].unpack(prim_->name(), "result", i, self));
    SmallVector<Tensor, 4> all(cot.begin(),
                               cot.end());  // results behind the last one reached have no cotangent
    all.resize(out_.size());
    if (last) release_saved();
    const SmallVector<Tensor, 3> grad_buffer = grad_buffers();
    Tensors grads = prim_->vjp({in, out, all, wanted, grad_buffer});
    for (size_t i = 0; i < grads.size() && i < in.size(); ++i) pin(in[i], grads[i]);
    return grads;
  }
  std::string_view name() const override { return prim_->name(); }
  void release_saved() override {
    released_ = true;
    in_.clear();
    out_.clear();
  }
  bool released() const override { return released_; }
  bool makes_views() const override { return prim_->is_view(); }
  const Tensor* viewed() const override {
    if (!prim_->is_view() || in_.empty()) return nullptr;
    const Tensor& in = in_[0].layout();
    return prim_->viewable({&in, 1}) ? &in : nullptr;
  }
  /// Appends the results that it has saved whose values are in `memory`.
  void add_kept(const Storage* memory, SmallVector<const Tensor*, 2>& kept) const {
    for (const SavedTensor& t : out_)
      if (t.layout().defined() && innermost(t.layout()).storage().get() == memory)
        kept.push_back(&t.layout());
  }
  void let_go_of_overwritten(std::vector<Ref<GradNode>>& from) override {
    for (SavedTensor& t : in_) t.let_go_of_overwritten(from);
    for (SavedTensor& t : out_) t.let_go_of_overwritten(from);
  }

 private:
  // Where the gradient of each input may be written; an input that appears twice is listed once.
  SmallVector<Tensor, 3> grad_buffers() const {
    SmallVector<Tensor, 3> list;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Ref<GradMeta>& leaf = inputs[i];
      bool first = leaf && leaf->now.grad_buffer.defined() && !leaf->now.arriving.defined();
      for (size_t j = 0; first && j < i; ++j) first = !(inputs[j] == leaf);
      if (!first) continue;
      list.resize(i + 1);
      list[i] = leaf->now.grad_buffer;
    }
    return list;
  }

  // Gives a cotangent the placement that its operand asks for: sums over ranks are completed where
  // a forward placement asks for it, nowhere else. Samples of vmap have none.
  static void pin(const Tensor& forward, Tensor& g) {
    constexpr LayerMask kPlaced = bit(Layer::kSharding) | kWrappedBit;
    // That of a number on the host, beside operands on a device, was computed there.
    if (g.defined() && forward.defined() && g.device() != forward.device()) [[unlikely]]
      g = g.to(forward.device());
    if (!g.defined() || !((g.layers() | forward.layers()) & kPlaced)) return;
    if (is_sample(g) || is_sample(forward)) return;
    const ShardingLayer* sharding = placing(g);
    if (!sharding) sharding = placing(forward);
    if (sharding) g = sharding->pin_cotangent(forward, std::move(g));
  }

  PrimRef prim_;
  SmallVector<SavedTensor, 3> in_;
  SmallVector<SavedTensor, 1> out_;
  bool released_ = false;
};

Ref<PrimitiveNode> begin_node(const PrimRef& prim, std::span<const Tensor> in) {
  auto node = make_ref<PrimitiveNode>(prim);
  for (const Tensor& t : in) node->add_input(grad_meta(t));
  node->save_inputs(in);
  return node;
}

void finish_node(const Ref<PrimitiveNode>& node, std::span<const Tensor> out) {
  node->save_outputs(out);
  for (size_t i = 0; i < out.size(); ++i)
    if (is_differentiable(out[i].dtype())) attach_grad_meta(out[i], node, int(i));
}

// Makes operands tensors of the current level, inside a function transform. False when none of them
// is recorded here: levels further out record what belongs to them.
bool asks_here(Inputs in) {
  Level* level = current_level();
  if (!level) return true;
  bool asks = false;
  for (Tensor& t : in) {
    t = level->adopt(t);
    asks |= grad_meta(t) != nullptr;
  }
  return asks;
}

// Reduces partial operands by ops of their own where communication is allowed, before recording.
void reduce_partials(const PrimRef& prim, Inputs in) {
  const Context& c = context();
  if (c.communication != Communication::kAlways && c.phase != Phase::kBackward) return;
  for (const Tensor& t : in)
    if (const ShardingLayer* sharding = placing(t)) return sharding->reduce_partials(prim, in);
}

Tensors autograd_layer(const PrimRef& prim, Inputs in) {
  if (!prim->differentiable() || (context().backend && !asks_here(in)))
    return dispatch_below(Layer::kAutograd, prim, in);
  reduce_partials(prim, in);
  auto node = begin_node(prim, in);
  Tensors out = dispatch_below(Layer::kAutograd, prim, in);
  finish_node(node, out);
  return out;
}

}  // namespace

SmallVector<const Tensor*, 2> kept_by_backward(const Tensor& t) {
  SmallVector<const Tensor*, 2> kept;
  const Storage* memory = innermost(t).storage().get();
  for (const Tensor* at = &t; memory; at = &wrapped(*at)->inner) {
    const GradMeta* meta = grad_meta(*at);
    while (meta && meta->producer && meta->producer->makes_views())
      meta = meta->producer->inputs[0].get();
    if (meta)
      if (const auto* node = dynamic_cast<const PrimitiveNode*>(meta->producer.get()))
        node->add_kept(memory, kept);
    if (!wrapped(*at)) break;
  }
  return kept;
}

void give_history(const PrimRef& prim, std::span<const Tensor> in, std::span<const Tensor> out) {
  bool wanted = false;
  bring_up_to_date(in);
  for (const Tensor& t : in) wanted |= grad_meta(t) != nullptr;
  if (wanted && prim->differentiable()) finish_node(begin_node(prim, in), out);
}

const LayerFn layer_functions[kNumLayers] = {autocast_layer, autograd_layer, sharding_layer};

}  // namespace tessera
