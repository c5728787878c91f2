// A fully sharded parameter has two leaves, but looks like one to the program: what is done to the
// sharded one affects both. Optimizers, writes while weights are whole, cleared gradients, frozen
// parameters, hooks and grad(), norms, and failures.
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <thread>

#include "collectives/decorators/counting.h"
#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/tensor/random.h"
#include "examples/models/gpt.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/tensor_parallel.h"
#include "tests/parallel/small_gpt.h"
#include "tests/support/checkpointed.h"
#include "tests/support/temp_folder.h"
#include "tests/support/unreliable.h"

namespace tessera::parallel {
namespace {

using test::ids;

models::GptPtr make_model(int64_t layers = 3) {
  models::GptOptions o = test::small_gpt();
  o.layers = layers;
  manual_seed(3);
  return models::gpt(o);
}

// The loss on the rows of this rank.
Tensor loss_of(models::Gpt& model, const ProcessGroup& group) {
  int64_t rows = test::kBatch / group.size();
  return model.loss(ids(0, group.rank() * rows, rows), ids(100, group.rank() * rows, rows));
}
Tensor serial_loss(models::Gpt& model) {
  return model.loss(ids(0, 0, test::kBatch), ids(100, 0, test::kBatch));
}

double difference(const Tensor& a, const Tensor& b) {
  return amax(abs(full_tensor(a.detach()) - full_tensor(b.detach()))).item<double>();
}

void expect_text(const std::string& text, std::string_view part) {
  TESSERA_ASSERT(text.find(part) != text.npos, "\"{}\" is not in: {}", part, text);
}

// ---- an optimizer made before

TEST(ReplacedParameters, AnOptimizerMadeBeforeIsRefused) {
  run_ranks(2, [&](ProcessGroup& group) {
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    std::function<void(models::Gpt&)> changes[] = {
        [](models::Gpt& m) { fully_shard(m); },
        [&](models::Gpt& m) {
          parallelize_module(m, mesh, models::tensor_parallel_plan(m.options));
        },
        [](models::Gpt& m) { m.to(kF64); }};
    for (auto& change : changes) {
      auto model = make_model();
      optim::AdamW early(model->named_parameters(), {.lr = 0.1});
      change(*model);
      optim::AdamW late(model->named_parameters(), {.lr = 0.1});
      LossParallel allowed;
      backward(loss_of(*model, group));
      expect_text(error_of([&] { early.step(); }), "wte.weight (f32[19, 10] cpu) is no parameter");
      TESSERA_ASSERT(early.step_count().item<double>() == 0, "the refused step was counted");
      late.step();
    }
  });
}

TEST(ReplacedParameters, MayComeBack) {
  auto model = nn::sequential(nn::linear(2, 2));
  Tensor old = model->parameters()[0], now = old.detach().clone().requires_grad_();
  optim::SGD sgd(model->parameters(), {.lr = 0.1});
  model->replace(old, now);
  expect_text(error_of([&] { sgd.step(); }), "make the optimizer after");
  model->replace(now, old);
  sgd.step();
}

// ---- writes into whole weights

TEST(Unshard, KeepsWhatIsLoaded) {
  auto other = make_model();
  other->init(99);
  for (bool forward : {false, true})
    run_ranks(2, [&](ProcessGroup& group) {
      auto model = make_model();
      auto fsdp = fully_shard(*model);
      fsdp->unshard();
      model->load_state(other->state());
      if (forward) backward(loss_of(*model, group));
      fsdp->reshard();
      auto want = other->named_parameters();
      size_t i = 0;
      for (const NamedTensor& p : model->named_parameters())
        TESSERA_ASSERT(p.tensor.is_sharded() && difference(p.tensor, want[i++].tensor) == 0,
                       "{} was lost", p.name);
    });
}

TEST(Unshard, RefusesWhatItCannotKeep) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto model = make_model();
    auto fsdp = fully_shard(*model, {.precision = {.param = kBF16}});
    fsdp->unshard();
    {
      NoGrad off;
      fill_(model->slot("wpe.weight"), 1.0);
    }
    expect_text(error_of([&] { fsdp->reshard(); }), "wpe.weight was written while it was gathered");

