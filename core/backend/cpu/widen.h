// Whole dense tensors converted to the type that arithmetic on them is done in, and back: for
// kernels that read an element many times.
#pragma once
#include "core/backend/cpu/convert.h"
#include "core/tensor/tensor.h"

namespace tessera::cpu {

/// Writes the values of dense `from` to dense `to` of the same shape.
inline void convert_into(const Tensor& from, const Tensor& to) {
  convert_loop(from.dtype(), to.dtype())(static_cast<char*>(to.raw()), int64_t(size_of(to.dtype())),
                                         static_cast<const char*>(from.raw()),
                                         int64_t(size_of(from.dtype())), from.numel());
}

/// Dense `x` in dtype `to`; x itself when it is so already.
inline Tensor converted(const Tensor& x, DType to) {
  if (x.dtype() == to) return x;
  Tensor out = empty(x.shape(), to, x.device());
  convert_into(x, out);
  return out;
}

/// Calls f with a zero of the type that arithmetic on `t` is done in: float, double or int64_t.
template <class F>
void by_compute_type(DType t, F f) {
  switch (compute_dtype(t)) {
    case kF32: return f(float());
    case kF64: return f(double());
    default: return f(int64_t());
  }
}

}  // namespace tessera::cpu
