// A Tensor is a handle: a copy of it shares the values. It sees a Storage through shape, strides
// and offset, and has two slots that layers above the kernels own: its history (autograd) and its
// placement (sharding). Invariant: shape, dtype, device and storage of a tensor never change; only
// assign_ changes the values.
#pragma once
#include <concepts>
#include <functional>
#include <initializer_list>
#include <iosfwd>
#include <source_location>
#include <span>
#include <string>

#include "core/base/ref.h"
#include "core/base/small_vector.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shape.h"
#include "core/tensor/storage.h"

namespace tessera {

/// The type of a tensor: everything but its values and where they are in memory.
struct Meta {
  Shape shape;
  Strides strides;
  DType dtype = kF32;
  Device device;

  static Meta contiguous(const Shape& shape, DType dtype, Device device) {
    return {shape, contiguous_strides(shape), dtype, device};
  }
};

/// Layers of the dispatch path that look at an op when one of its inputs asks for them, outermost
/// first.
enum class Layer : uint8_t { kAutocast, kAutograd, kSharding };
inline constexpr int kNumLayers = 3;
using LayerMask = uint8_t;
constexpr LayerMask bit(Layer l) { return LayerMask(1u << int(l)); }

struct TensorImpl final : RefCounted {
  Meta meta;
  Ref<Storage> storage;
  int64_t offset = 0;  // elements
  int64_t numel = 0;
  LayerMask layers = 0;    // which layers look at ops on this tensor
  bool inference = false;  // made under InferenceMode: may never be saved for backward
  bool detached = false;   // does not take over the history of assignments to its memory
  bool repeated = false;   // a part of an expanded tensor, other parts of which are the same memory
  Ref<RefCounted> autograd;  // owned by core/autograd
  Ref<RefCounted> shard;     // a ShardData; meta is then the global one and storage null

  /// Whether a view of this tensor that has no history is detached too: if this tensor is detached,
  /// or has a history, since the view was then made where nothing is recorded.
  bool views_detached() const { return detached || (layers & bit(Layer::kAutograd)); }
  /// Takes over from `viewed`, a view of which this is, what goes with its memory.
  void become_view_of(const TensorImpl& viewed) {
    inference = viewed.inference;
    detached = viewed.views_detached();
    repeated = viewed.repeated;
  }

  static void* operator new(size_t bytes) { return pool_allocate(bytes); }
  static void operator delete(void* p, size_t bytes) { pool_deallocate(p, bytes); }
};

// Types in signatures of methods. A file that calls such a method includes core/ops/scalar.h,
// indexing.h or sort.h.
class Scalar;
class TensorIndex;
struct ValuesAndIndices;

class Tensor {
 public:
  Tensor() = default;
  Tensor(const Tensor&) = default;
  Tensor(Tensor&&) noexcept = default;
  ~Tensor() = default;
  /// Assigning to a variable rebinds it to another handle; no value is copied.
  Tensor& operator=(const Tensor&) & = default;
  Tensor& operator=(Tensor&&) & noexcept = default;
  /// Assigning to an expression writes values, as assign_ does: t[0] = u; slice(t, 0, 0, 2) = 1.5.
  /// It is recorded as assign_ is. Throws what assign_ throws, and UserError where no other tensor
  /// has the memory, so that the values would be lost: a + b = u, (a + b)[0] = u.
  void operator=(const Tensor& values) &&;
  void operator=(const Scalar& value) &&;
  explicit Tensor(Ref<TensorImpl> impl) : impl_(std::move(impl)) {}
  /// Views `storage` as `meta` says, `offset` elements in.
  Tensor(Meta meta, Ref<Storage> storage, int64_t offset = 0);

