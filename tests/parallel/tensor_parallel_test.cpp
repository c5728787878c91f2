// Compares tensor parallelism, alone and with fully sharded parameters, with serial training.
#include "parallel/tensor_parallel.h"

#include <gtest/gtest.h>

#include "collectives/decorators/counting.h"
#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/autograd/transforms.h"
#include "core/nn/functional_call.h"
#include "core/nn/nn.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/tensor/random.h"
#include "examples/models/gpt.h"
#include "examples/models/mlp.h"
#include "parallel/fsdp.h"
#include "tests/parallel/small_gpt.h"
#include "tests/support/temp_folder.h"

namespace tessera::parallel {
namespace {

using test::check_close;
using test::Trained;
using test::TrainOptions;

// There is one column between the layers, which the first rank has.
TEST(TensorParallel, MoreRanksThanColumns) {
  Tensor x = sample_values({4, 3}, -1, 1, 1);
  auto make = [] {
    auto m = nn::sequential(nn::linear(3, 1), nn::tanh(), nn::linear(1, 4));
    m->to(kF64), m->init(1);
    return m;
  };
  auto serial = make();
  backward(mean(square((*serial)(x))));
  run_ranks(3, [&](ProcessGroup&) {
    auto model = make();
    parallelize_module(*model, init_device_mesh({{"tp", 3}}), {{"", pairwise()}});
    backward(mean(square((*model)(x))));
    auto want = serial->named_parameters();
    for (size_t i = 0; const NamedTensor& p : model->named_parameters()) {
      double off = amax(abs(full_tensor(p.tensor.grad()) - want[i++].tensor.grad())).item<double>();
      TESSERA_ASSERT(off < 1e-12, "{} differs by {}", p.name, off);
    }
  });
}

// The groups of a list of Linear layers are the layers themselves, hooks of both wrappers included.
TEST(TensorParallel, FullyShardedLayersOfAList) {
  Tensor x = cast(sample_values({4, 6}, -1, 1, 1), kF32);
  auto make = [] {
    auto m = nn::sequential(nn::linear(6, 8), nn::tanh(), nn::linear(8, 6));
    m->init(1);
    return m;
  };
  auto serial = make();
  backward(mean(square((*serial)(x))));
  run_ranks(4, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"tp", 2}});
    auto model = make();
    parallelize_module(*model, mesh["tp"], {{"", pairwise()}});
    fully_shard(*model, {.mesh = mesh["dp"]});
    int64_t first = mesh.coordinate("dp") * 2;
    backward(mean(square((*model)(clone(narrow(x, 0, first, 2))))));
    auto want = serial->named_parameters();
    size_t i = 0;
    for (const NamedTensor& p : model->named_parameters()) {
      double diff =
          amax(abs(full_tensor(p.tensor.grad()) - want[i++].tensor.grad())).item<double>();
      TESSERA_ASSERT(diff < 1e-6, "{} differs by {}", p.name, diff);
    }
    try {  // a row-wise layer keeps its bias through an exception
      (*model)(cast(sample_values({4, 5}, -1, 1, 1), kF32));
      TESSERA_ASSERT(false, "an input of the wrong width passed");
    } catch (const ShapeError&) {
    }
    TESSERA_ASSERT(model->named_parameters().size() == want.size(), "{} parameters",
                   model->named_parameters().size());
  });
}

