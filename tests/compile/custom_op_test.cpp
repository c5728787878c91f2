// Ops of a program's own in a compiled step: an opaque op is one node, which runs at each replay,
// and an elementwise op is part of the kernels around it. A custom function that reads values
// splits the step, and the report says what to do.
#include "core/autograd/custom_op.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "compile/compile.h"
#include "compile/debug/graph_file.h"
#include "compile/ir/interpreter.h"
#include "compile/record/trace.h"
#include "core/autograd/autograd.h"
#include "core/autograd/recompute.h"
#include "core/autograd/transforms.h"
#include "core/nn/nn.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "tests/compile/numbers.h"
#include "tests/compile/passes/close.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;
using test::numbers;

std::atomic<int> runs = 0;

// cap tanh(x / cap), f32 or f64.
template <class T>
void fill_softcap(const Tensor& x, double cap, const Tensor& y) {
  for (int64_t i = 0; i < x.numel(); ++i)
    y.data<T>()[i] = T(cap * std::tanh(double(x.values<T>()[i]) / cap));
}
const auto softcap = custom_op(
    "test::softcap", [](const Meta& x, double) { return x; },
    [](const Tensor& x, double cap, Tensor& y) {
      ++runs;
      if (x.dtype() == kF64)
        fill_softcap<double>(x, cap, y);
      else
        fill_softcap<float>(x, cap, y);
    },
    [](const Meta&, double cap, const Tensor& y, const Tensor& dy) {
      return dy * (1.0 - square(y / cap));
    });
// x in windows of n, one row for each, and the sum of each row.
const auto windows = custom_op(
    "test::windows",
    [](const Meta& x, int64_t n) {
      const int64_t rows = x.shape[0] / n;
      return Metas{Meta::contiguous({rows, n}, x.dtype, x.device),
                   Meta::contiguous({rows}, x.dtype, x.device)};
    },
    [](const Tensor& x, int64_t n, Tensor& rows, Tensor& sums) {
      const double* from = x.values<double>();
      for (int64_t i = 0; i < sums.numel(); ++i) {
        double& total = sums.data<double>()[i] = 0;
        for (int64_t k = 0; k < n; ++k) total += rows.data<double>()[i * n + k] = from[i * n + k];
      }
    });
const auto squareplus = elementwise(
    "test::squareplus", [](const Tensor& x) { return (x + sqrt(square(x) + 4.0)) * 0.5; },
    [](const Tensor& x, const Tensor& dy) { return dy * (x / sqrt(square(x) + 4.0) + 1.0) * 0.5; });

TEST(CustomOp, AnOpaqueOpIsANodeThatRunsAtEachReplay) {
  auto program = [](const Tensor& x) { return softcap(x * 2.0 + 1.0, 3) * x; };
  auto f = compile(program);
  for (int k = 0; k < 6; ++k) {
    const Tensor x = numbers(-k, 9), want = program(x);
    const int before = runs;
    expect_same_bits(f(x), want, "call " + std::to_string(k));
    EXPECT_EQ(runs - before, 1);
  }
  EXPECT_EQ(f.report().replays, 4) << f.report().why_not;
  EXPECT_EQ(f.report().segments, 2) << "one for each recording";
  EXPECT_EQ(f.report().unoptimised, "");
  EXPECT_NE(f.graph_report().find("kernels        3,"), std::string::npos)  // before, it, after
      << f.graph_report();
}

TEST(CustomOp, ATrainingStepWithOneIsNotSplit) {
  struct Run {
    std::shared_ptr<nn::Module> model;
    std::unique_ptr<optim::Optimizer> opt;
  };
  auto start = [] {
    manual_seed(3);
    auto model = nn::sequential(nn::linear(6, 8), nn::gelu(), nn::linear(8, 4));
    auto opt = std::make_unique<optim::AdamW>(model->parameters(),
                                              optim::AdamWOptions{.lr = 1e-2, .weight_decay = 0.1});
    return Run{model, std::move(opt)};
  };
  Run eager = start(), compiled = start();
  auto step_of = [](Run& r) {
    return [&r](const Tensor& x, const Tensor& y) {
      Tensor loss = mean(square(softcap(squareplus((*r.model)(x)), 2) - y));
      loss.backward();
      r.opt->step();
      r.opt->zero_grad();
      return loss.detach();
    };
  };
  auto step = compile(step_of(compiled), {.skip = "fuse"});
  for (int k = 0; k < 6; ++k) {
    const Tensor x = randn({5, 6}), y = randn({5, 4});
    expect_same_bits(step(x, y), step_of(eager)(x, y), "step " + std::to_string(k));
  }
  EXPECT_GE(step.report().replays, 3) << step.report().why_not;
  EXPECT_EQ(step.report().unoptimised, "");
  auto a = eager.model->parameters(), b = compiled.model->parameters();
  for (size_t i = 0; i < a.size(); ++i) expect_same_bits(b[i], a[i], "weight");
}