  bool defined() const { return bool(impl_); }
  const Meta& meta() const { return impl()->meta; }
  const Shape& shape() const { return impl()->meta.shape; }
  const Strides& strides() const { return impl()->meta.strides; }
  DType dtype() const { return impl()->meta.dtype; }
  Device device() const { return impl()->meta.device; }
  int ndim() const { return shape().size(); }
  int64_t numel() const { return impl()->numel; }
  /// Extent of `dim`, counted from the end when negative.
  int64_t size(int64_t dim) const { return shape()[wrap_dim(dim, ndim(), "size")]; }
  int64_t offset() const { return impl()->offset; }
  size_t nbytes() const { return size_t(numel()) * size_of(dtype()); }
  bool is_contiguous() const { return tessera::is_contiguous(shape(), strides()); }
  bool is_contiguous(MemoryFormat format) const {
    return format == MemoryFormat::kContiguous ? is_contiguous()
                                               : is_channels_last(shape(), strides());
  }
  const Ref<Storage>& storage() const { return impl()->storage; }

  /// The first element, for reading and writing by the host: waits until it may be written
  /// (Storage::wait_writable). Null for meta tensors. Throws UserError where the values are in
  /// memory that the host cannot read; cpu() copies them. After the memory was handed to an
  /// asynchronous collective or save, call it again: a pointer from before does not wait.
  void* raw() const {
    values_storage().wait_writable();
    return address();
  }
  /// As raw(), for reading: waits for pending writes only.
  const void* raw_values() const {
    values_storage().wait_ready();
    return address();
  }
  /// The first element as an address of the tensor's device, for a kernel or a copy that is
  /// enqueued there. Nothing waits: the backend has told the kernel's stream to.
  void* device_data() const {
    if (!impl()->storage) [[unlikely]]
      no_values();
    return address();
  }
  /// As raw() and raw_values(), typed; throw UserError when `T` is not the dtype.
  template <class T>
  T* data() const {
    if (dtype_of<T> != dtype()) [[unlikely]]
      wrong_type(dtype_of<T>);
    return static_cast<T*>(raw());
  }
  template <class T>
  const T* values() const {
    if (dtype_of<T> != dtype()) [[unlikely]]
      wrong_type(dtype_of<T>);
    return static_cast<const T*>(raw_values());
  }

  /// True when no other handle, view or graph can see the values: a kernel may overwrite them.
  bool uniquely_owned() const {
    return impl_->use_count() == 1 && impl_->storage && impl_->storage->use_count() == 1;
  }
  /// Returns a tensor on the same memory, without history. A recorded assignment through another
  /// handle changes its values but gives it no history. A sharded tensor stays sharded.
  Tensor detach() const;
  bool is_same(const Tensor& o) const { return impl_ == o.impl_; }
  TensorImpl* impl() const {
    if (!impl_) [[unlikely]]
      undefined();
    return impl_.get();
  }
  const Ref<TensorImpl>& ref() const { return impl_; }
  LayerMask layers() const { return impl_ ? impl_->layers : LayerMask(0); }
  bool is_sharded() const { return layers() & bit(Layer::kSharding); }

  // Methods that are ops: each is the function of its name with this tensor as its first argument.
  // They are defined in core/ops and core/autograd.
  /// Value of a one-element tensor, converted to T.
  template <class T>
  T item(std::source_location where = std::source_location::current()) const;
  const Shape& sizes() const { return shape(); }
  int64_t dim() const { return ndim(); }
  template <class T>
  T* data_ptr() const {
    return data<T>();
  }

  Tensor to(DType dtype) const;          // the same values in another dtype
  Tensor to(MemoryFormat format) const;  // as contiguous(format)
  /// The same values on `device` (the op transfer, core/dispatch/copy.h); itself on its own, one
  /// without values on kMeta.
  Tensor to(Device device) const;
  Tensor cpu() const;  // to(kCPU)
  Tensor contiguous(MemoryFormat format = MemoryFormat::kContiguous) const;
  Tensor clone() const;

