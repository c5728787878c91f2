// The bottom of the dispatch path. Eager runs kernels; Trace records. Below autograd and sharding,
// so a trace sees the rank-local ops of forward, backward, collectives and optimizer in one
// sequence.
#pragma once
#include <string_view>

#include "core/primitive/primitive.h"

namespace tessera {

class Backend {
 public:
  virtual ~Backend() = default;
  /// Results of `prim` on `in`. May take over operands that nobody else owns.
  virtual Tensors run(const PrimRef& prim, Inputs in) = 0;
  /// The one effect: the values of `dst[i]` become result i of `prim`, and their versions move.
  /// Shapes and dtypes of destinations and results are equal.
  virtual void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) = 0;
  /// True when ops are written down to be run again: numbers in a program then come as ops too,
  /// and not as tensors that nobody made.
  virtual bool records() const { return false; }
  /// The program is about to do what is no op: read a value, talk to other ranks through a group.
  /// A backend that puts ops off must have run them then. `what` names it and its place.
  virtual void leaves_ops(std::string_view /*what*/) {}
  /// The program reads the value of a tensor (item) at `where`, "file.cpp:12".
  virtual void value_read(std::string_view /*where*/) {}
  /// `slot`, a handle that outlives the ops (the gradient of a leaf), is read; or it is about to
  /// take `now`, or nothing when that is undefined. `owner` holds it.
  virtual void slot_read(const RefCounted& /*owner*/, const Tensor& /*slot*/) {}
  virtual void slot_changes(const RefCounted& /*owner*/, Tensor& /*slot*/, const Tensor& /*now*/) {}
  /// Which ops come next depends on `value`, a switch that outlives them and that `owner` holds; or
  /// it is about to change (setting.h).
  virtual void setting_read(const RefCounted& /*owner*/, const int64_t& /*value*/) {}
  virtual void setting_changes(const RefCounted& /*owner*/, int64_t& /*value*/) {}
  /// The program calls an op on these handles; which layers look at it depends on what they carry.
  virtual void takes(std::span<const Tensor> /*operands*/) {}
};

/// Runs kernels at once (CPU) or enqueues them (GPU).
Backend& eager_backend();

}  // namespace tessera