    model = make_model();
    fsdp = fully_shard(*model);
    optim::AdamW optimizer(model->parameters(), {.lr = 0.1});
    backward(loss_of(*model, group));
    fsdp->unshard();
    optimizer.step();
    NoGrad off;
    for (const Tensor& p : model->parameters()) fill_(p, 1.0);
    expect_text(error_of([&] { fsdp->reshard(); }), "was written both whole and sharded");
  });
}

TEST(Unshard, OfAModelThatIsGone) {
  std::shared_ptr<Fsdp> fsdp;
  {
    auto model = make_model();
    fsdp = fully_shard(*model);
  }
  expect_text(error_of([&] { fsdp->unshard(); }), "unshard() of a model that is gone");
  expect_text(error_of([&] { fsdp->reshard(); }), "reshard() of a model that is gone");
  EXPECT_GT(fsdp->memory().sharded, 0);
}

// The memory of a weight that was moved elsewhere may be allocated again, for the weight's
// successor.
TEST(Unshard, NoticesAnotherStorageAtTheSameAddress) {
  auto model = nn::sequential(nn::linear(4, 4));
  auto fsdp = fully_shard(*model, {.precision = {.param = kF64}});
  Tensor weight = model->parameters()[0], x = ones({1, 4}, {kF64});
  int reused = 0;
  for (int i = 0; i < 64; ++i) {
    fsdp->unshard();
    const Storage* before = shard_data(weight)->local.storage().get();
    shard_data(weight)->local = Tensor();
    shard_data(weight)->local = full({4, 4}, double(i), {kF32});
    reused += shard_data(weight)->local.storage().get() == before;
    NoGrad off;
    Tensor y = (*model)(x)-full_tensor(model->parameters()[1]);
    ASSERT_EQ(y.data<double>()[0], 4.0 * i) << "after " << reused << " addresses came again";
    fsdp->reshard();
  }
}

// ---- gradients that are cleared

TEST(ClearedGradients, AreGoneWithSyncOff) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto model = make_model();
    auto fsdp = fully_shard(*model);
    fsdp->set_sync(false);
    backward(loss_of(*model, group) * 100.0);
    TESSERA_ASSERT(fsdp->memory().gradients > 0, "nothing was kept");
    model->zero_grad();
    TESSERA_ASSERT(fsdp->memory().gradients == 0, "{} bytes are left", fsdp->memory().gradients);
    fsdp->set_sync(true);
    backward(loss_of(*model, group));
    auto serial = make_model();
    backward(serial_loss(*serial));
    auto want = serial->parameters();
    size_t i = 0;
    for (const NamedTensor& p : model->named_parameters()) {
      double diff = difference(p.tensor.grad(), want[i++].grad());
      TESSERA_ASSERT(diff < 1e-5, "{} differs by {}", p.name, diff);
    }
  });
}

// There is one rank, so that the memory of others is not counted.
TEST(ClearedGradients, TreesLetGoOfTheirLevels) {
  run_ranks(1, [&](ProcessGroup& group) {
    auto model = make_model();
    auto fsdp = fully_shard(*model, {.tree_accumulation = true});
    auto live_after = [&](int micro_batches) {
      for (int k = 0; k < micro_batches; ++k) backward(loss_of(*model, group));
      model->zero_grad();
      return cpu_memory_stats().live_bytes;
    };
    int64_t before = live_after(1);
    TESSERA_ASSERT(live_after(8) == before, "levels of the tree are alive after zero_grad");
    TESSERA_ASSERT(live_after(3) == before, "levels of an unfinished tree are alive");
  });
  run_ranks(1, [&](ProcessGroup& group) {
    auto model = make_model();
    auto ddp = parallel::ddp(model, {.tree_accumulation = true});
    auto live_after = [&](int micro_batches, bool finish) {
      for (int k = 0; k < micro_batches; ++k) {
        auto scope = ddp->no_sync(!finish || k + 1 < micro_batches);
        backward(loss_of(*model, group));
      }
      model->zero_grad();
      return cpu_memory_stats().live_bytes;
    };
    int64_t before = live_after(1, true);
    TESSERA_ASSERT(live_after(8, true) == before, "levels of ddp's tree are alive");
    TESSERA_ASSERT(live_after(3, false) == before, "levels of ddp's unfinished tree are alive");
  });
}

