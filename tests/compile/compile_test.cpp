// compile: what is recorded, what is replayed and what is not. Each program runs twice from the
// same state, compiled and not, and must give the same bits at every call.
#include "compile/compile.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <optional>
#include <thread>

#include "core/autograd/autograd.h"
#include "core/base/deterministic.h"
#include "core/dispatch/context.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/optim/clip.h"
#include "core/optim/optim.h"
#include "core/tensor/allocator.h"
#include "examples/models/gpt.h"
#include "tests/compile/numbers.h"
#include "tests/compile/passes/close.h"
#include "tests/support/temp_folder.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;
using test::numbers;

TEST(Compile, AFunctionOfItsArguments) {
  int runs = 0;
  auto f = compile([&](const Tensor& a, const Tensor& b) {
    ++runs;
    return exp(a) * b + 1.0;
  });
  for (int k = 0; k < 5; ++k) {
    Tensor a = numbers(k), b = numbers(-k);
    expect_same_bits(f(a, b), exp(a) * b + 1.0, "call " + std::to_string(k));
  }
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(f.report().replays, 3);
}

TEST(Compile, ResultsDoNotShareMemory) {
  auto f = compile([](const Tensor& a) { return a * 2.0; });
  Tensor first = f(numbers(1)), second = f(numbers(2)), third = f(numbers(3));
  expect_same_bits(first, numbers(1) * 2.0, "first");
  expect_same_bits(second, numbers(2) * 2.0, "second");
  expect_same_bits(third, numbers(3) * 2.0, "third");
}

// The first call interprets its graph; its result may take over memory of which a part was read.
TEST(Compile, ResultsOverPartsOfWhatEndsThere) {
  using Program = std::function<Tensor(const Tensor&)>;
  for (const Program& program :
       {Program([](const Tensor& a) { return slice(a * 2.0, 0, 2, 6) + 100.0; }),
        Program([](const Tensor& a) { return exp(chunk(a * 2.0, 2)[1]); }),
        Program([](const Tensor& a) {
          return relu((reshape(a, {2, 4}) * 2.0)[1]);
        }),
        Program([](const Tensor& a) { return neg(slice(a * 2.0, 0, 0, 4)); })}) {
    auto f = compile(program);
    for (int k = 0; k < 4; ++k)
      expect_same_bits(f(numbers(k, 8)), program(numbers(k, 8)), "call " + std::to_string(k));
  }
}

// Its results have the strides of the column that it writes, and may not lie over the operand.
TEST(Compile, AColumnIsWrittenByWhatReducesIt) {
  auto program = [](Tensor& state) {
    return [&state](const Tensor& x) {
      Tensor column = select(state, 1, 0);
      add_(column, sum(column, {0}, true));
      Tensor most = amax(column, {0}, true);
      return std::tuple(most, column - most, column * x);
    };
  };
  auto start = [] { return reshape(arange(0, 132), {33, 4}).clone(); };
  Tensor state = start(), expected = start();
  auto f = compile(program(state));
  for (int k = 0; k < 4; ++k) {
    auto [a, b, c] = f(arange(k, k + 33));
    auto [p, q, r] = program(expected)(arange(k, k + 33));
    const std::string call = "call " + std::to_string(k);
    expect_same_bits(state, expected, "state, " + call);
    expect_same_bits(Tensors{a, b, c}, Tensors{p, q, r}, call);
  }
}

TEST(Compile, ViewsWithoutElements) {
  auto program = [](const Tensor& x) { return sum(slice(x, 0, 4, 5)) + sum(x); };
  auto f = compile(program);
  for (int k = 0; k < 4; ++k)
    expect_same_bits(f(zeros({5, 0})), program(zeros({5, 0})), "call " + std::to_string(k));
}

TEST(Compile, TypesThatNeverRepeatDoNotPileUp) {
  auto f =
      compile([](const Tensor& a) { return a * 2.0 + 1.0; }, {.skip = "fuse", .dynamic = false});
  for (int64_t n = 1; n <= 150; ++n)
    expect_same_bits(f(numbers(1, n)), numbers(1, n) * 2.0 + 1.0, "length " + std::to_string(n));
  for (int k = 0; k < 2; ++k)
    expect_same_bits(f(numbers(k, 150)), numbers(k, 150) * 2.0 + 1.0, "again");
  EXPECT_EQ(f.report().replays, 1);
  EXPECT_EQ(f.report().compiled, 1);
}

