// The functions behind the templates of transforms.h, on flat lists of tensors.
// Internal: not part of the public interface.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/autograd/level.h"
#include "core/base/function_ref.h"

namespace tessera::transforms {

using List = std::vector<Tensor>;
using Function = FunctionRef<List(std::span<const Tensor>)>;

/// A function that ran, with the graph of its run.
class Recording {
 public:
  /// Results, as tensors of the level at which record() was called.
  const List& results() const { return results_; }
  /// Cotangents of all inputs from those of the results; zeros for inputs that were not wanted or
  /// that no result depends on. Throws ShapeError unless cotangents have the results' shapes.
  List pullback(std::span<const Tensor> cotangents) const;

 private:
  friend Recording record(Function f, std::span<const Tensor> in, const std::vector<bool>& wanted);
  Ref<Level> level_;
  List in_, leaves_, out_, results_;
};
/// Runs `f` on `in` at a new level, and records what depends on the wanted float inputs.
Recording record(Function f, std::span<const Tensor> in, const std::vector<bool>& wanted);

struct ValueAndGrad {
  List values, gradients;
};
/// Gradients of the first result of `f`, one element, by the wanted inputs; zeros for others.
ValueAndGrad value_and_grad_of(Function f, std::span<const Tensor> in,
                               const std::vector<bool>& wanted);

struct ValuesAndTangents {
  List values, tangents;
};
ValuesAndTangents jvp_of(Function f, std::span<const Tensor> in, std::span<const Tensor> tangents);

struct Batching {
  const std::vector<std::optional<int64_t>>& in_dims;  // by argument
  const std::vector<size_t>& leaves;                   // tensors of each argument
  const std::vector<int64_t>& out_dims;
  Randomness randomness;
};
List vmap_of(Function f, std::span<const Tensor> in, const Batching& b);

enum class Mode : uint8_t { kReverse, kForward };
/// Jacobians of the one result of `f` by each wanted input; undefined for others.
List jacobians(Mode mode, Function f, std::span<const Tensor> in, const std::vector<bool>& wanted);

}  // namespace tessera::transforms
