// Convolutions and pools: by products, by minimal filtering, by the library and by loops.
#include "core/ops/conv.h"
#include "core/ops/pool.h"
#include "tests/support/large_cases.h"

namespace tessera::test {
namespace {

using List = std::vector<Tensor>;

void add_conv(LargeCases& cases, const Shape& x, const Shape& w, const ConvGeometry& g) {
  int64_t taps = 1;
  for (int d = 1; d < w.size(); ++d) taps *= w[d];
  LargeCase c{fmt::format("convolution of {} by {}", to_string(x), to_string(w)),
              {grid_values(x, 1), grid_values(w, 2), grid_values({w[0]}, 3)},
              [=](const List& in) { return List{conv2d(in[0], in[1], in[2], g)}; },
              std::max(taps, numel(x) / x[1])};
  c.part = 61, c.roundings = 2;  // the bias is added apart
  cases.push_back(std::move(c));
}

}  // namespace

void add_windows(LargeCases& cases) {
  for (int64_t c : {63, 64, 65}) add_conv(cases, {2, c, 9, 9}, {c + 2, c, 1, 1}, {});
  // 15, 16 and 17 tiles of 2 x 2, and outputs in one, two and three panels.
  add_conv(cases, {2, 32, 6, 10}, {32, 32, 3, 3}, {.padding = 1});
  add_conv(cases, {2, 32, 8, 8}, {64, 32, 3, 3}, {.padding = 1});
  add_conv(cases, {2, 32, 2, 34}, {96, 32, 3, 3}, {.padding = 1});
  add_conv(cases, {3, 64, 13, 15}, {32, 64, 3, 3}, {.padding = 1});
  add_conv(cases, {2, 33, 17, 19}, {35, 33, 3, 3}, {.stride = 2, .padding = 1});
  add_conv(cases, {2, 24, 17, 19}, {36, 8, 3, 3}, {.padding = 1, .groups = 3});
  add_conv(cases, {2, 3, 37, 35}, {65, 3, 7, 7}, {.stride = 2, .padding = 3});
  add_conv(cases, {2, 20, 21, 19}, {33, 20, 5, 3}, {.padding = 2, .dilation = 2});
  for (int64_t n : {1, 2, 3}) add_conv(cases, {n, 1, 9, 9}, {1, 1, 3, 3}, {});
  auto pool = [&](const char* name, const Shape& x, auto f) {
    cases.push_back({fmt::format("{} of {}", name, to_string(x)),
                     {grid_values(x, 1)},
                     [f](const List& in) { return List{f(in[0])}; },
                     9});
    cases.back().ties = true;
  };
  auto largest = [](const Tensor& x) { return max_pool2d(x, 3, {.stride = 2}); };
  auto average = [](const Tensor& x) { return avg_pool2d(x, 3, {.stride = 2}); };
  for (int64_t width : {63, 65, 67}) {  // 31, 32, 33 windows of 1,024 channels
    pool("max_pool", {1, 1024, 3, width}, largest);
    pool("avg_pool", {1, 1024, 3, width}, average);
  }
  for (int64_t n : {1, 2, 3}) {
    pool("max_pool", {n, 17, 23, 21}, largest);
    pool("avg_pool", {n, 17, 23, 21}, average);
  }
}

}  // namespace tessera::test
