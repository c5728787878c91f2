// Compiled steps in mixed precision: the casts are ops of the graph, the scope that made them is
// part of the key of a call, and loss scaling skips a step without reading a number.
#include <gtest/gtest.h>

#include <limits>

#include "compile/compile.h"
#include "compile/record/trace.h"
#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "core/tensor/random.h"
#include "tests/compile/bits.h"
#include "tests/compile/passes/graphs.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;

Tensor rows(int call) {
  manual_seed(uint64_t(100 + call));
  return randn({8, 16});
}

// A model with its optimizer and scaler, and a whole step.
struct Training {
  std::shared_ptr<nn::Sequential> net = nn::sequential(
      nn::linear(16, 32), nn::gelu(), nn::layer_norm({.dim = 32}), nn::linear(32, 4));
  std::unique_ptr<optim::AdamW> opt;
  optim::GradScaler scaler;
  DType precision;  // of a scope within the step; f32: none
  Training(DType dtype, bool scaled)
      : scaler({.init_scale = 1024, .growth_interval = 3, .enabled = scaled}), precision(dtype) {
    net->init(3);
    opt = std::make_unique<optim::AdamW>(net->named_parameters(), optim::AdamWOptions{.lr = 0.01});
  }
  Tensor step(const Tensor& x) {
    Tensor loss;
    if (precision == kF32) {
      loss = mean(square((*net)(x)));
    } else {
      Autocast scope(precision);
      loss = mean(square((*net)(x)));
    }
    scaler.scale(loss).backward();
    auto clip =
        optim::clip_grad_norm(opt->parameters(), 1.0, {.grad_scale = scaler.inverse_scale()});
    scaler.step(*opt, clip);
    scaler.update();
    opt->zero_grad();
    return loss.detach();
  }
  std::vector<Tensor> state() {
    std::vector<Tensor> list;
    for (const Tensor& p : net->parameters()) list.push_back(p.detach());
    for (const NamedTensor& t : opt->named_state()) list.push_back(t.tensor);
    for (const NamedTensor& t : scaler.named_state()) list.push_back(t.tensor);
    return list;
  }
};

// Passes that add in another order are left out.
constexpr const char* kSameBits = "decompose,accumulate,fuse";

TEST(MixedPrecision, CompiledStepsEqualEagerOnes) {
  for (DType precision : {kBF16, kF16}) {
    Training compiled(precision, true), eager(precision, true);
    auto step = compile([&](const Tensor& x) { return compiled.step(x); }, {.skip = kSameBits});
    for (int call = 0; call < 12; ++call) {
      // An update to skip, before replays begin and when they do.
      Tensor x = rows(call);
      if (call == 1 || call == 7) x = x * std::numeric_limits<float>::infinity();
      step(x), eager.step(x);
      expect_same_bits(compiled.state(), eager.state(), "after step " + std::to_string(call));
      EXPECT_EQ(compiled.scaler.skipped(), call == 1 || call == 7) << call;
    }
    EXPECT_EQ(step.report().replays, 10) << step.report().why_not;
    EXPECT_EQ(step.report().compiled, 1);
    EXPECT_EQ(compiled.opt->step_count().item<double>(), 10);
  }
}

TEST(MixedPrecision, FusedStepsAreCloseToEagerOnes) {
  Training compiled(kBF16, true), eager(kBF16, true), exact(kF32, true);
  auto step = compile([&](const Tensor& x) { return compiled.step(x); });
  for (int call = 0; call < 8; ++call) {
    Tensor x = rows(call);
    if (call == 5) x = x * std::numeric_limits<float>::infinity();
    step(x), eager.step(x), exact.step(x);
    if (call == 5) {
      EXPECT_TRUE(compiled.scaler.skipped());
    }
  }
  EXPECT_EQ(step.report().replays, 6) << step.report().why_not;
  double rounding = 0, apart = 0;
  for (size_t i = 0; i < compiled.net->parameters().size(); ++i) {
    Tensor a = compiled.net->parameters()[i].detach(), b = eager.net->parameters()[i].detach(),
           c = exact.net->parameters()[i].detach();
    apart = std::max(apart, double(amax(abs(a - b)).item<float>()));
    rounding = std::max(rounding, double(amax(abs(c - b)).item<float>()));
  }
  EXPECT_GT(rounding, 0);
  EXPECT_LE(apart, rounding) << "no farther apart than bf16 is from f32";
}

