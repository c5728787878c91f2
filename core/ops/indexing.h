// Reading and writing elements by position. Index tensors hold integers; a position outside its dim
// throws UserError with the index, its place and the extent. Sources that are added at the same
// element are added in ascending order of their position, whatever the number of threads.
#pragma once
#include <optional>
#include <vector>

#include "core/ops/scalar.h"
#include "core/primitive/registry.h"

namespace tessera {

/// out[i][j] = x[index[i][j]][j] for dim 0 of a 2-d x; index has x's dims, and may be smaller
/// outside `dim`.
Tensor gather(const Tensor& x, int64_t dim, const Tensor& index);
/// As gather, with operands broadcast outside `dim` and negative positions counted from the end.
Tensor take_along_dim(const Tensor& x, const Tensor& index, int64_t dim);
/// Rows `index` [N] of `dim`; each may be named any number of times.
Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index);

/// A copy of x with x[index[i][j]][j] = src[i][j] for dim 0 of a 2-d x. Of several writes to an
/// element the last counts.
Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& src);
Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, Scalar value);
/// A copy of x with src[i][j] added to x[index[i][j]][j] for dim 0 of a 2-d x.
Tensor scatter_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& src);
/// Zeros of the shape of `like`, whose values are not read, with `src` added: the vjp of gather.
Tensor scatter_sum(const Tensor& like, int64_t dim, const Tensor& index, const Tensor& src);
enum class ScatterReduce : uint8_t { kSum, kProd, kMean, kAmax, kAmin };
/// As scatter_add, but reduces the sources of an element by `how`, together with the element of x,
/// or without it when `include_self` is false. Elements of x that have no source stay. Equal
/// extremes share the gradient. Means of integers are rounded down.
Tensor scatter_reduce(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& src,
                      ScatterReduce how, bool include_self = true);
/// A copy of x with rows `index` [N] of `dim` changed: alpha src is added (index_add), or src
/// replaces them (index_copy).
Tensor index_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& src,
                 Scalar alpha = 1);
Tensor index_copy(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& src);
Tensor index_fill(const Tensor& x, int64_t dim, const Tensor& index, Scalar value);

/// x[i, :, j]: one entry per leading dim of x, an undefined tensor for ":". Integer entries
/// broadcast together, negative ones count from the end; a bool entry of k dims stands for the
/// positions of its true elements in k dims of x. The result's dims are in NumPy's order.
Tensor index(const Tensor& x, std::span<const Tensor> indices);
/// Python's begin:end:step, where None is the first, or past the last. Negative positions count
/// from the end, positions beyond an end stop at it; steps are positive.
struct NoneType {
  constexpr operator std::optional<int64_t>() const { return {}; }
};
struct EllipsisType {};
inline constexpr NoneType None;
inline constexpr EllipsisType Ellipsis;
struct Slice {
  Slice(std::optional<int64_t> begin = {}, std::optional<int64_t> end = {}, int64_t step = 1)
      : begin(begin), end(end), step(step) {}
  std::optional<int64_t> begin, end;
  int64_t step;
};
/// One entry in the brackets: a position (its dim disappears), a Slice, None (a new dim of extent
/// 1), Ellipsis (as many whole dims as are left), or a tensor of positions or of bools.
class TensorIndex {
 public:
  enum class Kind : uint8_t { kPosition, kSlice, kNone, kEllipsis, kTensor };
  template <std::integral T>
  requires(!std::same_as<T, bool>) TensorIndex(T position)
      : kind(Kind::kPosition), position(int64_t(position)) {}
  TensorIndex(const Slice& slice) : kind(Kind::kSlice), slice(slice) {}
  TensorIndex(NoneType) : kind(Kind::kNone) {}
  TensorIndex(EllipsisType) : kind(Kind::kEllipsis) {}
  TensorIndex(Tensor tensor) : kind(Kind::kTensor), tensor(std::move(tensor)) {}

  Kind kind;
  int64_t position = 0;
  Slice slice;
  Tensor tensor;
};
/// x[at]; dims behind the last entry are whole: x.index({Ellipsis, Slice(1, 3)}) is x[..., 1:3].
/// The result is a view unless an entry is a tensor; then positions and slices are taken first, as
/// in PyTorch. Throws ShapeError for more entries than dims and for a second Ellipsis.
Tensor index(const Tensor& x, std::span<const TensorIndex> at);

/// A copy of x with x[indices] = values (broadcast), or with values added to it.
Tensor index_put(const Tensor& x, std::span<const Tensor> indices, const Tensor& values,
                 bool accumulate = false);
/// The same, written into x; recorded as assign_ is.
void index_put_(const Tensor& x, std::span<const Tensor> indices, const Tensor& values,
                bool accumulate = false);

/// x where `mask` is false, `value` where it is true.
Tensor masked_fill(const Tensor& x, const Tensor& mask, Scalar value);
/// The elements where `mask` is true, in row-major order [N]. Its extent depends on values.
Tensor masked_select(const Tensor& x, const Tensor& mask);
/// x with the elements of `src`, in row-major order, where `mask` (bool, broadcast to x) is true.
/// Throws UserError where `src` has another dtype than x, or fewer elements than `mask` takes.
Tensor masked_scatter(const Tensor& x, const Tensor& mask, const Tensor& src);
/// Elements of the flattened x, of the shape of `index`; negative positions count from the end.
Tensor take(const Tensor& x, const Tensor& index);
/// A copy of x with row `index` of `dim` being src, which lacks that dim.
Tensor select_scatter(const Tensor& x, const Tensor& src, int64_t dim, int64_t index);
/// Positions of elements that are not zero, i64 [N, ndim], in row-major order.
Tensor nonzero(const Tensor& x);
/// i64 [.., classes] with a one at each x; classes -1: the largest x plus one.
Tensor one_hot(const Tensor& x, int64_t classes = -1);

/// Positions (row, column), i64 [2, N], of what tril and triu keep of [rows, columns].
Tensor tril_indices(int64_t rows, int64_t columns, int64_t diagonal = 0);
Tensor triu_indices(int64_t rows, int64_t columns, int64_t diagonal = 0);

/// `index` with negative positions counted from the end of `extent`.
Tensor wrap_index(const Tensor& index, int64_t extent);

void register_indexing_ops(OpRegistry& registry);

}  // namespace tessera