// 64 graphs are kept: with as many, the next call finds none of them; with one fewer, it does.
TEST(Compile, AProgramWhoseTypesNeverRepeatStartsOver) {
  for (int64_t lengths : {63, 64}) {
    auto f =
        compile([](const Tensor& a) { return a * 2.0 + 1.0; }, {.skip = "fuse", .dynamic = false});
    for (int64_t n = 1; n <= lengths; ++n) f(numbers(1, n));
    EXPECT_EQ(f.report().compiled, 0);  // graphs that came once are interpreted
    expect_same_bits(f(numbers(2, 1)), numbers(2, 1) * 2.0 + 1.0, "the first length again");
    EXPECT_EQ(f.report().compiled, lengths == 63 ? 1 : 0);
  }
}

TEST(Compile, StateIsReadAndWrittenWhereItIs) {
  Tensor state = numbers(0);
  auto f = compile([&](const Tensor& a) {
    add_(state, a);
    return sum(state);
  });
  Tensor expected = numbers(0);
  for (int k = 0; k < 4; ++k) {
    if (k == 2) fill_(state, 7.0), fill_(expected, 7.0);  // by others, between calls
    Tensor total = f(numbers(k));
    add_(expected, numbers(k));
    expect_same_bits(state, expected, "state");
    expect_same_bits(total, sum(expected), "sum");
  }
  EXPECT_EQ(f.report().replays, 2);
}

TEST(Compile, ValuesThatAreReadBreakTheGraph) {
  int runs = 0;
  auto program = [&](const Tensor& a) {
    ++runs;
    Tensor b = a * a, c = b + 1.0;
    if (sum(c).item<double>() > 20) return exp(-b) + c;
    return c * 3.0;
  };
  auto f = compile(program);
  for (int k = 0; k < 6; ++k)
    expect_same_bits(f(numbers(k % 3)), program(numbers(k % 3)), "call " + std::to_string(k));
  EXPECT_EQ(runs, 12);
  EXPECT_EQ(f.report().replays, 0);
  EXPECT_EQ(f.report().segments, 12);
  EXPECT_EQ(f.report().compiled, 3);  // before the look; each of both ends
  EXPECT_NE(f.report().why_not.find("compile_test.cpp:"), std::string::npos) << f.report().why_not;
}

TEST(Compile, ABranchOnAnArgumentIsABreakToo) {
  auto program = [](const Tensor& a) { return a.data<double>()[0] > 1 ? a * 2.0 : a * 3.0; };
  auto f = compile(program);
  for (int k = 0; k < 6; ++k) expect_same_bits(f(numbers(k % 3)), program(numbers(k % 3)), "call");
  EXPECT_EQ(f.report().replays, 0);
}

TEST(Compile, TensorsThatOutliveTheCall) {
  Tensor kept;
  auto program = [&](const Tensor& a) {
    kept = a * 2.0;
    return kept + 1.0;
  };
  auto f = compile(program);
  for (int k = 0; k < 4; ++k) {
    expect_same_bits(f(numbers(k)), numbers(k) * 2.0 + 1.0, "result");
    expect_same_bits(kept, numbers(k) * 2.0, "kept");
  }
  EXPECT_EQ(f.report().replays, 0);
  EXPECT_NE(f.report().why_not.find("mul"), std::string::npos) << f.report().why_not;
}

TEST(Compile, ValuesOfTheProgramAreNotFrozen) {
  double x = 1;
  auto f = compile([&](const Tensor& a) { return a + from_values<double>({x}, {1}); });
  for (int k = 0; k < 4; ++k) {
    x = k;
    expect_same_bits(f(numbers(k)), numbers(k) + double(k), "call");
  }
  EXPECT_EQ(f.report().replays, 0);
}

TEST(Compile, ValuesOfTheProgramThatAreReturned) {
  double x = 0;
  auto f = compile([&](const Tensor& a) {
    Tensor t = from_values<double>({x}, {1});
    return std::pair(a + t, t);
  });
  for (int k = 0; k < 5; ++k) {
    x = k;
    auto [sum, t] = f(numbers(k));
    expect_same_bits(sum, numbers(k) + double(k), "sum");
    EXPECT_EQ(t.item<double>(), k);
  }
}

