// How rows are held; see rows.h.
#include "core/backend/cuda/kernels/rows.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::cuda {
namespace {

// Rows of softmax and norms: a thread has at least 16 bytes, and as many items as registers allow.
constexpr RowHold kHalf[] = {{16, 8}, {32, 8}, {32, 32}, {128, 32}, {256, 32}, {256, 0}};
constexpr RowHold kSingle[] = {{32, 4}, {32, 32}, {128, 32}, {256, 32}, {256, 0}};
constexpr RowHold kDouble[] = {{32, 4}, {32, 16}, {128, 16}, {256, 16}, {256, 0}};

// Rows whose threads keep sums beside them. A multiprocessor has registers for 768 of these
// threads, and for 512 where they are of f64 or a block has 512.
constexpr RowHold kGrad[] = {{16, 8}, {32, 8}, {128, 8}, {256, 8}, {512, 8}, {512, 16}, {256, 0}};
constexpr RowHold kGradDouble[] = {{16, 8}, {32, 8}, {128, 8}, {256, 8}, {512, 8}, {256, 0}};
constexpr int kGradThreads = 768;

// Rows of logits have a warp at least. While one of the two blocks of a multiprocessor waits for
// its long row, the other one computes.
constexpr RowHold kLossHalf[] = {{32, 8}, {32, 32}, {128, 32}, {256, 32}, {512, 0}};
constexpr RowHold kLossSingle[] = {{32, 4}, {32, 32}, {128, 32}, {256, 32}, {512, 0}};
constexpr RowHold kLossDouble[] = {{32, 4}, {32, 16}, {128, 16}, {256, 16}, {512, 0}};

constexpr int64_t kSumRows = 64;      // of a piece of norm_sums
constexpr int64_t kGradRows = 4;      // of a piece of a gradient, at least
constexpr int64_t kMostRows = 512;    // at most: a thread's sum is one chain of additions
constexpr int64_t kProcessors = 132;  // of an H100: their blocks of gradients run at once

int block_of(RowHold hold) { return hold.threads <= 32 ? 256 : hold.threads; }

Instance instance(const char* family, DType dtype, RowHold hold, std::string bounds) {
  return {fmt::format("{}_{}_{}x{}", family, name_of(dtype), hold.threads, hold.items),
          {{"T", std::string(element_type(name_of(dtype)))},
           {"THREADS", std::to_string(hold.threads)},
           {"ITEMS", std::to_string(hold.items)},
           {"BOUNDS", std::move(bounds)}}};
}
// Bounds that leave a block with the registers of `threads` threads on a multiprocessor.
std::string bounds(RowHold hold, int threads) {
  return fmt::format("{}, {}", block_of(hold), std::max(1, threads / block_of(hold)));
}

std::span<const RowHold> by_size(DType t, std::span<const RowHold> two,
                                 std::span<const RowHold> four, std::span<const RowHold> eight) {
  return size_of(t) == 2 ? two : size_of(t) == 4 ? four : eight;
}

}  // namespace

std::span<const RowHold> row_holds(DType t) { return by_size(t, kHalf, kSingle, kDouble); }
std::span<const RowHold> norm_grad_holds(DType t) { return by_size(t, kGrad, kGrad, kGradDouble); }
std::span<const RowHold> loss_holds(DType t) {
  return by_size(t, kLossHalf, kLossSingle, kLossDouble);
}
RowHold hold_of(std::span<const RowHold> holds, int64_t n) {
  return *std::find_if(holds.begin(), holds.end(), [&](const RowHold& h) {
    return h.items == 0 || n <= int64_t(h.threads) * h.items;
  });
}

RowHold norm_grad_hold(DType t, int64_t n, bool aligned) {
  const auto holds = norm_grad_holds(t);
  const RowHold hold = hold_of(holds, n);
  return aligned && rows_in_packs(t, hold, n) ? hold : holds.back();
}

Instance rows_instance(DType dtype, RowHold hold) {
  return instance("rows", dtype, hold, bounds(hold, 512));
}
Instance norm_grad_instance(DType dtype, RowHold hold) {
  return instance("norm_grad", dtype, hold,
                  bounds(hold, hold.items == 0 || dtype == kF64 ? 512 : kGradThreads));
}
Instance loss_instance(DType dtype, RowHold hold) {
  return instance("cross_entropy", dtype, hold,
                  bounds(hold, hold.items == 0 && dtype != kF64 ? 1024 : 512));
}

Geometry rows_geometry(RowHold hold, int64_t rows) {
  const int64_t each = block_of(hold) / hold.threads;
  return {{unsigned((rows + each - 1) / each), 1, 1}, {unsigned(block_of(hold)), 1, 1}, 0};
}
bool rows_in_packs(DType dtype, RowHold hold, int64_t n) {
  const int pack = 16 / int(size_of(dtype));
  return n % (hold.items == 0 ? pack : std::min(hold.items, pack)) == 0;
}

NormSums norm_sums(RowHold hold, int64_t rows, int64_t n) {
  NormSums sums{};
  const auto pieces = [&] { return (rows + sums.piece - 1) / sums.piece; };
  if (hold.items == 0) {
    sums.piece = kSumRows;
    while (pieces() > 32768) sums.piece *= 2;
    sums.pieces = unsigned(std::max<int64_t>(1, pieces()));
    sums.geometry = {{unsigned((n + 31) / 32), sums.pieces, 1}, {256, 1, 1}, 0};
  } else {
    const int64_t most = kProcessors * std::max(1, kGradThreads / hold.threads);
    sums.piece = unsigned(std::clamp((rows + most - 1) / most, kGradRows, kMostRows));
    sums.pieces = unsigned(std::max<int64_t>(1, pieces()));
    sums.geometry = rows_geometry(hold, sums.pieces);
  }
  return sums;
}

}  // namespace tessera::cuda
