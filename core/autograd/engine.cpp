// Backward visits nodes by falling number, so every consumer comes before its producers, and the
// cotangents of a node are complete when it is visited. A leaf's gradient is delivered as soon as
// its last contribution arrives. A run keeps its state at the nodes and leaves; an inner run that
// finds state of an outer one there moves it aside.
#include <algorithm>
#include <atomic>
#include <queue>
#include <unordered_map>

#include "core/autograd/autograd.h"
#include "core/autograd/level.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/observer.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/tensor/memory_label.h"

namespace tessera {
namespace {

struct ByNumber {
  bool operator()(const Ref<GradNode>& a, const Ref<GradNode>& b) const {
    return a->number < b->number;
  }
};

uint64_t next_run() {
  static std::atomic<uint64_t> run{0};  // only compared for equality, so its order does not matter
  return ++run;
}

void add_to(Tensor& total, Tensor g) {
  total = total.defined() ? add(std::move(total), std::move(g)) : std::move(g);
}

// Sets the gradient of a leaf to `g`.
void put(GradMeta& leaf, Tensor g) {
  notify(events::SlotChange{leaf, leaf.grad, g});
  leaf.grad = std::move(g);
}

// Throws UserError unless the current level recorded the history of `t`.
void check_level(const Tensor& t, const char* who) {
  Level* level = current_level();
  TESSERA_CHECK(
      !level || level->mine(t),
      "{}: {} comes from outside of the function transform that is running; pass it to the "
      "function as an argument to differentiate by it",
      who, describe(t));
}

class Backward {
 public:
  explicit Backward(BackwardOptions o)
      : options_(o), run_(next_run()), outer_(std::exchange(innermost_, this)) {}
  ~Backward() {
    innermost_ = outer_;
    for (auto& [node, progress] : outer_nodes_) node->now = std::move(progress);
    for (auto& [leaf, progress] : outer_leaves_) leaf->now = std::move(progress);
  }
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;

  void seed(const Tensor& root, Tensor g) {
    check_level(root, "backward");
    bring_up_to_date({&root, 1});
    GradMeta* meta = grad_meta(root);
    TESSERA_CHECK(
        meta, "backward: {} has no history; it was computed without any tensor that requires grad",
        describe(root));
    if (!g.defined()) {
      TESSERA_CHECK_AS(
          ShapeError, root.numel() == 1,
          "backward: the root is {}; give a gradient for it or reduce it to one element",
          describe(root));
      g = ones_like(root);
    }
    TESSERA_CHECK_AS(
        ShapeError,
        g.shape() == root.shape() && g.dtype() == root.dtype() && g.device() == root.device(),
        "backward: the root is {}, its gradient {}", describe(root), describe(g));
    discover(meta);
    roots_.push_back({Ref<GradMeta>(meta), std::move(g)});
  }
  /// Gradients that reach `t` are kept for result(); returns false if it has no history.
  void watch(const Tensor& t) {
    check_level(t, "grad");
    bring_up_to_date({&t, 1});
    GradMeta* meta = grad_meta(t);
    TESSERA_CHECK(meta, "grad: {} does not require grad", describe(t));
    watched_.emplace(key(meta), Tensor());
    returning_ = true;
  }
  Tensor result(const Tensor& t) { return watched_.at(key(grad_meta(t))); }

  void run() {
    if (Backward* around = returning_ ? nullptr : delivering_around()) {
      for (GradSink* s : sinks_) around->add_sink(s);
      return walk();
    }
    size_t finished = 0;
    auto tell_rest = [&](const std::string& why) {
      for (; finished < sinks_.size(); ++finished)
        returning_ ? sinks_[finished]->grad_finished(why)
                   : sinks_[finished]->backward_abandoned(why);
    };
    try {
      walk();
      for (; finished < sinks_.size(); ++finished)
        returning_ ? sinks_[finished]->grad_finished({}) : sinks_[finished]->backward_finished();
    } catch (const std::exception& e) {
      tell_rest(e.what());
      throw;
    } catch (...) {
      tell_rest("an unknown exception");
      throw;
    }
  }

 private:
  void walk() {
    for (auto& [meta, g] : roots_) arrive(*meta, std::move(g));
    while (!queue_.empty()) {
      Ref<GradNode> node = queue_.top();
      queue_.pop();
      visit(*node);
    }
  }