TEST(Compile, WhatIsRecordedIsReadByAnotherThread) {
  Tensor w = numbers(1), state = numbers(0), seen;
  auto elsewhere = [&](const Tensor& t) { std::thread([&] { seen = t * 2.0; }).join(); };
  auto f = compile([&](const Tensor& a) {
    Tensor y = a * w;
    elsewhere(w), elsewhere(a);
    return y + 1.0;
  });
  for (int k = 0; k < 4; ++k) {
    expect_same_bits(f(numbers(k)), numbers(k) * numbers(1) + 1.0, "call");
    if (k < 2) expect_same_bits(seen, numbers(k) * 2.0, "read elsewhere");
  }
  EXPECT_EQ(f.report().replays, 2) << f.report().why_not;

  std::string error;
  auto g = compile([&](const Tensor& a) {
    add_(state, a);
    std::thread([&] {
      try {
        seen = state * 2.0;
      } catch (const UserError& e) {
        error = e.what();
      }
    }).join();
  });
  g(numbers(1));
  EXPECT_EQ(error,
            "compile: what another thread records writes this memory; wait for its call to return");
  expect_same_bits(state, numbers(0) + numbers(1), "state");
}

// Another thread need not wait for what is pending for this thread only; ThreadSanitizer checks it.
TEST(Compile, AnotherThreadReadsWhileThisOneRecords) {
  Tensor w = numbers(1);
  const Tensor twice = numbers(1) * 2.0;
  std::atomic<bool> over = false;
  std::thread reader([&] {
    while (!over) expect_same_bits(w * 2.0, twice, "read elsewhere");
  });
  for (int k = 0; k < 100; ++k) {
    auto f = compile([&](const Tensor& a) { return a * w; }, {.skip = "fuse"});
    expect_same_bits(f(numbers(k)), numbers(k) * numbers(1), "call");
  }
  over = true;
  reader.join();
}

TEST(Compile, GradientsOfLeaves) {
  Tensor w = numbers(1).requires_grad_(), eager = numbers(1).requires_grad_();
  auto zeroed = [](Tensor& w) {
    return [&w](const Tensor& a) {
      w.set_grad({});
      Tensor loss = sum(square(w * a));
      loss.backward();
      return loss.detach();
    };
  };
  auto f = compile(zeroed(w));
  for (int k = 0; k < 4; ++k) {
    expect_same_bits(f(numbers(k)), zeroed(eager)(numbers(k)), "loss");
    expect_same_bits(w.grad(), eager.grad(), "grad");
  }
  EXPECT_EQ(f.report().replays, 2);
}

TEST(Compile, GradientsThatAccumulateOverCalls) {
  Tensor w = numbers(1).requires_grad_(), eager = numbers(1).requires_grad_();
  auto program = [](Tensor& w) { return [&w](const Tensor& a) { sum(square(w * a)).backward(); }; };
  auto f = compile(program(w));
  for (int k = 0; k < 5; ++k) {
    f(numbers(k)), program(eager)(numbers(k));
    expect_same_bits(w.grad(), eager.grad(), "grad after " + std::to_string(k));
    if (k == 2) w.set_grad({}), eager.set_grad({});
  }
}

TEST(Compile, GradientsMadeOutside) {
  Tensor w = numbers(1).requires_grad_(), eager = numbers(1).requires_grad_();
  auto program = [](Tensor& w) {
    return [&w](double rate) {
      NoGrad off;
      add_(w.detach(), w.grad() * -rate);
    };
  };
  auto f = compile(program(w));
  for (int k = 0; k < 5; ++k) {
    for (Tensor* t : {&w, &eager}) t->set_grad({}), sum(square(*t * numbers(k))).backward();
    f(0.01), program(eager)(0.01);
    expect_same_bits(w.detach(), eager.detach(), "after " + std::to_string(k));
  }
  auto drops = compile([&](double rate) {
    NoGrad off;
    add_(w.detach(), w.grad() * -rate);
    w.set_grad({});
  });
  for (int k = 0; k < 3; ++k) sum(square(w)).backward(), drops(0.01);
  EXPECT_EQ(drops.report().why_not,
            "gradients that were made outside of it are read and let go; put backward into the "
            "same function");
}

TEST(Compile, ResultsWithHistoryStayDifferentiable) {
  Tensor w = numbers(1).requires_grad_(), eager = numbers(1).requires_grad_();
  auto f = compile([&](const Tensor& a) { return sum(exp(w * a)); });
  for (int k = 0; k < 3; ++k) {
    f(numbers(k)).backward();
    sum(exp(eager * numbers(k))).backward();
    expect_same_bits(w.grad(), eager.grad(), "grad");
  }
}

TEST(Compile, AnExceptionOfTheProgramGoesOn) {
  Tensor state = numbers(0);
  auto f = compile([&](const Tensor& a) {
    add_(state, a);
    if (a.numel() == 3) throw UserError("three");
    return a + state;
  });
  f(numbers(1));
  EXPECT_THROW(f(numbers(1, 3)), ShapeError);
  auto g = compile([&](const Tensor& a) -> Tensor {
    add_(state, a);
    throw UserError("after an op");
  });
  EXPECT_THROW(g(numbers(2)), UserError);
  expect_same_bits(state, numbers(0) + numbers(1) + numbers(2), "what ran before the exception");
}