  // Views. A view of a temporary does not keep it: where no other tensor has the memory, assigning
  // to the view ((a + b)[0] = u) is refused.
  Tensor operator[](int64_t i) const&;  // select(0, i)
  Tensor operator[](int64_t i) && { return let_go(operator[](i)); }
  /// x.index({Slice(), Slice(1, 3), 0}): core/ops/indexing.h.
  Tensor index(std::initializer_list<TensorIndex> at) const&;
  Tensor index(std::initializer_list<TensorIndex> at) &&;
  Tensor reshape(const Shape& to) const&;  // one extent may be -1
  Tensor reshape(const Shape& to) && { return let_go(reshape(to)); }
  /// As reshape, and throws ShapeError where that would copy.
  Tensor view(const Shape& to) const&;
  Tensor view(const Shape& to) && { return let_go(view(to)); }
  Tensor flatten(int64_t first = 0, int64_t last_dim = -1) const&;
  Tensor flatten(int64_t first = 0, int64_t last_dim = -1) && {
    return let_go(flatten(first, last_dim));
  }
  Tensor unflatten(int64_t dim, const Shape& extents) const&;
  Tensor unflatten(int64_t dim, const Shape& extents) && { return let_go(unflatten(dim, extents)); }
  Tensor transpose(int64_t a, int64_t b) const&;
  Tensor transpose(int64_t a, int64_t b) && { return let_go(transpose(a, b)); }
  Tensor t() const&;  // of a matrix (or less)
  Tensor t() && { return let_go(t()); }
  Tensor mT() const&;  // transpose(-2, -1)
  Tensor mT() && { return let_go(mT()); }
  Tensor permute(const Dims& order) const&;
  Tensor permute(const Dims& order) && { return let_go(permute(order)); }
  Tensor unsqueeze(int64_t dim) const&;
  Tensor unsqueeze(int64_t dim) && { return let_go(unsqueeze(dim)); }
  Tensor squeeze(int64_t dim) const&;
  Tensor squeeze(int64_t dim) && { return let_go(squeeze(dim)); }
  Tensor squeeze() const&;  // of every dim of extent 1
  Tensor squeeze() && { return let_go(squeeze()); }
  Tensor slice(int64_t dim, int64_t begin, int64_t end, int64_t step = 1) const&;
  Tensor slice(int64_t dim, int64_t begin, int64_t end, int64_t step = 1) && {
    return let_go(slice(dim, begin, end, step));
  }
  Tensor narrow(int64_t dim, int64_t begin, int64_t size) const&;
  Tensor narrow(int64_t dim, int64_t begin, int64_t size) && {
    return let_go(narrow(dim, begin, size));
  }
  Tensor select(int64_t dim, int64_t index) const&;
  Tensor select(int64_t dim, int64_t index) && { return let_go(select(dim, index)); }

  Tensor expand(const Shape& to) const;
  Tensor expand_as(const Tensor& like) const;
  Tensor repeat(const Dims& repeats) const;
  Tensor flip(const Dims& dims) const;
  SmallVector<Tensor, 4> split(int64_t size, int64_t dim = 0) const;
  SmallVector<Tensor, 4> split(std::initializer_list<int64_t> sizes, int64_t dim = 0) const;
  SmallVector<Tensor, 4> chunk(int64_t pieces, int64_t dim = 0) const;
  SmallVector<Tensor, 4> unbind(int64_t dim = 0) const;

  Tensor index_select(int64_t dim, const Tensor& index) const;
  Tensor gather(int64_t dim, const Tensor& index) const;
  Tensor masked_fill(const Tensor& mask, Scalar value) const;
  Tensor masked_select(const Tensor& mask) const;

  Tensor sum(const Dims& dims = {}, bool keepdim = false) const;
  Tensor mean(const Dims& dims = {}, bool keepdim = false) const;
  Tensor prod(const Dims& dims = {}, bool keepdim = false) const;
  Tensor amax(const Dims& dims = {}, bool keepdim = false) const;
  Tensor amin(const Dims& dims = {}, bool keepdim = false) const;
  Tensor any(const Dims& dims = {}, bool keepdim = false) const;
  Tensor all(const Dims& dims = {}, bool keepdim = false) const;
  Tensor var(const Dims& dims = {}, int64_t correction = 1, bool keepdim = false) const;
  Tensor std(const Dims& dims = {}, int64_t correction = 1, bool keepdim = false) const;  // stddev
  Tensor logsumexp(const Dims& dims, bool keepdim = false) const;
  Tensor norm(double p = 2, const Dims& dims = {}, bool keepdim = false) const;
  Tensor max() const;
  Tensor min() const;
  ValuesAndIndices max(int64_t dim, bool keepdim = false) const;
  ValuesAndIndices min(int64_t dim, bool keepdim = false) const;
  Tensor argmax() const;
  Tensor argmin() const;
  Tensor argmax(int64_t dim, bool keepdim = false) const;
  Tensor argmin(int64_t dim, bool keepdim = false) const;
  ValuesAndIndices sort(int64_t dim = -1, bool descending = false) const;
  Tensor argsort(int64_t dim = -1, bool descending = false) const;
  ValuesAndIndices topk(int64_t k, int64_t dim = -1, bool largest = true) const;
  Tensor cumsum(int64_t dim) const;

