// Tensors [N, C, ..] as rows of channels, for the kernels that want their operands channels-last.
#pragma once
#include "core/backend/cpu/convert.h"
#include "core/dispatch/copy.h"
#include "core/tensor/tensor.h"

namespace tessera::cpu {

inline Meta channels_last_meta(const Shape& shape, DType dtype, Device device) {
  return {shape, channels_last_strides(shape), dtype, device};
}
/// `t` laid out channels-last; t itself when it is so already.
inline Tensor as_channels_last(const Tensor& t) {
  if (is_channels_last(t.shape(), t.strides())) return t;
  Tensor copy = empty(channels_last_meta(t.shape(), t.dtype(), t.device()));
  copy_values(copy, t);
  return copy;
}
/// Writes the values of `from` to `to`, which has the same dense layout and perhaps another dtype.
inline void convert_same_layout(const Tensor& from, const Tensor& to) {
  convert_loop(from.dtype(), to.dtype())(static_cast<char*>(to.raw()), int64_t(size_of(to.dtype())),
                                         static_cast<const char*>(from.raw_values()),
                                         int64_t(size_of(from.dtype())), from.numel());
}
/// `t` channels-last, in the dtype in which kernels compute with it.
inline Tensor channels_last_wide(const Tensor& t) {
  Tensor x = as_channels_last(t);
  const DType wide = compute_dtype(t.dtype());
  if (t.dtype() == wide) return x;
  Tensor copy = empty(channels_last_meta(t.shape(), wide, t.device()));
  convert_same_layout(x, copy);
  return copy;
}
/// The result of a kernel that computes in wider floats: `out` itself where its dtype is wide (or
/// where it is undefined), else a wide tensor of its layout, which finish() converts.
class WideResult {
 public:
  explicit WideResult(const Tensor& out) : out_(out), wide_(out) {
    if (!out.defined()) return;
    const DType t = compute_dtype(out.dtype());
    if (t == out.dtype() || !is_floating(out.dtype())) return;
    Meta m = out.meta();
    m.dtype = t;
    wide_ = empty(m);
  }
  const Tensor& get() const { return wide_; }
  void finish() const {
    if (out_.defined() && !wide_.is_same(out_)) convert_same_layout(wide_, out_);
  }

 private:
  const Tensor& out_;
  Tensor wide_;
};

}  // namespace tessera::cpu
