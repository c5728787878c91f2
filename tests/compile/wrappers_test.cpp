// Whole training steps of parallel models as graphs: clearing gradients, forward, backward,
// clipping, AdamW, dropout and its generator, with every collective in its place. After the trace,
// replays, runs of an executor and eager steps take turns; loss, norm, parameters, state of the
// optimizer and generator must equal, bit for bit, those of a second model that only takes eager
// steps.
#include <gtest/gtest.h>

#include <cmath>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/ir/interpreter.h"
#include "compile/passes/passes.h"
#include "compile/record/trace.h"
#include "compile/run/executor.h"
#include "core/dispatch/context.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "dtensor/dtensor.h"
#include "examples/models/gpt.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/pipeline.h"
#include "parallel/tensor_parallel.h"
#include "tests/compile/bits.h"
#include "tests/compile/passes/close.h"
#include "tests/compile/samples.h"
#include "tests/compile/wrapped_steps.h"

namespace tessera::compiler {
namespace {

using namespace test::wrapped;  // NOLINT: the steps that this file compiles
using test::expect_same_bits;

void expect_same_state(const Training& got, const Training& want, const std::string& when) {
  auto a = got.state(), b = want.state();
  for (size_t k = 0; k < a.size(); ++k)
    expect_same_bits(a[k].tensor, b[k].tensor, a[k].name + " after " + when);
}

// The distance of a step's result from the wanted one, relative to how far the step went from
// `before`: a step that does nothing is off by 1; sums in another order are off by 1e-6. Where a
// gradient is zero but for rounding (the bias of keys), Adam makes a full step of it, which the
// rest of the tensor outweighs.
void expect_same_way(const Tensor& got, const Tensor& want, const Tensor& before,
                     const std::string& name) {
  if (!is_floating(want.dtype())) return expect_same_bits(got, want, name);
  NoGrad off;
  auto length = [](const Tensor& x) { return std::sqrt(sum(square(x)).item<double>()); };
  const Tensor from = before.to(kF64);
  const double went = length(want.to(kF64) - from), apart = length(got.to(kF64) - want.to(kF64));
  EXPECT_LE(apart, 1e-4 * went) << name;
}

int collectives(const Graph& g) {
  int n = 0;
  for (const Node& node : g.nodes) n += node.role == Role::kCollective;
  return n;
}

void compare(const Case& c) {
  run_ranks(c.ranks, [&](ProcessGroup& group) {
    int64_t data_rank = group.rank();
    if (!c.mesh.empty()) data_rank = init_device_mesh(c.mesh).coordinate(c.data_axis);
    Training eager(c, data_rank), traced(c, data_rank);
    int64_t number = 0;
    Tensors want;
    auto next = [&] {
      for (Training* run : {&eager, &traced}) run->set_lr(1e-2 / double(number + 1));
      want = eager.step(eager.batch(number));
      return traced.batch(number++);
    };
    for (int i = 0; i < c.eager_steps; ++i) traced.step(next());
    std::vector<Tensor> inputs = next();
    Trace trace({.inputs = inputs, .names = traced.state()});
    Graph graph = trace.finish(traced.step(inputs));
    expect_same_state(traced, eager, "the traced step");
    TESSERA_CHECK(collectives(graph) > 0, "no collective in\n{}", to_string(graph));
    Graph cleaned = graph, fused = graph;
    run_passes(cleaned, "decompose,accumulate,fuse");
    run_passes(fused);
    TESSERA_CHECK(
        collectives(cleaned) == collectives(graph) && collectives(fused) == collectives(graph),
        "passes lost a collective of\n{}", to_string(graph));
    Executor executor(graph);
    for (const char* how :
         {"cleaned", "replayed", "executed", "executed", "eager", "executed", "replayed"}) {
      inputs = next();
      std::string when = fmt::format("step {} ({})", number, how);
      expect_same_bits(how[0] == 'c'   ? interpret(cleaned, inputs)
                       : how[0] == 'r' ? interpret(graph, inputs)
                       : how[1] == 'x' ? executor.run(inputs)
                                       : traced.step(inputs),
                       want, when);
      expect_same_state(traced, eager, when);
    }
    inputs = next();  // `want` and the state of `eager` are those after the step
    std::vector<Tensor> before;
    for (const NamedTensor& t : traced.state()) before.push_back(test::copy_of(t.tensor));
    test::expect_close(interpret(fused, inputs), want, {1e-5, 1e-5, 1e-2, 1e-2}, "fused");
    auto a = traced.state(), b = eager.state();
    for (size_t k = 0; k < a.size(); ++k)
      expect_same_way(a[k].tensor, b[k].tensor, before[k], a[k].name);
  });
}

// ---- data parallel

TEST(WrappedStep, Ddp) {
  for (int eager_steps : {0, 2}) {
    Case c = ddp({.bucket_bytes = 1024});
    c.eager_steps = eager_steps;
    compare(c);
  }
}

TEST(WrappedStep, DdpWithMicroBatches) {
  for (bool tree : {false, true}) {
    Case c = ddp({.bucket_bytes = 1024, .tree_accumulation = tree});
    c.micro_batches = 4;
    c.eager_steps = 1;
    compare(c);
  }
}

// ---- parameters cut

TEST(WrappedStep, Fsdp) {
  for (int eager_steps : {0, 2})
    for (bool reshard : {true, false}) {
      Case c = fsdp({.reshard_after_forward = reshard});
      c.eager_steps = eager_steps;
      compare(c);
    }
}

TEST(WrappedStep, FsdpWithMicroBatches) {
  for (bool tree : {false, true}) {
    Case c = fsdp({.tree_accumulation = tree});
    c.micro_batches = 2;
    c.sync_each = tree;
    c.eager_steps = 1;
    compare(c);
  }
}

TEST(WrappedStep, FsdpInMixedPrecision) {
  compare(fsdp({.precision = {.param = kBF16, .reduce = kF32, .output = kF32}}));
}

TEST(WrappedStep, HybridSharding) { compare(fsdp({}, {{"replicate", 2}, {"shard", 2}})); }

TEST(WrappedStep, TensorParallel) {
  for (bool sequence : {false, true}) compare(tensor_parallel(sequence));
}

TEST(WrappedStep, TensorParallelWithExactContraction) {
  // set on the ranks' threads
  Case c = tensor_parallel(false);
  c.wrap = [wrap = c.wrap](models::Gpt& m) {
    context().exact_contraction = true;
    return wrap(m);
  };
  compare(c);
}

TEST(WrappedStep, FsdpWithTensorParallel) {
  for (bool tree : {false, true}) {
    const Case c = fsdp_with_tensor_parallel(tree);
    compare(c);
  }
}

// Sends and receives are not ops: what they write would become a constant of the graph.
TEST(WrappedStep, APipelineIsRefused) {
  std::string text;
  try {
    run_ranks(2, [&](ProcessGroup& group) {
      auto stage = models::gpt_stage(options(), group.rank(), 2);
      parallel::Pipeline pipeline(stage, {.tied = {"wte.weight"}});
      Tensor ids = randint(0, kVocab, {kRows, kTokens}, {}, Generator(1).next_key());
      Trace trace({.inputs = {ids}});
      std::vector<parallel::MicroBatch> batch{{.input = ids, .target = ids}};
      pipeline.step(batch, [](const Tensor& logits, const Tensor& targets) {
        return cross_entropy(logits, targets, {.dim = -1});
      });
    });
  } catch (const Error& e) {
    text = e.what();
  }
  EXPECT_NE(text.find("on a process group ("), text.npos) << text;
}

}  // namespace
}  // namespace tessera::compiler