  Tensor exp() const;
  Tensor log() const;
  Tensor sqrt() const;
  Tensor rsqrt() const;
  Tensor square() const;
  Tensor abs() const;
  Tensor neg() const;
  Tensor sign() const;
  Tensor floor() const;
  Tensor ceil() const;
  Tensor round() const;
  Tensor sin() const;
  Tensor cos() const;
  Tensor tanh() const;
  Tensor sigmoid() const;
  Tensor relu() const;
  Tensor softmax(int64_t dim) const;
  Tensor log_softmax(int64_t dim) const;
  Tensor pow(const Tensor& exponent) const;
  Tensor pow(Scalar exponent) const;
  Tensor clamp(Scalar low, Scalar high) const;
  Tensor clamp_min(Scalar low) const;
  Tensor clamp_max(Scalar high) const;
  Tensor add(const Tensor& o) const;
  Tensor sub(const Tensor& o) const;
  Tensor mul(const Tensor& o) const;
  Tensor div(const Tensor& o) const;
  Tensor add(Scalar o) const;
  Tensor sub(Scalar o) const;
  Tensor mul(Scalar o) const;
  Tensor div(Scalar o) const;
  Tensor eq(const Tensor& o) const;
  Tensor ne(const Tensor& o) const;
  Tensor lt(const Tensor& o) const;
  Tensor le(const Tensor& o) const;
  Tensor gt(const Tensor& o) const;
  Tensor ge(const Tensor& o) const;
  Tensor eq(Scalar o) const;
  Tensor ne(Scalar o) const;
  Tensor lt(Scalar o) const;
  Tensor le(Scalar o) const;
  Tensor gt(Scalar o) const;
  Tensor ge(Scalar o) const;
  Tensor isnan() const;
  Tensor isinf() const;
  Tensor isfinite() const;
  Tensor logical_not() const;
  Tensor matmul(const Tensor& o) const;
  Tensor mm(const Tensor& o) const;
  Tensor bmm(const Tensor& o) const;
  Tensor dot(const Tensor& o) const;

  // In place, as the functions of core/ops/update.h. Recorded where this tensor or an operand
  // requires grad, unless in NoGrad; outside of NoGrad, a leaf that requires grad is refused.
  const Tensor& add_(const Tensor& o) const;
  const Tensor& sub_(const Tensor& o) const;
  const Tensor& mul_(const Tensor& o) const;
  const Tensor& div_(const Tensor& o) const;
  const Tensor& add_(Scalar o) const;
  const Tensor& sub_(Scalar o) const;
  const Tensor& mul_(Scalar o) const;
  const Tensor& div_(Scalar o) const;
  const Tensor& clamp_(Scalar low, Scalar high) const;
  const Tensor& assign_(const Tensor& values) const;  // t[0].assign_(u)
  const Tensor& copy_(const Tensor& src) const;       // assign_
  /// t.index_put_({rows}, u): core/ops/indexing.h.
  const Tensor& index_put_(std::initializer_list<Tensor> indices, const Tensor& values,
                           bool accumulate = false) const;
  const Tensor& fill_(Scalar value) const;
  const Tensor& zero_() const;
  const Tensor& operator+=(const Tensor& o) const { return add_(o); }
  const Tensor& operator-=(const Tensor& o) const { return sub_(o); }
  const Tensor& operator*=(const Tensor& o) const { return mul_(o); }
  const Tensor& operator/=(const Tensor& o) const { return div_(o); }
  const Tensor& operator+=(Scalar o) const;
  const Tensor& operator-=(Scalar o) const;
  const Tensor& operator*=(Scalar o) const;
  const Tensor& operator/=(Scalar o) const;

