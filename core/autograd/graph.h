// The graph that backward walks. A recorded op is a GradNode; a tensor that requires grad carries a
// GradMeta that names its producer, or is a leaf. Invariant: the number of a node is greater than
// those of the producers of its inputs, whatever threads made them, so walking nodes by falling
// number visits every consumer first.
// Internal: not part of the public interface.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/primitive/primitive.h"

namespace tessera {

class GradNode;

struct GradMeta;

/// Where finished gradients of leaves go instead of Tensor::grad: the reducer of data parallelism,
/// for one.
class GradSink {
 public:
  virtual ~GradSink() = default;
  /// The gradient of leaf number `slot` is complete for this backward.
  virtual void deliver(int slot, Tensor grad) = 0;
  /// Where the gradient of leaf number `slot` is to lie in the end: memory that nobody reads until
  /// it is delivered, and which backward may write from now on. What is delivered may be this very
  /// tensor, or lie elsewhere. Undefined: nowhere in particular.
  virtual Tensor grad_buffer(int /*slot*/) { return {}; }
  /// A backward that could reach a leaf of this sink is over, and so is every backward that it ran
  /// inside of.
  virtual void backward_finished() = 0;
  /// Called instead when that backward ended by an exception (one from backward_finished included),
  /// whose text is `why`: gradients that are still missing will not come. The exception goes on
  /// afterwards.
  virtual void backward_abandoned(const std::string& why) = 0;
  /// Tensor::set_grad took the gradient of leaf number `slot` away, as zero_grad does.
  virtual void cleared(int /*slot*/) {}

  // grad(), which delivers nothing:
  /// The leaf that stands in the program for leaf number `slot`; null: that leaf itself.
  virtual GradMeta* known_as(int /*slot*/) { return nullptr; }
  /// Its gradient, from that of leaf number `slot`.
  virtual Tensor converted(int /*slot*/, Tensor grad) { return grad; }
  /// grad() has walked over leaves of this sink. `failure` is what it ended by, else empty.
  virtual void grad_finished(const std::string& /*failure*/) {}
};

using GradHook = std::function<Tensor(const Tensor& grad)>;

/// What a backward keeps at a leaf, and at a node, while it runs. One that runs inside of another
/// puts its own in the place of the other's, which it restores when it is over.
struct LeafProgress {
  uint64_t run = 0;  // of which backward
  int pending = 0;   // contributions that are still to come
  Tensor arriving;
  Tensor grad_buffer;  // what the sink gave, while `arriving` may lie there
};
struct NodeProgress {
  uint64_t run = 0;
  SmallVector<Tensor, 2> arriving;
};

struct GradMeta final : RefCounted {
  Ref<GradNode> producer;  // null: a leaf
  int output = 0;          // which result of the producer
  uint32_t seen = 0;       // assignments to the memory that this history contains: assigned.h
  // Of a leaf:
  Tensor grad;
  GradSink* sink = nullptr;
  int slot = 0;
  std::vector<std::pair<int, GradHook>> hooks;
  int next_hook = 0;         // numbers are never given twice
  int64_t hook_changes = 0;  // how often one came or went
  bool replaced = false;     // another tensor took its place in its module: no gradient will come
  LeafProgress now;

  static void* operator new(size_t bytes) { return pool_allocate(bytes); }
  static void operator delete(void* p, size_t bytes) { pool_deallocate(p, bytes); }
};

/// Null when the tensor does not require grad.
inline GradMeta* grad_meta(const Tensor& t) {
  return t.layers() & bit(Layer::kAutograd) ? static_cast<GradMeta*>(t.impl()->autograd.get())
                                            : nullptr;
}
/// What the hooks of a leaf make of its gradient.
Tensor after_hooks(const GradMeta& leaf, Tensor grad);
/// Makes `t` the result `output` of `producer`, or a leaf when that is null.
void attach_grad_meta(const Tensor& t, Ref<GradNode> producer, int output);

/// Gives `out`, known results of `prim` on `in` that no graph has yet, the history that running the
/// op would have given them; nothing where no input requires grad.
void give_history(const PrimRef& prim, std::span<const Tensor> in, std::span<const Tensor> out);

class GradNode : public RefCounted {
 public:
  GradNode();
  ~GradNode() override;

  /// Cotangents of the inputs from those of the outputs (undefined = zero); `wanted` has a bit per
  /// input.
  virtual Tensors vjp(std::span<const Tensor> cot, uint32_t wanted, bool last) = 0;
  virtual std::string_view name() const = 0;
  /// Frees what was saved; a second backward then throws.
  virtual void release_saved() = 0;
  virtual bool released() const = 0;
  /// True where results share the memory of the first input.
  virtual bool makes_views() const { return false; }
  /// Shape, strides and offset of the first input where results share its memory; null where they
  /// do not, or where that was released.
  virtual const Tensor* viewed() const { return nullptr; }
  /// Frees saved values that were overwritten: to read one throws already. Appends the nodes that
  /// the others' memory comes from.
  virtual void let_go_of_overwritten(std::vector<Ref<GradNode>>& /*from*/) {}

  /// Adds the history of one more input; null: no gradient flows there.
  void add_input(GradMeta* meta) {
    if (meta && meta->producer && meta->producer->number >= number) [[unlikely]]
      come_after(*meta->producer);
    inputs.push_back(Ref<GradMeta>(meta));
  }

  /// The greatest number that a node of this thread has: an op recorded now belongs to it.
  static uint64_t last_number();

  uint64_t number;  // creation order on this thread, and behind the producers of inputs
  SmallVector<Ref<GradMeta>, 3> inputs;  // by add_input
  NodeProgress now;
  uint64_t walked = 0;  // the last walk for let_go_of_overwritten that came by

 private:
  // `producer` is of another thread, whose numbers run ahead: so do this thread's from now on.
  void come_after(const GradNode& producer);
};

/// A tensor kept for backward: a value, with the version its storage had, or the recipe that brings
/// the value back.
class SavedTensor {
 public:
  SavedTensor() = default;
  /// Keeps the value and its history.
  static SavedTensor input(const Tensor& t);
  /// Keeps the value of result `output` of the node that will own this; history is tied on unpack,
  /// so no cycle arises.
  static SavedTensor result(const Tensor& t, int output);
  /// Keeps shape and dtype only; reading the values throws BugError.
  static SavedTensor shape_only(const Tensor& t);

  /// If the storage was written since, to read the result throws UserError naming `op` and `what`.
  Tensor unpack(std::string_view op, const char* what, size_t index,
                const Ref<GradNode>& owner) const;

  /// As GradNode's.
  void let_go_of_overwritten(std::vector<Ref<GradNode>>& from);
  const Tensor& layout() const { return tensor_; }

 private:
  bool overwritten() const;

  Tensor tensor_;
  Ref<Recipe> recipe_;  // then tensor_ has no values
  uint32_t version_ = 0;
  int8_t output_ = -1;
  bool let_go_ = false;  // was overwritten; tensor_ has no values
};

}  // namespace tessera
