// A small GPT cut into stages, compared with the same model in one piece.
#include "parallel/pipeline.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <optional>
#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/io/hash.h"
#include "core/nn/nn.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/stage.h"
#include "parallel/tensor_parallel.h"
#include "tests/collectives/verbs.h"
#include "tests/parallel/small_gpt.h"

namespace tessera::parallel {
namespace {

using test::check_close;
using test::ids;
using test::kBatch;
using test::kTokens;
using test::kVocab;
using test::Trained;

enum class Replicas { kDdp, kFsdp };

struct Plan {
  models::GptOptions model;
  std::function<Schedule(int, int)> schedule = one_forward_one_backward;
  int micro_batches = 4;
  Replicas replicas = Replicas::kDdp;
  bool reduce_once = true;  // a step, rather than every backward
};

models::GptOptions four_blocks() {
  models::GptOptions o = test::small_gpt();
  o.layers = 4;
  return o;
}

const PipelineOptions kTied = {.tied = {"wte.weight"}};

const StageLoss kLoss = [](const Tensor& logits, const Tensor& targets) {
  return cross_entropy(logits, targets, {.dim = -1});
};

MicroBatch micro_batch(int64_t step, int64_t first, int64_t rows) {
  std::vector<int64_t> numbers;
  for (int64_t r = 0; r < rows; ++r) numbers.push_back(step * kBatch + first + r);
  return {ids(step, first, rows), ids(step + 100, first, rows),
          from_values<int64_t>(numbers, {rows})};
}

// The steps of test::train on this rank of a mesh: stages along "pp", replicas along other axes.
Trained train(const DeviceMesh& mesh, const Plan& plan) {
  Scoped<DType> type(context().default_dtype, kF64);
  manual_seed(3);
  std::vector<std::string> axes = mesh.axes();
  std::erase(axes, "pp");
  int dp = 1, dp_rank = 0;
  for (const std::string& axis : axes) {
    dp *= mesh.size(axis);
    dp_rank = dp_rank * mesh.size(axis) + mesh.coordinate(axis);
  }
  auto model = models::gpt_stage(plan.model, mesh.coordinate("pp"), mesh.size("pp"));
  PipelineOptions options{.mesh = mesh["pp"], .schedule = plan.schedule, .tied = {"wte.weight"}};
  if (dp > 1 && plan.replicas == Replicas::kDdp) {
    auto replicated = ddp(model, {.group = mesh.group(axes[0])});
    options.set_sync = [replicated](bool on) { replicated->set_sync(on); };
  } else if (dp > 1) {
    auto fsdp = fully_shard(model, {.mesh = mesh.slice(axes)});
    options.set_sync = [fsdp](bool on) { fsdp->set_sync(on); };
  }
  if (!plan.reduce_once) options.set_sync = nullptr;
  Pipeline pipeline(model, options);
  optim::AdamW opt(model->named_parameters(), {.lr = 0.01, .weight_decay = 0.1});
  int64_t rows = kBatch / dp / plan.micro_batches;
  Trained t;
  for (int64_t step = 0; step < 3; ++step) {
    std::vector<MicroBatch> batch;
    for (int64_t k = 0; k < plan.micro_batches; ++k)
      batch.push_back(micro_batch(step, (k * dp + dp_rank) * rows, rows));
    default_generator().seek(uint64_t(step) << 20);
    Tensor loss = mean(pipeline.step(batch, kLoss));
    loss = reshape(loss, {1});
    for (const std::string& axis : axes) mesh.group(axis)->all_reduce(loss, ReduceOp::kAvg);
    t.losses.push_back(loss.item<double>());
    optim::Clip clip = pipeline.clip_grad_norm(0.5);
    t.norm = clip.norm.item<double>();
    // The same gradients as those of a loss that was scaled by 4: their norm is a quarter, and the
    // step is told to scale them by a quarter.
    const optim::Clip scaled = pipeline.clip_grad_norm(1e9, scalar_tensor(0.25, kF64));
    TESSERA_ASSERT(std::abs(scaled.norm.item<double>() - t.norm / 4) <= 1e-10 * t.norm &&
                       scaled.scale.item<double>() == 0.25,
                   "a norm of {} and a scale of {}", scaled.norm.item<double>(),
                   scaled.scale.item<double>());
    opt.step(clip.scale);
    opt.zero_grad();
    int bound = max_live(plan.schedule(pipeline.stages(), plan.micro_batches), pipeline.stage());
    TESSERA_ASSERT(pipeline.peak_live() == bound, "{} micro-batches were alive where {} are due",
                   pipeline.peak_live(), bound);
  }
  pipeline.parameters().check_copies_equal();
  t.params = pipeline.parameters().gather();
  return t;
}

void check_same(const Trained& got, const Trained& want) {
  TESSERA_ASSERT(got.params.size() == want.params.size(), "{} parameters where {} are due",
                 got.params.size(), want.params.size());
  check_close(got, want, 1e-10);
  for (size_t i = 0; i < want.losses.size(); ++i)
    TESSERA_ASSERT(std::abs(got.losses[i] - want.losses[i]) <= 1e-10,
                   "the loss of step {} is {} where {} is due", i, got.losses[i], want.losses[i]);
}

void expect_pipeline_equals_serial(const models::GptOptions& o) {
  for (int micro_batches : {1, 2, 4, 8}) {
    Trained serial = test::train(nullptr, {.model = o, .micro_batches = micro_batches});
    for (int stages : {1, 2, 3, 4})
      for (auto* schedule : {&gpipe, &one_forward_one_backward})
        run_ranks(stages, [&](ProcessGroup& group) {
          DeviceMesh mesh = init_device_mesh({{"pp", group.size()}});
          check_same(train(mesh, {o, *schedule, micro_batches}), serial);
        });
  }
}

TEST(Pipeline, TrainsAsSerial) { expect_pipeline_equals_serial(four_blocks()); }
TEST(Pipeline, UntiedHead) {
  models::GptOptions o = four_blocks();
  o.tied = false, o.bias = false;
  expect_pipeline_equals_serial(o);
}
TEST(Pipeline, DropoutMasksAreThoseOfSerial) {
  models::GptOptions o = four_blocks();
  o.dropout = 0.3;
  expect_pipeline_equals_serial(o);
}

TEST(Pipeline, WithReplicatedAndShardedStages) {
  models::GptOptions o = four_blocks();
  o.dropout = 0.2;
  for (int micro_batches : {1, 2, 4}) {
    Trained serial = test::train(nullptr, {.model = o, .micro_batches = 2 * micro_batches});
    for (Replicas replicas : {Replicas::kDdp, Replicas::kFsdp})
      for (int stages : {2, 3})
        for (auto* schedule : {&gpipe, &one_forward_one_backward})
          run_ranks(2 * stages, [&](ProcessGroup&) {
            DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"pp", stages}});
            check_same(train(mesh, {o, *schedule, micro_batches, replicas}), serial);
          });
  }
}

