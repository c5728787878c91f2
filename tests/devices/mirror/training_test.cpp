// Models that train on the device and on the CPU, compared by a hash of losses and parameters.
#include "compile/compile.h"
#include "core/core.h"
#include "core/io/hash.h"
#include "core/tensor/device_runtime.h"
#include "examples/models/gpt.h"
#include "testing.h"

using namespace tessera;

namespace {

// Makes the model and returns its loss on the batch of a step.
struct Lesson {
  std::function<std::shared_ptr<nn::Module>()> make;
  std::function<Tensor(nn::Module&, int64_t step, Device)> loss;
};

Tensor labels(int64_t step, const Shape& shape, Device d) {
  return randint(0, 10, shape, {.device = kCPU}, from_values<int64_t>({step, 1}, {2})).to(d);
}
Tensor values(int64_t step, const Shape& shape, Device d) {
  return randn(shape, {.device = kCPU}, from_values<int64_t>({step, 2}, {2})).to(d);
}

Lesson mlp() {
  return {[] {
            return nn::sequential(nn::linear(12, 32), nn::gelu(), nn::dropout(0.2),
                                  nn::layer_norm(32), nn::linear(32, 10));
          },
          [](nn::Module& m, int64_t step, Device d) {
            return nn::cross_entropy(m(values(step, {8, 12}, d)), labels(step, {8}, d));
          }};
}

Lesson convolutions() {
  return {[] {
            return nn::sequential(nn::conv2d({.in = 3, .out = 8, .kernel = 3, .padding = 1}),
                                  nn::batch_norm2d({.channels = 8}), nn::relu(), nn::max_pool2d(2),
                                  nn::conv2d({.in = 8, .out = 10, .kernel = 3, .stride = 2}),
                                  nn::batch_norm2d({.channels = 10}));
          },
          [](nn::Module& m, int64_t step, Device d) {
            const Tensor y = m(values(step, {4, 3, 8, 8}, d));
            return nn::cross_entropy(y.mean({2, 3}), labels(step, {4}, d));
          }};
}

Lesson gpt() {
  return {[] {
            return std::make_shared<models::Gpt>(models::GptOptions{
                .vocab = 11, .context = 6, .layers = 2, .heads = 2, .dim = 16, .dropout = 0.1});
          },
          [](nn::Module& m, int64_t step, Device d) {
            return static_cast<models::Gpt&>(m).loss(labels(step, {3, 6}, d),
                                                     labels(step + 100, {3, 6}, d));
          }};
}

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(std::vector<NamedTensor>)>;

// Four clipped steps; the model is made on the device, or moved there. Compiled steps replay from
// the third on.
std::string learned(const Lesson& lesson, const MakeOptimizer& make, Device d, bool moved,
                    bool compiled = false) {
  manual_seed(7);
  DeviceScope scope(moved ? kCPU : d);
  auto model = lesson.make();
  model->init(5);
  if (moved) model->to(d);
  auto optimizer = make(model->named_parameters());
  std::vector<NamedTensor> all;
  auto learn = [&](const Tensor& loss) {
    optimizer->zero_grad();
    loss.backward();
    optim::clip_grad_norm_(model->parameters(), 0.5);
    optimizer->step();
    return loss.detach();
  };
  auto step_of_inputs = compile(
      [&](const Tensor& x, const Tensor& y) { return learn(nn::cross_entropy((*model)(x), y)); });
  for (int64_t step = 0; step < 4; ++step) {
    const Tensor loss = compiled ? step_of_inputs(values(step, {8, 12}, d), labels(step, {8}, d))
                                 : learn(lesson.loss(*model, step, d));
    all.push_back({fmt::format("loss.{}", step), loss});
  }
  EXPECT_EQ(step_of_inputs.report().replays, compiled ? 2 : 0) << step_of_inputs.report().why_not;
  for (NamedTensor& t : model->state()) all.push_back(std::move(t));
  for (NamedTensor& t : optimizer->named_state()) all.push_back(std::move(t));
  return io::params_xxh128(all);
}

std::unique_ptr<optim::Optimizer> adamw(std::vector<NamedTensor> p) {
  return std::make_unique<optim::AdamW>(std::move(p), optim::AdamWOptions{.lr = 0.01});
}

void expect_same(const Lesson& lesson, const MakeOptimizer& make) {
  const std::string want = learned(lesson, make, kCPU, false);
  mirror::for_each_seed([&] {
    for (bool moved : {false, true})
      EXPECT_EQ(learned(lesson, make, mirror::device(1), moved), want) << "moved: " << moved;
  });
}

TEST(MirrorTraining, Mlp) { expect_same(mlp(), adamw); }
TEST(MirrorTraining, ConvolutionsWithBatchNorm) { expect_same(convolutions(), adamw); }
TEST(MirrorTraining, GptWithDropout) { expect_same(gpt(), adamw); }

// The device compiles no kernels, so that graphs run with its own.
TEST(MirrorTraining, CompiledSteps) {
  const std::string want = learned(mlp(), adamw, kCPU, false);
  mirror::for_each_seed(
      [&] { EXPECT_EQ(learned(mlp(), adamw, mirror::device(1), false, /*compiled=*/true), want); });
}

TEST(MirrorTraining, EveryOptimizer) {
  const std::vector<MakeOptimizer> others = {
      [](auto p) {
        return std::make_unique<optim::SGD>(
            std::move(p), optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true});
      },
      [](auto p) {
        return std::make_unique<optim::RMSprop>(std::move(p), optim::RMSpropOptions{.lr = 0.01});
      },
      [](auto p) {
        return std::make_unique<optim::Adagrad>(std::move(p), optim::AdagradOptions{.lr = 0.01});
      },
      [](auto p) {
        return std::make_unique<optim::Lion>(std::move(p), optim::LionOptions{.lr = 0.01});
      },
  };
  for (size_t i = 0; i < others.size(); ++i) {
    SCOPED_TRACE(i);
    expect_same(mlp(), others[i]);
  }
}

TEST(MirrorTraining, ASteadyStepWaitsForNothingAndTakesNoNewMemory) {
  const Device d = mirror::device();
  DeviceScope scope(d);
  for (const Lesson& lesson : {mlp(), convolutions(), gpt()}) {
    auto model = lesson.make();
    auto optimizer = adamw(model->named_parameters());
    int64_t memory = 0, waits = 0;
    for (int64_t step = 0; step < 6; ++step) {
      if (step == 2) memory = memory_stats(d).system_calls, waits = mirror::host_waits();
      const Tensor loss = lesson.loss(*model, step, d);
      optimizer->zero_grad();
      loss.backward();
      const optim::Clip clip = optim::clip_grad_norm(model->parameters(), 0.5);
      optimizer->step_if_finite(clip.scale);
    }
    EXPECT_EQ(memory_stats(d).system_calls, memory);
    EXPECT_EQ(mirror::host_waits(), waits);
  }
}

}  // namespace
