// Views: the same storage seen with other shapes and strides. Values are copied only by a reshape
// that no strides can express, and by contiguous, clone, cat, stack and pad. Dims may be negative
// (counted from the end).
#pragma once
#include <vector>

#include "core/primitive/registry.h"

namespace tessera {

Tensor permute(const Tensor& x, const Dims& order);
Tensor transpose(const Tensor& x, int64_t a, int64_t b);
/// A view of x where strides allow it, otherwise of a dense copy. One extent may be -1.
Tensor reshape(const Tensor& x, const Shape& to);
Tensor flatten(const Tensor& x, int64_t first = 0, int64_t last = -1);
Tensor unflatten(const Tensor& x, int64_t dim, const Shape& extents);
Tensor squeeze(const Tensor& x, int64_t dim);
Tensor unsqueeze(const Tensor& x, int64_t dim);
/// Repeats dims of extent 1 (and new leading dims) with stride 0. -1 keeps an extent.
Tensor expand(const Tensor& x, const Shape& to);
/// Elements begin, begin + step, ... below end of `dim`; negative positions count from the end.
Tensor slice(const Tensor& x, int64_t dim, int64_t begin, int64_t end, int64_t step = 1);
Tensor narrow(const Tensor& x, int64_t dim, int64_t begin, int64_t size);
/// Element `index` of `dim`, which disappears.
Tensor select(const Tensor& x, int64_t dim, int64_t index);
/// Views of a temporary: assigning to one is refused where no other tensor has its memory.
Tensor slice(Tensor&& x, int64_t dim, int64_t begin, int64_t end, int64_t step = 1);
Tensor narrow(Tensor&& x, int64_t dim, int64_t begin, int64_t size);
Tensor select(Tensor&& x, int64_t dim, int64_t index);
/// Consecutive pieces of `dim`: of the given sizes, which add up to its extent, or of one `size`
/// (split), or `pieces` of one size (chunk). With one size, the last piece may be smaller.
Tensors split(const Tensor& x, const std::vector<int64_t>& sizes, int64_t dim = 0);
Tensors split(const Tensor& x, int64_t size, int64_t dim = 0);
inline Tensors split(const Tensor& x, std::initializer_list<int64_t> sizes, int64_t dim = 0) {
  return split(x, std::vector<int64_t>(sizes), dim);
}
Tensors chunk(const Tensor& x, int64_t pieces, int64_t dim = 0);
/// All elements of `dim`, which disappears.
Tensors unbind(const Tensor& x, int64_t dim = 0);

/// Dense in the order of `format`; `x` itself when it is so already. Channels-last takes [N, C, ..]
/// with at least one dim behind the channels.
Tensor contiguous(Tensor x, MemoryFormat format = MemoryFormat::kContiguous);
/// A copy.
Tensor clone(const Tensor& x);
/// Joins along an existing dim (cat) or a new one (stack); dtypes are promoted.
Tensor cat(std::span<const Tensor> parts, int64_t dim = 0);
Tensor stack(std::span<const Tensor> parts, int64_t dim = 0);
inline Tensor cat(std::initializer_list<Tensor> parts, int64_t dim = 0) {
  return cat(std::span<const Tensor>(parts.begin(), parts.size()), dim);
}
inline Tensor stack(std::initializer_list<Tensor> parts, int64_t dim = 0) {
  return stack(std::span<const Tensor>(parts.begin(), parts.size()), dim);
}
/// Zeros of extent `extent` in `dim`, with `x` at begin, begin + step, ...: the vjp of slice.
Tensor unslice(const Tensor& x, int64_t dim, int64_t begin, int64_t step, int64_t extent);

void register_view_ops(OpRegistry& registry);

}  // namespace tessera