// ---- frozen parameters

// `all` false: what stands at a block's end is trained, what stands before it is frozen.
void expect_frozen_groups_go(bool all) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto freeze = [&](models::Gpt& m) {
      for (const NamedTensor& p : m.named_parameters()) {
        bool first = p.name.starts_with("h.0") || !p.name.starts_with("h.");
        bool last = p.name.find("mlp") != p.name.npos || p.name.find("ln_2") != p.name.npos;
        if (!first && (all || !last)) m.slot(p.name).requires_grad_(false);
      }
    };
    auto model = make_model(8), serial = make_model(8);
    freeze(*model), freeze(*serial);
    auto fsdp = fully_shard(*model);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      Tensor loss = loss_of(*model, group);
      int64_t root = fsdp->memory().gathered;
      backward(loss);
      FsdpMemory m = fsdp->memory();
      TESSERA_ASSERT(m.gathered == 0, "{} bytes of weights are left", m.gathered);
      TESSERA_ASSERT(m.gathered_peak <= root + 2 * m.largest_group,
                     "{} bytes were gathered, {} of the model's own, {} a group", m.gathered_peak,
                     root, m.largest_group);
    }
    backward(serial_loss(*serial));
    auto want = serial->parameters();
    size_t i = 0;
    for (const NamedTensor& p : model->named_parameters()) {
      const Tensor& w = want[i++];
      if (!w.requires_grad()) continue;
      double diff = difference(p.tensor.grad(), w.grad());
      TESSERA_ASSERT(diff < 1e-5, "{} differs by {}", p.name, diff);
    }
  });
}

TEST(FrozenParameters, GroupsOfThemAreLetGoInBackward) { expect_frozen_groups_go(true); }
TEST(FrozenParameters, GroupsFrozenInPartAreLetGoInBackward) { expect_frozen_groups_go(false); }

// Backward ends above the frozen blocks: they are gathered once, for forward.
TEST(FrozenParameters, BlocksBelowAreNotGatheredForBackward) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto counting = make_ref<CountingGroup>(Ref<ProcessGroup>(&group));
    auto model = make_model(4);
    for (const NamedTensor& p : model->named_parameters())
      if (!p.name.starts_with("h.3") && !p.name.starts_with("ln_f"))
        model->slot(p.name).requires_grad_(false);
    fully_shard(*model, {.mesh = init_device_mesh({{"dp", 2}}, counting)});
    auto gathers = [&] { return counting->counts().calls(CollKind::kAllGather); };
    int64_t last = 0;
    for (int step = 0; step < 2; ++step) {
      Tensor loss = loss_of(*model, group);
      int64_t before = gathers();
      backward(loss);
      last = gathers() - before;
    }
    int64_t block = int64_t(model->submodule("h.3").parameters().size());
    TESSERA_ASSERT(last == block, "{} gathers in backward, a block has {}", last, block);
  });
}

// ---- hooks and grad()