struct Training {
  Generator generator{5};
  models::GptPtr model;
  std::unique_ptr<optim::AdamW> opt;

  explicit Training(double dropout) {
    model = models::gpt({.vocab = 11,
                         .context = 8,
                         .layers = 2,
                         .heads = 2,
                         .dim = 16,
                         .dropout = dropout,
                         .bias = true});
    model->init(3);
    opt = std::make_unique<optim::AdamW>(optim::decay_matrices_only(model->named_parameters(), 0.1),
                                         optim::AdamWOptions{.lr = 1e-2, .betas = {0.9, 0.99}});
  }
  auto program() {
    return [this](const Tensor& ids, const Tensor& targets) {
      Scoped<Generator*> draws(context().generator, &generator);
      opt->zero_grad();
      Tensor loss = model->loss(ids, targets);
      loss.backward();
      optim::Clip clip = optim::clip_grad_norm(model->parameters(), 0.5);
      opt->step(clip.scale);
      return std::pair(loss.detach(), clip.norm);
    };
  }
};

std::pair<Tensor, Tensor> batch(int number) {
  Generator g(uint64_t(100 + number));
  return {randint(0, 11, {3, 8}, {}, g.next_key()), randint(0, 11, {3, 8}, {}, g.next_key())};
}

// Without generated kernels losses have the same bits; with them f32 sums have another order, which
// changes the loss of the first steps by 1e-6.
void train(const std::string& skip, double tolerance) {
  Training eager(0.2), compiled(0.2);
  auto step =
      compile(compiled.program(), {.names = compiled.model->named_parameters(), .skip = skip});
  for (int k = 0; k < 6; ++k) {
    auto [ids, targets] = batch(k);
    for (Training* t : {&eager, &compiled}) t->opt->set_lr(1e-2 / (k + 1));
    auto [loss, norm] = step(ids, targets);
    auto [expected, expected_norm] = eager.program()(ids, targets);
    test::Tolerance near{.f64 = tolerance, .f32 = tolerance};
    test::expect_close(loss, expected, near, "loss of step " + std::to_string(k));
    test::expect_close(norm, expected_norm, near, "norm of step " + std::to_string(k));
  }
  EXPECT_GE(step.report().replays, 3) << step.report().why_not;
}
TEST(Compile, AWholeTrainingStep) { train("", 1e-6); }
TEST(Compile, AWholeTrainingStepToTheBit) { train("decompose,accumulate,fuse", 0); }
TEST(Compile, AWholeTrainingStepInDeterministicModeToTheBit) {
  DeterministicScope on;
  train("", 0);
}

// Optimizers have options and facts that are no tensors.
TEST(Compile, AnOptimizersOptionsMayChangeBetweenSteps) {
  for (double dampening : {0.0, 0.25}) {
    auto run = [&](bool compiled) {
      Tensor w = cast(numbers(1, 8), kF32).requires_grad_();
      optim::SGD opt(std::vector{w}, {.lr = 0.1, .momentum = 0.9, .dampening = dampening});
      auto program = [&](const Tensor& x) {
        opt.zero_grad();
        sum(x * w * w).backward();
        opt.step();
      };
      auto step = compile(program);
      for (int k = 0; k < 12; ++k) {
        Tensor x = cast(numbers(k, 8), kF32) * 0.01;
        if (k == 6) opt.set_weight_decay(0, 0.5);
        if (k == 9)  // as a checkpoint that is read in place
          for (const NamedTensor& s : opt.named_state())
            if (s.name == "step") fill_(s.tensor, 100.0);
        compiled ? step(x) : program(x);
      }
      if (compiled && dampening == 0) {
        EXPECT_GE(step.report().replays, 6) << step.report().why_not;
      }
      return w.detach();
    };
    test::expect_close(run(true), run(false), {.f64 = 1e-6, .f32 = 1e-6},
                       "dampening " + std::to_string(dampening));
  }
}

// Nothing but the mode tells the recordings apart.
TEST(Compile, EachModeHasAGraphOfItsOwn) {
  Tensor x = cast(numbers(-3, 2048), kF32), rows = reshape(x, {64, 32});
  auto program = [](const Tensor& t) { return log_softmax(t * 0.3) + 1.0; };
  auto step = compile(program);
  for (bool mode : {false, true, false, true}) {
    DeterministicScope scope(mode);
    for (int k = 0; k < 3; ++k) {
      Tensor y = step(rows);
      if (mode) expect_same_bits(y, program(rows), "call " + std::to_string(k));
    }
    bool one_kernel = step.graph_report().find("kernels        1,") != std::string::npos;
    EXPECT_EQ(one_kernel, !mode) << step.graph_report();
  }
  EXPECT_EQ(step.report().compiled, 2);
}