TEST(Pipeline, EveryBackwardMayReduce) {
  Trained serial = test::train(nullptr, {.model = four_blocks(), .micro_batches = 8});
  for (Replicas replicas : {Replicas::kDdp, Replicas::kFsdp})
    run_ranks(4, [&](ProcessGroup&) {
      DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"pp", 2}});
      check_same(train(mesh, {four_blocks(), one_forward_one_backward, 4, replicas, false}),
                 serial);
    });
}

TEST(Pipeline, WithHybridSharding) {
  Trained serial = test::train(nullptr, {.model = four_blocks(), .micro_batches = 8});
  run_ranks(8, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"replicate", 2}, {"shard", 2}, {"pp", 2}});
    check_same(train(mesh, {four_blocks(), one_forward_one_backward, 2, Replicas::kFsdp}), serial);
  });
}

TEST(Pipeline, OverGloo) {
  if (!test::kHaveGloo) GTEST_SKIP() << "Gloo is left out of this build";
  Trained serial = test::train(nullptr, {.model = four_blocks(), .micro_batches = 4});
  for (auto* schedule : {&gpipe, &one_forward_one_backward})
    run_ranks(3,
              [&](ProcessGroup&) {
                DeviceMesh mesh = init_device_mesh({{"pp", 3}});
                check_same(train(mesh, {four_blocks(), *schedule}), serial);
              },
              {.backend = "gloo"});
}

