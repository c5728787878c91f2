// The graph that backward walks. A recorded op is a GradNode; a tensor that requires grad has a
// GradMeta, which names its producer or marks a leaf. Invariant: a node has a greater number than
// the nodes that produced its inputs, also where other threads recorded these. So a walk by falling
// number visits every consumer before its producers.
// Internal: not part of the public interface.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/primitive/primitive.h"

namespace tessera {

class GradNode;

struct GradMeta;

/// Takes finished gradients of leaves in place of Tensor::grad; the reducer of data parallelism is
/// one.
class GradSink {
 public:
  virtual ~GradSink() = default;
  /// The gradient of leaf number `slot` is complete for this backward.
  virtual void deliver(int slot, Tensor grad) = 0;
  /// Where the gradient of leaf number `slot` is to lie in the end. Nothing reads that memory until
  /// the gradient is delivered, and backward may write it from now on. The tensor delivered may be
  /// this one or another. Undefined: the sink has no such place.
  virtual Tensor grad_buffer(int /*slot*/) { return {}; }
  /// A backward that could reach a leaf of this sink is over, and so is every backward around it.
  /// Called once for all of them.
  virtual void backward_finished() = 0;
  /// Called instead when that backward ended by an exception (one from backward_finished included),
  /// whose text is `why`: gradients that are still missing will not come. The exception is rethrown
  /// afterwards.
  virtual void backward_abandoned(const std::string& why) = 0;
  /// Tensor::set_grad removed the gradient of leaf number `slot`, as zero_grad does.
  virtual void cleared(int /*slot*/) {}

  // For grad(), which delivers nothing:
  /// The program's leaf for which leaf number `slot` stands in the graph; null: that leaf itself.
  virtual GradMeta* known_as(int /*slot*/) { return nullptr; }
  /// The gradient of that leaf, from the gradient of leaf number `slot`.
  virtual Tensor converted(int /*slot*/, Tensor grad) { return grad; }
  /// grad() has walked over leaves of this sink; `failure` is the text of its exception, or empty.
  virtual void grad_finished(const std::string& /*failure*/) {}
};

using GradHook = std::function<Tensor(const Tensor& grad)>;

/// What a backward keeps at each leaf and node while it runs. A backward inside of another one puts
/// its own there, and restores the other's when it is over.
struct LeafProgress {
  uint64_t run = 0;  // the number of the backward that this belongs to
  int pending = 0;   // contributions that are still to come
  Tensor arriving;
  Tensor grad_buffer;  // from the sink, while the sum in `arriving` may lie there
};
struct NodeProgress {
  uint64_t run = 0;
  SmallVector<Tensor, 2> arriving;
};

struct GradMeta final : RefCounted {
  Ref<GradNode> producer;  // null: a leaf
  int output = 0;          // which result of the producer
  uint32_t seen = 0;       // assignments that this history includes: assigned.h
  // For leaves only:
  Tensor grad;
  GradSink* sink = nullptr;
  int slot = 0;
  std::vector<std::pair<int, GradHook>> hooks;
  int next_hook = 0;         // numbers are never reused
  int64_t hook_changes = 0;  // how often a hook was added or removed
  bool replaced = false;     // another tensor is in its place in its module: no gradient will come
  LeafProgress now;

  static void* operator new(size_t bytes) { return pool_allocate(bytes); }
  static void operator delete(void* p, size_t bytes) { pool_deallocate(p, bytes); }
};

/// Null when the tensor does not require grad.
inline GradMeta* grad_meta(const Tensor& t) {
  return t.layers() & bit(Layer::kAutograd) ? static_cast<GradMeta*>(t.impl()->autograd.get())
                                            : nullptr;
}
/// The gradient that the hooks of `leaf` turn `grad` into.
Tensor after_hooks(const GradMeta& leaf, Tensor grad);
/// Makes `t` result number `output` of `producer`, or a leaf when `producer` is null.
void attach_grad_meta(const Tensor& t, Ref<GradNode> producer, int output);

/// Gives `out`, which are results of `prim` on `in` without history, the history that running the
/// op would have given them; does nothing where no input requires grad.
void give_history(const PrimRef& prim, std::span<const Tensor> in, std::span<const Tensor> out);

/// `t` without history and values; reading the latter throws UserError with the text `why`.
Tensor unreadable(const Tensor& t, std::string why);

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
  /// The first input, as a layout without values, where results share its memory; null where they
  /// do not, or where it was released.
  virtual const Tensor* viewed() const { return nullptr; }
  /// Frees saved values that were overwritten; reading these throws anyway. Appends to
  /// `from` the nodes that the memory of the other saved values comes from.
  virtual void let_go_of_overwritten(std::vector<Ref<GradNode>>& /*from*/) {}

  /// Adds the history of one more input; null: no gradient flows to it.
  void add_input(GradMeta* meta) {
    if (meta && meta->producer && meta->producer->number >= number) [[unlikely]]
      come_after(*meta->producer);
    inputs.push_back(Ref<GradMeta>(meta));
  }

  /// The greatest number of a node that this thread made: the node of the op recorded last.
  static uint64_t last_number();

  uint64_t number;  // above those that this thread gave before, and the inputs' producers'
  SmallVector<Ref<GradMeta>, 3> inputs;  // by add_input
  NodeProgress now;
  uint64_t walked = 0;  // stamp of the last let_go_of_overwritten walk that came by

 private:
  // Lifts this node's number, and the next ones of this thread, above that of a foreign `producer`.
  void come_after(const GradNode& producer);
};

/// A tensor kept for backward: its values, with the version that its storage had, or a recipe that
/// computes the values again.
class SavedTensor {
 public:
  SavedTensor() = default;
  /// Keeps the value and its history.
  static SavedTensor input(const Tensor& t);
  /// Keeps the value of result `output` of the node that will own this; its history is attached by
  /// unpack, so that the node does not own itself.
  static SavedTensor result(const Tensor& t, int output);
  /// Keeps shape and dtype only; reading the values throws BugError.
  static SavedTensor shape_only(const Tensor& t);

  /// Throws UserError naming `op` and `what` when the result is read, if it was overwritten since.
  Tensor unpack(std::string_view op, const char* what, size_t index,
                const Ref<GradNode>& owner) const;

  /// As GradNode::let_go_of_overwritten.
  void let_go_of_overwritten(std::vector<Ref<GradNode>>& from);
  const Tensor& layout() const { return tensor_; }

 private:
  bool overwritten() const;

  Tensor tensor_;
  Ref<Recipe> recipe_;  // then tensor_ has no values
  uint32_t version_ = 0;
  int8_t output_ = -1;
  bool let_go_ = false;  // was overwritten and freed; tensor_ has no values
};

}  // namespace tessera
