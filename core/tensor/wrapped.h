// A tensor as a function transform sees it: a handle that stands for another one, `inner`, which
// lies one level further out. Under vmap the inner tensor has one more dim, in front, that the
// program does not see. Invariant: a wrapper is never sharded itself (its inner tensor may be), so
// it lies in the slot of ShardData; ops reach the inner tensor through the backend of its level.
// Internal: not part of the public interface.
#pragma once
#include "core/tensor/tensor.h"

namespace tessera {

/// The bit of TensorImpl::layers that marks a wrapper; no layer of the dispatch path has it.
inline constexpr LayerMask kWrappedBit = 0x80;

struct Wrapped : RefCounted {
  Wrapped(Tensor inner, bool batched) : inner(std::move(inner)), batched(batched) {}
  /// The same handle on other values of equal type.
  virtual Ref<Wrapped> with(Tensor inner) const = 0;
  /// Whether a thread still runs the function that the handle was made for. Ops on it are refused
  /// outside of that function, since they would not be recorded at its level.
  virtual bool in_use() const = 0;
  Tensor inner;
  const bool batched;  // inner has the batch in dim 0
};

/// Null unless `t` is a wrapper.
inline Wrapped* wrapped(const Tensor& t) {
  return t.layers() & kWrappedBit ? static_cast<Wrapped*>(t.impl()->shard.get()) : nullptr;
}
/// The tensor at the bottom of all wrappers, which has the values.
inline const Tensor& innermost(const Tensor& t) {
  const Tensor* at = &t;
  while (const Wrapped* w = wrapped(*at)) at = &w->inner;
  return *at;
}
/// True when `t` is a sample of a batch, at its own level or further out.
inline bool is_sample(const Tensor& t) {
  for (const Tensor* at = &t; const Wrapped* w = wrapped(*at); at = &w->inner)
    if (w->batched) return true;
  return false;
}
/// True when some layer of `mask` would look at ops on `t`, at its own level or further out.
inline bool asks_at_any_level(const Tensor& t, LayerMask mask) {
  const Tensor* at = &t;
  while (!(at->layers() & mask)) {
    const Wrapped* w = wrapped(*at);
    if (!w) return false;
    at = &w->inner;
  }
  return true;
}
/// The handle of `payload`: the type of its inner tensor, without the batch where there is one.
Tensor wrapper(Ref<Wrapped> payload);

}  // namespace tessera