TEST(Pipeline, StagesAreDrawnAsTheWhole) {
  manual_seed(5);
  auto whole = models::gpt(four_blocks());
  uint64_t next = uint64_t(default_generator().state().data<int64_t>()[1]);
  std::string want = io::params_xxh128(whole->named_parameters());
  run_ranks(3, [&](ProcessGroup& group) {
    manual_seed(5);
    auto stage = models::gpt_stage(four_blocks(), group.rank(), 3);
    EXPECT_EQ(uint64_t(default_generator().state().data<int64_t>()[1]), next);
    Pipeline pipeline(stage, kTied);
    EXPECT_EQ(pipeline.parameters().num_parameters(), whole->num_parameters());
    EXPECT_EQ(io::params_xxh128(pipeline.parameters().gather()), want);
    EXPECT_LT(stage->num_parameters(), whole->num_parameters());
  });
}

// A rank never has memory for more than its stage, whenever that gets its values.
TEST(Pipeline, StagesOnTheMetaDeviceAreDrawnLater) {
  auto whole = models::gpt(four_blocks());
  whole->init(7);
  std::string want = io::params_xxh128(whole->named_parameters());
  run_ranks(3, [&](ProcessGroup& group) {
    models::GptPtr stage;
    {
      nn::OnDevice meta(kMeta);
      stage = models::gpt_stage(four_blocks(), group.rank(), 3);
    }
    Pipeline pipeline(stage, kTied);
    materialize(*stage);
    stage->init(7);
    EXPECT_EQ(io::params_xxh128(pipeline.parameters().gather()), want);
    std::vector<MicroBatch> batch(2, micro_batch(0, 0, 2));
    pipeline.step(batch, kLoss);
  });
}

// Nothing is recorded, and every rank gets the losses of the whole model.
TEST(Pipeline, EvaluatesAsSerial) {
  manual_seed(5);
  auto whole = models::gpt(four_blocks());
  std::vector<MicroBatch> batch;
  std::vector<double> want;
  for (int64_t k = 0; k < 3; ++k) {
    batch.push_back(micro_batch(k, 0, 2));
    want.push_back(whole->loss(batch.back().input, batch.back().target).item<double>());
  }
  run_ranks(3, [&](ProcessGroup& group) {
    manual_seed(5);
    auto stage = models::gpt_stage(four_blocks(), group.rank(), 3);
    Pipeline pipeline(stage, kTied);
    Tensor losses = pipeline.evaluate(batch, kLoss);
    for (int64_t k = 0; k < 3; ++k) EXPECT_NEAR(losses.data<double>()[k], want[size_t(k)], 1e-6);
    for (const Tensor& p : stage->parameters()) EXPECT_FALSE(p.grad().defined());
  });
}

// Shapes are told again where they change, and a later step may have other ones.
TEST(Pipeline, MicroBatchesOfSeveralShapes) {
  models::GptOptions o = four_blocks();
  o.dropout = 0.3;
  std::vector<std::pair<int64_t, int64_t>> shapes = {{1, 6}, {1, 6}, {2, 4}, {2, 4}, {1, 6}};
  auto batch_of = [&](int64_t step) {
    std::vector<MicroBatch> batch;
    int64_t first = 0;
    for (auto [rows, tokens] : shapes) {
      MicroBatch b = micro_batch(step, first, rows);
      b.input = narrow(b.input, 1, 0, tokens), b.target = narrow(b.target, 1, 0, tokens);
      batch.push_back(std::move(b));
      first += rows;
    }
    if (step == 1) batch.resize(3), std::swap(batch[0], batch[2]);
    return batch;
  };
  Scoped<DType> type(context().default_dtype, kF64);
  manual_seed(5);
  auto whole = models::gpt(o);
  for (int64_t step : {0, 1}) {
    std::vector<MicroBatch> batch = batch_of(step);
    for (const MicroBatch& b : batch) {
      SampleScope samples(b.samples);
      default_generator().seek(40);
      backward(whole->loss(b.input, b.target) * (1.0 / double(batch.size())));
    }
  }
  for (auto* schedule : {&gpipe, &one_forward_one_backward})
    run_ranks(3, [&](ProcessGroup& group) {
      Scoped<DType> type(context().default_dtype, kF64);
      manual_seed(5);
      auto stage = models::gpt_stage(o, group.rank(), 3);
      Pipeline pipeline(stage, {.schedule = *schedule, .tied = {"wte.weight"}});
      std::map<std::string, Tensor> sums;
      for (int64_t step : {0, 1}) {
        default_generator().seek(40);
        pipeline.step(batch_of(step), kLoss);
        for (const NamedTensor& p : stage->named_parameters()) {
          Tensor& sum = sums[p.name];
          sum = sum.defined() ? sum + p.tensor.grad() : p.tensor.grad();
        }
        stage->zero_grad();
      }
      for (auto& [name, sum] : sums)
        EXPECT_LT(amax(abs(sum - whole->slot(name).grad())).item<double>(), 1e-12) << name;
    });
}

