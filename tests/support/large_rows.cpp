// Softmax, losses, norms and embedding: rows, and as many as threads share.
#include "core/ops/batch_norm.h"
#include "core/ops/batch_norm_stats.h"
#include "core/ops/fused.h"
#include "core/ops/losses.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "tests/support/large_cases.h"

namespace tessera::test {
namespace {

using List = std::vector<Tensor>;

void add_softmax(LargeCases& cases, int64_t rows, int64_t n) {
  const Tensor x = grid_values({rows, n}, 1, -4, 4);
  const std::string of = " of " + to_string(x.shape());
  cases.push_back({"softmax" + of, {x}, [](const List& in) { return List{softmax(in[0])}; }, n});
  cases.push_back(
      {"log_softmax" + of, {x}, [](const List& in) { return List{log_softmax(in[0])}; }, n});
}

void add_cross_entropy(LargeCases& cases, int64_t rows, int64_t n) {
  Tensor targets = sample_integers({rows}, 0, n, 2);
  targets.data<int64_t>()[rows / 2] = -100;
  const List in = {grid_values({rows, n}, 1, -4, 4), targets};
  const std::string of = "cross_entropy of " + to_string(in[0].shape());
  for (Reduction r : {Reduction::kMean, Reduction::kSum, Reduction::kNone})
    cases.push_back(
        {of + " reduction " + std::to_string(int(r)), in,
         [=](const List& in) { return List{cross_entropy(in[0], in[1], {.reduction = r})}; }, n});
  cases.push_back(
      {of + " smoothed", in,
       [=](const List& in) { return List{cross_entropy(in[0], in[1], {.label_smoothing = 0.1})}; },
       n, true, 3});
}

void add_norms(LargeCases& cases, int64_t rows, int64_t n) {
  const List in = {grid_values({rows, n}, 1), grid_values({n}, 2, 0.5, 1), grid_values({n}, 3)};
  const std::string of = " of " + to_string(in[0].shape());
  const int64_t length = std::max(rows, n);
  cases.push_back({"layer_norm" + of, in,
                   [](const List& in) { return List{layer_norm(in[0], in[1], in[2])}; }, length});
  cases.push_back({"rms_norm" + of,
                   {in[0], in[1]},
                   [](const List& in) { return List{rms_norm(in[0], in[1])}; },
                   length});
}

void add_batch_norm(LargeCases& cases, const Shape& shape) {
  const List in = {grid_values(shape, 1), grid_values({shape[1]}, 2, 0.5, 1),
                   grid_values({shape[1]}, 3)};
  cases.push_back({"batch_norm of " + to_string(shape), in,
                   [](const List& in) {
                     return List{batch_norm(in[0], {}, {}, {in[1], in[2], true})};
                   },
                   numel(shape) / shape[1]});
}

// For a batch that several ranks have: statistics lie in f32 beside 16-bit floats.
void add_batch_norm_parts(LargeCases& cases, const Shape& shape) {
  const Shape channels{shape[1]};
  const auto wide = [](const Tensor& t, const Tensor& x) {
    return cast(t, x.dtype() == kF64 ? kF64 : kF32);
  };
  auto add = [&](const char* name, List in, auto f) {
    cases.push_back({fmt::format("batch_norm_{} of {}", name, to_string(shape)), std::move(in), f,
                     numel(shape) / shape[1], false});
  };
  const Tensor x = grid_values(shape, 1), g = grid_values(shape, 2), y = grid_values(shape, 3);
  const Tensor mean = grid_values(channels, 4, -0.25, 0.25),
               var = grid_values(channels, 5, 0.25, 0.5), weight = grid_values(channels, 6, 0.5, 1),
               bias = grid_values(channels, 7);
  add("stats", {x}, [](const List& in) {
    const ChannelMoments of = batch_norm_stats(in[0]);
    return List{of.mean, of.var};
  });
  add("apply", {x, mean, var, weight, bias, y}, [wide](const List& in) {
    const ChannelMoments of{wide(in[1], in[0]), wide(in[2], in[0])};
    const Tensor w = wide(in[3], in[0]), b = wide(in[4], in[0]);
    return List{batch_norm_apply(in[0], of, w, b, 1e-5),
                batch_norm_apply(in[0], of, w, b, 1e-5, {.residual = in[5], .relu = true})};
  });
  add("grad_stats", {g, x, mean, y}, [wide](const List& in) {
    const Tensor m = wide(in[2], in[0]);
    const ChannelSums all = batch_norm_grad_stats(in[0], in[1], m),
                      some = batch_norm_grad_stats(in[0], in[1], m, in[3]);
    return List{all.g, all.gx, some.g, some.gx};
  });
  add("grad_apply", {g, x, mean, var, weight, y}, [wide](const List& in) {
    const ChannelMoments of{wide(in[2], in[0]), wide(in[3], in[0])};
    const ChannelSums sums{of.mean * 0.5, of.var * 0.25};
    const BatchNormGrads all =
        batch_norm_grad_apply(in[0], in[1], of, sums, wide(in[4], in[0]), 1e-5);
    const BatchNormGrads some =
        batch_norm_grad_apply(in[0], in[1], of, sums, wide(in[4], in[0]), 1e-5, in[5], true);
    return List{all.x, some.x, some.residual};
  });
}

// Means of so many elements have gradients that f16 does not hold: sums there.
void add_losses(LargeCases& cases) {
  // Differences are odd multiples of 2^-8, away from where losses have kinks.
  const Tensor x = grid_values({33, 1001}, 1), y = grid_values({33, 1001}, 2, -0.5, 0.5) + 0x1p-8;
  auto add = [&](const char* name, int roundings, auto loss) {
    for (Reduction r : {Reduction::kMean, Reduction::kSum})
      cases.push_back({fmt::format("{}, {}", name, r == Reduction::kMean ? "mean" : "sum"),
                       {x, y},
                       [=](const List& in) { return List{loss(in[0], in[1], r)}; },
                       x.numel(),
                       true,
                       r == Reduction::kMean ? 0 : roundings});
  };
  add("mse_loss", 2, [](auto& a, auto& b, Reduction r) { return mse_loss(a, b, r); });
  add("l1_loss", 2, [](auto& a, auto& b, Reduction r) { return l1_loss(a, b, r); });
  add("smooth_l1_loss", 3,
      [](auto& a, auto& b, Reduction r) { return smooth_l1_loss(a, b, 1, r); });
  add("huber_loss", 3, [](auto& a, auto& b, Reduction r) { return huber_loss(a, b, 0.5, r); });
  add("binary_cross_entropy_with_logits", 3, [](auto& a, auto& b, Reduction r) {
    return binary_cross_entropy_with_logits(a, b, {}, {}, r);
  });
}

}  // namespace

void add_rows(LargeCases& cases) {
  for (int64_t n : {31, 32, 33, 1025}) add_softmax(cases, 3, n);
  for (int64_t rows : {31, 32, 33}) add_softmax(cases, rows, 1024);
  for (int64_t n : {1023, 1024, 1025, 5003}) add_cross_entropy(cases, 3, n);
  for (int64_t rows : {31, 32, 33}) add_cross_entropy(cases, rows, 1024);
  for (int64_t rows : {63, 64, 65, 129, 300}) add_norms(cases, rows, 33);
  for (int64_t rows : {63, 64, 65, 128, 129}) add_norms(cases, rows, 512);
  add_norms(cases, 3, 1031);
  for (const Shape& s : {Shape{7, 3, 1, 1},
                         {2, 3, 2, 2},
                         {3, 3, 3, 1},
                         {7, 5, 73, 1},
                         {8, 5, 8, 8},
                         {27, 5, 19, 1},
                         {5, 67, 5, 41},
                         {1, 160, 8, 51},  // pieces of 409 rows, which blocks of eight do not fill
                         {1, 160, 1, 409},
                         {2, 160, 5, 41}})
    add_batch_norm(cases, s), add_batch_norm_parts(cases, s);
  cases.push_back({"group_norm",
                   {grid_values({3, 12, 9, 11}, 1), grid_values({12}, 2), grid_values({12}, 3)},
                   [](const List& in) { return List{group_norm(in[0], 4, in[1], in[2])}; },
                   297});
  for (int64_t ids : {127, 128, 129})
    cases.push_back({"embedding of " + std::to_string(ids) + " ids",
                     {sample_integers({ids}, 0, 40, 1), grid_values({40, 64}, 2)},
                     [](const List& in) { return List{embedding(in[0], in[1])}; },
                     ids});
  for (int64_t width : {31, 32, 33})
    cases.push_back({"embedding of width " + std::to_string(width),
                     {sample_integers({1024}, 0, 50, 1), grid_values({50, width}, 2)},
                     [](const List& in) { return List{embedding(in[0], in[1], 3)}; },
                     1024});
  add_losses(cases);
}

}  // namespace tessera::test
