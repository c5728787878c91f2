// Cases of convolutions that our own kernels compute: at the extents from which they take a call,
// and where they cut it. Each row of tables names the limit that it is beside.
#include "core/dispatch/dispatch.h"
#include "core/ops/conv.h"
#include "core/ops/conv_grad_norm.h"
#include "core/ops/conv_stats.h"
#include "tests/support/large_cases.h"

namespace tessera::test {
namespace {

using List = std::vector<Tensor>;

LargeCase convolution(size_t number, const Shape& x, const Shape& w, const ConvGeometry& g,
                      int threads = 3) {
  int64_t taps = 1;
  for (int d = 1; d < w.size(); ++d) taps *= w[d];
  LargeCase c{fmt::format("convolution {} of {} by {}", number, to_string(x), to_string(w)),
              {grid_values(x, 1), grid_values(w, 2)},
              [=](const List& in) { return List{conv2d(in[0], in[1], {}, g)}; },
              std::max(taps, numel(x) / x[1])};
  c.part = 61, c.threads = threads;
  return c;
}

}  // namespace

void add_f32_convolutions(LargeCases& cases) {
  auto add = [&](const Shape& x, const Shape& w, const ConvGeometry& g, int threads = 3) {
    cases.push_back(convolution(cases.size(), x, w, g, threads));
  };
  // Products for each place of the kernel: channels, narrow results, lines that are gathered,
  // outputs that are transposed.
  for (int64_t c : {63, 64, 65}) add({2, c, 7, 9}, {66, c, 3, 3}, {.stride = 2});
  for (int64_t width : {6, 7, 8}) add({2, 66, 5, width}, {68, 66, 3, 3}, {.padding = 1});
  for (int64_t height : {15, 16, 17}) add({1, 66, height, 5}, {68, 66, 3, 3}, {.padding = 1});
  for (int64_t outputs : {163, 164, 165}) add({1, 66, 2, 8}, {outputs, 66, 1, 3}, {});
  // Minimal filtering: channels of a panel, groups of 8 tiles, blocks of them, threads.
  for (int64_t c : {31, 32, 33, 96}) add({2, c, 8, 8}, {64, c, 3, 3}, {.padding = 1});
  for (int64_t c : {2016, 2048, 2080}) add({1, c, 8, 8}, {32, c, 3, 3}, {.padding = 1});
  add({2, 64, 8, 8}, {32, 64, 3, 3}, {.padding = 1}, 1);
  add({1, 32, 2, 46}, {32, 32, 3, 3}, {.padding = 1});  // 23 tiles: groups of 8, 8 and 7
  add({1, 32, 12, 8}, {32, 32, 3, 3}, {.padding = 1});
  add({1, 32, 10, 10}, {32, 32, 3, 3}, {.padding = 1});  // 16 and 9
  for (int64_t width : {12, 16, 20}) add({2, 192, 12, width}, {32, 192, 3, 3}, {.padding = 1});
  // For the gradient by the weight: 31, 32, 33 tiles and 511, 512, 513; panels of channels.
  add({1, 32, 2, 62}, {32, 32, 3, 3}, {.padding = 1});
  add({1, 32, 8, 16}, {32, 32, 3, 3}, {.padding = 1});
  add({1, 32, 6, 22}, {32, 32, 3, 3}, {.padding = 1});
  add({1, 32, 14, 146}, {32, 32, 3, 3}, {.padding = 1});
  add({2, 32, 32, 32}, {32, 32, 3, 3}, {.padding = 1});
  add({1, 32, 54, 38}, {32, 32, 3, 3}, {.padding = 1});
  LargeCase sums{"a convolution that sums its channels",
                 {grid_values({2, 32, 9, 11}, 1), grid_values({24, 32, 3, 3}, 2)},
                 [](List in) {
                   ConvAttributes same;
                   same.window = {{1, 1}, {1, 1}, {1, 1}, {1, 1}, 1};
                   const Tensors out = dispatch(conv_stats_op(same), in);
                   return List(out.begin(), out.end());
                 }};
  sums.length = 288 * 198, sums.gradients = false, sums.roundings = 0, sums.part = 61;
  cases.push_back(std::move(sums));
  LargeCase norm{"a convolution that normalises",
                 {grid_values({2, 32, 9, 11}, 1), grid_values({24, 32, 3, 3}, 2),
                  grid_values({24}, 3), grid_values({24}, 4, 0.5, 2), grid_values({24}, 5),
                  grid_values({24}, 6), grid_values({2, 24, 9, 11}, 7)},
                 [](List in) {
                   return List{dispatch1(conv_norm_op({{{{1, 1}, {1, 1}, {1, 1}, {1, 1}, 1}},
                                                       {1e-5, {true, true, true, true}}}),
                                         in)};
                 }};
  norm.length = 288, norm.gradients = false, norm.roundings = 0, norm.part = 61;
  cases.push_back(std::move(norm));
  LargeCase grads{
      "a gradient of a convolution that masks and sums",
      {grid_values({2, 24, 9, 11}, 1), grid_values({24, 32, 3, 3}, 2),
       grid_values({2, 32, 9, 11}, 3), grid_values({32}, 4), grid_values({32}, 5, 0.5, 2),
       grid_values({2, 32, 9, 11}, 6), grid_values({2, 32, 9, 11}, 7)},
      [](List in) {
        const Tensors out =
            dispatch(conv_grad_norm_op({{{{1, 1}, {1, 1}, {1, 1}, {1, 1}, 1}, {9, 11}},
                                        {1e-5, {true, true, true, true}}}),
                     in);
        return List(out.begin(), out.end());
      }};
  grads.length = 216 * 198, grads.gradients = false, grads.roundings = 0, grads.part = 61;
  cases.push_back(std::move(grads));
}

void add_bf16_convolutions(LargeCases& cases) {
  auto add = [&](const Shape& x, const Shape& w, const ConvGeometry& g, int threads = 3) {
    cases.push_back(convolution(cases.size(), x, w, g, threads));
  };
  // Channels that make a panel, outputs that make a side, places enough.
  for (int64_t c : {31, 32, 33}) add({2, c, 8, 9}, {64, c, 3, 3}, {.padding = 1});
  for (int64_t outputs : {15, 16, 17}) add({2, 32, 6, 9}, {outputs, 32, 3, 1}, {});
  for (auto [height, width] : {std::pair<int64_t, int64_t>{7, 9}, {8, 8}, {5, 13}})
    add({1, 32, height, width}, {32, 32, 3, 3}, {.padding = 1});
  // Lines of 7, 8 and 9 places; taps that are turned in registers, and apart.
  for (int64_t width : {7, 8, 9}) add({2, 32, 11, width}, {32, 32, 3, 3}, {.padding = 1});
  for (auto [height, width] : {std::pair<int64_t, int64_t>{1, 7}, {2, 4}, {3, 5}, {4, 4}, {1, 17}})
    add({2, 32, 10, 26}, {32, 32, height, width}, {});
  // Panels of the weight that are packed at once, and rows that several such blocks meet.
  for (int64_t outputs : {32, 64, 96}) add({1, 256, 8, 8}, {outputs, 256, 3, 3}, {.padding = 1});
  for (int64_t rows : {63, 64, 65}) {  // of groups of eight
    cases.push_back(convolution(cases.size(), {1, 1024, rows, 8}, {192, 1024, 1, 1}, {}));
    cases.back().gradients = false;
  }
  for (int64_t width : {66, 67, 68})  // groups of rows; up to 67 are found once for both blocks
    add({1, 32, 18, width + 10}, {64, 32, 11, 11}, {});
  // Taps and panels that threads pack; strides: each class of places is a product.
  for (int64_t outputs : {32, 64, 96}) add({2, 32, 8, 8}, {outputs, 32, 1, 1}, {.stride = 2});
  for (int64_t outputs : {32, 64, 96}) add({2, 32, 8, 8}, {outputs, 32, 1, 1}, {});
  for (int64_t height : {14, 16, 18})  // 7, 8, 9 groups of rows in a class
    add({1, 32, height, 16}, {32, 32, 3, 3}, {.stride = 2, .padding = 1});
  // The gradient by the weight: places of a block, with several taps and with one, pairs of images
  // in it, panels that tiles go through, rows that threads pack, threads.
  for (auto [height, width] : {std::pair<int64_t, int64_t>{17, 47}, {20, 40}, {9, 89}})
    add({2, 32, height, width + 2}, {32, 32, 1, 3}, {});
  for (auto [height, width] : {std::pair<int64_t, int64_t>{15, 17}, {16, 16}, {1, 257}})
    add({2, 32, height, width}, {32, 32, 1, 1}, {});
  for (int64_t images : {2, 4, 6}) add({images, 32, 8, 16}, {32, 32, 1, 1}, {});
  for (auto [height, width] : {std::pair<int64_t, int64_t>{33, 62}, {32, 64}, {41, 50}})
    add({1, 64, height, width}, {66, 64, 1, 1}, {});  // places that a product sums at once, or not
  for (int64_t c : {64, 96, 128}) add({2, c, 28, 28}, {16, c, 1, 3}, {});
  add({2, 32, 4, 11}, {16, 32, 2, 1}, {}, 1);
  add({2, 32, 5, 11}, {16, 32, 3, 1}, {});
  add({2, 32, 5, 11}, {48, 32, 2, 1}, {});
  // The same by minimal filtering of 7 x 7: tiles whose pixels are found together.
  for (int64_t images : {7, 8, 9, 17}) add({images, 32, 7, 7}, {32, 32, 3, 3}, {.padding = 1});
}

}  // namespace tessera::test