TEST(ShardedLeaves, GradGivesReducedShards) {
  auto serial = make_model();
  std::vector<Tensor> params = serial->parameters();
  Tensor root = serial_loss(*serial);
  Tensors want = grad({&root, 1}, params);
  run_ranks(2, [&](ProcessGroup& group) {
    auto model = make_model();
    auto fsdp = fully_shard(*model);
    std::vector<Tensor> mine = model->parameters();
    Tensor loss = loss_of(*model, group);
    Tensors got = grad({&loss, 1}, mine);
    for (size_t i = 0; i < mine.size(); ++i) {
      TESSERA_ASSERT(got[i].defined() && got[i].is_sharded(), "gradient {} is missing", i);
      TESSERA_ASSERT(layout_of(got[i]) == layout_of(mine[i]), "gradient {} is {}", i,
                     describe(got[i]));
      double diff = difference(got[i], want[i]);
      TESSERA_ASSERT(diff < 1e-5, "gradient {} differs by {}", i, diff);
      TESSERA_ASSERT(!mine[i].grad().defined(), "grad() accumulated");
    }
    TESSERA_ASSERT(fsdp->memory().gathered == 0, "weights are still whole");
    backward(loss_of(*model, group));  // as if nothing had been
    TESSERA_ASSERT(difference(mine[3].grad(), want[3]) < 1e-5, "a backward afterwards");
  });
}

TEST(ShardedLeaves, HooksSeeTheReducedGradient) {
  auto serial = make_model();
  backward(serial_loss(*serial));
  run_ranks(2, [&](ProcessGroup& group) {
    auto model = make_model();
    fully_shard(*model);
    Tensor leaf = model->parameters()[2];
    std::vector<Tensor> seen;
    add_hook(leaf, [&](const Tensor& g) {
      seen.push_back(g);
      return g * 2.0;
    });
    backward(loss_of(*model, group));
    Tensor want = serial->parameters()[2].grad();
    TESSERA_ASSERT(seen.size() == 1 && layout_of(seen[0]) == layout_of(leaf), "{} calls",
                   seen.size());
    TESSERA_ASSERT(difference(seen[0], want) < 1e-5, "the hook saw another gradient");
    TESSERA_ASSERT(difference(leaf.grad(), want * 2.0) < 1e-5, "what it made of it was dropped");
  });
}

TEST(ShardedLeaves, GradAndHooksWithTensorParallel) {
  auto serial = make_model();
  std::vector<Tensor> params = serial->parameters();
  Tensor root = serial_loss(*serial);
  Tensors want = grad({&root, 1}, params);
  run_ranks(4, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"tp", 2}});
    auto model = make_model();
    parallelize_module(*model, mesh["tp"], models::tensor_parallel_plan(model->options));
    fully_shard(*model, {.mesh = mesh["dp"]});
    std::vector<Tensor> mine = model->parameters();
    std::vector<double> seen(mine.size(), -1);
    for (size_t i = 0; i < mine.size(); ++i)
      add_hook(mine[i], [&, i](const Tensor& g) {
        seen[i] = difference(g, want[i]);
        return Tensor();
      });
    LossParallel allowed;
    int64_t first = mesh.coordinate("dp") * 4;
    auto loss = [&] { return model->loss(ids(0, first, 4), ids(100, first, 4)); };
    Tensor l = loss();
    Tensors got = grad({&l, 1}, mine);
    backward(loss());
    for (size_t i = 0; i < mine.size(); ++i) {
      double diff = difference(got[i], want[i]);
      TESSERA_ASSERT(diff < 1e-5, "gradient {} differs by {}", i, diff);
      TESSERA_ASSERT(seen[i] >= 0 && seen[i] < 1e-5, "hook {} saw a difference of {}", i, seen[i]);
    }
  });
}

// A penalty reads parameters outside of forward.
TEST(ShardedLeaves, MayBeUsedDirectly) {
  auto with_penalty = [](models::Gpt& m, const Tensor& loss) {
    return full_tensor(sum(square(m.parameters()[2]))) * 0.5 + loss;
  };
  auto serial = make_model();
  backward(with_penalty(*serial, serial_loss(*serial)));
  run_ranks(2, [&](ProcessGroup& group) {
    auto model = make_model();
    fully_shard(*model);
    backward(with_penalty(*model, loss_of(*model, group)));
    double diff = difference(model->parameters()[2].grad(), serial->parameters()[2].grad());
    TESSERA_ASSERT(diff < 1e-5, "the gradient differs by {}", diff);
  });
}

