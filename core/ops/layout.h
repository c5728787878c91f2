// Rearranging elements: compositions of views, joins and index_select, so they need no kernels, and
// are differentiable and shardable as those are. Dims may be negative.
#pragma once
#include "core/ops/scalar.h"
#include "core/primitive/registry.h"

namespace tessera {

Tensor movedim(const Tensor& x, const Dims& from, const Dims& to);
Tensor swapaxes(const Tensor& x, int64_t a, int64_t b);
Tensor broadcast_to(const Tensor& x, const Shape& to);
/// All tensors expanded to their common shape.
Tensors broadcast_tensors(std::span<const Tensor> tensors);
Tensors meshgrid(std::span<const Tensor> vectors);  // indexing "ij"
inline Tensors meshgrid(std::initializer_list<Tensor> vectors) {
  return meshgrid(std::span<const Tensor>(vectors.begin(), vectors.size()));
}
/// Every choice of one element of each vector, in order: [number, vectors].
Tensor cartesian_prod(std::span<const Tensor> vectors);
template <class... T>
Tensor cartesian_prod(const Tensor& first, const T&... others) {
  const Tensor vectors[] = {first, others...};
  return cartesian_prod(std::span<const Tensor>(vectors));
}
/// Joined along rows (vstack) or columns (hstack; of vectors, along their dim); a vector is a row.
Tensor vstack(std::span<const Tensor> parts);
Tensor hstack(std::span<const Tensor> parts);
inline Tensor vstack(std::initializer_list<Tensor> parts) {
  return vstack(std::span<const Tensor>(parts.begin(), parts.size()));
}
inline Tensor hstack(std::initializer_list<Tensor> parts) {
  return hstack(std::span<const Tensor>(parts.begin(), parts.size()));
}
/// Matrices along the diagonal of one that is 0 elsewhere; a vector is a row.
Tensor block_diag(std::span<const Tensor> blocks);

/// Elements of `dims` in reverse.
Tensor flip(const Tensor& x, const Dims& dims);
/// A quarter turn from dims[0] towards dims[1], `times` times.
Tensor rot90(const Tensor& x, int64_t times = 1, const Dims& dims = {0, 1});
/// [.., C r r, H, W] -> [.., C, H r, W r] and back: Shi et al. 2016.
Tensor pixel_shuffle(const Tensor& x, int64_t r);
Tensor pixel_unshuffle(const Tensor& x, int64_t r);
/// Element i of each dim moves to i + shift, and from the end to the beginning; without dims, the
/// flattened tensor is rolled.
Tensor roll(const Tensor& x, const Dims& shifts, const Dims& dims = {});
/// The tensor repeats[d] times along each dim; more repeats than dims add leading dims.
Tensor repeat(const Tensor& x, const Dims& repeats);
/// As repeat, and missing leading repeats are 1.
Tensor tile(const Tensor& x, const Dims& repeats);
/// Each element `count` times (each row of `dim`).
Tensor repeat_interleave(const Tensor& x, int64_t count, int64_t dim);
/// Row i of `dim` counts[i] times; the extent of the result depends on values.
Tensor repeat_interleave(const Tensor& x, const Tensor& counts, int64_t dim);
/// `pieces` parts of `dim` whose extents differ by at most one, larger ones first.
Tensors tensor_split(const Tensor& x, int64_t pieces, int64_t dim = 0);
/// Windows of `size` elements every `step`, in a new last dim.
Tensor unfold(const Tensor& x, int64_t dim, int64_t size, int64_t step);

/// Elements (i, i + offset) of dims `a` and `b`, as a new last dim in their place.
Tensor diagonal(const Tensor& x, int64_t offset = 0, int64_t a = 0, int64_t b = 1);
/// [N] -> a matrix with x on its `offset`-th diagonal; a matrix -> that diagonal.
Tensor diag(const Tensor& x, int64_t offset = 0);
/// [.., N] -> [.., M, M], M = N + |offset|: each vector on the `offset`-th diagonal of a matrix.
Tensor diag_embed(const Tensor& x, int64_t offset = 0);

enum class PadMode : uint8_t { kConstant, kReflect, kReplicate, kCircular };
/// `pads`: pairs (before, after) from the last dim on, as in PyTorch; negative ones cut (kConstant
/// only).
Tensor pad(const Tensor& x, const Dims& pads, PadMode mode = PadMode::kConstant, Scalar value = 0);

}  // namespace tessera