TEST(TensorParallel, AnMlpOfAnyDepth) {
  Tensor x = cast(sample_values({5, 6}, -1, 1, 1), kF32), y = sample_integers({5}, 0, 4, 2);
  for (int64_t layers : {0, 1, 2, 3}) {
    models::MlpOptions o{.in = 6, .hidden = 10, .out = 4, .layers = layers};
    auto run = [&](bool cut) {
      auto model = models::mlp(o);
      model->init(1);
      if (cut)
        parallelize_module(*model, init_device_mesh({{"tp", world().size()}}),
                           models::tensor_parallel_plan(o));
      LossParallel same_targets;
      backward(model->loss(x, y));
      std::vector<Tensor> grads;
      for (const Tensor& p : model->parameters()) grads.push_back(full_tensor(p.grad()));
      return grads;
    };
    std::vector<Tensor> want = run(false);
    run_ranks(3, [&](ProcessGroup&) {
      std::vector<Tensor> got = run(true);
      for (size_t i = 0; i < want.size(); ++i)
        TESSERA_ASSERT(amax(abs(got[i] - want[i])).item<double>() < 1e-6, "{} layers, gradient {}",
                       layers, i);
    });
  }
}

// Two ways of cutting: heads, vocabulary, width and sequence do not divide by 3.
void expect_tp_equals_serial(const models::GptOptions& o, bool sequence_parallel) {
  Trained serial = test::train(nullptr, {.model = o});
  for (int ranks : {1, 2, 3, 4})
    run_ranks(ranks, [&](ProcessGroup& group) {
      DeviceMesh mesh = init_device_mesh({{"tp", group.size()}});
      Trained t = test::train(
          [&](models::Gpt& m) {
            parallelize_module(m, mesh, models::tensor_parallel_plan(m.options, sequence_parallel));
          },
          {.model = o});
      check_close(t, serial, 1e-10);
    });
}

TEST(TensorParallel, TrainsAsSerial) { expect_tp_equals_serial(test::small_gpt(), false); }
TEST(TensorParallel, SequenceParallelTrainsAsSerial) {
  expect_tp_equals_serial(test::small_gpt(), true);
}
TEST(TensorParallel, UntiedHead) {
  models::GptOptions o = test::small_gpt();
  o.tied = false, o.bias = false;
  expect_tp_equals_serial(o, false);
}
TEST(TensorParallel, DropoutMasksAreThoseOfSerial) {
  models::GptOptions o = test::small_gpt();
  o.dropout = 0.2;
  expect_tp_equals_serial(o, false);
  expect_tp_equals_serial(o, true);
}

TEST(TensorParallel, WithFullyShardedParameters) {
  models::GptOptions o = test::small_gpt();
  o.dropout = 0.1;
  Trained serial = test::train(nullptr, {.model = o});
  for (std::vector<MeshAxis> axes : {std::vector<MeshAxis>{{"dp", 2}, {"tp", 2}},
                                     {{"dp", 2}, {"tp", 3}},
                                     {{"dp", 4}, {"tp", 2}}})
    for (bool sequence : {false, true})
      run_ranks(axes[0].size * axes[1].size, [&](ProcessGroup&) {
        DeviceMesh mesh = init_device_mesh(axes);
        Trained t = test::train(
            [&](models::Gpt& m) {
              parallelize_module(m, mesh["tp"], models::tensor_parallel_plan(m.options, sequence));
              fully_shard(m, {.mesh = mesh["dp"]});
            },
            {.model = o, .dp_ranks = mesh.size("dp"), .dp_rank = mesh.coordinate("dp")});
        check_close(t, serial, 1e-10);
      });
}

TEST(TensorParallel, WithHybridSharding) {
  Trained serial = test::train(nullptr);
  run_ranks(8, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"replicate", 2}, {"shard", 2}, {"tp", 2}});
    DeviceMesh dp = mesh.slice({"replicate", "shard"});
    Trained t = test::train(
        [&](models::Gpt& m) {
          parallelize_module(m, mesh["tp"], models::tensor_parallel_plan(m.options));
          fully_shard(m, {.mesh = dp});
        },
        {.dp_ranks = 4, .dp_rank = mesh.coordinate("replicate") * 2 + mesh.coordinate("shard")});
    check_close(t, serial, 1e-10);
  });
}