TEST(ShardedLeaves, TwoGradientsInOneBackwardAreRefused) {
  auto serial = make_model();
  backward(serial_loss(*serial));
  run_ranks(1, [&](ProcessGroup& group) {
    auto model = make_model();
    auto fsdp = fully_shard(*model);
    Tensor loss = checkpointed(loss_of(*model, group),
                               [&](const Tensor& t) { return t + loss_of(*model, group); });
    std::string text = "nothing was thrown";
    try {
      backward(loss);
    } catch (const UserError& e) {
      text = e.what();
    }
    expect_text(text, "got two gradients in one backward");
    model->zero_grad();
    backward(loss_of(*model, group));
    double diff = difference(model->parameters()[2].grad(), serial->parameters()[2].grad());
    TESSERA_ASSERT(diff < 1e-5, "the gradient of a backward afterwards differs by {}", diff);
  });
}

// ---- norms

TEST(ShardedNorms, InfinityIsTheLargestOfAllRanks) {
  auto serial = make_model();
  backward(serial_loss(*serial));
  const optim::ClipOptions infinity{.norm_type = std::numeric_limits<double>::infinity()};
  double want = optim::clip_grad_norm(serial->parameters(), 1, infinity).norm.item<double>();
  for (bool tp : {false, true})
    run_ranks(4, [&](ProcessGroup& group) {
      DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"tp", 2}});
      auto model = make_model();
      if (tp) parallelize_module(*model, mesh["tp"], models::tensor_parallel_plan(model->options));
      fully_shard(*model, {.mesh = tp ? mesh["dp"] : mesh});
      LossParallel allowed;
      int64_t rows = tp ? test::kBatch / 2 : test::kBatch / 4,
              first = (tp ? mesh.coordinate("dp") : group.rank()) * rows;
      backward(model->loss(ids(0, first, rows), ids(100, first, rows)));
      double got = optim::clip_grad_norm(model->parameters(), 1, infinity).norm.item<double>();
      TESSERA_ASSERT(std::abs(got - want) < 1e-6, "{} where {} is due", got, want);
    });
}

TEST(ShardedNorms, TakeOneCollectiveForEachAxis) {
  run_ranks(4, [&](ProcessGroup& group) {
    auto counting = make_ref<CountingGroup>(Ref<ProcessGroup>(&group));
    DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"tp", 2}}, counting);
    auto model = make_model();
    parallelize_module(*model, mesh["tp"], models::tensor_parallel_plan(model->options));
    fully_shard(*model, {.mesh = mesh["dp"]});
    LossParallel allowed;
    int64_t first = mesh.coordinate("dp") * 4;
    backward(model->loss(ids(0, first, 4), ids(100, first, 4)));
    for (double type : {2.0, std::numeric_limits<double>::infinity()}) {
      int64_t before = counting->counts().total_calls();
      optim::clip_grad_norm(model->parameters(), 1, {.norm_type = type}).norm.item<double>();
      int64_t calls = counting->counts().total_calls() - before;
      TESSERA_ASSERT(calls == 2, "norm {}: {} collectives", type, calls);
    }
  });
}

// ---- all or nothing

TEST(FullyShard, ChecksAllBeforeItChangesAny) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto model = make_model();
    FsdpOptions o;
    o.shard_dim = [](const std::string& name, const Tensor&) {
      return name == "ln_f.bias" ? 1 : 0;
    };
    std::string e;
    try {
      fully_shard(*model, o);
    } catch (const ShardingError& error) {
      e = error.what();
    }
    expect_text(e, "ln_f.bias (f32[10] cpu) cannot be sharded by dim 1");
    for (const NamedTensor& p : model->named_parameters())
      TESSERA_ASSERT(!p.tensor.is_sharded(), "{} was sharded", p.name);
    fully_shard(*model);
    backward(loss_of(*model, group));
  });
}

