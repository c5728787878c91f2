// Instances and launches of transpose.cu; see transpose.h.
#include "core/backend/cuda/kernels/transpose.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::cuda {
namespace {

// A shorter dim lies in few sectors of the memory, which a cache keeps.
constexpr int64_t kShortest = 16;
constexpr int64_t kCountable = int64_t(1) << 31;

struct TileShape {
  unsigned lanes, rows, columns;
};
TileShape tile_of(int bytes) {
  const unsigned lanes = bytes < 4 ? 4 / unsigned(bytes) : 1;
  return {lanes, 32 * lanes, bytes == 4 ? 64 : 32 * lanes};
}

Divisor tiles_of(unsigned extent, unsigned side) {
  return make_divisor((extent + side - 1) / side);
}

// The loop along which the operand is dense; 0 where there is none but the result's.
size_t rows_of(const std::vector<Loop>& loops) {
  const auto fits = [](const Loop& l) { return l.extent >= kShortest && l.extent < kCountable; };
  const Loop& columns = loops[0];
  if (columns.stride[0] != 1 || columns.stride[1] == 0 || !fits(columns)) return 0;
  for (size_t d = 1; d < loops.size(); ++d)
    if (loops[d].stride[1] == 1 && fits(loops[d])) return d;
  return 0;
}

// Whether lines of operand k that begin at `data` consist of whole words.
bool has_words(const void* data, int bytes, unsigned lanes, int64_t line, const Walk& batch,
               int k) {
  bool whole = reinterpret_cast<uintptr_t>(data) % (lanes * unsigned(bytes)) == 0;
  whole = whole && line % int64_t(lanes) == 0;
  for (int d = 0; d < batch.ndim; ++d) whole = whole && batch.stride[k][d] % int(lanes) == 0;
  return whole;
}

TransposeLaunch launch_of(const Loop& columns, const Loop& rows, const WalkPiece& batch,
                          const Strided& out, const Strided& in) {
  const TileShape tile = tile_of(out.bytes);
  TransposeLaunch l;
  TransposeCall& c = l.call;
  c.in = static_cast<const char*>(in.data) + batch.begin[1] * in.bytes;
  c.out = const_cast<char*>(static_cast<const char*>(out.data)) + batch.begin[0] * out.bytes;
  c.batch = batch.walk;
  c.columns = unsigned(columns.extent), c.rows = unsigned(rows.extent);
  c.in_column = columns.stride[1], c.out_row = rows.stride[0];
  c.row_tiles = tiles_of(c.rows, tile.rows), c.column_tiles = tiles_of(c.columns, tile.columns);
  c.in_words = has_words(c.in, in.bytes, tile.lanes, c.in_column, c.batch, 1);
  c.out_words = has_words(c.out, out.bytes, tile.lanes, c.out_row, c.batch, 0);
  const int64_t blocks = int64_t(c.row_tiles.divisor) * c.column_tiles.divisor * c.batch.count;
  l.geometry = cover(blocks, 1);
  l.geometry.block[0] = 256;
  return l;
}

// Walks over the loops but the columns', which is the first, and the rows'.
std::vector<WalkPiece> batch_of(const std::vector<Loop>& loops, size_t rows, const Strided& out,
                                const Strided& in) {
  std::vector<int64_t> extents, strides[2];
  for (size_t d = 1; d < loops.size(); ++d) {
    if (d == rows) continue;
    extents.push_back(loops[d].extent);
    for (size_t k = 0; k < 2; ++k) strides[k].push_back(loops[d].stride[k]);
  }
  const Strided operands[] = {{out.data, out.bytes, strides[0]}, {in.data, in.bytes, strides[1]}};
  return make_walks(extents, operands);
}

}  // namespace

Instance transpose_instance(int bytes) {
  return {fmt::format("transpose_{}", bytes), {{"T", std::string(bits_type(bytes))}}};
}

std::vector<TransposeLaunch> transpose_launches(std::span<const int64_t> extents,
                                                const Strided& out, const Strided& in) {
  if (std::count(extents.begin(), extents.end(), 0) > 0) return {};
  const Strided operands[] = {out, in};
  const std::vector<Loop> loops = merged_loops(extents, operands);
  const size_t rows = rows_of(loops);
  if (rows == 0) return {};
  std::vector<TransposeLaunch> launches;
  for (const WalkPiece& piece : batch_of(loops, rows, out, in))
    launches.push_back(launch_of(loops[0], loops[rows], piece, out, in));
  return launches;
}

}  // namespace tessera::cuda
