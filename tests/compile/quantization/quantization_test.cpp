// Compares models on bytes with the f32 models they are made from: layers that are found, folded
// norms, residuals in the epilogue, accuracy, files, errors.
#include "compile/quantization/quantization.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/core.h"
#include "core/io/safetensors.h"
#include "core/tensor/random.h"
#include "examples/models/resnet.h"
#include "tests/support/temp_folder.h"

namespace tessera::quant {
namespace {

double largest(const Tensor& t) { return amax(abs(t)).item<double>(); }
// The root of the mean square of a - b, divided by that of b.
double relative_error(const Tensor& a, const Tensor& b) {
  NoGrad off;
  return std::sqrt(mean(square(a - b)).item<double>() / mean(square(b)).item<double>());
}

// The largest error, relative to its results, of a network that rounds so many tensors (inputs and
// weights of its layers): each is rounded to 1 / 255 of a range of some eight standard deviations,
// which makes independent errors of 8 / 255 / sqrt(12) = 0.9 % in the root of the mean square.
double rounding_of(int tensors) { return 8 / 255.0 / std::sqrt(12.0) * std::sqrt(double(tensors)); }

// Statistics that batches would have left behind.
void draw_statistics(nn::Module& model) {
  NoGrad off;
  model.apply([](nn::Module& m) {
    auto* norm = dynamic_cast<nn::BatchNormNd*>(&m);
    if (!norm) return;
    assign_(norm->running_mean, randn(norm->running_mean.shape()) * 0.3);
    assign_(norm->running_var, rand(norm->running_var.shape()) + 0.5);
    assign_(norm->weight.detach(), rand(norm->weight.shape()) + 0.5);
    assign_(norm->bias.detach(), randn(norm->bias.shape()) * 0.2);
  });
}

std::shared_ptr<Quantized> calibrated(const std::shared_ptr<nn::Module>& model, const Tensor& x,
                                      PrepareOptions options = {}) {
  auto prepared = prepare(model, std::move(options));
  (*prepared)(x);
  return convert(prepared);
}

TEST(Quantization, NormsFoldIntoWeights) {
  manual_seed(1);
  auto model = nn::sequential(nn::conv2d({.in = 3, .out = 8, .kernel = 3, .padding = 1}),
                              nn::batch_norm2d({.channels = 8}), nn::relu(),
                              nn::conv2d({.in = 8, .out = 5, .kernel = 1, .bias = false}),
                              nn::batch_norm2d({.channels = 5}));
  draw_statistics(*model);
  model->eval();
  Tensor x = randn({2, 3, 6, 7});
  Layers found =
      find_layers([&](const Tensor& t) { return (*model)(t); }, x, model->named_parameters(), {});
  ASSERT_EQ(found.layers.size(), 2u);
  EXPECT_EQ(found.layers[0].name, "0");
  EXPECT_EQ(found.layers[1].name, "3");
  EXPECT_TRUE(found.layers[0].relu);
  EXPECT_FALSE(found.layers[1].relu);
  NoGrad off;
  const Layer &a = found.layers[0], &b = found.layers[1];
  Tensor y = relu(conv2d(x, a.weight, a.bias, {.padding = 1}));
  y = conv2d(y, b.weight, b.bias);
  EXPECT_LE(largest(y - (*model)(x)), 1e-5);
  // The recorded forward itself computes what the model does.
  Tensor again = run_observed(found, x, [](const Root&, const Tensor&) {});
  EXPECT_EQ(largest(again - (*model)(x)), 0);
}

TEST(Quantization, WeightsAreRoundedByChannel) {
  Layer layer;
  layer.weight = from_values<float>({1, -2, 0.5f, 0, 0, 0, 100, 3, -127}, {3, 3});
  layer.bias = zeros({3});
  LayerTensors t = round_weights(layer);
  Tensor back = (t.weight.to(kF32) - 128.0) * reshape(t.weight_scale, {3, 1});
  for (int64_t i : {0, 1, 2}) {
    const double step = t.weight_scale[i].item<double>();
    EXPECT_LE(largest(back[i] - layer.weight[i]), step / 2);
  }
  EXPECT_EQ(t.weight_scale[1].item<float>(), 1) << "zeros need no scale";
  EXPECT_EQ(t.weight.to(kI64)[2][2].item<int64_t>(), 1);
  EXPECT_EQ(t.weight_scale[2].item<float>(), 1);
}

TEST(Quantization, HistogramsClipTailsWhereThatErrsLess) {
  Observed least(Observer::kMinMax), body(Observer::kHistogram);
  manual_seed(2);
  std::vector<Tensor> seen;
  for (int i = 0; i < 4; ++i) seen.push_back(randn({200000}) * (1.0 + i));  // the range grows
  seen.push_back(from_values<float>({-90, 90}, {2}));
  for (const Tensor& x : seen) least.see(x, "x"), body.see(x, "x");
  const QuantizationParameters all = least.parameters(), most = body.parameters();
  EXPECT_NEAR(all.scale, 180.0 / 255, 1e-6);
  EXPECT_LT(most.scale, 0.9 * all.scale);
  // Relative to what each sample holds.
  auto squared_error = [&](const QuantizationParameters& q) {
    double e = 0;
    for (const Tensor& x : seen)
      e += sum(square(dequantize(quantize(x, q), q) - x)).item<double>() /
           mean(square(x)).item<double>();
    return e;
  };
  EXPECT_LT(squared_error(most), squared_error(all));
  // No other range of the same shape errs much less.
  for (double by : {0.5, 0.8, 1.25, 2.0})
    EXPECT_LT(squared_error(most), 1.02 * squared_error({most.scale * by, most.zero_point}));
  // A few samples with values a hundred times as large leave the range to the others.
  Observed fair(Observer::kHistogram);
  Tensor batch = randn({32, 5000});
  mul_(narrow(batch, 0, 7, 2), 100);
  fair.see(batch, "batch");
  EXPECT_LT(fair.parameters().scale * 255, 0.25 * (fair.max() - fair.min()));
  Observed positive(Observer::kHistogram);
  positive.see(relu(randn({1000})), "y");
  EXPECT_EQ(positive.parameters().zero_point, 0);
  Observed zero(Observer::kHistogram);
  zero.see(zeros({10}), "z");
  EXPECT_EQ(zero.parameters().scale, 1);
}

models::ResNetOptions tiny(int64_t depth) {
  return {.depth = depth, .classes = 10, .width = 16, .small_images = false};
}

TEST(Quantization, ResidualNetworksStayBytes) {
  for (int64_t depth : {18, 50}) {
    SCOPED_TRACE(depth);
    manual_seed(3);
    auto model = models::resnet(tiny(depth));
    draw_statistics(*model);
    model->eval();
    Tensor x = randn({4, 3, 64, 64});
    auto fast = calibrated(model, x);
    NoGrad off;
    Tensor y = (*fast)(x), want = (*model)(x);
    EXPECT_EQ(y.dtype(), kF32);
    const double rounding = rounding_of(depth == 18 ? 21 : 54);
    EXPECT_LT(relative_error(y, want), rounding);
    const std::string report = fast->report();
    size_t lines = size_t(std::ranges::count(report, '\n'));
    // Every convolution and the linear layer, then the average, and nothing else.
    EXPECT_EQ(lines, size_t(depth == 18 ? 21 : 54) + 1) << report;
    expect_contains(report, "conv1: ");
    expect_contains(report, "layer1.0.conv2: ");
    expect_contains(report, "1 x avg_pool: f32");
    expect_contains(report, depth == 18 ? "layer1.1.conv2: " : "layer1.1.conv3: ");
    expect_contains(report, ", norm folded, residual, relu");
    expect_contains(report, "fc: ");
    EXPECT_EQ(report.find("ref"), std::string::npos) << "no reference kernels\n" << report;
    EXPECT_EQ(largest((*fast)(x)-y), 0) << "the same bits again";
    // Another batch and another size run as well, and the first is still there.
    Tensor other = randn({3, 3, 96, 96});
    // Its values may lie beyond the ranges, which were chosen by the first batch.
    EXPECT_LT(relative_error((*fast)(other), (*model)(other)), 3 * rounding);
    EXPECT_EQ(largest((*fast)(x)-y), 0);
  }
}

TEST(Quantization, MinMaxAndLayersKeptInF32) {
  manual_seed(4);
  auto model = models::resnet(tiny(18));
  draw_statistics(*model);
  model->eval();
  Tensor x = randn({4, 3, 64, 64});
  auto fast = calibrated(model, x, {.observer = Observer::kMinMax, .keep_f32 = {"conv1", "fc"}});
  NoGrad off;
  EXPECT_LT(relative_error((*fast)(x), (*model)(x)), rounding_of(21));
  expect_contains(fast->report(), "conv1: f32, as keep_f32 asks");
  expect_contains(fast->report(), "fc: f32, as keep_f32 asks");
  expect_contains(
      error_of([&] { calibrated(model, x, {.keep_f32 = {"convolution1"}}); }),
      "keep_f32 names convolution1, which is no layer; there are conv1, layer1.0.conv1");
}

// What is between layers and is not known runs in f32.
TEST(Quantization, UnknownOpsRunInF32) {
  manual_seed(5);
  auto model = nn::sequential(nn::linear(12, 32), nn::gelu(), nn::linear(32, 32),
                              nn::layer_norm(32), nn::relu(), nn::linear(32, 4));
  model->eval();
  Tensor x = randn({7, 5, 12});
  auto fast = calibrated(model, x);
  NoGrad off;
  EXPECT_LT(relative_error((*fast)(x), (*model)(x)), rounding_of(6));
  expect_contains(fast->report(), "1 x gelu: f32");
  expect_contains(fast->report(), "1 x layer_norm: f32");
}

// A residual stream that only norms read is added in f32; one that a layer reads is bytes.
struct Stream final : nn::Module {
  explicit Stream(bool normed) : normed(normed) {
    norm = register_module("norm", nn::layer_norm(16));
    up = register_module("up", nn::linear(16, 32));
    down = register_module("down", nn::linear(32, 16));
    last = register_module("last", nn::linear(16, 16));
  }
  bool normed;
  nn::LayerNormPtr norm;
  nn::LinearPtr up, down, last;

