// Reading and writing elements by position. Index tensors are integers; positions outside a dim
// throw UserError with the index, its position and the extent. Where several sources meet in one
// element, they are added in ascending order of their position, whatever the number of threads.
#pragma once
#include <optional>
#include <vector>

#include "core/ops/scalar.h"
#include "core/primitive/registry.h"

namespace tessera {

/// out[i][j] = x[index[i][j]][j] for dim 0 of two; index has x's dims, and may be smaller outside
/// `dim`.
Tensor gather(const Tensor& x, int64_t dim, const Tensor& index);
/// As gather, with operands broadcast outside `dim` and negative positions counted from the end.
Tensor take_along_dim(const Tensor& x, const Tensor& index, int64_t dim);
/// Rows `index` [N] of `dim`; each may be named any number of times.
Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index);

/// A copy of x with x[index[i][j]][j] = src[i][j] for dim 0 of two. Of several writes the last
/// stays.
Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& src);
Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index, Scalar value);
/// A copy of x with src[i][j] added to x[index[i][j]][j] for dim 0 of two.
Tensor scatter_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& src);
/// Zeros of the shape of `like`, whose values are not read, with `src` added: the vjp of gather.
Tensor scatter_sum(const Tensor& like, int64_t dim, const Tensor& index, const Tensor& src);
enum class ScatterReduce : uint8_t { kSum, kProd, kMean, kAmax, kAmin };
/// As scatter_add, with what meets at a place reduced by `how`, together with the element of x
/// that is there, or without it when `include_self` is false; other elements of x stay. Equal
/// extremes share the gradient. Integer means round down.
Tensor scatter_reduce(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& src,
                      ScatterReduce how, bool include_self = true);
/// A copy of x with alpha src added to (index_add), written over (index_copy) rows `index` [N] of
/// `dim`.
Tensor index_add(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& src,
                 Scalar alpha = 1);
Tensor index_copy(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& src);
Tensor index_fill(const Tensor& x, int64_t dim, const Tensor& index, Scalar value);

/// x[i, :, j]: one entry per leading dim of x, an undefined tensor for ":". Integer entries
/// broadcast together, negative ones count from the end; a bool entry of k dims stands for the
/// positions of its true elements in k dims of x. Dims of the result are placed as NumPy does.
Tensor index(const Tensor& x, std::span<const Tensor> indices);
/// A copy of x with x[indices] = values (broadcast), or with values added to it.
Tensor index_put(const Tensor& x, std::span<const Tensor> indices, const Tensor& values,
                 bool accumulate = false);

/// x where `mask` is false, `value` where it is true.
Tensor masked_fill(const Tensor& x, const Tensor& mask, Scalar value);
/// The elements where `mask` is true, in row-major order [N]. Its extent depends on values.
Tensor masked_select(const Tensor& x, const Tensor& mask);
/// Positions of elements that are not zero, i64 [N, ndim], in row-major order.
Tensor nonzero(const Tensor& x);
/// i64 [.., classes] with a one at each x; classes -1: the largest x plus one.
Tensor one_hot(const Tensor& x, int64_t classes = -1);

/// `index` with negative positions counted from the end of `extent`.
Tensor wrap_index(const Tensor& index, int64_t extent);

void register_indexing_ops(OpRegistry& registry);

}  // namespace tessera
