// Methods of Tensor that are ops, spelled so that programs read well.
#include "core/dispatch/observer.h"
#include "core/dispatch/sharding.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "core/tensor/element.h"
#include "core/tensor/wrapped.h"

namespace tessera {

Tensor Tensor::to(DType dtype) const { return cast(*this, dtype); }
Tensor Tensor::reshape(const Shape& to) const { return tessera::reshape(*this, to); }
Tensor Tensor::transpose(int64_t a, int64_t b) const { return tessera::transpose(*this, a, b); }
Tensor Tensor::to(MemoryFormat format) const { return contiguous(format); }
Tensor Tensor::contiguous(MemoryFormat format) const { return tessera::contiguous(*this, format); }
Tensor Tensor::clone() const { return tessera::clone(*this); }
Tensor Tensor::operator[](int64_t i) const { return select(*this, 0, i); }

template <class T>
T Tensor::item(std::source_location where) const {
  TESSERA_CHECK_AS(ShapeError, numel() == 1, "item: {} has {} elements, not one", describe(*this),
                   numel());
  notify(events::ValueRead{where});
  if (const Wrapped* w = wrapped(*this); w && !w->batched) return w->inner.item<T>(where);
  if (const ShardingLayer* sharding = sharding_of(*this)) return sharding->whole_value().item<T>();
  if constexpr (std::is_same_v<T, bool>) return read_real(raw_values(), dtype()) != 0;
  if constexpr (std::is_integral_v<T>) return T(read_integer(raw_values(), dtype()));
  return T(read_real(raw_values(), dtype()));
}
template float Tensor::item(std::source_location) const;
template double Tensor::item(std::source_location) const;
template int64_t Tensor::item(std::source_location) const;
template int Tensor::item(std::source_location) const;
template bool Tensor::item(std::source_location) const;

}  // namespace tessera