  // A result of a node is one place in the graph, whichever handle it is reached by.
  using Key = std::pair<const void*, int>;
  struct KeyHash {
    size_t operator()(const Key& k) const {
      return std::hash<const void*>()(k.first) * 31 + size_t(k.second);
    }
  };
  static Key key(GradMeta* m) {
    return m->producer ? Key{m->producer.get(), m->output} : Key{m, 0};
  }

  // The outermost backward() around this one, if there is one.
  Backward* delivering_around() const {
    Backward* found = nullptr;
    for (Backward* b = outer_; b; b = b->outer_)
      if (!b->returning_) found = b;
    return found;
  }

  void add_sink(GradSink* sink) {
    if (std::ranges::find(sinks_, sink) == sinks_.end()) sinks_.push_back(sink);
  }

  bool stops_at(GradMeta* m) const { return options_.stop_at_inputs && watched_.contains(key(m)); }

  // Counts the contributions that each leaf will get, and lists the sinks that wait for some.
  void discover(GradMeta* root) {
    std::vector<GradMeta*> stack{root};
    while (!stack.empty()) {
      GradMeta* meta = stack.back();
      stack.pop_back();
      if (GradNode* node = meta->producer.get()) {
        if (node->now.run == run_ || stops_at(meta)) continue;
        if (outer_ && node->now.run) outer_nodes_.emplace_back(node, std::move(node->now));
        node->now.run = run_;
        node->now.arriving.clear();
        for (auto& in : node->inputs)
          if (in) stack.push_back(in.get());
      } else {
        if (meta->now.run != run_) {
          if (outer_ && meta->now.run) outer_leaves_.emplace_back(meta, std::move(meta->now));
          meta->now = {
              .run = run_, .pending = 0, .arriving = {}, .grad_buffer = grad_buffer_of(*meta)};
          if (meta->sink) add_sink(meta->sink);
        }
        ++meta->now.pending;
      }
    }
  }

  // No buffer is used where its content could change later: a hook or a graph of this backward may
  // keep the gradient, and a backward around this one may have its own sum there.
  Tensor grad_buffer_of(const GradMeta& leaf) const {
    bool delivered =
        leaf.sink && leaf.hooks.empty() && !returning_ && !options_.create_graph && !outer_;
    return delivered && !current_level() ? leaf.sink->grad_buffer(leaf.slot) : Tensor();
  }

  void arrive(GradMeta& meta, Tensor g) {
    if (GradNode* node = meta.producer.get()) {
      if (stops_at(&meta)) {
        if (g.defined()) add_to(watched_.at(key(&meta)), std::move(g));
        return;
      }
      auto& arriving = node->now.arriving;
      if (arriving.empty()) queue_.push(meta.producer);
      if (arriving.size() <= size_t(meta.output)) arriving.resize(size_t(meta.output) + 1);
      // A zero is passed on too: a leaf below waits for one contribution over each of its edges.
      if (g.defined()) add_to(arriving[size_t(meta.output)], std::move(g));
      return;
    }
    LeafProgress& now = meta.now;
    if (g.defined() && now.grad_buffer.defined() && now.arriving.is_same(now.grad_buffer))
      add_(now.grad_buffer, g);  // the first contribution lies where the sum is to lie
    else if (g.defined())
      add_to(now.arriving, std::move(g));
    if (--now.pending == 0) finish(meta);
  }

  void finish(GradMeta& leaf) {
    Tensor g = std::exchange(leaf.now.arriving, {});
    leaf.now.grad_buffer = {};
    if (!g.defined()) return;
    if (returning_) return give_back(leaf, std::move(g));
    g = after_hooks(leaf, std::move(g));
    if (leaf.sink) return leaf.sink->deliver(leaf.slot, std::move(g));
    accumulate(leaf, std::move(g));
  }

  // grad() may have been asked for a leaf for which another one stands in the graph.
  void give_back(GradMeta& leaf, Tensor g) {
    GradMeta* known = leaf.sink ? leaf.sink->known_as(leaf.slot) : nullptr;
    auto it = watched_.find(key(known ? known : &leaf));
    if (it == watched_.end()) return;
    add_to(it->second, known ? leaf.sink->converted(leaf.slot, std::move(g)) : std::move(g));
  }