TEST(TensorParallel, MetaModelIsDrawnPieceByPiece) {
  auto whole = models::gpt(test::small_gpt());
  whole->init(7);
  run_ranks(4, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"tp", 2}});
    for (bool fsdp : {false, true}) {
      nn::OnDevice meta(kMeta);
      auto model = models::gpt(test::small_gpt());
      parallelize_module(*model, mesh["tp"], models::tensor_parallel_plan(model->options));
      if (fsdp)
        fully_shard(*model, {.mesh = mesh["dp"]});
      else
        materialize(*model);
      model->init(7);
      auto want = whole->named_parameters();
      size_t i = 0;
      for (const NamedTensor& p : model->named_parameters()) {
        Tensor full = full_tensor(p.tensor.detach());
        TESSERA_ASSERT(amax(abs(full - want[i++].tensor.detach())).item<double>() == 0,
                       "{} differs", p.name);
      }
    }
  });
}

struct Calls {
  int64_t all_reduce = 0, others = 0;
};
Calls calls_of(const CollectiveCounts& c) {
  int64_t reduces = c.calls(CollKind::kAllReduce);
  return {reduces, c.total_calls() - reduces};
}

// One collective for each column-row pair and direction; the vocabulary adds three sums for the
// embedding and the loss, and one for the head's input.
TEST(TensorParallel, OneCollectivePerPairAndDirection) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto counting = make_ref<CountingGroup>(Ref<ProcessGroup>(&group));
    DeviceMesh mesh = init_device_mesh({{"tp", 2}}, counting);
    auto model = nn::sequential(nn::linear(6, 8), nn::gelu(), nn::linear(8, 6), nn::linear(6, 10),
                                nn::relu(), nn::linear(10, 4));
    parallelize_module(*model, mesh, {{"", pairwise()}});
    Tensor x = cast(sample_values({3, 6}, -1, 1, 1), kF32).requires_grad_();
    int64_t before = counting->counts().total_calls();
    Tensor y = (*model)(x);
    Calls forward = calls_of(counting->counts());
    TESSERA_ASSERT(forward.all_reduce == 2 && forward.others + forward.all_reduce - before == 2,
                   "forward: {} all-reduces, {} others", forward.all_reduce, forward.others);
    backward(sum(square(y)));
    Calls all = calls_of(counting->counts());
    TESSERA_ASSERT(all.all_reduce == 4 && all.others == forward.others,
                   "backward: {} all-reduces, {} others", all.all_reduce - forward.all_reduce,
                   all.others - forward.others);
  });
}

// "*" names the blocks, not the list of them: each is made parallel once.
TEST(TensorParallel, ListOfBlocks) {
  auto blocks = [] {
    manual_seed(5);
    auto block = [] { return nn::sequential(nn::linear(6, 8), nn::gelu(), nn::linear(8, 6)); };
    return nn::sequential(block(), block());
  };
  Tensor x = cast(sample_values({3, 6}, -1, 1, 1), kF32);
  NoGrad off;
  Tensor want = (*blocks())(x);
  run_ranks(2, [&](ProcessGroup&) {
    NoGrad off;
    auto model = blocks();
    parallelize_module(*model, init_device_mesh({{"tp", 2}}), {{"*", pairwise()}});
    Tensor y = full_tensor((*model)(x));
    double error = amax(abs(y - want)).item<float>();
    TESSERA_ASSERT(error < 1e-6, "differs by {}", error);
  });
}

TEST(TensorParallel, CollectivesOfAGpt) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto counting = make_ref<CountingGroup>(Ref<ProcessGroup>(&group));
    DeviceMesh mesh = init_device_mesh({{"tp", 2}}, counting);
    auto model = models::gpt(test::small_gpt());
    parallelize_module(*model, mesh, models::tensor_parallel_plan(model->options));
    const int64_t layers = model->options.layers;
    LossParallel allowed;
    Tensor loss = model->loss(test::ids(0, 0, 8), test::ids(1, 0, 8));
    Calls forward = calls_of(counting->counts());
    TESSERA_ASSERT(forward.all_reduce == 2 * layers + 3 && forward.others == 0,
                   "forward: {} all-reduces, {} others", forward.all_reduce, forward.others);
    backward(loss);
    Calls all = calls_of(counting->counts());
    TESSERA_ASSERT(all.all_reduce - forward.all_reduce == 2 * layers + 1 && all.others == 0,
                   "backward: {} all-reduces, {} others", all.all_reduce - forward.all_reduce,
                   all.others);
  });
}

