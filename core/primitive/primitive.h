// What an op is. A Primitive owns mathematics alone: shapes, loops, derivative, decomposition.
// Kernels are in a table keyed by (op, device); sharding and batching follow from axes().
// Invariant: a Primitive is immutable, and its results depend on operands and attributes alone.
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

/// Which values a vjp reads, as bits. Autograd keeps only the shape of everything else, so a vjp
/// that reads more than its mask says throws.
struct SaveMask {
  uint32_t inputs = 0, outputs = 0;
};

struct VjpArgs {
  std::span<const Tensor> in;   // without values where SaveMask does not ask for them
  std::span<Tensor> out;        // likewise; a vjp that moves one out may overwrite it
  std::span<const Tensor> cot;  // one per output; undefined = zero
  uint32_t wanted = ~0u;        // bit i: the gradient of input i is needed
  // Where the gradient of input i is to lie in the end (in a bucket of data parallelism): a vjp may
  // write it there and return that tensor, which saves a copy. Undefined or missing: anywhere.
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
  /// How many operands the op has with these attributes; kAnyNumber: one or more. Overridden where
  /// that is not always traits().operands.
  virtual int64_t operand_count() const { return traits().operands; }

  /// Shapes, dtypes and device of the results; the kernel's plan sets the strides. Throws
  /// ShapeError, whose text has every operand's shape.
  virtual Metas infer(MetaSpan in) const = 0;
  /// Loops of the op; the default says that nothing may be split. Tests compare it with infer.
  virtual AxisMap axes(MetaSpan) const { return {}; }
  /// The op that a rank runs if it holds `loops[f]` of every factor f of `map`; `map` is what
  /// axes() returned for the global operands. Null: the same op.
  virtual PrimRef localize(const AxisMap& /*map*/, std::span<const Range> /*loops*/) const {
    return nullptr;
  }

  /// Additions and multiplications of a product; 0 for other ops, which do not count theirs.
  virtual double flops(MetaSpan /*in*/, std::span<const Meta> /*out*/) const { return 0; }

  /// True where the op draws random bits; one of its operands is then the key, i64 [2].
  virtual bool draws() const { return traits().kind == OpKind::kDraw; }

  virtual SaveMask saved() const { return {}; }
  /// Cotangents of the inputs from those of the outputs, in ordinary ops, so that they can be
  /// differentiated again. An undefined result means zero. The default throws NotDifferentiable.
  virtual Tensors vjp(const VjpArgs&) const;
  /// False when vjp always throws: the op is then not recorded and its outputs carry no gradient
  /// (comparisons, argmax).
  virtual bool differentiable() const { return true; }

  /// The op in terms of others, for devices without a kernel of it and for the compiler. The
  /// default throws BugError.
  virtual Tensors decompose(std::span<const Tensor> in) const;
  virtual bool decomposable() const { return false; }

  /// The op's own kernel for a device whose table has none: for ops that are made above the core
  /// (collectives, a user's own). Null where it has none.
  virtual const Kernel* own_kernel(DeviceKind) const { return nullptr; }

  /// A view is metadata: it has view() and no kernel. Its results share the storage of `in`.
  bool is_view() const { return traits().kind == OpKind::kView; }
  virtual Tensors view(std::span<const Tensor> in) const;
  /// False where no strides view operand 0 this way, so that it is copied first: a rank's part of a
  /// tensor may be laid out otherwise than the whole tensor that the view was made for.
  virtual bool viewable(std::span<const Tensor> /*in*/) const { return true; }

  /// Visits the attributes by name: equality, hashing, printing and graph files are built on it. An
  /// op with attributes derives from PrimitiveOf (core/primitive/primitive_of.h), which defines it.
  virtual void attributes(AttributeVisitor&) const {}
  /// The same op with the attributes that `attributes` gives, which must be all of them; the
  /// default, for ops without any, is the op itself. Whether they fit operands is checked by infer.
  virtual PrimRef with_attributes(AttributeReader& /*attributes*/) const { return PrimRef(this); }

 private:
  const OpInfo& op_;
};

/// The vjp of a primitive through its decomposition, which is differentiated: fused derivatives use
/// it as their own vjp (second derivatives). Needs every input saved. Defined in core/autograd.
Tensors vjp_by_decomposition(const Primitive& prim, const VjpArgs& args);

/// Same op with the same attributes.
bool same_primitive(const Primitive& a, const Primitive& b);
uint64_t hash_primitive(const Primitive& p);
/// "sum(dims=[1], keepdim=1)".
std::string to_string(const Primitive& p);
/// "f32[2, 3], f32[3, 4]", for error texts.
std::string describe(MetaSpan in);

}  // namespace tessera
