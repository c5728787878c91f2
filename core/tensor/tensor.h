// A Tensor is a handle: copying shares, nothing is copied. It sees a Storage through shape, strides
// and offset, and has two payload slots that the layers above the kernels own: how it was computed
// (autograd) and how it is sharded. Invariant: shape, dtype, device and storage of a tensor never
// change; only assign_ changes the values.
#pragma once
#include <source_location>
#include <span>
#include <string>

#include "core/base/ref.h"
#include "core/base/small_vector.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shape.h"
#include "core/tensor/storage.h"

namespace tessera {

/// All that is known of a tensor without its values.
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
  LayerMask layers = 0;      // which layers want to see ops on this tensor
  bool inference = false;    // made under inference_mode: may never be saved for backward
  Ref<RefCounted> autograd;  // owned by core/autograd
  Ref<RefCounted> shard;     // a ShardData; meta is then the global one and storage null

  static void* operator new(size_t bytes) { return pool_allocate(bytes); }
  static void operator delete(void* p, size_t bytes) { pool_deallocate(p, bytes); }
};

class Tensor {
 public:
  Tensor() = default;
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

  /// First element, on the tensor's device, for reading and writing: waits until it may be written
  /// (Storage::wait_writable). Null for meta tensors. A pointer that is kept guards nothing: ask
  /// again after memory was handed to an asynchronous collective or save.
  void* raw() const {
    values_storage().wait_writable();
    return address();
  }
  /// First element, for reading; waits for pending writes only. Null for meta tensors.
  const void* raw_values() const {
    values_storage().wait_ready();
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
  /// The same values without history. A sharded tensor stays sharded.
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

  // Spelled here so that programs read well; defined in core/ops and core/autograd.
  /// Value of a one-element tensor, converted to T.
  template <class T>
  T item(std::source_location where = std::source_location::current()) const;
  Tensor to(DType dtype) const;           // the same values in another dtype
  Tensor to(MemoryFormat format) const;   // as contiguous(format)
  Tensor reshape(const Shape& to) const;  // one extent may be -1
  Tensor transpose(int64_t a, int64_t b) const;
  Tensor contiguous(MemoryFormat format = MemoryFormat::kContiguous) const;
  Tensor clone() const;
  Tensor operator[](int64_t i) const;  // select(0, i)
  bool requires_grad() const;
  Tensor& requires_grad_(bool on = true);
  Tensor grad() const;  // undefined before the first backward
  void set_grad(Tensor g) const;
  void backward() const;  // of a one-element tensor

 private:
  Storage& values_storage() const {
    const TensorImpl* t = impl();
    if (!t->storage) [[unlikely]]
      no_values();
    return *t->storage;
  }
  void* address() const {
    return static_cast<char*>(impl_->storage->data()) +
           size_t(impl_->offset) * size_of(impl_->meta.dtype);
  }
  [[noreturn]] static void undefined();
  [[noreturn]] void no_values() const;
  [[noreturn]] void wrong_type(DType asked) const;

  Ref<TensorImpl> impl_;
};

/// What a tensor that is spread over the ranks of a mesh carries in its shard slot: this rank's
/// piece. The layer that knows where the other pieces are derives from it
/// (core/dispatch/sharding.h).
struct ShardData : RefCounted {
  Tensor local;
  /// Where the pieces are: "(Shard(0), Replicate)".
  virtual std::string placement() const = 0;
};
/// Null unless `t` is sharded.
inline ShardData* shard_data(const Tensor& t) {
  return t.is_sharded() ? static_cast<ShardData*>(t.impl()->shard.get()) : nullptr;
}
/// This rank's piece of a sharded tensor; a plain one itself.
inline const Tensor& local_of(const Tensor& t) {
  const ShardData* shard = shard_data(t);
  return shard ? shard->local : t;
}

using Tensors = SmallVector<Tensor, 4>;
/// Operands on their way down. A callee may take one over by moving from it; that is how a
/// temporary is reused in place.
using Inputs = std::span<Tensor>;

/// Uninitialised dense tensor.
Tensor empty(const Shape& shape, DType dtype = kF32, Device device = {});
Tensor empty(const Meta& meta);
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

}  // namespace tessera
