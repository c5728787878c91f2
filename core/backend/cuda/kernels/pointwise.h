// The host's side of pointwise.cu: which instance an op with its dtypes needs, and the launches
// that cover its operands.
#pragma once
#include "core/backend/cuda/kernels/walk.h"
#include "core/base/small_vector.h"
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

/// How an op walks over operands of known layouts, wherever these are in memory.
struct PointwiseWalks {
  PointwiseShape shape{};
  std::vector<WalkPiece> packs;  // none where the layouts do not allow packs
  std::vector<WalkPiece> elements;
};
/// Operand 0 is the result. Where operands are is not looked at.
PointwiseWalks pointwise_walks(PointwiseShape shape, std::span<const int64_t> extents,
                               std::span<const Strided> operands);

/// One launch of an instance: the entry's name behind the instance's, and its one parameter.
struct PointwiseLaunch {
  bool packed = false;
  Geometry geometry;
  PointwiseCall call;
  const char* entry() const { return packed ? "packs" : "elements"; }
};
using PointwiseLaunches = SmallVector<PointwiseLaunch, 1>;
/// Launches that compute `operands[0]` (the result) from the others, whose layouts are those that
/// `walks` were made for: of packs, where addresses allow them. An operand without data is the
/// number whose bits are `values[k - 1]`. `report` may be null unless the op traps.
PointwiseLaunches pointwise_launches(const PointwiseWalks& walks, std::span<const Strided> operands,
                                     std::span<const unsigned long long> values, Report* report);

}  // namespace tessera::cuda
