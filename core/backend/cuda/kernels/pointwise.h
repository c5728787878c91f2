// The host's side of pointwise.cu: which instance an op with its dtypes needs, and the launches
// that cover its operands.
#pragma once
#include "core/backend/cuda/kernels/walk.h"
#include "core/tensor/dtype.h"

namespace tessera::cuda {

/// What core/ops/pointwise.def says of an op.
struct PointwiseOp {
  std::string_view name;
  int operands;
  bool on_integers, on_floats, to_bool, traps;
  int cost;
};
std::span<const PointwiseOp> pointwise_ops();

/// Elements that one pack holds and packs that a thread of the entry `packs` takes.
struct PointwiseShape {
  int width, steps;
};
PointwiseShape shape_of(const PointwiseOp& op, DType dtype);
PointwiseShape shape_of_cast(DType from, DType to);
PointwiseShape shape_of_copy(int bytes);  // and of a selection

/// `dtype` is that of the operands; entries `packs` and `elements`.
Instance pointwise_instance(const PointwiseOp& op, DType dtype);
/// Between different dtypes; a copy is another instance.
Instance cast_instance(DType from, DType to);
/// Elements of 1, 2, 4 or 8 bytes, whatever they are: their bits are kept.
Instance copy_instance(int bytes);
Instance where_instance(int bytes);

/// One launch of an instance: the entry's name behind the instance's, and its one parameter.
struct PointwiseLaunch {
  const char* entry;
  Geometry geometry;
  PointwiseCall call;
};
/// Launches that compute `operands[0]` (the result) from the others over `extents`. An operand
/// without data is the number whose bits are `values[k - 1]`. `report` may be null unless the op
/// traps.
std::vector<PointwiseLaunch> pointwise_launches(PointwiseShape shape,
                                                std::span<const int64_t> extents,
                                                std::span<const Strided> operands,
                                                std::span<const unsigned long long> values,
                                                Report* report);

}  // namespace tessera::cuda
