#include "core/tensor/tensor.h"

#include <algorithm>
#include <cstring>

#include "core/tensor/device_runtime.h"
#include "core/tensor/wrapped.h"

namespace tessera {

Tensor::Tensor(Meta meta, Ref<Storage> storage, int64_t offset) : impl_(new TensorImpl) {
  impl_->numel = tessera::numel(meta.shape);
  impl_->meta = std::move(meta);
  impl_->storage = std::move(storage);
  impl_->offset = offset;
}

Tensor Tensor::detach() const {
  // A constant is one at every level.
  if (const Wrapped* w = wrapped(*this)) [[unlikely]] {
    Tensor t = wrapper(w->with(w->inner.detach()));
    t.impl_->detached = true;
    return t;
  }
  Tensor t(meta(), storage(), offset());
  t.impl_->inference = impl_->inference;
  t.impl_->detached = true;
  if (is_sharded()) [[unlikely]] {
    t.impl_->shard = impl_->shard;
    t.impl_->layers |= bit(Layer::kSharding);
  }
  return t;
}

Tensor wrapper(Ref<Wrapped> payload) {
  const Tensor& inner = payload->inner;
  Meta meta = inner.meta();
  if (payload->batched) meta.shape.erase(0), meta.strides.erase(0);
  Tensor t(std::move(meta), payload->batched ? nullptr : inner.storage(), inner.offset());
  t.impl()->shard = std::move(payload);
  t.impl()->layers = kWrappedBit;
  return t;
}

void Tensor::undefined() { throw UserError("tensor: used before it was given a value"); }
void Tensor::no_values() const {
  TESSERA_CHECK(!is_sharded(),
                "tensor: values of {} were asked for, but they are spread over ranks; use "
                "full_tensor() for all of them, to_local() for this rank's",
                describe(*this));
  TESSERA_CHECK(
      !wrapped(*this),
      "tensor: values of {} were asked for inside a vmap, where they are a batch; compute "
      "with ops (where, gather) or return the tensor and read it outside",
      describe(*this));
  TESSERA_CHECK(!storage(),
                "tensor: the host cannot read or write values of {}; copy them with cpu()",
                describe(*this));
  throw BugError(
      fmt::format("tensor: values of {} read, but only its shape was kept", describe(*this)));
}
void Tensor::wrong_type(DType asked) const {
  throw UserError(fmt::format("data: {} was read as {}; convert it with .to() first",
                              describe(*this), name_of(asked)));
}

// More than any address space; sizes below it cannot overflow further on.
constexpr size_t kMaxTensorBytes = size_t(1) << 47;

static inline size_t bytes_of(const Meta& meta) {
  size_t bytes = size_of(meta.dtype);
  bool too_large = false, none = false;
  for (int64_t e : meta.shape) {
    too_large |= __builtin_mul_overflow(bytes, size_t(e), &bytes) || bytes > kMaxTensorBytes;
    none |= e == 0;
  }
  TESSERA_CHECK_AS(ShapeError, none || !too_large, "empty: {}{} does not fit any memory",
                   name_of(meta.dtype), to_string(meta.shape));
  // A layout with gaps (a window of a larger tensor) reaches further than its elements fill.
  size_t reach = 1;
  for (int d = 0; d < meta.shape.size(); ++d)
    reach += size_t(meta.shape[d] - 1) * size_t(meta.strides[d]);
  return none ? 0 : std::max(bytes, reach * size_of(meta.dtype));
}

Tensor detail::empty_of(const Meta& meta) {
  const size_t bytes = bytes_of(meta);
  if (!meta.device.is_cpu()) [[unlikely]]
    check_device(meta.device, "empty");
  return Tensor(meta, Ref(new Storage(bytes, meta.device, allocator_of(meta.device))));
}

Tensor empty_in(const Meta& meta, Allocator& allocator) {
  return Tensor(meta, Ref(new Storage(bytes_of(meta), meta.device, allocator)));
}

Tensor empty(const Shape& shape, DType dtype, Device device) {
  for (int64_t e : shape)
    TESSERA_CHECK_AS(ShapeError, e >= 0, "empty: shape {} has a negative extent", to_string(shape));
  return empty(Meta::contiguous(shape, dtype, device));
}

template <class T>
Tensor from_values(std::span<const T> values, const Shape& shape) {
  TESSERA_CHECK_AS(ShapeError, int64_t(values.size()) == numel(shape),
                   "from_values: {} values for shape {}", values.size(), to_string(shape));
  Tensor t = empty(shape, dtype_of<T>);
  if (!values.empty()) std::memcpy(t.raw(), values.data(), values.size_bytes());
  return t;
}
template Tensor from_values(std::span<const float>, const Shape&);
template Tensor from_values(std::span<const double>, const Shape&);
template Tensor from_values(std::span<const int64_t>, const Shape&);
template Tensor from_values(std::span<const int32_t>, const Shape&);
template Tensor from_values(std::span<const uint8_t>, const Shape&);
template Tensor from_values(std::span<const bool>, const Shape&);
template Tensor from_values(std::span<const Float8E4M3>, const Shape&);
template Tensor from_values(std::span<const Float8E5M2>, const Shape&);

std::string describe(const Tensor& t) {
  if (!t.defined()) return "undefined";
  std::string text =
      fmt::format("{}{} {}", name_of(t.dtype()), to_string(t.shape()), to_string(t.device()));
  return t.is_sharded() ? text + " " + shard_data(t)->placement() : text;
}

}  // namespace tessera
