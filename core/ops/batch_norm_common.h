// Code that the batch-norm primitives share: checks of operands, loops. Only batch_norm.cpp and
// batch_norm_stats.cpp include it.
#pragma once
#include "core/ops/batch_norm_attributes.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera::batch_norm_family {

inline DType stat_type(DType t) { return t == kF64 ? kF64 : kF32; }

/// `t` [C] reshaped to broadcast to `x` [N, C, ..].
inline Tensor beside(const Tensor& t, const Tensor& x) {
  Shape s = Dims::filled(x.ndim(), 1);
  s[1] = t.numel();
  return reshape(t, s);
}
inline Dims all_but_channels(const Tensor& x) {
  Dims d{0};
  for (int i = 2; i < x.ndim(); ++i) d.push_back(i);
  return d;
}

/// running += factor (value - running), in the dtype of `running`.
void follow_(const Tensor& running, const Tensor& value, const Tensor& factor);

/// The loops of x and of a tensor with one value a channel; all but the channel loop are `others`.
struct NormLoops {
  AxisMap map;
  OperandLoops x, channel;
  explicit NormLoops(const Shape& s, Factor::Kind others = Factor::kWhole) {
    for (int d = 0; d < s.size(); ++d) map.add(d == 1 ? Factor::kPass : others, s[d]);
    x = broadcast_loops(s, s);
    channel = {x[1]};
  }
};

class BatchNormFamily : public PrimitiveWith<BatchNormAttributes> {
 public:
  using PrimitiveWith::PrimitiveWith;

 protected:
  void check_x(const Meta& x) const {
    TESSERA_CHECK_AS(ShapeError, x.shape.size() >= 2 && is_floating(x.dtype),
                     "{}: x is {}{}; expected floats [N, C, ..]", name(), name_of(x.dtype),
                     to_string(x.shape));
  }
  void check_like_x(const Meta& x, const Meta& t, const char* what) const {
    TESSERA_CHECK_AS(ShapeError, t.shape == x.shape && t.dtype == x.dtype,
                     "{}: {} is {}{} beside x {}{}; expected one type", name(), what,
                     name_of(t.dtype), to_string(t.shape), name_of(x.dtype), to_string(x.shape));
  }
  void check_channel(const Meta& x, const Meta& t, const char* what) const {
    TESSERA_CHECK_AS(
        ShapeError,
        t.shape == Shape{x.shape[1]} && (t.dtype == x.dtype || t.dtype == stat_type(x.dtype)),
        "{}: {} is {}{}; expected {}[{}] beside x {}", name(), what, name_of(t.dtype),
        to_string(t.shape), name_of(stat_type(x.dtype)), x.shape[1], to_string(x.shape));
  }
};

}  // namespace tessera::batch_norm_family