TEST(TensorParallel, ErrorsSayWhatToDo) {
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    auto model = models::gpt(test::small_gpt());
    std::string e = error_of([&] { parallelize_module(*model, mesh, {{"h.*.atn", colwise()}}); });
    TESSERA_ASSERT(e.find("no module is called \"h.*.atn\"") != e.npos, "{}", e);
    e = error_of([&] { parallelize_module(*model, mesh, {{"ln_f", colwise()}}); });
    TESSERA_ASSERT(e.find("colwise of \"ln_f\"") != e.npos, "{}", e);
    auto twice = models::gpt(test::small_gpt());
    e = error_of([&] {
      parallelize_module(*twice, mesh, {{"h.0.mlp.c_fc", colwise()}, {"h.*.mlp.c_fc", rowwise()}});
    });
    TESSERA_ASSERT(e.find("is named by \"h.0.mlp.c_fc\" and by \"h.*.mlp.c_fc\"") != e.npos, "{}",
                   e);
    auto other = models::gpt(test::small_gpt());
    parallelize_module(*other, mesh, models::tensor_parallel_plan(other->options));
    e = error_of([&] { other->loss(test::ids(0, 0, 4), test::ids(1, 0, 4)); });
    TESSERA_ASSERT(e.find("ReplicatePlain") != e.npos || e.find("LossParallel") != e.npos, "{}", e);
  });
}

// A plan's hooks place values inside of function transforms as they do outside: gradients are the
// tape's to the bit, forward and second derivatives those of one rank.
TEST(TensorParallel, PlansWorkInsideFunctionTransforms) {
  const Tensor x = sample_values({4, 6}, -1, 1, 1);
  auto make = [] {
    auto m = nn::sequential(nn::linear(6, 8), nn::tanh(), nn::linear(8, 6));
    m->init(1);
    m->to(kF64);
    return m;
  };
  auto transformed = [&](nn::Module& m, const Tensor& x) {
    auto loss = [&](const std::vector<Tensor>& w) {
      return nn::functional_call(m, w, [&] { return full_tensor(mean(square(m(x)))); });
    };
    const std::vector<Tensor> w = m.parameters(), g = grad(loss)(w);
    auto [value, forward] = jvp(loss, w, w);
    auto norm = [&](const std::vector<Tensor>& w) {
      Tensor total = scalar_tensor(0.0, kF64, kCPU);
      for (const Tensor& g : grad(loss)(w)) total = total + full_tensor(sum(square(g)));
      return total;
    };
    std::vector<Tensor> all = g;
    for (const Tensor& second : grad(norm)(w)) all.push_back(second);
    all.push_back(value), all.push_back(forward);
    return all;
  };
  auto serial = make();
  const std::vector<Tensor> want = transformed(*serial, x);
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    auto model = make();
    parallelize_module(*model, mesh, {{"", pairwise()}});
    const std::vector<Tensor> got = transformed(*model, x);
    for (size_t i = 0; i < want.size(); ++i) {
      double far = amax(abs(full_tensor(got[i]) - want[i])).item<double>();
      TESSERA_ASSERT(far < 1e-12, "result {} differs by {}", i, far);
    }
    backward(full_tensor(mean(square((*model)(x)))));
    size_t i = 0;
    for (const Tensor& p : model->parameters()) {
      double far = amax(abs(full_tensor(p.grad()) - full_tensor(got[i++]))).item<double>();
      TESSERA_ASSERT(far == 0, "gradient {} differs by {} from the tape's", i, far);
    }
  });
}

}  // namespace
}  // namespace tessera::parallel
