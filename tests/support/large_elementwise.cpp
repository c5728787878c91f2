// Elements one by one and by their positions: shared among threads, in blocks that are widened, in
// rows that do not lie densely behind each other.
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/scan.h"
#include "core/ops/sort.h"
#include "core/ops/views.h"
#include "core/tensor/random.h"
#include "tests/support/large_cases.h"

namespace tessera::test {
namespace {

using List = std::vector<Tensor>;

void add_positions(LargeCases& cases) {
  for (int64_t width : {1023, 1024, 1025}) {
    const List in = {grid_values({40, width}, 1), sample_integers({33}, 0, 40, 2),
                     grid_values({33, width}, 3)};
    const std::string of = " of rows of " + std::to_string(width);
    cases.push_back({"index_select" + of,
                     {in[0], in[1]},
                     [](const List& in) { return List{index_select(in[0], 0, in[1])}; },
                     33});
    cases.push_back({"index_add" + of, in,
                     [](const List& in) { return List{index_add(in[0], 0, in[1], in[2])}; }, 33,
                     true, 2});
    cases.push_back({"gather" + of,
                     {in[0], sample_integers({33, width}, 0, 40, 4)},
                     [](const List& in) { return List{gather(in[0], 0, in[1])}; },
                     33});
  }
  for (int64_t outer : {127, 128, 129})
    cases.push_back({"index_select in " + std::to_string(outer) + " rows",
                     {grid_values({outer, 20, 16}, 1), sample_integers({16}, 0, 20, 2)},
                     [](const List& in) { return List{index_select(in[0], 1, in[1])}; },
                     16});
}

void add_orders(LargeCases& cases) {
  for (int64_t rows : {127, 128, 129}) {
    // No two of a row are equal: 256 values of the grid.
    Tensor x = grid_values({rows, 128}, 1);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < 128; ++k)
        x.data<double>()[r * 128 + k] = double((k * 77 + r * 31) % 128 - 64) / 128;
    const std::string of = " of " + std::to_string(rows) + " rows";
    cases.push_back({"sort" + of, {x}, [](const List& in) { return List{sort(in[0], 1).values}; }});
    cases.push_back({"argmax" + of, {x}, [](const List& in) { return List{argmax(in[0], 1)}; }});
  }
  for (int64_t rows : {255, 256, 257})
    cases.push_back({"cumsum of " + std::to_string(rows) + " rows",
                     {grid_values({rows, 128}, 1)},
                     [](const List& in) { return List{cumsum(in[0], 1)}; },
                     128});
}

void add_dropout(LargeCases& cases) {
  const Tensor key = from_values<int64_t>({3, 9}, {2});
  auto dropped = [&](const Tensor& x, const Tensor& samples) {
    List in = {x};
    if (samples.defined()) in.push_back(samples);
    cases.push_back({"dropout of " + to_string(x.shape()) + (samples.defined() ? " by sample" : ""),
                     in, [key](const List& in) {
                       return List{dropout(in[0], 0.3, key, in.size() > 1 ? in[1] : Tensor())};
                     }});
  };
  for (int64_t n : {1023, 1024, 1025, 32767, 32768, 32769}) dropped(grid_values({n}, 1), {});
  for (int64_t n : {31, 32, 33})
    dropped(grid_values({n, 1024}, 1), sample_integers({n}, 0, 1000, 2));
}

}  // namespace

void add_elementwise(LargeCases& cases) {
  auto both = [](const List& in) { return List{gelu(in[0]) * in[1] + exp(in[0])}; };
  for (int64_t n : {511, 512, 513, 65535, 65536, 65537}) {
    cases.push_back({"elements, " + std::to_string(n),
                     {grid_values({n}, 1), grid_values({n}, 2)},
                     both,
                     1,
                     true,
                     4});
    cases.push_back({"elements and a number each, " + std::to_string(n),
                     {grid_values({n}, 1), grid_values({1}, 2)},
                     both,
                     n,
                     true,
                     4});
  }
  for (int64_t rows : {63, 64, 65}) {
    cases.push_back({"rows with gaps, " + std::to_string(rows),
                     {grid_values({rows, 1030}, 1), grid_values({rows, 1024}, 2)},
                     [=](const List& in) {
                       return both({slice(in[0], 1, 3, 1027), in[1]});
                     },
                     1,
                     true,
                     4});
    cases.push_back({"a row for every row, " + std::to_string(rows),
                     {grid_values({rows, 1024}, 1), grid_values({1024}, 2)},
                     both,
                     rows,
                     true,
                     4});
  }
  cases.push_back({"a transpose",
                   {grid_values({257, 259}, 1), grid_values({259, 257}, 2)},
                   [=](const List& in) {
                     return both({transpose(in[0], 0, 1), in[1]});
                   },
                   1,
                   true,
                   4});
  add_positions(cases), add_orders(cases), add_dropout(cases);
}

}  // namespace tessera::test