// A step that was recorded in one precision is not replayed in another.
TEST(MixedPrecision, TheScopeAroundACallIsGuarded) {
  Training compiled(kF32, false), eager(kF32, false);
  auto step = compile([&](const Tensor& x) { return compiled.step(x); }, {.skip = kSameBits});
  const DType order[] = {kF32, kF32, kF32, kBF16, kBF16, kBF16, kF32, kF16, kBF16};
  for (int call = 0; call < 9; ++call) {
    Autocast scope(order[call]);
    expect_same_bits(step(rows(call)), eager.step(rows(call)), "loss " + std::to_string(call));
    expect_same_bits(compiled.state(), eager.state(), "after step " + std::to_string(call));
  }
  EXPECT_EQ(step.report().replays, 4) << step.report().why_not;
}

// What autocast leaves in several dtypes is promoted while the step is recorded: its graph has the
// casts.
TEST(MixedPrecision, OperandsThatStillDifferArePromoted) {
  auto step_of = [] {
    manual_seed(7);
    Tensor w = randn({16, 16}).requires_grad_(), b = randn({16}).requires_grad_();
    return [w, b](const Tensor& x) {
      const Tensor of[] = {w, b};
      Autocast scope(kBF16);
      Tensor h = linear(x, w, b), mixed = where(gt(h, 0), h, x) + h * x;
      Tensor loss = mean(pow(abs(cat({mixed, h}, 1)) + 0.5, full({}, 1.3)));
      Tensors grads = grad({&loss, 1}, of);
      return std::vector<Tensor>{loss.detach(), grads[0], grads[1]};
    };
  };
  auto compiled = compile(step_of(), {.skip = kSameBits});
  auto eager = step_of();
  for (int call = 0; call < 5; ++call)
    expect_same_bits(compiled(rows(call)), eager(rows(call)), "call " + std::to_string(call));
  EXPECT_EQ(compiled.report().replays, 3) << compiled.report().why_not;
}

// A cast that was made before a step is recorded would be frozen in its graph.
TEST(MixedPrecision, CastsOfAScopeAreNotFrozen) {
  Tensor w = rows(1).requires_grad_();
  auto product = compile([&](const Tensor& x) { return linear(x, w).detach(); });
  Autocast scope(kBF16);
  for (int call = 0; call < 6; ++call) {
    expect_same_bits(product(rows(call)), linear(rows(call).to(kBF16), w.detach().to(kBF16)),
                     "values as they are now");
    linear(rows(0), w);  // kept in the scope
    NoGrad off;
    assign_(w, rows(50 + call));
  }
  EXPECT_GT(product.report().replays, 0) << product.report().why_not;
}

// Casts there and back between two ops of one precision, and second casts of one value, vanish.
TEST(MixedPrecision, CastsThatUndoEachOtherVanish) {
  Tensor x = rows(0), w = rows(1).requires_grad_(), v = rows(2).requires_grad_();
  Graph g = test::graph_of({x}, [&] {
    NoGrad off;
    Autocast scope(kBF16, {.cache_weights = false});
    Tensor h = linear(x, w);
    return Tensors{matmul(h.to(kF32), v) + matmul(linear(x, w).to(kF32), v)};
  });
  EXPECT_EQ(test::count(g, "cast"), 10);
  Graph after = test::checked(g, {{x}}, [](Graph& graph) { run_passes(graph, kSameBits); });
  EXPECT_EQ(test::count(after, "cast"), 3) << "x, w and v: " << test::nodes_of(after);
}

}  // namespace
}  // namespace tessera::compiler