TEST(Compile, TrainAndEvalAreTwoGraphs) {
  Training run(0.5);
  auto forward = compile([&](const Tensor& ids) {
    NoGrad off;
    return (*run.model)(ids);
  });
  Tensor ids = batch(0).first;
  run.model->eval();
  Tensor expected = forward(ids);
  run.model->train();
  for (int k = 0; k < 2; ++k) EXPECT_FALSE(sum(abs(forward(ids) - expected)).item<double>() == 0);
  run.model->eval();
  expect_same_bits(forward(ids), expected, "eval again");
  EXPECT_EQ(forward.report().recordings, 4);
}

// Environment variables are read when a graph is built.
TEST(Compile, WithoutACompilerOrACacheAStepRunsWithoutGeneratedKernels) {
  TempFolder folder;
  struct Case {
    const char *variable, *value, *said;  // null: nothing is said, as no code is asked for
    CompileMode mode = CompileMode::kDefault;
  };
  for (const Case& c :
       {Case{"TESSERA_COMPILE_CXX", "/no/such/compiler", "/no/such/compiler"},
        {"TESSERA_COMPILE_CXX", "/no/such/compiler", nullptr, CompileMode::kReduceOverhead},
        {"TESSERA_COMPILE_CACHE", "/proc/tessera", "the cache /proc/tessera cannot be written"}}) {
    std::map<std::string, std::optional<std::string>> before;
    for (const char* name : {"TESSERA_COMPILE_CXX", "TESSERA_COMPILE_CACHE"})
      before[name] =
          std::getenv(name) ? std::optional<std::string>(std::getenv(name)) : std::nullopt;
    setenv("TESSERA_COMPILE_CACHE", (folder / "cache").c_str(), 1);
    setenv(c.variable, c.value, 1);
    testing::internal::CaptureStderr();
    auto f = compile([](const Tensor& a) { return softmax(exp(a) * 2.0, -1) + 1.0; },
                     {.name = "alone", .mode = c.mode});
    for (int k = 0; k < 3; ++k) {
      Tensor a = numbers(k);
      expect_same_bits(f(a), softmax(exp(a) * 2.0, -1) + 1.0, "call");
    }
    const std::string said = testing::internal::GetCapturedStderr();
    for (const auto& [name, value] : before)
      value ? setenv(name.c_str(), value->c_str(), 1) : unsetenv(name.c_str());
    EXPECT_EQ(f.report().replays, 1);
    EXPECT_EQ(f.report().unoptimised, "");
    EXPECT_EQ(std::ranges::count(said, '\n'), c.said ? 1 : 0) << said;
    for (const char* part : {c.said ? c.said : c.value, "alone runs without generated kernels"})
      EXPECT_EQ(said.find(part) != std::string::npos, bool(c.said)) << said;
  }
}

TEST(Compile, GraphsAreDumpedAsRecordedAndAsOptimised) {
  TempFolder folder;
  setenv("TESSERA_COMPILE_DUMP", folder.str().c_str(), 1);
  auto f = compile([](const Tensor& a) { return exp(a) * 2.0 + 1.0; }, {.name = "dumped"});
  f(numbers(1)), f(numbers(2));
  unsetenv("TESSERA_COMPILE_DUMP");
  const std::string end = fmt::format(".{}.txt", getpid());
  const std::string recorded = folder.read("dumped.1.recorded" + end),
                    optimised = folder.read("dumped.1.optimised" + end);
  EXPECT_NE(recorded.find("exp"), std::string::npos) << recorded;
  EXPECT_NE(recorded, optimised);
}

// A program that makes a new batch itself at each call gives the right results, and none of the
// batches is kept.
TEST(Compile, CapturedBatchesAreLetGo) {
  Tensor batch;
  for (bool look : {false, true}) {
    auto g = compile([&] {
      Tensor s = sum(batch * 2.0);
      if (look) s.item<float>();
      return s;
    });
    int64_t before = cpu_memory_stats().live_bytes;
    for (int i = 0; i < 20; ++i) {
      batch = full({1 << 16}, double(i));
      g();
    }
    EXPECT_LE(cpu_memory_stats().live_bytes - before, 8 * (int64_t(1) << 18)) << look;
  }
}

}  // namespace
}  // namespace tessera::compiler