  bool requires_grad() const;
  Tensor& requires_grad_(bool on = true);
  /// True where no recorded op made it: a parameter, or a tensor that does not require grad.
  bool is_leaf() const;
  Tensor grad() const;  // undefined before the first backward
  void set_grad(Tensor g) const;
  void backward() const;  // of a one-element tensor
  void backward(const Tensor& gradient, bool retain_graph = false, bool create_graph = false) const;
  /// add_hook of core/autograd/autograd.h, for a leaf.
  int register_hook(std::function<Tensor(const Tensor& grad)> hook) const;

 private:
  Storage& values_storage() const {
    const TensorImpl* t = impl();
    if (!t->storage || !t->storage->host_addressable()) [[unlikely]]
      no_values();
    return *t->storage;
  }
  void* address() const {
    return static_cast<char*>(impl_->storage->data()) +
           size_t(impl_->offset) * size_of(impl_->meta.dtype);
  }
  // Returns `view`, after this handle has let go of its tensor.
  Tensor let_go(Tensor view) {
    impl_ = {};
    return view;
  }
  [[noreturn]] static void undefined();
  [[noreturn]] void no_values() const;
  [[noreturn]] void wrong_type(DType asked) const;

  Ref<TensorImpl> impl_;
};

/// The content of the shard slot of a tensor that is spread over the ranks of a mesh: this rank's
/// piece. The sharding layer, which knows where the other pieces are, derives from it
/// (core/dispatch/sharding.h).
struct ShardData : RefCounted {
  Tensor local;
  /// Where the pieces are: "(Shard(0), Replicate)".
  virtual std::string placement() const = 0;
};
/// The shard slot of `t`; null unless it is sharded.
inline ShardData* shard_data(const Tensor& t) {
  return t.is_sharded() ? static_cast<ShardData*>(t.impl()->shard.get()) : nullptr;
}
/// This rank's piece of a sharded tensor; a plain tensor itself.
inline const Tensor& local_of(const Tensor& t) {
  const ShardData* shard = shard_data(t);
  return shard ? shard->local : t;
}

using Tensors = SmallVector<Tensor, 4>;
/// Operands on their way through dispatch. A callee may move one out, and so becomes its owner:
/// that is how the memory of a temporary is reused.
using Inputs = std::span<Tensor>;

/// Uninitialised dense tensor.
Tensor empty(const Shape& shape, DType dtype = kF32, Device device = {});
namespace detail {
Tensor empty_of(const Meta& meta);
}
/// A tensor of type `meta`. A template, so that numbers in braces are a shape and not a Meta.
template <std::same_as<Meta> M>
Tensor empty(const M& meta) {
  return detail::empty_of(meta);
}
/// A dense f32/i64/... tensor over a copy of `values`; throws ShapeError unless numel(shape) of
/// them are given.
template <class T>
Tensor from_values(std::span<const T> values, const Shape& shape);
template <class T>
Tensor from_values(std::initializer_list<T> values, const Shape& shape) {
  return from_values(std::span<const T>(values.begin(), values.size()), shape);
}

/// "f32[2, 3] cpu".
std::string describe(const Tensor& t);
/// Values as NumPy prints them, long dims elided. Sharded: where every rank has them, as in item.
std::string to_string(const Tensor& t);
std::ostream& operator<<(std::ostream& out, const Tensor& t);

}  // namespace tessera

template <>
struct fmt::formatter<tessera::Tensor> {  // "{}"
  constexpr auto parse(fmt::format_parse_context& c) { return c.begin(); }
  template <class Context>
  auto format(const tessera::Tensor& t, Context& c) const {
    return fmt::format_to(c.out(), "{}", tessera::to_string(t));
  }
};