struct WithBuffers final : nn::Module {
  WithBuffers() {
    register_parameter("weight", weight, nn::empty_parameter({4, 4}));
    register_buffer("mean", mean, empty({4}, kF32, nn::parameter_device()));
    draw();
  }
  Tensor forward(Tensor x) override { return linear(x, weight) + mean; }
  void reset(const nn::InitKeys&) override {
    NoGrad off;
    fill_(weight, 1.0), fill_(mean, 2.0);
  }
  Tensor weight, mean;
};

TEST(FullyShard, GivesBuffersOfAMetaModelMemory) {
  run_ranks(2, [&](ProcessGroup&) {
    nn::OnDevice meta(kMeta);
    WithBuffers model;
    fully_shard(model);
    TESSERA_ASSERT(!model.mean.device().is_meta(), "{}", describe(model.mean));
    model.init(1);
    Tensor y = model(ones({1, 4}, {.device = kCPU}));
    TESSERA_ASSERT(y.data<float>()[0] == 6, "{}", y.data<float>()[0]);
  });
}

// ---- time and failure

TEST(Communication, TimeIsThatOfAllMicroBatches) {
  for (bool fsdp : {false, true})
    run_ranks(2, [&](ProcessGroup& group) {
      auto model = make_model();
      std::shared_ptr<Fsdp> sharded;
      std::unique_ptr<Reducer> reducer;
      if (fsdp)
        sharded = fully_shard(*model);
      else
        reducer = make_reducer(*model, {});
      group.flush();
      for (int k = 0; k < 2; ++k) {
        if (k == 0 && group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(80));
        backward(loss_of(*model, group));
      }
      double ms = fsdp ? sharded->communication_ms() : reducer->communication_ms();
      if (group.rank() == 0) TESSERA_ASSERT(ms > 50, "{} ms, a peer came 80 ms late", ms);
      ms = fsdp ? sharded->communication_ms() : reducer->communication_ms();
      TESSERA_ASSERT(ms == 0, "{} ms were counted twice", ms);
    });
}

struct Breakable final : nn::Module {
  Breakable() {
    first = register_module("first", nn::linear(4, 4));
    second = register_module("second", nn::linear(4, 4));
    init(7);
  }
  Tensor forward(Tensor x) override {
    Tensor y = (*second)((*first)(std::move(x)));
    return apply_function(make_ref<Unreliable>(fails), {&y, 1})[0];
  }
  nn::LinearPtr first, second;
  bool fails = false;
};

// Nothing was sent when it fails: without a message, the other rank would wait for its deadline, a
// minute.
TEST(Communication, AFailureBeforeTheFirstReductionIsToldAtOnce) {
  for (bool fsdp : {false, true}) {
    std::string text;
    auto start = std::chrono::steady_clock::now();
    EXPECT_THROW(run_ranks(2,
                           [&](ProcessGroup& group) {
                             Breakable model;
                             std::unique_ptr<Reducer> reducer;
                             if (fsdp)
                               fully_shard(model);
                             else
                               reducer = make_reducer(model, {});
                             model.fails = group.rank() == 0;
                             Tensor loss = mean(square(model(ones({2, 4}))));
                             if (group.rank() == 0) {
                               try {
                                 backward(loss);
                               } catch (const UserError&) {  // a program that goes on
                                 std::this_thread::sleep_for(std::chrono::milliseconds(200));
                               }
                               return;
                             }
                             try {
                               backward(loss);
                               for (const Tensor& p : model.parameters()) full_tensor(p.grad());
                               for (const Tensor& p : model.parameters())
                                 if (!p.grad().is_sharded()) p.grad().raw();
                             } catch (const CommError& e) {
                               text = e.what();
                               throw;
                             }
                           }),
                 CommError);
    expect_text(text, "a backward failed");
    expect_text(text, "unreliable: no derivative today");
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  }
}

}  // namespace
}  // namespace tessera::parallel