 protected:
  Tensor forward(Tensor x) override {
    Tensor h = (*down)(relu((*up)(normed ? (*norm)(x) : x)));
    return (*last)(x + h);
  }
};
TEST(Quantization, ResidualsOfTransformersStayF32) {
  manual_seed(6);
  for (bool normed : {true, false}) {
    auto model = std::make_shared<Stream>(normed);
    model->eval();
    Tensor x = randn({9, 16});
    auto fast = calibrated(model, x);
    NoGrad off;
    EXPECT_LT(relative_error((*fast)(x), (*model)(x)), rounding_of(6));
    EXPECT_EQ(fast->report().find("1 x add: f32") != std::string::npos, normed) << fast->report();
  }
}

// Trained here: noisy classes of small images.
TEST(Quantization, KeepsWhatATrainedModelKnows) {
  manual_seed(7);
  const Tensor prototypes = randn({10, 3, 16, 16});
  auto draw = [&](int64_t n) {
    Tensor y = randint(0, 10, {n});
    return std::pair(index_select(prototypes, 0, y) * 0.35 + randn({n, 3, 16, 16}), y);
  };
  auto model =
      nn::sequential(nn::conv2d({.in = 3, .out = 16, .kernel = 3, .padding = 1, .bias = false}),
                     nn::batch_norm2d({.channels = 16}), nn::relu(), nn::max_pool2d(2),
                     nn::conv2d({.in = 16, .out = 32, .kernel = 3, .padding = 1, .bias = false}),
                     nn::batch_norm2d({.channels = 32}), nn::relu(), nn::max_pool2d(2),
                     nn::flatten(), nn::linear(512, 10));
  auto opt = optim::AdamW(model->parameters(), {.lr = 3e-3});
  for (int step = 0; step < 60; ++step) {
    auto [x, y] = draw(64);
    Tensor loss = nn::cross_entropy((*model)(x), y);
    opt.zero_grad();
    loss.backward();
    opt.step();
  }
  model->eval();
  auto prepared = prepare(model);
  for (int i = 0; i < 4; ++i) (*prepared)(draw(64).first);
  auto fast = convert(prepared);
  NoGrad off;
  auto [x, y] = draw(1000);
  auto right = [&, &y = y](const Tensor& logits) {
    return mean(eq(argmax(logits, 1), y).to(kF32)).item<double>();
  };
  const Tensor slow_logits = (*model)(x), fast_logits = (*fast)(x);
  EXPECT_GT(right(slow_logits), 0.6);
  EXPECT_LT(right(slow_logits), 0.999) << "too easy to tell models apart";
  EXPECT_NEAR(right(fast_logits), right(slow_logits), 0.01);
  EXPECT_EQ(fast->report().find("max_pool: f32"), std::string::npos) << fast->report();
}

TEST(Quantization, FilesHoldTheConvertedModel) {
  manual_seed(8);
  auto model = models::resnet(tiny(18));
  draw_statistics(*model);
  model->eval();
  Tensor x = randn({2, 3, 64, 64});
  auto fast = calibrated(model, x);
  NoGrad off;
  Tensor want = (*fast)(x);
  TempFolder folder;
  const std::string path = folder / "int8.safetensors";
  std::vector<NamedTensor> state = fast->state();
  io::save_safetensors(path, state);
  size_t bytes = 0;
  for (const NamedTensor& t : state) bytes += t.tensor.nbytes();
  EXPECT_LT(double(bytes), 0.3 * 4 * double(model->num_parameters()));
  auto file = io::SafetensorsFile::open(path);
  std::vector<NamedTensor> loaded;
  for (const std::string& name : file.names()) loaded.push_back({name, file.load(name)});
  auto other = models::resnet(tiny(18));  // weights of its own
  other->eval();
  auto again = load(other, loaded);
  EXPECT_EQ(largest((*again)(x)-want), 0);
  // And into a model that has run already.
  Tensor scale = fast->slot("layer1.0.conv1.weight_scale");
  assign_(scale, scale * 2.0);
  EXPECT_NE(largest((*fast)(x)-want), 0);
  fast->load_state(loaded);
  EXPECT_EQ(largest((*fast)(x)-want), 0);
  loaded[0].name = "layer9.conv1.something";
  expect_contains(error_of([&] { load(other, loaded); }), "no tensor of a converted model");
  expect_contains(error_of([&] { load(other, model->state()); }), "not that of a converted model");
  auto partly = calibrated(model, x, {.keep_f32 = {"fc"}});
  expect_contains(error_of([&] { (*load(other, partly->state()))(x); }),
                  "the state has no layer fc; name it in keep_f32");
}

// 0 is exact, so a sample of small values costs at most its own values, however large its weight.
TEST(Quantization, DimSamplesLeaveTheRangeToTheOthers) {
  manual_seed(10);
  auto model = nn::sequential(nn::linear(256, 8));
  model->eval();
  NoGrad off;
  const Tensor x = randn({32, 256});
  for (double dim : {1e-4, 1e-20}) {
    SCOPED_TRACE(dim);
    Tensor batch = clone(x);
    mul_(batch[7], dim);
    EXPECT_LT(relative_error((*calibrated(model, batch))(x), (*model)(x)), rounding_of(2));
  }
}

TEST(Quantization, RangesDoNotDependOnTheOrderOfBatches) {
  manual_seed(11);
  const Tensor constant = full({4000}, 1e-3), noise = randn({4, 4000});
  Observed before(Observer::kHistogram), after(Observer::kHistogram);
  before.see(constant, "x"), before.see(noise, "x");
  after.see(noise, "x"), after.see(constant, "x");
  EXPECT_EQ(before.parameters().scale, after.parameters().scale);
  EXPECT_GT(after.parameters().scale * 255, 5);
}

TEST(Quantization, ChannelsOfTinyWeightsGiveTheirBias) {
  manual_seed(12);
  NoGrad off;
  Tensor x = randn({2, 3, 8, 8});
  for (double tiny : {1e-36, 1e-41})
    for (bool all : {false, true}) {
      SCOPED_TRACE(fmt::format("{} {}", tiny, all));
      auto conv = nn::conv2d({.in = 3, .out = 4, .kernel = 3});
      fill_(conv->bias, 1);
      mul_(all ? conv->weight.detach() : conv->weight.detach()[1], tiny);
      auto model = nn::sequential(conv);
      model->eval();
      const Tensor y = (*calibrated(model, x))(x);
      EXPECT_LT(relative_error(y, (*model)(x)), rounding_of(2));
      EXPECT_LT(largest(narrow(y, 1, 1, 1) - 1.0), 1e-6);
    }
}

// Calls one layer twice, and has another whose path equals the name of the second call.
struct Twice final : nn::Module {
  Twice() {
    fc = register_module("fc", nn::linear(16, 16));
    fc_2 = register_module("fc_2", nn::linear(16, 16));
  }
  nn::LinearPtr fc, fc_2;

