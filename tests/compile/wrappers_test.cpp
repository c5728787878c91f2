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

namespace tessera::compiler {
namespace {

using test::expect_same_bits;

constexpr int64_t kVocab = 11, kTokens = 6, kRows = 2;

models::GptOptions options() {
  return {.vocab = kVocab,
          .context = kTokens,
          .layers = 2,
          .heads = 2,
          .dim = 8,
          .dropout = 0.1,
          .bias = true};
}

// What a wrapper provides: what must live as long as the model, and how micro-batches before the
// last stay on their rank.
struct Wrapped {
  std::shared_ptr<void> keep;
  std::function<void(bool)> set_sync = [](bool) {};
};
struct Case {
  int ranks = 2;
  std::function<Wrapped(models::Gpt&)> wrap;
  std::string data_axis = {};  // ranks along it have batches of their own; empty: all do
  std::vector<MeshAxis> mesh = {};
  int64_t micro_batches = 1;
  bool sync_each = false;  // every micro-batch is reduced
  int eager_steps = 0;     // before the traced one
};

class Training {
 public:
  Training(const Case& c, int64_t data_rank) : c_(c), data_rank_(data_rank) {
    model_ = models::gpt(options());
    model_->init(3);
    wrapped_ = c.wrap(*model_);
    optimizer_ =
        std::make_unique<optim::AdamW>(optim::decay_matrices_only(model_->named_parameters(), 0.1),
                                       optim::AdamWOptions{.lr = 1e-2, .betas = {0.9, 0.99}});
  }

  // ids [B, T], targets [B, T], sample numbers [B] of each micro-batch of step `number`.
  std::vector<Tensor> batch(int64_t number) const {
    std::vector<Tensor> all;
    for (int64_t k = 0; k < c_.micro_batches; ++k) {
      Generator g(uint64_t((number * 16 + data_rank_) * 16 + k));
      for (int i = 0; i < 2; ++i)
        all.push_back(randint(0, kVocab, {kRows, kTokens}, {}, g.next_key()));
      int64_t first = ((number * 16 + data_rank_) * 16 + k) * kRows;
      all.push_back(from_values<int64_t>({first, first + 1}, {kRows}));
    }
    return all;
  }

  // The losses of this rank's micro-batches, the norm of all gradients, and what a report needs:
  // the last loss of every rank.
  Tensors step(const std::vector<Tensor>& batch) {
    Scoped<Generator*> draws(context().generator, &generator_);
    Tensors out;
    optimizer_->zero_grad();
    for (int64_t k = 0; k < c_.micro_batches; ++k) {
      const Tensor* b = &batch[size_t(3 * k)];
      Scoped<Tensor> samples(context().samples, b[2]);
      wrapped_.set_sync(c_.sync_each || k + 1 == c_.micro_batches);
      LossParallel spread_vocabulary;
      Tensor loss = model_->loss(b[0], b[1]);
      backward(c_.micro_batches > 1 ? loss * (1.0 / double(c_.micro_batches)) : loss);
      out.push_back(full_tensor(loss.detach()));
    }
    optim::Clip clip = optim::clip_grad_norm(optimizer_->parameters(), 0.5);
    optimizer_->step(clip.scale);
    out.push_back(full_tensor(clip.norm));
    out.push_back(all_gather(reshape(out[out.size() - 2], {1}), world_group()));
    return out;
  }
  void set_lr(double lr) { optimizer_->set_lr(lr); }

  // This rank's pieces.
  std::vector<NamedTensor> state() const {
    std::vector<NamedTensor> all = model_->named_parameters();
    for (NamedTensor& t : optimizer_->named_state()) all.push_back(std::move(t));
    for (NamedTensor& t : all)
      if (t.tensor.is_sharded()) t.tensor = to_local(t.tensor.detach());
    all.push_back({"generator", generator_.state()});
    return all;
  }

 private:
  const Case& c_;
  const int64_t data_rank_;
  Generator generator_{5};
  models::GptPtr model_;
  Wrapped wrapped_;
  std::unique_ptr<optim::AdamW> optimizer_;
};

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

Case ddp(parallel::DdpOptions o) {
  Case c;
  c.wrap = [o](models::Gpt& m) -> Wrapped {
    std::shared_ptr<parallel::Reducer> r = parallel::make_reducer(m, o);
    return {r, [r](bool on) { r->set_sync(on); }};
  };
  return c;
}

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

Case fsdp(parallel::FsdpOptions o, std::vector<MeshAxis> mesh = {{"dp", 2}}) {
  Case c;
  c.ranks = 1;
  for (const MeshAxis& axis : mesh) c.ranks *= axis.size;
  c.wrap = [o, mesh](models::Gpt& m) -> Wrapped {
    parallel::FsdpOptions own = o;  // of this rank's thread
    own.mesh = init_device_mesh(mesh);
    auto fsdp = parallel::fully_shard(m, own);
    return {fsdp, [fsdp](bool on) { fsdp->set_sync(on); }};
  };
  return c;
}

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

Case tensor_parallel(bool sequence) {
  Case c;
  c.mesh = {{"dp", 1}, {"tp", 2}};
  c.data_axis = "dp";
  c.wrap = [sequence](models::Gpt& m) -> Wrapped {
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    parallel::parallelize_module(m, mesh, models::tensor_parallel_plan(m.options, sequence));
    return {};
  };
  return c;
}

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
    Case c;
    c.ranks = 4;
    c.mesh = {{"dp", 2}, {"tp", 2}};
    c.data_axis = "dp";
    c.wrap = [&](models::Gpt& m) -> Wrapped {
      DeviceMesh mesh = init_device_mesh(c.mesh);
      parallel::parallelize_module(m, mesh["tp"], models::tensor_parallel_plan(m.options));
      return {parallel::fully_shard(m, {.mesh = mesh["dp"], .tree_accumulation = tree})};
    };
    c.micro_batches = tree ? 2 : 1;
    c.sync_each = true;
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