// A step leaves the generator of every rank behind the keys of one micro-batch, as one rank would.
TEST(Pipeline, GeneratorsMoveOnTogether) {
  models::GptOptions o = four_blocks();
  o.dropout = 0.3;
  manual_seed(5);
  auto whole = models::gpt(o);
  whole->loss(ids(0, 0, 2), ids(100, 0, 2));
  int64_t want = default_generator().state().data<int64_t>()[1];
  run_ranks(3, [&](ProcessGroup& group) {
    manual_seed(5);
    auto stage = models::gpt_stage(o, group.rank(), 3);
    Pipeline pipeline(stage, kTied);
    std::vector<MicroBatch> batch(4, micro_batch(0, 0, 2));
    pipeline.step(batch, kLoss);
    EXPECT_EQ(default_generator().state().data<int64_t>()[1], want);
    EXPECT_EQ(default_generator().state().data<int64_t>()[0], 5);
  });
}

// Stages without parameters, or with frozen ones, before and behind a trained one.
TEST(Pipeline, StagesThatLearnNothing) {
  run_ranks(4, [&](ProcessGroup& group) {
    manual_seed(1);
    auto whole = nn::sequential(nn::linear(3, 5), nn::linear(5, 4), nn::relu(), nn::linear(4, 2));
    (*whole)[0]->requires_grad_(false);
    auto copy = nn::sequential(nn::linear(3, 5), nn::linear(5, 4), nn::relu(), nn::linear(4, 2));
    copy->load_state(whole->state());
    Pipeline pipeline(pipeline_stage(*whole, group.rank(), 4), {.schedule = gpipe});
    Tensor x = from_values<float>({1, -2, 3, 4, 5, -6}, {2, 3});
    StageLoss loss = [](const Tensor& y, const Tensor& t) { return mean(square(y - t)); };
    Tensor target = from_values<float>({1, 2, 3, 4}, {2, 2});
    std::vector<MicroBatch> batch(2, {x, target});
    pipeline.step(batch, loss);
    backward(loss((*copy)(x), target));
    for (const NamedTensor& p : copy->named_parameters()) {
      if (p.name.substr(0, 1) != std::to_string(group.rank())) continue;
      Tensor mine = whole->slot(p.name);
      EXPECT_EQ(mine.grad().defined(), group.rank() > 0) << p.name;
      if (!mine.grad().defined()) continue;
      EXPECT_LT(amax(abs(mine.grad() - p.tensor.grad())).item<double>(), 1e-6) << p.name;
    }
  });
}

// An activation that backward does not read is freed once it was sent.
TEST(Pipeline, SentActivationsAreNotKept) {
  run_ranks(2, [](ProcessGroup& group) {
    auto whole = nn::sequential(nn::linear(3, 3), nn::linear(3, 3));
    auto stage = pipeline_stage(*whole, group.rank(), 2);
    std::vector<Ref<Storage>> given;
    if (group.rank() == 0) {
      stage->add_pre_hook([&](nn::Module&, Inputs) {
        // The first was taken before the third could be sent.
        EXPECT_TRUE(given.size() < 3 || given[0]->use_count() == 1);
      });
      stage->add_post_hook(
          [&](nn::Module&, Inputs, Tensor& out) { given.push_back(out.storage()); });
    }
    Pipeline pipeline(stage, {.schedule = gpipe});
    Tensor x = from_values<float>({1, 2, 3}, {1, 3});
    std::vector<MicroBatch> batch(4, {x, x});
    pipeline.step(batch, [](const Tensor& y, const Tensor&) { return mean(y); });
    EXPECT_EQ(given.size(), group.rank() == 0 ? 4u : 0u);
    EXPECT_TRUE((*whole)[size_t(group.rank())]->parameters()[0].grad().defined());
  });
}

