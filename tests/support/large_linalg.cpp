// Matrices of a batch, sparse rows, and bytes: as many as threads share.
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/linalg.h"
#include "core/ops/pointwise.h"
#include "core/ops/quantized.h"
#include "core/ops/samples.h"
#include "core/ops/scaled_matmul.h"
#include "core/ops/sparse.h"
#include "core/ops/views.h"
#include "tests/support/large_cases.h"

namespace tessera::test {
namespace {

using List = std::vector<Tensor>;

// Near twice the identity: factors, and gradients through them, keep the accuracy of sums.
Tensor matrices(int64_t count) {
  return grid_values({count, 16, 16}, 1, -0.125, 0.125) + eye(16, 16, {.dtype = kF64}) * 2.0;
}

void add_matrices(LargeCases& cases, const char* op, std::initializer_list<int64_t> counts,
                  std::function<List(const List&)> f) {
  for (int64_t count : counts) {
    cases.push_back({fmt::format("{} of {} matrices", op, count),
                     {matrices(count), grid_values({count, 16, 16}, 2)},
                     f,
                     64});
    cases.back().roundings = 0;
  }
}

// Row m has m % 3 edges and those that are left at the end, so that edges and rows are `total`.
Csr matrix(int64_t rows, int64_t columns, int64_t total) {
  std::vector<int64_t> crow{0};
  for (int64_t m = 0; m < rows; ++m) crow.push_back(crow.back() + m % 3);
  crow.back() = total - rows;
  return {from_values<int64_t>(crow, {rows + 1}), sample_integers({total - rows}, 0, columns, 3)};
}

void add_sparse(LargeCases& cases, int64_t total, int64_t width) {
  const Csr a = matrix(150, 40, total);
  const Tensor values = grid_values({a.col.numel()}, 1);
  const std::string of = fmt::format(" of {} edges and rows, {} columns", total, width);
  for (ScatterReduce how : {ScatterReduce::kSum, ScatterReduce::kAmax, ScatterReduce::kAmin}) {
    cases.push_back({fmt::format("spmm {}{}", int(how), of),
                     {values, grid_values({40, width}, 2)},
                     [=](const List& in) { return List{spmm_reduce(a, in[0], in[1], how)}; },
                     std::max(total, width)});
    cases.back().ties = how != ScatterReduce::kSum;
    cases.push_back({fmt::format("segment_reduce {}{}", int(how), of),
                     {grid_values({a.col.numel(), width}, 3)},
                     [=](const List& in) { return List{segment_reduce(in[0], a.crow, how)}; },
                     total});
    cases.back().ties = how != ScatterReduce::kSum;
  }
  // Factors of 1 - 2^-6 and 1 + 2^-6: one that is left out shows however long the product is.
  const Tensor signs = cast(sample_integers({a.col.numel(), width}, 0, 2, 3), kF64) * 2.0 - 1.0;
  cases.push_back(
      {"segment_reduce by products" + of,
       {signs * 0x1p-6 + 1.0},
       [=](const List& in) { return List{segment_reduce(in[0], a.crow, ScatterReduce::kProd)}; },
       total,
       true,
       0});
}

// Scales, biases and sums are multiples of powers of two: results are exact in every dtype.
void add_bytes(LargeCases& cases) {
  auto byte = [](const Shape& s, uint64_t key) {
    return cast(sample_integers(s, 0, 256, key), kU8);
  };
  for (int64_t rows : {63, 64, 65}) {
    const Tensor scale = full({rows}, 0x1p-10, {.dtype = kF64}),
                 bias = grid_values({rows}, 3, -64, 64);
    for (bool quantized : {true, false}) {
      const QuantizedEpilogue then{
          .relu = quantized, .quantized = quantized, .y_zero_point = quantized ? 7 : 0};
      const std::string of = fmt::format(" of {} rows to {}", rows, quantized ? "bytes" : "floats");
      cases.push_back({"quantized_linear" + of,
                       {byte({rows, 129}, 1), byte({rows, 129}, 2), scale, bias},
                       [=](const List& in) {
                         return List{quantized_linear(in[0], 117, in[1], in[2], in[3], then)};
                       },
                       1,
                       false});
      cases.back().jumps = quantized;
      cases.push_back({"quantized_conv" + of,
                       {byte({2, 33, 9, 11}, 1), byte({rows, 33, 3, 3}, 2), scale, bias},
                       [=](const List& in) {
                         return List{quantized_conv(in[0], 117, in[1], in[2], in[3],
                                                    {{1, 1}, {1, 1}, {1, 1}, {1, 1}, 1}, then)};
                       },
                       1,
                       false});
      cases.back().jumps = quantized;
    }
    cases.push_back(
        {fmt::format("quantized_max_pool of {} channels", rows),
         {byte({2, rows, 17, 19}, 1)},
         [](const List& in) {
           return List{quantized_max_pool(in[0], {{9, 10}, {3, 3}, {2, 2}, {1, 1}, {1, 1}})};
         },
         1,
         false});
  }
}

// Products of numbers that eight bits hold, which are rounded to these even where a sum of ranks'
// parts is off by a little.
void add_float8(LargeCases& cases) {
  const auto held = [](const Shape& shape, uint64_t seed, DType by) {
    return cast(cast(grid_values(shape, seed), by), kF32);
  };
  for (int64_t summed : {255, 256, 257})
    cases.push_back(
        {fmt::format("scaled_matmul of sums of {}", summed),
         {held({67, summed}, 1, kF8E5M2), held({33, summed}, 2, kF8E4M3)},
         [](const List& in) {
           const Tensor half = full({}, 0.5, {.dtype = kF32});
           return List{scaled_matmul(cast(in[0], kF8E5M2), cast(in[1], kF8E4M3), half, half, kF32)};
         },
         1,
         false});
}

}  // namespace

void add_linalg(LargeCases& cases) {
  add_matrices(cases, "cholesky", {47, 48, 49}, [](const List& in) {
    return List{linalg::cholesky(in[0] + transpose(in[0], -2, -1))};
  });
  add_matrices(cases, "solve_triangular", {15, 16, 17}, [](const List& in) {
    return List{linalg::solve_triangular(in[0], in[1], {.upper = true}),
                linalg::solve_triangular(in[0], in[1], {.upper = false, .left = false})};
  });
  add_matrices(cases, "qr", {7, 8, 9}, [](const List& in) {
    const linalg::QR f = linalg::qr(in[0]);
    return List{f.q, f.r};
  });
  add_matrices(cases, "svd", {1, 2, 3, 5}, [](const List& in) {
    const linalg::SVD f = linalg::svd(in[0].detach());
    return List{f.s, matmul(f.u * unsqueeze(f.s, -2), f.vh)};
  });
  for (int64_t total : {511, 512, 513}) add_sparse(cases, total, 64);
  for (int64_t width : {31, 32, 33, 63, 65}) add_sparse(cases, 700, width);
  add_sparse(cases, 1500, 8);
  add_bytes(cases);
  add_float8(cases);
  for (int64_t n : {131071, 131072, 131073}) {
    cases.push_back({"quantize " + std::to_string(n),
                     {grid_values({n}, 1)},
                     [](const List& in) {
                       const Tensor q = quantize(in[0], {0x1p-6, 117});
                       return List{q, dequantize(q, {0x1p-6, 117})};
                     },
                     1,
                     false});
    cases.back().jumps = true;
  }
}

}  // namespace tessera::test
