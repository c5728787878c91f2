// Stages of every model compared with the whole model: what they read besides activations, what
// they share, and running statistics.
#include <gtest/gtest.h>

#include <algorithm>

#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/io/hash.h"
#include "core/nn/nn.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "examples/models/bert.h"
#include "examples/models/mlp.h"
#include "examples/models/resnet.h"
#include "parallel/pipeline.h"
#include "tests/support/temp_folder.h"

namespace tessera::parallel {
namespace {

constexpr int kMicroBatches = 3;

const StageLoss kLoss = [](const Tensor& y, const Tensor& targets) {
  return cross_entropy(y, targets, {.dim = -1});
};

using Named = std::vector<NamedTensor>;
using Forward = std::function<Tensor(nn::Module& model, const Tensor& x, const MicroBatch& b)>;
const Forward kPlain = [](nn::Module& m, const Tensor& x, const MicroBatch&) { return m(x); };

/// A model, whole and in stages, on micro-batches that it learns from.
struct Subject {
  std::function<std::shared_ptr<nn::Module>()> whole;
  std::function<std::shared_ptr<nn::Module>(int stage, int stages)> stage;
  std::vector<MicroBatch> batch;
  Forward forward = kPlain;
  std::vector<std::string> tied = {};
  std::vector<int> stages = {1, 2, 3};
};

void by_name(Named& list) { std::ranges::sort(list, {}, &NamedTensor::name); }

// Losses, gradients, and the state after two forwards and backwards of all micro-batches.
struct Learned {
  std::vector<double> losses;
  Named gradients, state;
};

Learned serial(const Subject& s, ProcessGroup& alone) {
  auto model = s.whole();
  RunningStatistics statistics(*model, Ref<ProcessGroup>(&alone), true);
  Learned out;
  for (int step = 0; step < 2; ++step) {
    const uint64_t key = uint64_t(step) << 20;
    for (size_t k = 0; k < s.batch.size(); ++k) {
      const MicroBatch& b = s.batch[k];
      default_generator().seek(key);
      SampleScope samples(b.samples);
      statistics.before(k, s.batch.size());
      Tensor y = s.forward(*model, b.input, b);
      statistics.after(k, s.batch.size());
      Tensor loss = kLoss(y, b.target);
      backward(loss * (1.0 / double(s.batch.size())));
      out.losses.push_back(loss.item<double>());
    }
    out.gradients.clear();
    for (const NamedTensor& p : model->named_parameters())
      out.gradients.push_back({p.name, p.tensor.grad().clone()});
    model->zero_grad();
  }
  out.state = model->state();
  by_name(out.state);
  return out;
}

Learned staged(const Subject& s, ProcessGroup& group, Schedule (*schedule)(int, int)) {
  auto stage = s.stage(group.rank(), group.size());
  RunningStatistics statistics(*stage, group.split(group.rank()), true);
  Pipeline pipeline(stage, {.schedule = schedule,
                            .tied = s.tied,
                            .forward = [&](const Tensor& x,
                                           const MicroBatch& b) { return s.forward(*stage, x, b); },
                            .statistics = &statistics});
  Learned out;
  for (int step = 0; step < 2; ++step) {
    default_generator().seek(uint64_t(step) << 20);
    const Tensor losses = pipeline.step(s.batch, kLoss);
    for (int64_t k = 0; k < losses.numel(); ++k) out.losses.push_back(losses.data<double>()[k]);
    out.gradients.clear();
    for (const NamedTensor& p : stage->named_parameters())
      out.gradients.push_back({p.name, p.tensor.grad().clone()});
    stage->zero_grad();
  }
  out.state = pipeline.parameters().gather_state();
  by_name(out.state);
  return out;
}

void check_near(const Tensor& got, const Tensor& want, const std::string& what) {
  const Tensor a = cast(got, kF64), b = cast(want, kF64);
  TESSERA_ASSERT(a.shape() == b.shape(), "{} is {} where {} is due", what, describe(a),
                 describe(b));
  const double far = amax(abs(a - b)).item<double>(), size = amax(abs(b)).item<double>();
  TESSERA_ASSERT(far <= 1e-11 * (1 + size), "{} differs by {} of {}", what, far, size);
}

void expect_stages_equal_whole(const Subject& s) {
  auto in_f64 = [](auto f) {
    Scoped<DType> type(context().default_dtype, kF64);
    return f();
  };
  Learned want;
  run_ranks(1, [&](ProcessGroup& group) { want = in_f64([&] { return serial(s, group); }); });
  for (int stages : s.stages)
    for (auto* schedule : {&gpipe, &one_forward_one_backward})
      run_ranks(stages, [&](ProcessGroup& group) {
        const Learned got = in_f64([&] { return staged(s, group, schedule); });
        for (size_t i = 0; i < want.losses.size(); ++i)
          TESSERA_ASSERT(std::abs(got.losses.at(i) - want.losses[i]) <= 1e-12, "loss {} is {}", i,
                         got.losses[i]);
        for (const NamedTensor& g : got.gradients) {
          auto at = std::ranges::find(want.gradients, g.name, &NamedTensor::name);
          TESSERA_ASSERT(at != want.gradients.end(), "a parameter {}", g.name);
          check_near(g.tensor, at->tensor, "the gradient of " + g.name);
        }
        TESSERA_ASSERT(got.state.size() == want.state.size(), "{} names", got.state.size());
        for (size_t i = 0; i < want.state.size(); ++i) {
          TESSERA_ASSERT(got.state[i].name == want.state[i].name, "{}", got.state[i].name);
          check_near(got.state[i].tensor, want.state[i].tensor, got.state[i].name);
        }
      });
}

Tensor rows(int64_t k, int64_t n) {
  std::vector<int64_t> numbers;
  for (int64_t r = 0; r < n; ++r) numbers.push_back(k * n + r);
  return from_values<int64_t>(numbers, {n});
}

// Three layers; segments and padding are read by every stage, dropout goes on across them.
Subject bert() {
  const models::BertOptions o{.vocab = 17,
                              .context = 6,
                              .layers = 3,
                              .heads = 2,
                              .dim = 8,
                              .hidden = 12,
                              .dropout = 0.2,
                              .attention_dropout = 0.1};
  Subject s;
  s.whole = [o] {
    auto m = models::bert_for_masked_lm(o);
    m->init(4);
    return m;
  };
  s.stage = [o](int stage, int stages) {
    auto m = models::bert_stage(o, stage, stages);
    m->init(4);
    return m;
  };
  for (int k = 0; k < kMicroBatches; ++k) {
    const uint64_t seed = uint64_t(10 * k);
    Tensor segments = sample_integers({2, 5}, 0, 2, seed + 2),
           mask = ne(sample_integers({2, 5}, 0, 4, seed + 3), scalar_tensor(0, kI64));
    s.batch.push_back({.input = sample_integers({2, 5}, 0, 17, seed),
                       .target = sample_integers({2, 5}, 0, 17, seed + 1),
                       .samples = rows(k, 2),
                       .beside = {segments, mask}});
  }
  s.forward = [](nn::Module& m, const Tensor& x, const MicroBatch& b) {
    return dynamic_cast<models::BertForMaskedLM&>(m)(
        {.ids = x, .segments = b.beside[0], .key_mask = b.beside[1]});
  };
  s.tied = {models::kBertWords};
  return s;
}

TEST(PipelineModels, BertWithSegmentsAndPadding) { expect_stages_equal_whole(bert()); }

// Segments and padding each matter to the numbers that are compared above.
TEST(PipelineModels, SegmentsAndPaddingChangeTheLoss) {
  run_ranks(1, [](ProcessGroup& group) {
    Scoped<DType> type(context().default_dtype, kF64);
    Subject s = bert();
    const std::vector<double> all = serial(s, group).losses;
    for (size_t one : {0, 1}) {
      Subject without = s;
      for (MicroBatch& b : without.batch) b.beside[one] = {};
      EXPECT_GT(std::abs(serial(without, group).losses[0] - all[0]), 1e-7) << one;
    }
  });
}

Subject resnet(int64_t depth) {
  const models::ResNetOptions o{
      .depth = depth, .classes = 5, .width = 3, .small_images = depth < 50};
  Subject s;
  s.whole = [o] {
    auto m = models::resnet(o);
    m->init(4);
    return m;
  };
  s.stage = [o](int stage, int stages) {
    auto m = models::resnet_stage(o, stage, stages);
    m->init(4);
    return m;
  };
  for (int k = 0; k < kMicroBatches; ++k)
    s.batch.push_back({.input = sample_values({2, 3, 16, 16}, -1, 1, uint64_t(k + 1)),
                       .target = sample_integers({2}, 0, 5, uint64_t(k + 40))});
  s.stages = {1, 3, 8};  // the last: one block each, of the smaller net
  return s;
}

TEST(PipelineModels, ResNetWithRunningStatistics) { expect_stages_equal_whole(resnet(18)); }
TEST(PipelineModels, ResNetOfBottlenecks) { expect_stages_equal_whole(resnet(50)); }

TEST(PipelineModels, Mlp) {
  const models::MlpOptions o{.in = 6, .hidden = 7, .out = 4, .layers = 3, .dropout = 0.3};
  Subject s;
  s.whole = [o] {
    auto m = models::mlp(o);
    m->init(4);
    return m;
  };
  s.stage = [o](int stage, int stages) {
    auto m = models::mlp_stage(o, stage, stages);
    m->init(4);
    return m;
  };
  for (int k = 0; k < kMicroBatches; ++k)
    s.batch.push_back({.input = sample_values({2, 2, 3}, -1, 1, uint64_t(k + 1)),
                       .target = sample_integers({2}, 0, 4, uint64_t(k + 40)),
                       .samples = rows(k, 2)});
  s.stages = {1, 2, 4};
  expect_stages_equal_whole(s);
}

// Without statistics to keep, each micro-batch moves them on, as it does in a program of one rank.
TEST(PipelineModels, StatisticsMoveWithEachMicroBatchUnlessKept) {
  const Subject s = resnet(18);
  run_ranks(2, [&](ProcessGroup& group) {
    auto stage = s.stage(group.rank(), 2);
    Pipeline pipeline(stage, {});
    std::vector<MicroBatch> batch = s.batch;
    for (MicroBatch& b : batch) b.input = cast(b.input, kF32);
    pipeline.step(batch, kLoss);
    for (const NamedTensor& b : stage->named_buffers()) {
      if (!b.name.ends_with("tracked")) continue;
      EXPECT_EQ(b.tensor.item<int64_t>(), kMicroBatches) << b.name;
    }
  });
}

TEST(PipelineModels, NumbersOfParametersLeaveBuffersOut) {
  const Subject s = resnet(18);
  auto whole = s.whole();
  run_ranks(2, [&](ProcessGroup& group) {
    auto stage = s.stage(group.rank(), 2);
    Pipeline pipeline(stage, {});
    EXPECT_EQ(pipeline.parameters().num_parameters(), whole->num_parameters());
    EXPECT_EQ(io::params_xxh128(pipeline.parameters().gather()),
              io::params_xxh128(whole->named_parameters()));
  });
}

TEST(PipelineModels, PartsThatAreNone) {
  auto refused = [](auto f, const char* part) {
    try {
      f();
    } catch (const UserError& e) {
      expect_contains(e.what(), part);
      return;
    }
    FAIL() << part;
  };
  refused([] { models::resnet_stage({.depth = 18}, 0, 9); }, "of 9 for 8 modules");
  refused([] { models::ResNet({.depth = 18}, {3, 9}); }, "blocks [3, 9) are no part of 8");
  refused([] { models::bert_stage(models::bert_mini(), 0, 5); }, "of 5 for 4 modules");
  refused(
      [] {
        models::BertForMaskedLM(models::bert_mini(), {2, 2});
      },
      "layers [2, 2) are no part of 4");
  refused([] { models::mlp_stage({.layers = 2}, 0, 4); }, "of 4 for 3 modules");
  refused([] { models::Mlp({.layers = 2}, {-1, 2}); }, "layers [-1, 2) are no part of 3");
}

}  // namespace
}  // namespace tessera::parallel
