// Every registered op: the graph of its samples, forward and gradients, when replayed equals eager
// bit for bit, on the values it was traced with and on others.
#include <gtest/gtest.h>

#include "compile/compile.h"
#include "compile/ir/interpreter.h"
#include "compile/ir/verify.h"
#include "compile/record/trace.h"
#include "tests/compile/passes/close.h"
#include "tests/compile/samples.h"
#include "tests/support/channels_last.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;

using test::copies;
using test::defined_only;
using test::evaluate;

TEST(TraceSweep, TracedEqualsEager) {
  test::for_each_sample([&](const Sample& s, const std::string& what) {
    Tensors eager = defined_only(evaluate(s, s.in));
    std::vector<Tensor> in = copies(s.in);
    Trace trace({.inputs = in});
    Tensors traced = defined_only(evaluate(s, in));
    Graph graph = trace.finish(traced);
    expect_same_bits(traced, eager, what + " while traced");
    expect_same_bits(interpret(graph, copies(s.in)), eager, what + " replayed");
    for (size_t i = 0; i < in.size(); ++i)
      expect_same_bits(in[i], s.in[i], what + " wrote its operand");
    EXPECT_FALSE(to_string(graph).empty());
  });
}

constexpr test::Tolerance kReordered{.f64 = 1e-13, .f32 = 1e-6, .f16 = 2e-3, .bf16 = 2e-2};

// Records without running, interprets, then plans and replays; with fused kernels, whose sums have
// another order, and without.
void compile_sweep(const std::string& skip) {
  test::for_each_sample([&](const Sample& s, const std::string& what) {
    Tensors eager = defined_only(evaluate(s, s.in));
    auto f = compile([&](const std::vector<Tensor>& in) { return defined_only(evaluate(s, in)); },
                     {.skip = skip});
    for (int call = 0; call < 3; ++call) {
      std::vector<Tensor> in = copies(s.in);
      std::string name = what + " call " + std::to_string(call);
      expect_close(f(in), eager, skip.empty() ? kReordered : test::Tolerance{}, name);
      for (size_t i = 0; i < in.size(); ++i)
        expect_same_bits(in[i], s.in[i], what + " wrote its operand");
    }
    EXPECT_EQ(f.report().replays, 1) << f.report().why_not;
  });
}

TEST(CompileSweep, CompiledEqualsEager) { compile_sweep(""); }
TEST(CompileSweep, WithoutFusedKernelsToTheBit) { compile_sweep("decompose,accumulate,fuse"); }

// Every op on operands in channels-last memory, pointwise ones together in a graph.
TEST(CompileSweep, ChannelsLastEqualsEager) {
  std::vector<Sample> pointwise;
  auto check = [](const std::vector<Sample>& samples, const std::string& what) {
    std::vector<Tensor> in;
    Tensors eager;
    auto all = [&](const std::vector<Tensor>& operands) {
      Tensors out;
      auto at = operands.begin();
      for (const Sample& s : samples) {
        const auto next = at + int64_t(s.in.size());
        for (Tensor& t : defined_only(evaluate(s, {at, next}))) out.push_back(std::move(t));
        at = next;
      }
      return out;
    };
    for (const Sample& s : samples) in.insert(in.end(), s.in.begin(), s.in.end());
    in = test::channels_last(in);
    const Tensors want = all(in);
    auto f = compile(all);
    for (int call = 0; call < 3; ++call)
      expect_close(f(in), want, kReordered, what + " call " + std::to_string(call));
    EXPECT_EQ(f.report().replays, 1) << what << ": " << f.report().why_not;
  };
  int forms = 0;
  test::for_each_sample([&](const Sample& sample, const std::string& what) {
    const std::optional<Sample> s = test::with_channels(sample);
    if (!s) return;
    ++forms;
    if (test::is_pointwise(*s))
      pointwise.push_back(*s);
    else
      check({*s}, what);
  });
  EXPECT_GT(forms, 150);
  constexpr size_t kTogether = 40;  // a compiler run each
  for (size_t i = 0; i < pointwise.size(); i += kTogether)
    check({pointwise.begin() + int64_t(i),
           pointwise.begin() + int64_t(std::min(i + kTogether, pointwise.size()))},
          fmt::format("pointwise ops from number {} on", i));
}

TEST(TraceSweep, ReplayFollowsItsInputs) {
  for (const char* name : {"mul", "contract", "softmax", "layer_norm", "sum", "gelu"}) {
    for (const OpEntry& op : op_registry().entries()) {
      if (op.name != name) continue;
      Sample s = op.samples()[0];
      std::vector<Tensor> in = copies(s.in), other = copies(s.in);
      Trace trace({.inputs = in});
      Graph graph = trace.finish(defined_only(evaluate(s, in)));
      for (Tensor& t : other)
        for (int64_t i = 0; t.dtype() == kF64 && i < t.numel(); ++i)
          t.data<double>()[i] = 0.25 + 0.5 * t.data<double>()[i];
      expect_same_bits(interpret(graph, other), defined_only(evaluate(s, other)), name);
    }
  }
}

}  // namespace
}  // namespace tessera::compiler
