// What an op is. A Primitive owns only mathematics: shapes, loops, derivative, decomposition.
// Kernels live in a table keyed by (op, device); sharding and batching follow from axes().
// Invariant: a Primitive is immutable and pure.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "core/primitive/axis_map.h"
#include "core/primitive/traits.h"

namespace tessera {

class Primitive;
class AttributeReader;
class AttributeVisitor;
struct Kernel;
using PrimRef = Ref<const Primitive>;

/// Bits of what a vjp reads. Everything else is kept as a shape without values, so a wrong mask
/// fails loudly.
struct SaveMask {
  uint32_t inputs = 0, outputs = 0;
};

struct VjpArgs {
  std::span<const Tensor> in;   // shape-only where SaveMask did not ask for the values
  std::span<Tensor> out;        // likewise; moved from, a saved result may be overwritten
  std::span<const Tensor> cot;  // one per output; undefined = zero
  uint32_t wanted = ~0u;        // bit i: the gradient of input i is needed
  // Where the gradient of input i is to lie in the end (a bucket of data parallelism): a vjp may
  // write it there and return that tensor, which saves a copy. Undefined, or none: nowhere.
  std::span<const Tensor> grad_buffer = {};
  bool wants(int i) const { return i >= 32 || (wanted >> i & 1); }
  Tensor grad_buffer_of(size_t i) const {
    return i < grad_buffer.size() ? grad_buffer[i] : Tensor();
  }
};

class Primitive : public RefCounted {
 public:
  /// `op` lives as long as the program.
  explicit Primitive(const OpInfo& op) : op_(op) {}
  static void* operator new(size_t bytes) { return pool_allocate(bytes); }
  static void operator delete(void* p, size_t bytes) { pool_deallocate(p, bytes); }

  const OpInfo& info() const { return op_; }
  OpId id() const { return op_.id; }
  std::string_view name() const { return op_.name; }
  const OpTraits& traits() const { return op_.traits; }

  static constexpr int64_t kAnyNumber = -1;
  /// Operands that the op has with these attributes; kAnyNumber: one or more. Ops for which it is
  /// not always traits().operands override it.
  virtual int64_t operand_count() const { return traits().operands; }

  /// Shapes, dtypes and device of the results; strides are set by the kernel's plan. Throws
  /// ShapeError with every shape.
  virtual Metas infer(MetaSpan in) const = 0;
  /// Loops of the op; the default says that nothing may be split. Verified against infer in tests.
  virtual AxisMap axes(MetaSpan) const { return {}; }
  /// The op one rank runs when it holds `loops[f]` of every factor f of `map`, which is what axes()
  /// returned for the global operands; null: the same op.
  virtual PrimRef localize(const AxisMap& /*map*/, std::span<const Range> /*loops*/) const {
    return nullptr;
  }

  /// Additions and multiplications of a product; of other ops they are not counted.
  virtual double flops(MetaSpan /*in*/, std::span<const Meta> /*out*/) const { return 0; }

  virtual SaveMask saved() const { return {}; }
  /// Cotangents of the inputs from those of the outputs, in ordinary ops, so that it can be
  /// differentiated again. An undefined result means zero. The default throws NotDifferentiable.
  virtual Tensors vjp(const VjpArgs&) const;
  /// False when vjp always throws: then recording is skipped and outputs carry no gradient
  /// (comparisons, argmax).
  virtual bool differentiable() const { return true; }

  /// The op in terms of others, used when a device has no kernel and by the compiler. The default
  /// throws BugError.
  virtual Tensors decompose(std::span<const Tensor> in) const;
  virtual bool decomposable() const { return false; }

  /// A kernel that the op brings along, used where the table of the device has none: for ops made
  /// above the core (collectives, a user's own). Null: it brings none.
  virtual const Kernel* own_kernel(DeviceKind) const { return nullptr; }

  /// Views are metadata: they have no kernel, only this. Results share the storage of `in`.
  bool is_view() const { return traits().kind == OpKind::kView; }
  virtual Tensors view(std::span<const Tensor> in) const;
  /// False where operand 0, as it lies in memory, has no such view and is copied first: a rank's
  /// part of a tensor may lie otherwise than the whole did when this became a view.
  virtual bool viewable(std::span<const Tensor> /*in*/) const { return true; }

  /// What the op was made with, by name: equality, hashing, printing and graph files are built on
  /// it. Ops with attributes are a PrimitiveOf (core/primitive/primitive_of.h), which says it.
  virtual void attributes(AttributeVisitor&) const {}
  /// The same op with other attributes, all of which `attributes` gives; the default, for ops
  /// without any, is the op itself. Whether operands fit them is for infer to say.
  virtual PrimRef with_attributes(AttributeReader& /*attributes*/) const { return PrimRef(this); }

 private:
  const OpInfo& op_;
};

/// The vjp of any primitive with a decomposition, by differentiating that: what fused derivatives
/// use for their own (second) derivatives. Needs every input saved. Defined in core/autograd.
Tensors vjp_by_decomposition(const Primitive& prim, const VjpArgs& args);

/// Same op with the same attributes.
bool same_primitive(const Primitive& a, const Primitive& b);
uint64_t hash_primitive(const Primitive& p);
/// "sum(dims=[1], keepdim=1)".
std::string to_string(const Primitive& p);
/// "f32[2, 3], f32[3, 4]", for error texts.
std::string describe(MetaSpan in);

}  // namespace tessera