 protected:
  Tensor forward(Tensor x) override { return (*fc_2)(gelu((*fc)(gelu((*fc)(x))))); }
};
TEST(Quantization, LayersCalledTwiceHaveNamesOfTheirOwn) {
  manual_seed(13);
  auto model = std::make_shared<Twice>();
  model->eval();
  Tensor x = randn({9, 16});
  NoGrad off;
  auto fast = calibrated(model, x);
  EXPECT_LT(relative_error((*fast)(x), (*model)(x)), rounding_of(6));
  for (const char* name : {"fc: ", "fc_2: ", "fc_3: "}) expect_contains(fast->report(), name);
  // A layer that is kept in f32 by its path is kept so in every call.
  fast = calibrated(model, x, {.keep_f32 = {"fc"}});
  EXPECT_LT(relative_error((*fast)(x), (*model)(x)), rounding_of(2));
  const std::string report = fast->report();
  expect_contains(report, "fc: f32, as keep_f32 asks");
  expect_contains(report, "fc_2: ");
  EXPECT_EQ(report.find("fc_3"), std::string::npos) << report;
}

TEST(Quantization, WeightsThatChangeInCalibrationAreTheOnesConverted) {
  manual_seed(14);
  auto model = nn::sequential(nn::linear(16, 8)), other = nn::sequential(nn::linear(16, 8));
  model->eval();
  other->eval();
  Tensor x = randn({9, 16});
  NoGrad off;
  auto prepared = prepare(model);
  (*prepared)(x);
  model->load_state(other->state());
  expect_contains(error_of([&] { convert(prepared); }), "changed after calibration");
  EXPECT_EQ(largest((*prepared)(x) - (*model)(x)), 0);
  EXPECT_LT(relative_error((*convert(prepared))(x), (*other)(x)), rounding_of(2));
}

TEST(Quantization, WhatRunsInF32FollowsTheModel) {
  manual_seed(15);
  auto norm = nn::batch_norm1d({.channels = 16});
  auto model = nn::sequential(norm, nn::linear(16, 8));
  model->eval();
  Tensor x = randn({9, 16});
  NoGrad off;
  auto fast = calibrated(model, x);
  (*fast)(x);
  fill_(norm->running_var, 9);
  EXPECT_LT(relative_error((*fast)(x), (*model)(x)), rounding_of(21));
}

TEST(Quantization, CalibratesOnEveryLayout) {
  manual_seed(16);
  auto model = nn::sequential(nn::flatten(), nn::linear(60, 8));
  model->eval();
  Tensor x = randn({4, 3, 4, 5});
  NoGrad off;
  auto prepared = prepare(model);
  (*prepared)(x);
  const Tensor want = (*model)(x);
  EXPECT_EQ(largest((*prepared)(x.to(MemoryFormat::kChannelsLast)) - want), 0);
  const Tensor turned = transpose(contiguous(transpose(x, 2, 3)), 2, 3);
  EXPECT_EQ(largest((*prepared)(turned)-want), 0);
  auto fast = convert(prepared);
  EXPECT_LT(relative_error((*fast)(x.to(MemoryFormat::kChannelsLast)), want), rounding_of(2));
}

// A batch that a layer's result overflows on is not counted at all.
TEST(Quantization, BatchesThatFailLeaveNoTrace) {
  manual_seed(17);
  auto first = nn::linear(8, 8);
  auto model = nn::sequential(first, nn::gelu(), nn::linear(8, 2));
  model->eval();
  NoGrad off;
  mul_(first->weight.detach(), 100);
  Tensor x = randn({4, 8});
  auto prepared = prepare(model);
  (*prepared)(x);
  const double before = prepared->decide().roots.at("input").scale;
  EXPECT_NE(error_of([&] { (*prepared)(x * 1e37); }), "");
  EXPECT_EQ(prepared->decide().roots.at("input").scale, before);
}

TEST(Quantization, Refusals) {
  manual_seed(9);
  auto model = nn::sequential(nn::linear(8, 8), nn::relu(), nn::linear(8, 2));
  expect_contains(error_of([&] { prepare(model); }), "in training mode; call eval()");
  model->eval();
  expect_contains(error_of([&] { convert(prepare(model)); }),
                  "was not calibrated, so no scale is known (of 0.weight on)");
  auto prepared = prepare(model);
  Tensor x = randn({4, 8}), bad = clone(x);
  bad.data<float>()[3] = INFINITY;
  expect_contains(error_of([&] { (*prepared)(bad); }), "1 of 32 values of input are not finite");
  expect_contains(error_of([&] { (*prepared)(x.to(kBF16)); }), "give it in f32");
  (*prepared)(x);
  auto fast = convert(prepared);
  Tensor leaf = clone(x).requires_grad_();
  expect_contains(error_of([&] { (*fast)(leaf); }), "run it under NoGrad");
  EXPECT_FALSE((*fast)(x).requires_grad());
  fast->train();
  expect_contains(error_of([&] { (*fast)(x); }), "call eval()");
  fast->eval().to(kBF16);
  expect_contains(error_of([&] { (*fast)(x); }), "of 0 is bf16; they stay f32");
  auto low = nn::sequential(nn::linear(8, 8));
  low->eval().to(kBF16);
  expect_contains(error_of([&] { prepare(low); }),
                  "0.weight is bf16; quantization takes models in f32");
  auto none = nn::sequential(nn::relu());
  none->eval();
  auto watched = prepare(none);
  (*watched)(x);
  expect_contains(error_of([&] { convert(watched); }), "no layer that runs on bytes");
}

}  // namespace
}  // namespace tessera::quant
