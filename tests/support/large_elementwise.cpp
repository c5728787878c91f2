// Cases of elementwise ops and ops by position: shared among threads, in blocks that are widened,
// in rows with gaps between them.
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
  // In a column every index occurs once at most, so the result does not depend on an order.
  for (int64_t rows : {31, 32, 33}) {
    List in = {grid_values({40, 65}, 1), zeros({rows, 65}, {.dtype = kI64}),
               grid_values({rows, 65}, 3)};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < 65; ++k) in[1].data<int64_t>()[r * 65 + k] = (r * 7 + k * 3) % 40;
    const std::string of = fmt::format(" of {} rows", rows);
    cases.push_back(
        {"scatter" + of, in, [](const List& in) { return List{scatter(in[0], 0, in[1], in[2])}; }});
    for (auto [name, how] : {std::pair{"prod", ScatterReduce::kProd},
                             {"amax", ScatterReduce::kAmax},
                             {"amin", ScatterReduce::kAmin}}) {
      List some = in;
      // Several meet at a place. Products of 16-bit floats are rounded at each factor and left out.
      some[1] = sample_integers({rows, 65}, 0, 20, 2);
      if (how == ScatterReduce::kProd)
        some[0] = grid_values({40, 65}, 1, 0.75, 1.25), some[2] = some[2] + 1.5;
      cases.push_back(
          {fmt::format("scatter_{}{}", name, of), some,
           [how](const List& in) { return List{scatter_reduce(in[0], 0, in[1], in[2], how)}; },
           rows, true, how == ScatterReduce::kProd ? 0 : 1});
      cases.back().ties = how != ScatterReduce::kProd;
    }
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
    cases.push_back({"argmin" + of, {x}, [](const List& in) { return List{argmin(in[0], 1)}; }});
    // Some queries are edges; no element of `between` is, so that other sums of edges change
    // nothing.
    const Tensor edges = sort(x, 1).values, queries = grid_values({rows, 65}, 2, -0.5, 0.5),
                 between = queries + 0x1p-8;
    for (bool among : {false, true})
      for (bool right : {false, true}) {
        cases.push_back(
            {fmt::format("searchsorted{}, {} of {}", of, right ? "right" : "left",
                         among ? "edges" : "what lies between edges"),
             {edges, among ? queries : between},
             [right](const List& in) { return List{searchsorted(in[0], in[1], right)}; },
             1,
             false});
        cases.back().jumps = among;
      }
  }
  for (int64_t rows : {255, 256, 257})
    cases.push_back({"cumsum of " + std::to_string(rows) + " rows",
                     {grid_values({rows, 128}, 1)},
                     [](const List& in) { return List{cumsum(in[0], 1)}; },
                     128});
}

void add_scans(LargeCases& cases) {
  for (int64_t rows : {255, 256, 257}) {
    const std::string of = fmt::format(" of {} rows", rows);
    const Tensor x = grid_values({rows, 33}, 1), y = grid_values({rows, 33}, 2, -0.5, 0.5);
    for (auto [name, scan] : {std::pair{"cummax", &cummax}, {"cummin", &cummin}})
      cases.push_back({name + of,
                       {x},
                       [scan](const List& in) {
                         const auto [values, indices] = scan(in[0], 1);
                         return List{values, indices};
                       },
                       33});
    cases.push_back({"logcumsumexp" + of,
                     {x},
                     [](const List& in) { return List{logcumsumexp(in[0], 1)}; },
                     33,
                     true,
                     4});
    for (bool reverse : {false, true})
      cases.push_back(
          {fmt::format("linear_scan{}{}", of, reverse ? ", from the end" : ""),
           {y, x},
           [reverse](const List& in) { return List{linear_scan(in[0], in[1], 1, reverse)}; },
           33,
           true,
           3});
  }
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

void add_draws(LargeCases& cases) {
  for (int64_t n : {1023, 1024, 1025, 32769})
    cases.push_back({fmt::format("draws of {}", n),
                     {from_values<int64_t>({3, 9}, {2})},
                     [n](const List& in) {
                       List out;
                       for (DType t : {kF64, kF32, kBF16})
                         for (auto draw : {rand, randn})
                           out.push_back(draw({n}, {.dtype = t}, in[0]));
                       out.push_back(randint(-5, 1000, {n}, {}, in[0]));
                       return out;
                     },
                     1,
                     false,
                     0});
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
    cases.push_back(
        {"elements between others, " + std::to_string(n),
         {grid_values({n}, 1), grid_values({n}, 2, -0.5, 0), grid_values({n}, 3, 0, 0.5)},
         [](const List& in) {
           return List{clamp(in[0], -0.25, 0.75), clamp(in[0], in[1], in[2]),
                       lerp(in[0], in[1], in[2]), mul_add(in[0], in[1], in[2])};
         },
         1,
         true,
         3});
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
  add_positions(cases), add_orders(cases), add_scans(cases), add_dropout(cases), add_draws(cases);
}

}  // namespace tessera::test
