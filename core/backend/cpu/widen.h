// Converts whole tensors to the dtype in which kernels compute with them, and back, for kernels
// that read an element many times.
#pragma once
#include "core/backend/cpu/convert.h"
#include "core/dispatch/copy.h"
#include "core/tensor/tensor.h"

namespace tessera::cpu {

/// Writes the values of dense `from` to `to` of the same shape.
inline void convert_into(const Tensor& from, const Tensor& to) {
  if (!to.is_contiguous()) {
    Tensor dense = empty(to.shape(), to.dtype(), to.device());
    convert_into(from, dense);
    return copy_values(to, dense);
  }
  convert_loop(from.dtype(), to.dtype())(static_cast<char*>(to.raw()), int64_t(size_of(to.dtype())),
                                         static_cast<const char*>(from.raw_values()),
                                         int64_t(size_of(from.dtype())), from.numel());
}

/// `x` in dtype `to`, dense; x itself when it has that dtype already.
inline Tensor converted(const Tensor& x, DType to) {
  if (x.dtype() == to) return x;
  Tensor out = empty(x.shape(), to, x.device());
  convert_into(x.is_contiguous() ? x : dense_copy(x), out);
  return out;
}

/// Calls run(in, out) with f32 in the place of every operand and result of the 16-bit dtype `t`.
template <class F>
void through_f32(std::span<const Tensor> in, std::span<const Tensor> out, DType t, F run) {
  Tensors wide_in, wide_out;
  for (const Tensor& x : in) wide_in.push_back(x.dtype() == t ? converted(x, kF32) : x);
  for (const Tensor& y : out)
    wide_out.push_back(y.dtype() == t ? empty(y.shape(), kF32, y.device()) : y);
  run(std::span<const Tensor>(wide_in), std::span<const Tensor>(wide_out));
  for (size_t i = 0; i < out.size(); ++i)
    if (out[i].dtype() == t) convert_into(wide_out[i], out[i]);
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
