// Merging and cutting of nests of loops; see walk.h.
#include "core/backend/cuda/kernels/walk.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kCountable = int64_t(1) << 31;

// Makes positions of packs; false where the operands do not allow it.
bool pack(std::vector<Loop>& dims, size_t operands, int width) {
  Loop& inner = dims.front();
  if (inner.extent % width != 0 || inner.stride[0] != 1) return false;
  for (size_t k = 0; k < operands; ++k) {
    if (inner.stride[k] == 0) continue;
    if (inner.stride[k] != 1) return false;
    for (size_t d = 1; d < dims.size(); ++d)
      if (dims[d].stride[k] % width != 0) return false;
  }
  inner.extent /= width;
  for (int64_t& stride : inner.stride) stride *= width;
  return true;
}

bool countable(const std::vector<Loop>& dims, size_t operands) {
  int64_t count = 1, last[kWalkOperands] = {};
  for (const Loop& dim : dims) {
    if (dim.extent >= kCountable || count * dim.extent >= kCountable) return false;
    count *= dim.extent;
    for (size_t k = 0; k < operands; ++k) last[k] += std::abs(dim.stride[k]) * (dim.extent - 1);
  }
  return std::all_of(last, last + operands, [](int64_t n) { return n < kCountable; });
}

void cut(std::vector<Loop> dims, size_t operands, const int64_t* begin,
         std::vector<WalkPiece>& pieces) {
  if (!countable(dims, operands)) {
    // Halves of the outermost loop that has any.
    size_t d = dims.size() - 1;
    while (dims[d].extent == 1) --d;
    const int64_t extent = dims[d].extent, half = (extent + 1) / 2;
    int64_t next[kWalkOperands];
    for (size_t k = 0; k < operands; ++k) next[k] = begin[k] + half * dims[d].stride[k];
    dims[d].extent = half;
    cut(dims, operands, begin, pieces);
    dims[d].extent = extent - half;
    return cut(std::move(dims), operands, next, pieces);
  }
  WalkPiece piece{};
  std::copy_n(begin, operands, piece.begin);
  piece.walk.count = 1;
  piece.walk.ndim = int(dims.size());
  TESSERA_ASSERT(dims.size() <= size_t(kWalkDims), "kernels: a walk of {} loops", dims.size());
  for (size_t d = 0; d < dims.size(); ++d) {
    piece.walk.count *= unsigned(dims[d].extent);
    piece.walk.extent[d] = make_divisor(uint32_t(dims[d].extent));
    for (size_t k = 0; k < operands; ++k) piece.walk.stride[k][d] = int(dims[d].stride[k]);
  }
  pieces.push_back(piece);
}

}  // namespace

Divisor make_divisor(uint32_t divisor) {
  const auto shift = uint32_t(std::bit_width(divisor - 1));
  const uint64_t multiplier = ((uint64_t(1) << 32) * ((uint64_t(1) << shift) - divisor)) / divisor;
  return {divisor, uint32_t(multiplier + 1), shift};
}

std::vector<Loop> merged_loops(std::span<const int64_t> extents,
                               std::span<const Strided> operands) {
  std::vector<Loop> dims;
  for (size_t d = extents.size(); d-- > 0;) {
    if (extents[d] == 1) continue;
    Loop dim{extents[d], {}};
    for (size_t k = 0; k < operands.size(); ++k) dim.stride[k] = operands[k].strides[d];
    dims.push_back(dim);
  }
  std::stable_sort(dims.begin(), dims.end(), [](const Loop& a, const Loop& b) {
    return std::abs(a.stride[0]) < std::abs(b.stride[0]);
  });
  std::vector<Loop> result;
  for (const Loop& dim : dims) {
    bool fits = !result.empty();
    for (size_t k = 0; fits && k < operands.size(); ++k)
      fits = dim.stride[k] == result.back().stride[k] * result.back().extent;
    if (fits)
      result.back().extent *= dim.extent;
    else
      result.push_back(dim);
  }
  if (result.empty()) result.push_back({1, {}});
  return result;
}

std::vector<WalkPiece> make_walks(std::span<const int64_t> extents,
                                  std::span<const Strided> operands, int width) {
  TESSERA_ASSERT(!operands.empty() && operands.size() <= size_t(kWalkOperands),
                 "kernels: a walk of {} operands", operands.size());
  std::vector<WalkPiece> pieces;
  if (std::count(extents.begin(), extents.end(), 0) > 0) return pieces;
  std::vector<Loop> dims = merged_loops(extents, operands);
  if (width > 1 && !pack(dims, operands.size(), width)) return pieces;
  const int64_t begin[kWalkOperands] = {};
  cut(std::move(dims), operands.size(), begin, pieces);
  return pieces;
}

bool are_packs(const WalkPiece& piece, std::span<const Strided> operands, int width) {
  for (size_t k = 0; k < operands.size(); ++k) {
    const auto address = reinterpret_cast<uintptr_t>(operands[k].data);
    const bool broadcast = piece.walk.stride[k][0] == 0;
    if (!broadcast && address % uintptr_t(operands[k].bytes * width) != 0) return false;
  }
  return true;
}

Geometry cover(int64_t count, int threads, int64_t each) {
  const int64_t part = threads * each, blocks = (count + part - 1) / part;
  TESSERA_ASSERT(blocks < kCountable, "kernels: {} blocks in one launch", blocks);
  Geometry g;
  g.grid[0] = unsigned(std::max<int64_t>(blocks, 1)), g.block[0] = unsigned(threads);
  return g;
}

}  // namespace tessera::cuda