// The deadline of a message begins when it is its turn, so a stage may take longer for a batch.
TEST(Pipeline, DeadlinesAreForOneMessage) {
  run_ranks(2,
            [](ProcessGroup& group) {
              auto slow = nn::activation("Slow", [](Tensor x) {
                std::this_thread::sleep_for(Millis(300));
                return x;
              });
              auto whole = nn::sequential(nn::linear(3, 3), slow);
              Pipeline pipeline(pipeline_stage(*whole, group.rank(), 2), {.schedule = gpipe});
              Tensor x = from_values<float>({1, 2, 3}, {1, 3});
              std::vector<MicroBatch> batch(8, {x, x});
              pipeline.step(batch, [](const Tensor& y, const Tensor&) { return mean(y); });
              EXPECT_GT(pipeline.communication_ms(), group.rank() == 0 ? 1000 : 0);
            },
            {.timeout = Millis(1500)});
}

// ---- errors

// Returns the error of each rank's `body`.
std::vector<std::string> errors_of(int ranks, FunctionRef<void(ProcessGroup&)> body) {
  std::vector<std::string> texts(size_t(ranks), "no error");
  try {
    run_ranks(ranks, [&](ProcessGroup& group) {
      try {
        body(group);
      } catch (const Error& e) {
        texts[size_t(group.rank())] = e.what();
      }
    });
  } catch (const CommError&) {  // the group is dead, as each rank knows
  }
  return texts;
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

TEST(Pipeline, AStageThatFailsTakesTheOthersAlong) {
  for (auto* schedule : {&gpipe, &one_forward_one_backward}) {
    auto texts = errors_of(3, [&](ProcessGroup& group) {
      auto stage = models::gpt_stage(four_blocks(), group.rank(), 3);
      int forwards = 0;
      stage->add_pre_hook([&](nn::Module&, Inputs) {
        TESSERA_CHECK(group.rank() != 1 || ++forwards < 3, "the roof fell in");
      });
      Pipeline pipeline(stage, {.schedule = *schedule, .tied = {"wte.weight"}});
      std::vector<MicroBatch> batch(4, micro_batch(0, 0, 2));
      pipeline.step(batch, kLoss);
    });
    EXPECT_EQ(texts[1], "the roof fell in");
    for (int other : {0, 2})
      EXPECT_TRUE(holds(texts[size_t(other)], "stage 1 failed: the roof fell in"))
          << texts[size_t(other)];
  }
}

TEST(Pipeline, ADeadlockIsRefusedBeforeItRuns) {
  auto texts = errors_of(2, [](ProcessGroup& group) {
    auto stage = models::gpt_stage(four_blocks(), group.rank(), 2);
    bool bad = true;
    Pipeline pipeline(stage, {.schedule =
                                  [&](int stages, int micro_batches) {
                                    Schedule s = one_forward_one_backward(stages, micro_batches);
                                    if (bad) std::swap(s.stages[1][3], s.stages[1][4]);
                                    return s;
                                  },
                              .tied = {"wte.weight"}});
    std::vector<MicroBatch> batch(2, micro_batch(0, 0, 2));
    std::string refused;
    try {
      pipeline.step(batch, kLoss);
    } catch (const UserError& e) {
      refused = e.what();
    }
    bad = false;  // nothing was sent: the group lives
    pipeline.step(batch, kLoss);
    throw UserError(refused);
  });
  for (const std::string& text : texts)
    EXPECT_TRUE(holds(text, "a deadlock: stage 0 waits")) << text;
}

TEST(Pipeline, ErrorsSayWhatToDo) {
  auto any = [](const std::vector<std::string>& texts, const std::string& part) {
    for (const std::string& t : texts)
      if (holds(t, part)) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure()
           << part << " is in neither " << texts[0] << "\nnor " << texts[1];
  };
  auto stage_of = [](ProcessGroup& group) {
    return models::gpt_stage(four_blocks(), group.rank(), 2);
  };
  std::vector<MicroBatch> four(4, micro_batch(0, 0, 2)), two(2, micro_batch(0, 0, 2));
  EXPECT_TRUE(any(errors_of(2,
                            [&](ProcessGroup& group) {
                              Pipeline p(stage_of(group), kTied);
                              p.step(group.rank() == 0 ? four : two, kLoss);
                            }),
                  "stage 1 was given 2 micro-batches, stage 0 4"));
  EXPECT_TRUE(any(errors_of(2,
                            [&](ProcessGroup& group) {
                              Pipeline p(
                                  stage_of(group),
                                  {.schedule = group.rank() == 0 ? gpipe : one_forward_one_backward,
                                   .tied = {"wte.weight"}});
                              p.step(four, kLoss);
                            }),
                  "stages 0 and 1 run different schedules"));
  EXPECT_TRUE(any(errors_of(2,
                            [&](ProcessGroup& group) {
                              manual_seed(uint64_t(group.rank()));
                              Pipeline p(stage_of(group), kTied);
                              p.step(two, kLoss);
                            }),
                  "the copies of wte.weight on ranks 0 and 1 of the world hold different values"));
  EXPECT_TRUE(any(errors_of(2,
                            [&](ProcessGroup& group) {
                              Pipeline p(stage_of(group), kTied);
                              p.step(two, kLoss);
                              p.step(two, kLoss);
                            }),
                  "wte.weight, which several stages share, still has the gradient"));
  EXPECT_TRUE(any(errors_of(2,
                            [&](ProcessGroup& group) {
                              models::GptOptions o = four_blocks();
                              o.vocab = 19 + group.rank();
                              Pipeline p(models::gpt_stage(o, group.rank(), 2), kTied);
                            }),
                  "wte.weight is f32[19, 10] on stage 0 and f32[20, 10] on stage 1"));
  // Two norms begin equal, but are not one.
  EXPECT_TRUE(
      any(errors_of(2, [&](ProcessGroup&) { Pipeline p(nn::sequential(nn::layer_norm(3)), {}); }),
          "stages 0 and 1 both have a parameter 0.weight"));
  EXPECT_TRUE(any(errors_of(2,
                            [&](ProcessGroup& group) {
                              Pipeline p(stage_of(group), {.tied = {"wte.weight", "wte"}});
                            }),
                  "no stage has a parameter wte, which is in tied"));
  EXPECT_TRUE(any(errors_of(2,
                            [&](ProcessGroup& group) {
                              Pipeline p(stage_of(group), kTied);
                              p.step({}, kLoss);
                            }),
                  "a step of no micro-batches"));
  EXPECT_TRUE(any(errors_of(2,
                            [&](ProcessGroup& group) {
                              Pipeline p(stage_of(group), kTied);
                              p.step(std::vector<MicroBatch>(2), kLoss);
                            }),
                  "micro-batch 0 has no input"));
  EXPECT_TRUE(any(errors_of(2,
                            [&](ProcessGroup& group) {
                              DeviceMesh mesh = init_device_mesh({{"pp", 2}});
                              Pipeline p(stage_of(group), {.mesh = mesh["dp"]});
                            }),
                  "\"dp\""));
  EXPECT_TRUE(any(errors_of(2,
                            [&](ProcessGroup& group) {
                              DeviceMesh mesh = init_device_mesh({{"dp", 1}, {"pp", 2}});
                              Pipeline p(stage_of(group), {.mesh = mesh});
                            }),
                  "a mesh of 2 axes (dp=1, pp=2)"));
  EXPECT_TRUE(any(errors_of(2,
                            [&](ProcessGroup& group) {
                              models::GptOptions o = four_blocks();
                              o.layers = 1;
                              models::gpt_stage(o, group.rank(), 2);
                            }),
                  "of 2 for 1 modules; a stage has at least one"));
}

// The shape of an activation has to follow from the input's.
TEST(Pipeline, ShapesThatDoNotFollowAreRefused) {
  auto texts = errors_of(2, [](ProcessGroup& group) {
    int calls = 0;
    auto grows = nn::activation("Grows", [&](Tensor x) {
      return ++calls == 2 ? cat(Tensors{x, x}, 0) : x;
    });
    auto whole = nn::sequential(nn::linear(3, 3), grows, nn::linear(3, 3));
    Pipeline p(pipeline_stage(*whole, group.rank(), 2), {});
    Tensor x = from_values<float>({1, 2, 3}, {1, 3});
    std::vector<MicroBatch> batch(3, {x, x});
    p.step(batch, [](const Tensor& y, const Tensor&) { return mean(y); });
  });
  EXPECT_TRUE(holds(texts[0], "gave f32[2, 3] cpu for micro-batch 1")) << texts[0];
  EXPECT_TRUE(holds(texts[1], "stage 0 failed")) << texts[1];
}

}  // namespace
}  // namespace tessera::parallel
