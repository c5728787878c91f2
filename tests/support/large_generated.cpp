// What compile fuses, at the extents where generated kernels cut: blocks of a sum, rows of a sum
// over rows, chunks of rows, softmax of long rows.
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "tests/support/large_cases.h"

namespace tessera::test {
namespace {

using List = std::vector<Tensor>;

void add_total(LargeCases& cases, int64_t n) {
  cases.push_back({"a sum of products of " + std::to_string(n),
                   {grid_values({n}, 1), grid_values({n}, 2)},
                   [](const List& in) { return List{sum(square(in[0]) * in[1])}; },
                   n,
                   true,
                   3});
}

void add_columns(LargeCases& cases, int64_t rows) {
  cases.push_back({"a sum of products over rows, " + std::to_string(rows),
                   {grid_values({rows, 37}, 1), grid_values({rows, 37}, 2)},
                   [](const List& in) { return List{sum(square(in[0]) * in[1], {0})}; },
                   rows,
                   true,
                   3});
}

void add_softmax_of_sum(LargeCases& cases, int64_t rows, int64_t n, int64_t part) {
  cases.push_back({fmt::format("softmax of a sum, {} x {}", rows, n),
                   {grid_values({rows, n}, 1, -4, 4), grid_values({n}, 2)},
                   [](const List& in) { return List{softmax(in[0] + in[1])}; },
                   std::max(rows, n),
                   true,
                   8,
                   part});
}

void add_rows_of(LargeCases& cases, int64_t rows, int64_t n) {
  const List in = {grid_values({rows, n}, 1, -4, 4), grid_values({n}, 2)};
  cases.push_back({fmt::format("rows less their mean, {} x {}", rows, n), in,
                   [](const List& in) {
                     const Tensor c = in[0] - mean(in[0], {-1}, true);
                     return List{c * rsqrt(mean(square(c), {-1}, true) + 1.0) * in[1]};
                   },
                   std::max(rows, n), true, 8});
  add_softmax_of_sum(cases, rows, n, 13);
}

}  // namespace

void add_generated(LargeCases& cases) {
  for (int64_t n : {4095, 4096, 4097, 28672, 32768, 36864, 65535, 65536, 65537, 98304, 98305})
    add_total(cases, n);
  for (int64_t rows : {63, 64, 65, 129, 1001}) add_columns(cases, rows);
  for (int64_t n : {31, 32, 33, 255, 256, 257, 4097}) add_rows_of(cases, 33, n);
  for (int64_t n : {8191, 8192, 8193}) add_softmax_of_sum(cases, 100, n, 509);
  for (int64_t n : {65535, 65536, 65537}) add_rows_of(cases, 1, n);
}

}  // namespace tessera::test