// What differs in a number is another op; what is the same runs once, for it is pure.
TEST(CustomOp, OpsThatDifferInANumberAreTwo) {
  auto program = [](const Tensor& x) { return softcap(x, 1) + softcap(x, 2) * softcap(x, 1); };
  auto f = compile(program);
  for (int k = 0; k < 4; ++k) {
    const Tensor x = numbers(-k, 7), want = program(x);
    const int before = runs;
    expect_same_bits(f(x), want, "call " + std::to_string(k));
    EXPECT_EQ(runs - before, k == 0 ? 3 : 2);  // a graph that comes once runs as recorded
  }
  EXPECT_EQ(f.report().replays, 2) << f.report().why_not;
}

TEST(CustomOp, SizesThatVary) {
  auto program = [](const Tensor& x) {
    auto [rows, sums] = windows(softcap(x * 2.0, 3), x.size(0) / 4);
    return std::tuple(rows - unsqueeze(sums, -1), sums * 3.0);
  };
  auto f = compile(program);
  for (int64_t n : {8, 16, 12, 40, 24, 36, 8, 20, 28, 32, 16}) {
    auto [rows, sums] = f(numbers(1, n));
    auto [want_rows, want_sums] = program(numbers(1, n));
    expect_same_bits(Tensors{rows, sums}, Tensors{want_rows, want_sums},
                     "length " + std::to_string(n));
  }
  EXPECT_GE(f.report().sizes, 4) << f.report().why_static;
  EXPECT_EQ(f.report().why_not, "");
}

TEST(CustomOp, IsRecordedInTransformsAndRecomputations) {
  auto program = [](const Tensor& x) {
    auto h = [](const Tensor& t) { return softcap(t * t, 2); };
    return vmap(grad([&](const Tensor& t) { return sum(recompute(h, t)); }))(x);
  };
  auto f = compile(program);
  for (int k = 0; k < 4; ++k)
    expect_same_bits(f(reshape(numbers(k, 6), {2, 3})), program(reshape(numbers(k, 6), {2, 3})),
                     "call " + std::to_string(k));
  EXPECT_EQ(f.report().replays, 2) << f.report().why_not;
}

TEST(CustomOp, AnElementwiseOpIsPartOfItsKernel) {
  auto program = [](const Tensor& x) { return squareplus(x * 2.0) + 1.0; };
  auto f = compile(program);
  for (int k = 0; k < 4; ++k)
    test::expect_close(f(numbers(k, 50)), program(numbers(k, 50)), {.f64 = 1e-14}, "values");
  EXPECT_EQ(f.report().replays, 2) << f.report().why_not;
  EXPECT_NE(f.graph_report().find("kernels        1,"), std::string::npos) << f.graph_report();
}

TEST(CustomOp, IsReadFromFilesOfGraphs) {
  Tensor x = numbers(1, 8);
  Trace trace({.inputs = {x}});
  auto [rows, sums] = windows(softcap(x, 2.5), 2);
  const Graph g = trace.finish({rows, sums});
  EXPECT_NE(to_string(g).find("test::softcap(%0; number0=2.5)"), std::string::npos) << to_string(g);
  EXPECT_NE(to_string(g).find("test::windows(%1; number0=2)"), std::string::npos) << to_string(g);
  EXPECT_EQ(g.nodes.size(), 2u);
  const Graph again = graph_from_json(graph_to_json(g));
  EXPECT_EQ(to_string(again), to_string(g));
  expect_same_bits(interpret(again, {x}), Tensors{rows, sums}, "results");
}

// Doubles x by pointers.
class Doubled final : public CustomFunction {
 public:
  std::string_view name() const override { return "doubled"; }
  Tensors forward(std::span<const Tensor> in) override {
    Tensor y = contiguous(in[0]).clone();
    for (int64_t i = 0; i < y.numel(); ++i) y.data<double>()[i] *= 2;
    return {y};
  }
  Tensors vjp(std::span<const Tensor>, std::span<const Tensor> cot) override {
    return {cot[0] * 2.0};
  }
};

TEST(CustomOp, ACustomFunctionThatReadsValuesSplitsTheStepAndTheReportSaysWhatToDo) {
  auto program = [](const Tensor& x) {
    return exp(apply_function(make_ref<Doubled>(), {x * 3.0})[0]);
  };
  auto f = compile(program);
  for (int k = 0; k < 4; ++k)
    expect_same_bits(f(numbers(-k)), program(numbers(-k)), "call " + std::to_string(k));
  EXPECT_EQ(f.report().replays, 0);
  const std::string& why = f.report().why_not;
  EXPECT_NE(why.find("the memory of a tensor is read in the custom function doubled; an opaque op "
                     "(custom_op"),
            std::string::npos)
      << why;
  // Elsewhere the text is as it was.
  auto looks = compile([](const Tensor& x) { return x * (x * 2.0).data<double>()[0]; });
  looks(numbers(1));
  EXPECT_EQ(looks.report().why_not, "the memory of a tensor is read");
}

}  // namespace
}  // namespace tessera::compiler