  void accumulate(GradMeta& leaf, Tensor g) {
    if (!leaf.grad.defined()) {
      // A tensor that has other owners, or whose elements share memory, must not become a grad,
      // which may later be written in place.
      bool ours = g.uniquely_owned() && g.is_contiguous() && !g.impl()->repeated;
      put(leaf, ours ? std::move(g) : clone(g));
    } else {
      put(leaf, add(leaf.grad, std::move(g)));
    }
  }

  void visit(GradNode& node) {
    Scoped<uint64_t> visiting(context().grad_node, node.number);
    SmallVector<Tensor, 2> cot = std::move(node.now.arriving);
    node.now.arriving.clear();
    if (returning_)
      for (size_t i = 0; i < cot.size(); ++i)
        if (auto it = watched_.find({&node, int(i)}); it != watched_.end()) it->second = cot[i];
    uint32_t wanted = 0;
    for (size_t i = 0; i < node.inputs.size() && i < 32; ++i)
      wanted |= node.inputs[i] ? 1u << i : 0;
    Tensors grads;
    bool last = !options_.retain_graph && !options_.create_graph;
    if (std::ranges::any_of(cot, &Tensor::defined)) grads = node.vjp(cot, wanted, last);
    cot.clear();
    if (last) node.release_saved();
    for (size_t i = 0; i < node.inputs.size(); ++i)
      if (node.inputs[i])
        arrive(*node.inputs[i], i < grads.size() ? std::move(grads[i]) : Tensor());
  }

  BackwardOptions options_;
  uint64_t run_;
  bool returning_ = false;
  SmallVector<GradSink*, 2> sinks_;
  std::vector<std::pair<Ref<GradMeta>, Tensor>> roots_;
  std::unordered_map<Key, Tensor, KeyHash> watched_;
  std::priority_queue<Ref<GradNode>, std::vector<Ref<GradNode>>, ByNumber> queue_;
  // The backward around this one, and below it the state that it had at shared nodes and leaves.
  Backward* const outer_;
  std::vector<std::pair<GradNode*, NodeProgress>> outer_nodes_;
  std::vector<std::pair<GradMeta*, LeafProgress>> outer_leaves_;

