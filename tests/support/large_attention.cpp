// Attention: tiles of queries and keys, heads, and every form of mask and dropout.
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "tests/support/large_cases.h"

namespace tessera::test {
namespace {

using List = std::vector<Tensor>;

struct Extents {
  int64_t batch, heads, queries, keys, width, value_width;
};

List operands_of(const Extents& e) {
  return {grid_values({e.batch, e.heads, e.queries, e.width}, 1, -0.5, 0.5),
          grid_values({e.batch, e.heads, e.keys, e.width}, 2, -0.5, 0.5),
          grid_values({e.batch, e.heads, e.keys, e.value_width}, 3)};
}

void add_tiles(LargeCases& cases, const Extents& e) {
  for (bool causal : {false, true})
    cases.push_back(
        {fmt::format("attention of {} queries, {} keys, {} x {} heads of {}{}", e.queries, e.keys,
                     e.batch, e.heads, e.width, causal ? ", causal" : ""),
         operands_of(e),
         [=](const List& in) {
           return List{
               scaled_dot_product_attention(in[0], in[1], in[2], {.causal = causal, .scale = 0.7})};
         },
         std::max(e.queries, e.keys), true, 3});
}

// A mask that is an operand: of all of [B, H, T, S] or broadcast to it.
struct Mask {
  std::string name;
  Tensor values;  // undefined: none
};

void add_forms(LargeCases& cases, const Extents& e, const Mask& mask, bool causal, double dropped,
               AttentionKernel kernel) {
  List in = operands_of(e);
  if (mask.values.defined()) in.push_back(mask.values);
  cases.push_back({fmt::format("attention{} with {}, dropout {}{}",
                               kernel == AttentionKernel::kPlain ? " in ordinary ops" : "",
                               mask.name, dropped, causal ? ", causal" : ""),
                   in,
                   [=](const List& in) {
                     return List{
                         scaled_dot_product_attention(in[0], in[1], in[2],
                                                      {.mask = in.size() > 3 ? in[3] : Tensor(),
                                                       .causal = causal,
                                                       .dropout = dropped,
                                                       .kernel = kernel})};
                   },
                   std::max(e.queries, e.keys), true, 4});
  cases.back().draws = dropped > 0;
}

}  // namespace

void add_attention(LargeCases& cases) {
  for (auto [t, s] : {std::pair<int64_t, int64_t>{15, 127},
                      {16, 128},
                      {17, 129},
                      {31, 31},
                      {32, 32},
                      {33, 33},
                      {63, 63},
                      {64, 64},
                      {65, 65},
                      {70, 300},
                      {129, 64}})
    add_tiles(cases, {1, 1, t, s, 24, 40});
  for (int64_t heads : {2, 3}) add_tiles(cases, {1, heads, 33, 33, 18, 6});
  add_tiles(cases, {2, 3, 20, 131, 5, 7});
  add_tiles(cases, {1, 2, 40, 40, 64, 64});

  const Extents e{2, 2, 33, 130, 12, 10};
  const Tensor all = grid_values({2, 2, 33, 130}, 5), keys = grid_values({1, 1, 1, 130}, 6),
               queries = grid_values({33, 130}, 7);
  const Mask masks[] = {
      {"no mask", {}},
      {"a mask of all scores", gt(all, -0.4)},
      {"a mask of keys", gt(keys, -0.4)},
      {"a mask of queries and keys", gt(queries, -0.4)},
      {"a mask under which some queries see nothing",
       logical_and(gt(queries, -0.4), ge(reshape(arange(0, 33), {33, 1}), 3))},
      {"numbers added to all scores", all},
      {"numbers added to keys", keys},
  };
  for (const Mask& mask : masks)
    for (bool causal : {false, true})
      for (double dropped : {0.0, 0.3})
        for (AttentionKernel kernel : {AttentionKernel::kAuto, AttentionKernel::kPlain})
          add_forms(cases, e, mask, causal, dropped, kernel);
  // Random words come by fours of keys, which rows begin with or not.
  for (int64_t s : {5, 127, 128, 129, 260})
    add_forms(cases, {1, 3, 34, s, 12, 10}, {fmt::format("{} keys", s), {}}, false, 0.3,
              AttentionKernel::kAuto);
}

}  // namespace tessera::test
