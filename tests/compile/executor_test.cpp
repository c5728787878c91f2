// The executor computes what interpret() computes: for every op of the registry, training steps,
// and effects through views. Also: what it does with the memory of outputs and inputs, when it
// plans, and what it refuses.
#include "compile/run/executor.h"

#include <random>

#include "compile/ir/interpreter.h"
#include "compile/record/trace.h"
#include "compile/run/program.h"
#include "core/autograd/autograd.h"
#include "core/base/profile.h"
#include "core/dispatch/call.h"
#include "core/ops/contract.h"
#include "core/ops/conv.h"
#include "core/ops/fused.h"
#include "core/ops/losses.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/compile/bits.h"
#include "tests/compile/passes/fuzz.h"
#include "tests/compile/passes/graphs.h"
#include "tests/compile/samples.h"
#include "tests/compile/training.h"
#include "tests/support/counted_plan.h"
#include "tests/support/late_reader.h"
#include "tests/support/temp_folder.h"

namespace tessera::compiler {
namespace {

using test::batch, test::copies, test::defined_only, test::evaluate, test::expect_same_bits,
    test::Training;

// Returns other values that the op accepts as well: only floats change, and only slightly.
std::vector<Tensor> varied(const std::vector<Tensor>& in) {
  std::vector<Tensor> out = copies(in);
  for (Tensor& t : out)
    for (int64_t i = 0; t.dtype() == kF64 && i < int64_t(t.storage()->bytes() / 8); ++i)
      static_cast<double*>(t.storage()->data())[i] *= 0.9375;
  return out;
}

// What has no kernel on the CPU runs eagerly, as the ops that it is made of.
TEST(Executor, EveryOpAndItsGradient) {
  int eager_nodes = 0, without_kernel = 0;
  for (const OpEntry& op : op_registry().entries()) {
    int number = 0;
    for (const Sample& s : op.samples()) {
      std::string what = op.name + " sample " + std::to_string(number++);
      SCOPED_TRACE(what);
      std::vector<Tensor> in = copies(s.in), other = varied(s.in);
      Trace trace({.inputs = in});
      Tensors traced = defined_only(evaluate(s, in));
      Graph graph = trace.finish(traced);
      Tensors expected = interpret(graph, other);
      Executor executor(graph);
      eager_nodes += executor.memory().eager_nodes;
      without_kernel += !s.prim->is_view() && !find_kernel(*s.prim, kCPU);
      for (int run = 0; run < 2; ++run) {
        std::vector<Tensor> given = copies(s.in);
        expect_same_bits(executor.run(given), traced, what);
        for (size_t i = 0; i < in.size(); ++i)
          expect_same_bits(given[i], s.in[i], what + " wrote its operand");
        expect_same_bits(executor.run(other), expected, what + " on other values");
      }
    }
  }
  EXPECT_EQ(eager_nodes, without_kernel);
}

// Random programs with views, writes to state and gradients; as traced and after all passes, where
// fused kernels are interpreted.
void run_random_step(uint64_t seed, bool passes) {
  test::RandomStep step(seed);
  Graph graph = test::graph_of(step.inputs, [&] { return step.run(); });
  if (passes) run_passes(graph);
  Executor executor(graph);
  EXPECT_EQ(executor.memory().eager_nodes, 0);
  for (int run = 0; run < 2; ++run) {
    // What each leaves behind; the replay puts the state back.
    Tensors expected = test::results(graph, step.inputs), got;
    std::vector<Tensor> inputs = copies(step.inputs);
    for (const Tensor& t : executor.run(inputs)) got.push_back(test::copy_of(t));
    for (const ImplicitInput& i : graph.implicit) got.push_back(test::copy_of(i.tensor));
    for (const Tensor& t : inputs) got.push_back(t);
    expect_same_bits(got, expected, to_string(graph));
  }
}

TEST(Executor, RandomSteps) {
  for (bool passes : {false, true})
    for (uint64_t seed = 0; seed < 200 && !HasFailure(); ++seed) {
      SCOPED_TRACE(fmt::format("seed {}{}", seed, passes ? " after passes" : ""));
      run_random_step(seed, passes);
    }
}

void compare_steps(double dropout) {
  Training eager(dropout), compiled(dropout);
  auto [ids, targets] = batch(0);
  eager.step(ids, targets);
  Trace trace({.inputs = {ids, targets}, .names = compiled.state()});
  Tensors first = compiled.step(ids, targets);
  Executor executor(trace.finish(first));
  EXPECT_EQ(executor.memory().eager_nodes, 0);
  size_t scratch = 0;  // of one product at a time; it grows with threads, as large as values here
  const Program program = make_program(executor.graph());
  for (const Step& s : program.steps)
    if (s.scratch != kNoMemory)
      scratch = std::max(scratch, program.memories[size_t(s.scratch)].bytes);
  EXPECT_LT(executor.memory().arena_bytes, executor.memory().unplanned_bytes / 3 + scratch);
  for (int n = 1; n <= 5; ++n) {
    auto [i, t] = batch(n);
    for (Training* run : {&eager, &compiled}) run->opt->set_lr(1e-2 / (n + 1));
    Tensors expected = eager.step(i, t);
    Tensor given[] = {i, t};
    uint32_t version = compiled.model->parameters()[0].storage()->version();
    expect_same_bits(executor.run(given), expected, "step " + std::to_string(n));
    EXPECT_GT(compiled.model->parameters()[0].storage()->version(), version);
    auto a = compiled.state(), b = eager.state();
    for (size_t k = 0; k < a.size(); ++k)
      expect_same_bits(a[k].tensor, b[k].tensor, a[k].name + " after step " + std::to_string(n));
  }
}

TEST(Executor, TrainingStep) { compare_steps(0); }
TEST(Executor, TrainingStepWithDropout) { compare_steps(0.2); }

Tensor values(std::initializer_list<float> v, const Shape& s) { return from_values<float>(v, s); }

// The gradients of q, k and v, which one projection x [B, T, H, 3, W] gives, are three results of
// one op that are joined: the op writes them into the joined value, unless one of them has another
// reader.
TEST(Executor, ResultsAreMadeWhereTheyAreJoined) {
  for (bool read_elsewhere : {false, true}) {
    Tensor x = randn({2, 5, 4, 3, 8}).requires_grad_(), g = randn({2, 4, 5, 8});
    std::vector<Tensor> in{x, g};
    Graph graph = test::graph_of(in, [&]() -> Tensors {
      Tensors parts = split(x, {1, 1, 1}, 3);
      for (Tensor& p : parts) p = permute(reshape(p, {2, 5, 4, 8}), {0, 2, 1, 3});
      Tensor y = scaled_dot_product_attention(parts[0], parts[1], parts[2], {.causal = true});
      std::vector<Tensor> from{x, parts[1]};
      Tensors gradients = grad({{y}}, from, {{g}});
      if (!read_elsewhere) gradients.pop_back();
      return gradients;
    });
    run_passes(graph);
    Executor executor(graph);
    Tensors expected = interpret(graph, in);
    Profiler profiler;
    expect_same_bits(executor.run(in), expected, "joined");
    bool joins = std::ranges::any_of(profiler.profile()->events(),
                                     [](const ProfileEvent& e) { return e.name == "cat"; });
    EXPECT_EQ(joins, read_elsewhere) << to_string(graph);
  }
}

TEST(Executor, EffectsThroughViews) {
  auto step = [](const Tensor& state, const Tensor& x) {
    Tensor row = select(state, 0, 1), before = row * 2.0;
    add_(row, x);
    Tensor both = state * 10.0;
    add_(state, both);
    assign_(select(state, 0, 0), row);             // from the same memory
    assign_(state, transpose(state, 0, 1) * 1.0);  // a result in another order
    return before + row;
  };
  Tensor start = values({1, 2, 3, 4}, {2, 2}), x = values({5, 7}, {2});
  Tensor eager = start.clone(), compiled = start.clone();
  Trace trace({.inputs = {x}});
  step(compiled, x);
  Tensor again = compiled;
  Graph graph = trace.finish({step(compiled, x), compiled});
  step(eager, x), step(eager, x);
  Executor executor(graph);
  for (float v : {-1.f, 9.f, 0.5f}) {
    Tensor y = values({v, 2 * v}, {2});
    step(eager, y);
    Tensors expected{step(eager, y), eager};
    expect_same_bits(executor.run({&y, 1}), expected, "step");
  }
}

TEST(Executor, OutputsAreNewUnlessNobodyHoldsTheLastOnes) {
  Tensor x = values({1, 2}, {2});
  Trace trace({.inputs = {x}});
  Executor executor(trace.finish({x * 2.0}));
  Tensor kept = executor.run({&x, 1})[0];
  Tensor y = values({3, 4}, {2});
  Tensor next = executor.run({&y, 1})[0];
  EXPECT_NE(kept.raw(), next.raw());
  expect_same_bits(kept, values({2, 4}, {2}), "the first output");
  expect_same_bits(next, values({6, 8}, {2}), "the second output");
  void* place = next.raw();
  Tensor view = next[0];
  next = {};
  next = executor.run({&x, 1})[0];
  EXPECT_NE(next.raw(), place) << "a view of it is alive";
  view = {}, place = next.raw(), next = {};
  EXPECT_EQ(executor.run({&y, 1})[0].raw(), place);
}

TEST(Executor, OutputsMayBeInputsAndViews) {
  Tensor x = values({1, 2, 3, 4}, {2, 2}), w = values({1, 1}, {2});
  Trace trace({.inputs = {x}});
  Tensor sum = x + w;
  Executor executor(trace.finish({x, transpose(x, 0, 1), w, sum, sum[1], sum}));
  Tensor y = values({5, 6, 7, 8}, {2, 2});
  Tensors out = executor.run({&y, 1});
  EXPECT_EQ(out[0].storage(), y.storage());
  EXPECT_EQ(out[1].storage(), y.storage());
  EXPECT_EQ(out[2].storage(), w.storage());
  EXPECT_EQ(out[3].storage(), out[4].storage());
  expect_same_bits(out[1], transpose(y, 0, 1), "a view of the input");
  expect_same_bits(out[4], values({8, 9}, {2}), "a view of a result");
}

TEST(Executor, InputsAreLetGo) {
  Tensor x = values({1, 2}, {2});
  Trace trace({.inputs = {x}});
  Executor executor(trace.finish({x * 2.0}));
  Tensor y = values({3, 4}, {2});
  executor.run({&y, 1});
  EXPECT_TRUE(y.uniquely_owned());
  // An output may come back as an input.
  Tensor z = executor.run({&y, 1})[0];
  for (int i = 0; i < 4; ++i) z = executor.run({&z, 1})[0];
  expect_same_bits(z, values({96, 128}, {2}), "outputs as inputs");
}

TEST(Executor, InputsMayBeViewsElsewhere) {
  Tensor x = values({1, 2, 3, 4}, {2, 2});
  Trace trace({.inputs = {x}});
  Executor executor(trace.finish({transpose(x, 0, 1) * 2.0}));
  Tensor all = values({9, 9, 5, 6, 7, 8}, {3, 2}), y = slice(all, 0, 1, 3);
  expect_same_bits(executor.run({&y, 1})[0], contiguous(transpose(y, 0, 1)) * 2.0, "rows 1 and 2");
}

TEST(Executor, ImplicitInputsCanBeReplaced) {
  Tensor x = values({1, 2}, {2}), state = values({10, 20}, {2});
  Trace trace({.inputs = {x}});
  add_(state, x);
  Executor executor(trace.finish({state * 1.0}));
  Tensor other = values({100, 200}, {2});
  expect_same_bits(executor.run({&x, 1}, {&other, 1})[0], values({101, 202}, {2}), "replaced");
  expect_same_bits(other, values({101, 202}, {2}), "the replacement");
  expect_same_bits(executor.run({&x, 1})[0], values({12, 24}, {2}), "its own again");
  expect_same_bits(state, values({12, 24}, {2}), "the traced one");
  expect_contains(error_of([&] { executor.run({&x, 1}, {&x, 1}); }), "shares memory");
  Tensor wide = values({1, 2, 3}, {3});
  expect_contains(error_of([&] {
                    executor.run({&x, 1}, {&wide, 1});
                  }),
                  "implicit input 0 is f32[3]");
}

// Something outside of the graph still reads the state: the steps before the write do not wait for
// it.
TEST(Executor, StateIsWrittenAfterItsReaders) {
  Tensor state = ones({64}), early = zeros({64}), x = ones({64});
  Trace trace({.inputs = {x}});
  assign_(early, x * 2.0 + state);
  assign_(state, state + early);
  Executor executor(trace.finish({}));
  for (int run = 0; run < 3; ++run) {
    std::vector<float> before(state.values<float>(), state.values<float>() + 64);
    Ref<test::LateReader> reader = test::read_late(state), other;
    float other_before = early.values<float>()[0];
    if (run == 1) other = test::read_late(early);
    executor.run({&x, 1});
    EXPECT_EQ(reader->read, before);
    if (other) {
      EXPECT_EQ(other->read, std::vector<float>(64, other_before));
    }
    EXPECT_NE(state.values<float>()[0], before[0]);
  }
}

TEST(Executor, RefusesOtherInputs) {
  Tensor x = values({1, 2}, {2});
  Trace trace({.inputs = {x}});
  Executor executor(trace.finish({x * 2.0}));
  Tensor wide = values({1, 2, 3}, {3}), two[] = {x, x};
  expect_contains(error_of([&] { executor.run({&wide, 1}); }), "executor: input 0 is f32[3]");
  expect_contains(error_of([&] { executor.run(two); }), "2 inputs, the graph was traced with 1");
  Tensor column = transpose(values({1, 2, 3, 4}, {2, 2}), 0, 1)[0];
  expect_contains(error_of([&] { executor.run({&column, 1}); }), "strides");
}

TEST(Executor, AnErrorInTheMiddleLeavesItUsable) {
  Tensor x = values({1, 2, 3, 4, 5, 6}, {2, 3}), t = from_values<int64_t>({0, 2}, {2});
  Trace trace({.inputs = {x, t}});
  Executor executor(trace.finish({cross_entropy(x * 2.0, t)}));
  Tensor good[] = {x, t}, bad[] = {x, from_values<int64_t>({0, 3}, {2})};
  Tensor expected = executor.run(good)[0];
  expect_contains(error_of([&] { executor.run(bad); }), "target 3 at row 1");
  EXPECT_TRUE(bad[1].uniquely_owned());
  expect_same_bits(executor.run(good)[0], expected, "after an error");
}

TEST(Executor, DyingOperandsAreWrittenOver) {
  Tensor x = rand({64, 64});
  auto arena_of = [&](auto f) {
    Trace trace({.inputs = {x}});
    return Executor(trace.finish({f()})).memory().arena_bytes;
  };
  constexpr size_t kSquare = 64 * 64 * 4;
  // One after the other, in the memory of the output.
  EXPECT_EQ(arena_of([&] { return exp(gelu(tanh(x))); }), 0u);
  EXPECT_EQ(arena_of([&] { return sum(exp(gelu(tanh(x)))); }), kSquare);
  EXPECT_EQ(arena_of([&] {
              Tensor y = tanh(x);
              return sum(y * y);
            }),
            kSquare);
  // The operand is read again.
  EXPECT_EQ(arena_of([&] {
              Tensor y = tanh(x);
              Tensor first = sum(gelu(y));
              return first + sum(y);
            }),
            2 * kSquare);
  // Another layout of it is read by the same op.
  EXPECT_EQ(arena_of([&] {
              Tensor y = tanh(x);
              return sum(y + transpose(y, 0, 1));
            }),
            2 * kSquare);
}

// Each result is the number of the plan that computed it.
TEST(Executor, StepsArePlannedOnceForTheSettingsOfAThread) {
  const PrimRef op = test::counted_plan(1);
  std::vector<Tensor> in{values({1, 2}, {2})};
  Executor executor(test::graph_of(in, [&] {
    Tensor a[] = {in[0]}, b[] = {in[0]};
    return Tensors{dispatch1(op, a), dispatch1(op, b)};
  }));
  const int64_t first = test::plans_made, threads = num_threads();
  auto numbers = [&] {
    const Tensors y = executor.run(in);
    EXPECT_EQ(y[0].item<int64_t>(), y[1].item<int64_t>()) << "equal calls share a plan";
    return y[0].item<int64_t>();
  };
  EXPECT_EQ(numbers(), first);
  EXPECT_EQ(numbers(), first);
  set_num_threads(int(threads) + 1);
  EXPECT_EQ(numbers(), first + 1);
  EXPECT_EQ(numbers(), first + 1);
  set_num_threads(int(threads));
  EXPECT_EQ(numbers(), first + 2);
  DeterministicScope other_mode(!deterministic_algorithms());
  EXPECT_EQ(numbers(), first + 3);
  EXPECT_EQ(numbers(), first + 3);
  EXPECT_EQ(test::plans_made, first + 3);
}

TEST(Executor, OtherThreadsAndAnotherModeGiveTheBitsThatEagerOpsGive) {
  Tensor x = randn({96, 80}), w = randn({64, 80}), image = randn({2, 3, 12, 12}),
         kernel = randn({8, 3, 3, 3});
  const std::vector<Tensor> in{x, w, image, kernel};
  auto step = [&] { return Tensors{contract("ij,kj->ik", x, w) * 2.0, conv2d(image, kernel)}; };
  Executor executor(test::graph_of(in, step));
  const int before = num_threads();
  for (bool deterministic : {false, true, false})
    for (int threads : {1, 3, 2, 1}) {
      DeterministicScope mode(deterministic);
      set_num_threads(threads);
      const Tensors y = executor.run(in), expected = step();
      set_num_threads(before);
      for (size_t i = 0; i < y.size(); ++i) expect_same_bits(y[i], expected[i], "result");
    }
}

}  // namespace
}  // namespace tessera::compiler