  inline static thread_local Backward* innermost_ = nullptr;
};

// A new handle on the same values, one node further from the operand: two equal operands then have
// separate gradients.
Tensor alias(const Tensor& t) {
  static const PrimRef prim = copy_primitive();
  if (!is_differentiable(t.dtype())) return t;
  if (t.requires_grad() && grad_enabled()) return dispatch1(prim, operands(Tensor(t)));
  return without_history(t).requires_grad_();
}

bool alike(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() && a.device() == b.device();
}

Tensor at(std::span<const Tensor> list, size_t i) { return i < list.size() ? list[i] : Tensor(); }

}  // namespace

void backward(std::span<const Tensor> roots, std::span<const Tensor> root_grads,
              BackwardOptions options) {
  GradMode scope(options.create_graph);
  Scoped<Phase> phase(context().phase, Phase::kBackward);
  MemoryLabel label(MemoryUse::kGradients);
  Backward b(options);
  for (size_t i = 0; i < roots.size(); ++i) b.seed(roots[i], at(root_grads, i));
  b.run();
}

Tensors grad(std::span<const Tensor> roots, std::span<const Tensor> inputs,
             std::span<const Tensor> root_grads, BackwardOptions options) {
  GradMode scope(options.create_graph);
  Scoped<Phase> phase(context().phase, Phase::kBackward);
  MemoryLabel label(MemoryUse::kGradients);
  Backward b(options);
  for (const Tensor& t : inputs) b.watch(t);
  for (size_t i = 0; i < roots.size(); ++i) b.seed(roots[i], at(root_grads, i));
  b.run();
  Tensors result;
  for (const Tensor& t : inputs) result.push_back(b.result(t));
  return result;
}

Tensors vjp_by_decomposition(const Primitive& prim, const VjpArgs& args) {
  bool create_graph = grad_enabled();
  Tensors in, watched, roots, cots, result;
  for (const Tensor& t : args.in)
    in.push_back(create_graph                   ? alias(t)
                 : is_differentiable(t.dtype()) ? without_history(t).requires_grad_()
                                                : t);
  {
    EnableGrad on;
    Tensors out = prim.decompose(in);
    for (size_t i = 0; i < out.size(); ++i)
      if (args.cot[i].defined() && out[i].requires_grad())
        roots.push_back(out[i]), cots.push_back(args.cot[i]);
  }
  for (const Tensor& t : in)
    if (t.requires_grad()) watched.push_back(t);
  Tensors grads = roots.empty()
                      ? watched
                      : tessera::grad(roots, watched, cots,
                                      {.create_graph = create_graph, .stop_at_inputs = true});
  size_t next = 0;
  for (const Tensor& t : in)
    result.push_back(t.requires_grad() && !roots.empty() ? grads[next++] : Tensor());
  return result;
}

static void hooks_change(GradMeta& leaf) {
  notify(events::LeavesOps{[] { return std::string("a hook of a gradient is added or removed"); }});
  ++leaf.hook_changes;
}

int add_hook(const Tensor& leaf, GradHook hook) {
  bring_up_to_date({&leaf, 1});
  GradMeta* meta = grad_meta(leaf);
  TESSERA_CHECK(meta && !meta->producer, "add_hook: {} is not a leaf that requires grad",
                describe(leaf));
  hooks_change(*meta);
  meta->hooks.emplace_back(meta->next_hook, std::move(hook));
  return meta->next_hook++;
}

Tensor after_hooks(const GradMeta& leaf, Tensor g) {
  notify(events::SettingRead{leaf, leaf.hook_changes});
  const auto hooks = leaf.hooks;  // a hook may remove itself
  for (auto& [number, hook] : hooks)
    if (Tensor changed = hook(g); changed.defined()) {
      TESSERA_CHECK_AS(ShapeError, alike(changed, g),
                       "add_hook: a hook returned {} for a gradient {}; it must keep shape, dtype "
                       "and device",
                       describe(changed), describe(g));
      g = std::move(changed);
    }
  return g;
}

void remove_hook(const Tensor& leaf, int number) {
  if (GradMeta* meta = grad_meta(leaf)) {
    hooks_change(*meta);
    std::erase_if(meta->hooks, [&](auto& h) { return h.first == number; });
  }
}

bool Tensor::requires_grad() const {
  bring_up_to_date({this, 1});
  notify(events::HandlesRead{{this, 1}});
  return grad_meta(*this) != nullptr;
}

Tensor& Tensor::requires_grad_(bool on) {
  bring_up_to_date({this, 1});
  GradMeta* meta = grad_meta(*this);
  if (on && !meta) {
    TESSERA_CHECK(is_differentiable(dtype()),
                  "requires_grad_: {} has no gradients; floats of 16 bits and more have",
                  describe(*this));
    TESSERA_CHECK(!impl()->inference,
                  "requires_grad_: {} was made in inference mode; clone it outside",
                  describe(*this));
    attach_grad_meta(*this, {}, 0);
  } else if (!on && meta) {
    TESSERA_CHECK(!meta->producer, "requires_grad_(false): {} is not a leaf; use detach()",
                  describe(*this));
    impl()->autograd.reset();
    impl()->layers &= LayerMask(~bit(Layer::kAutograd));
  }
  return *this;
}

Tensor Tensor::grad() const {
  bring_up_to_date({this, 1});
  GradMeta* meta = grad_meta(*this);
  if (!meta) return {};
  notify(events::SlotRead{*meta, meta->grad});
  return meta->grad;
}

void Tensor::set_grad(Tensor g) const {
  bring_up_to_date({this, 1});
  GradMeta* meta = grad_meta(*this);
  TESSERA_CHECK(meta, "set_grad: {} does not require grad", describe(*this));
  TESSERA_CHECK_AS(ShapeError, !g.defined() || alike(g, *this),
                   "set_grad: {} is no gradient of {}; it must have its shape, dtype and device",
                   describe(g), describe(*this));
  put(*meta, std::move(g));
  if (meta->sink && !meta->grad.defined()) meta->sink->cleared(meta->slot);
}

bool Tensor::is_leaf() const {
  bring_up_to_date({this, 1});
  GradMeta* meta = grad_meta(*this);
  return !meta || !meta->producer;
}

void Tensor::backward() const { tessera::backward(*this); }
void Tensor::backward(const Tensor& gradient, bool retain_graph, bool create_graph) const {
  tessera::backward(*this, gradient, {.retain_graph = retain_graph, .create_graph = create_graph});
}

int Tensor::register_hook(std::function<Tensor(const Tensor& grad)> hook) const {
  return add_hook(*this, std::move(hook));
}

}  // namespace tessera
