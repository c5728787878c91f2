// What changes between calls besides their arguments: a step that was recorded before the change is
// not replayed after it. Each program runs compiled and, from the same state, eagerly.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>

#include "collectives/loopback/run_ranks.h"
#include "compile/build.h"
#include "compile/compile.h"
#include "compile/ir/interpreter.h"
#include "compile/record/step_recorder.h"
#include "compile/record/trace.h"
#include "core/autograd/autograd.h"
#include "core/autograd/graph.h"
#include "core/autograd/recompute.h"
#include "core/autograd/transforms.h"
#include "core/base/deterministic.h"
#include "core/dispatch/context.h"
#include "core/dispatch/tracked_setting.h"
#include "core/nn/nn.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "parallel/ddp.h"
#include "tests/compile/bits.h"
#include "tests/compile/numbers.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;
using test::numbers;

Tensor rows(double first) { return reshape(numbers(first, 8), {2, 4}).to(kF32); }

// A model of two layers, and the gradients that a step leaves.
struct Model {
  std::shared_ptr<nn::Sequential> net = nn::sequential(nn::linear(4, 3), nn::linear(3, 2));
  Model() { net->init(3); }
  auto program() {
    return [this](const Tensor& x) {
      net->zero_grad();
      Tensor loss = sum(square((*net)(x)));
      loss.backward();
      return loss.detach();
    };
  }
  std::vector<Tensor> gradients() {
    std::vector<Tensor> list;
    for (const Tensor& p : net->parameters())
      list.push_back(p.requires_grad() && p.grad().defined() ? p.grad().to(kF64) : Tensor());
    return list;
  }
};

// Calls both until replays are certain, with `change` applied to both before some of the calls.
void expect_followed(const std::function<void(Model&, int call)>& change, int64_t replays) {
  Model compiled, eager;
  auto step = compile(compiled.program(), {.skip = "decompose,accumulate,fuse"});
  for (int call = 0; call < 12; ++call) {
    change(compiled, call), change(eager, call);
    expect_same_bits(step(rows(call)), eager.program()(rows(call)), "loss " + std::to_string(call));
    expect_same_bits(compiled.gradients(), eager.gradients(), "after " + std::to_string(call));
  }
  EXPECT_EQ(step.report().replays, replays) << step.report().why_not;
}

TEST(Guards, NothingChanges) {
  expect_followed([](Model&, int) {}, 10);
}

TEST(Guards, FrozenParameters) {
  expect_followed(
      [](Model& m, int call) {
        if (call == 4) m.net->parameters()[0].requires_grad_(false);
        if (call == 8) m.net->parameters()[0].requires_grad_(true);
      },
      6);
}

TEST(Guards, HooksOfGradients) {
  auto number = std::make_shared<int>();
  expect_followed(
      [=](Model& m, int call) {
        Tensor w = m.net->parameters()[2];
        if (call == 4) *number = add_hook(w, [](const Tensor& g) { return g * 2.0; });
        if (call == 8) remove_hook(w, *number);
      },
      6);
}

TEST(Guards, HooksOfModules) {
  std::map<Model*, nn::HookHandle> handles;
  expect_followed(
      [&](Model& m, int call) {
        if (call == 4)
          handles[&m] =
              m.net->add_post_hook([](nn::Module&, Inputs, Tensor& out) { out = out * 3.0; });
        if (call == 8) handles[&m].remove();
      },
      6);
}

TEST(Guards, ReplacedParameters) {
  expect_followed(
      [](Model& m, int call) {
        if (call != 4) return;
        Tensor old = m.net->parameters()[1];
        m.net->replace(old, (old.detach() + 1.0).detach().requires_grad_());
      },
      8);
}

TEST(Guards, ModulesThatAreGone) {
  auto model = std::make_unique<Model>();
  auto step = compile([&](const Tensor& x) { return sum((*model->net)(x)).detach(); },
                      {.skip = "decompose,accumulate,fuse"});
  for (int call = 0; call < 12; ++call) {
    if (call % 4 == 0) {
      model = std::make_unique<Model>();
      model->net->init(uint64_t(call));
    }
    Tensor expected = sum((*model->net)(rows(call))).detach();
    expect_same_bits(step(rows(call)), expected, "call " + std::to_string(call));
  }
  EXPECT_EQ(step.report().replays, 6);
}

// Scratch is planned for the kernels of one mode.
TEST(Guards, DeterministicMode) {
  auto step = compile([](const Tensor& x) { return matmul(x, transpose(x, 0, 1)) + ones({2}); });
  for (int call = 0; call < 3; ++call) step(rows(1));
  EXPECT_EQ(step.report().replays, 1);
  {
    DeterministicScope on;
    step(rows(1));
    EXPECT_EQ(step.report().replays, 1);
  }
  step(rows(1));
  EXPECT_EQ(step.report().replays, 2);
}

// What is made without a dtype, and what integers become, has the default one of the call.
TEST(Guards, DefaultDType) {
  auto program = [](const Tensor& x) { return sqrt(x) + ones({2}); };
  auto step = compile(program);
  Tensor x = from_values<int64_t>({2, 3}, {2});
  for (int call = 0; call < 12; ++call) {
    Scoped<DType> type(context().default_dtype, call / 3 % 2 ? kF64 : kF32);
    Tensor y = step(x);
    EXPECT_EQ(y.dtype(), context().default_dtype) << "call " << call;
    expect_same_bits(y, program(x), "call " + std::to_string(call));
  }
  EXPECT_GE(step.report().replays, 4) << step.report().why_not;
}

// Two views of one storage, of one shape, neither of them dense.
TEST(Guards, StridesOfAnArgument) {
  auto program = [](const Tensor& x) { return x * 2.0 + 1.0; };
  auto step = compile(program);
  Tensor whole = reshape(numbers(1, 16), {4, 4});
  Tensor rows = narrow(whole, 1, 0, 2), columns = narrow(transpose(whole, 0, 1), 1, 0, 2);
  for (int call = 0; call < 12; ++call) {
    const Tensor& x = call / 3 % 2 ? columns : rows;
    expect_same_bits(contiguous(step(x)), contiguous(program(x)), "call " + std::to_string(call));
  }
  EXPECT_GE(step.report().replays, 4) << step.report().why_not;
}

TEST(Guards, ASettingThatTheStepMakes) {
  TrackedSetting on(1);
  auto step = compile([&](const Tensor& x) {
    int64_t before = on.read();
    on.write(0);
    Tensor y = x * double(1 + on.read());
    on.write(7);
    return y + double(before);
  });
  for (int call = 0; call < 8; ++call) {
    if (call < 4) on.write(1);  // later on it is what the last call left
    double before = call <= 4 && call != 4 ? 1 : 7;
    expect_same_bits(step(numbers(call)), numbers(call) + before, "call");
    EXPECT_EQ(on.read(), 7);
  }
  EXPECT_EQ(step.report().replays, 4);
}

// The recorder is below the backends of both.
TEST(Guards, WhatATransformInARecomputationTouchesReachesTheRecorder) {
  TrackedSetting cube(0);
  Tensor x = numbers(2), w = numbers(1).requires_grad_();
  auto f = [&](const Tensor& t) {
    w.set_grad({});
    EXPECT_TRUE(w.requires_grad());
    return sum(cube.read() ? t * t * t : t * t);
  };
  StepRecorder recorder({.inputs = {x}}, [](Graph graph, std::span<const Tensor> inputs) {
    return interpret(graph, inputs);
  });
  Tensor dx = recompute([&](const Tensor& t) { return grad(f)(t); }, x);
  recorder.finish();
  ASSERT_EQ(recorder.settings().size(), 1u);
  EXPECT_EQ(recorder.settings()[0].before, 0);
  EXPECT_TRUE(recorder.settings()[0].depends);
  ASSERT_EQ(recorder.slots().size(), 1u);
  EXPECT_EQ(recorder.slots()[0].owner.get(), grad_meta(w));
  EXPECT_TRUE(recorder.slots()[0].changed);
  EXPECT_TRUE(std::ranges::any_of(recorder.handles(),
                                  [&](const TouchedHandle& h) { return h.handle.is_same(w); }));
  expect_same_bits(dx, x * 2.0, "gradient");
}

TEST(Guards, ASettingThatIsReadInATransform) {
  TrackedSetting cube(0);
  auto f = [&](const Tensor& t) { return sum(cube.read() ? t * t * t : t * t); };
  auto step = compile([&](const Tensor& x) { return grad(f)(x); });
  for (int call = 0; call < 12; ++call) {
    cube.write(call / 4 % 2);
    const Tensor x = numbers(call);
    expect_same_bits(step(x), cube.read() ? x * x * 3.0 : x * 2.0, "call " + std::to_string(call));
  }
  EXPECT_GE(step.report().replays, 6) << step.report().why_not;
}

// A module's training mode only matters to modules that ask for it.
TEST(Guards, TrainingModeOfModules) {
  auto layer = nn::linear(4, 3);
  auto drop = nn::dropout(0.5);
  layer->init(1);
  auto plain = compile([&](const Tensor& x) { return (*layer)(x).detach(); },
                       {.skip = "decompose,accumulate,fuse"});
  auto asks = compile([&](const Tensor& x) { return (*drop)(x)*1.0; });
  for (int call = 0; call < 6; ++call) {
    layer->train(call < 3), drop->train(call < 3);
    const Tensor x = rows(call + 1);
    expect_same_bits(plain(x), (*layer)(x).detach(), "layer " + std::to_string(call));
    const Tensor y = asks(x);
    if (call < 3)
      EXPECT_FALSE(any(y == x).item<bool>()) << call << ": an element is dropped or doubled";
    else
      expect_same_bits(y, x, "nothing is dropped");
  }
  EXPECT_EQ(plain.report().replays, 4) << plain.report().why_not;
  EXPECT_EQ(asks.report().replays, 2) << asks.report().why_not;
}

// Two ranks with data of their own: gradients are reduced, or stay on their rank.
void expect_sync_followed(const std::function<std::function<void(bool)>(Model&)>& wrap) {
  run_ranks(2, [&](ProcessGroup& g) {
    Model compiled, eager;
    auto set = wrap(compiled), set_eager = wrap(eager);
    auto step = compile(compiled.program(), {.skip = "decompose,accumulate,fuse"});
    for (int call = 0; call < 12; ++call) {
      bool sync = call < 4 || call >= 8;
      set(sync), set_eager(sync);
      Tensor x = rows(call + 5 * g.rank());
      expect_same_bits(step(x), eager.program()(x), "loss");
      std::vector<Tensor> got, want;
      for (const Tensor& p : compiled.net->parameters()) got.push_back(p.grad());
      for (const Tensor& p : eager.net->parameters()) want.push_back(p.grad());
      expect_same_bits(got, want, "call " + std::to_string(call));
    }
    EXPECT_GT(step.report().replays, 0) << step.report().why_not;
  });
}
TEST(Guards, SyncOfDdp) {
  expect_sync_followed([](Model& m) {
    std::shared_ptr<parallel::Reducer> r = parallel::make_reducer(*m.net, {.group = world_group()});
    return [r](bool on) { r->set_sync(on); };
  });
}

// ---- passes that fail

void fails(Graph& g) {
  g.nodes.pop_back();  // whatever it did by then
  throw std::runtime_error("no luck");
}

TEST(Build, APassThatThrowsLeavesTheGraphAsItWas) {
  Tensor x = numbers(1);
  Trace trace({.inputs = {x}});
  Tensor y = exp(x) * 2.0 + 1.0;
  Graph graph = trace.finish({y});
  std::string why;
  const Pass passes[] = {{"fails", fails}};
  Executor executor = build(graph, {}, 1, &why, passes);
  EXPECT_EQ(why, "pass fails: no luck");
  EXPECT_EQ(to_string(executor.graph()), to_string(graph));
  expect_same_bits(executor.run({{numbers(3)}})[0], exp(numbers(3)) * 2.0 + 1.0, "result");
  EXPECT_THROW(build(graph, {.skip = "nosuch"}), UserError);
  why.clear();
  build(graph, {}, 1, &why);
  EXPECT_EQ(why, "");
}

TEST(Guards, ErrorsNameWhatWasCalled) {
  Tensor x = numbers(1);
  auto overwritten = compile([&](const Tensor& a, const Tensor& b) {
    add_(a, b);
    return a * 1.0;
  });
  try {
    overwritten(x, x);
    FAIL() << "shares memory";
  } catch (const UserError& e) {
    EXPECT_EQ(std::string(e.what()).substr(0, 8), "compile:") << e.what();
  }
}

TEST(Guards, AnArgumentThatIsAlsoState) {
  Tensor state = numbers(0), eager_state = numbers(0);
  auto program = [](Tensor& s) {
    return [&s](const Tensor& a) { return add_(s, a), a * 2.0 + s; };
  };
  auto step = compile(program(state));
  for (int k = 0; k < 8; ++k) {
    const bool itself = k == 4 || k == 6;
    Tensor out = step(itself ? state : numbers(k));
    expect_same_bits(out, program(eager_state)(itself ? eager_state : numbers(k)), "result");
    expect_same_bits(state, eager_state, "state after call " + std::to_string(k));
  }
  EXPECT_EQ(step.report().replays, 2);  // it is recorded anew, both ways
}

// A program that makes a handle makes a new one at each call; one that returns an existing handle
// returns that.
TEST(Guards, HandlesThatAreReturned) {
  Tensor w = numbers(1);
  auto step = compile([&](const Tensor& x) { return std::tuple(w.detach(), w, x * w); });
  for (int k = 0; k < 6; ++k) {
    auto [fresh, same, product] = step(numbers(k));
    EXPECT_TRUE(same.is_same(w)) << k;
    EXPECT_FALSE(fresh.requires_grad()) << k;
    EXPECT_TRUE(fresh.storage() == w.storage());
    fresh.requires_grad_();
  }
  EXPECT_EQ(step.report().replays, 4) << step.report().why_not;
}

// Assignment that autograd records is part of the step, unless memory from outside is left with it.
TEST(Guards, RecordedAssignments) {
  Tensor w = rows(1).detach().requires_grad_();
  auto program = [w](const Tensor& x) {
    w.set_grad({});
    Tensor y = w * x, out = zeros({3, 4});
    y[0] = x[1] * w[1];
    y.slice(1, 0, 4, 2) *= 2.0;
    for (int64_t i = 0; i < 2; ++i) out[i] = y[i] * x[i];
    out[2] = out[0] + out[1];
    Tensor loss = sum(square(out));
    loss.backward();
    return loss.detach();
  };
  auto step = compile(program);
  for (int call = 0; call < 4; ++call) {
    const Tensor x = rows(call + 2), loss = program(x), gradient = w.grad().clone();
    expect_same_bits(step(x), loss, "loss");
    expect_same_bits(w.grad(), gradient, "gradient");
  }
  EXPECT_GE(step.report().replays, 1);

  Tensor buffer = zeros({2, 4});
  auto leaves = compile([w, buffer](const Tensor& x) {
    buffer.assign_(w * x);
    return x * 2.0;
  });
  for (int call = 0; call < 4; ++call) {
    leaves(rows(call));
    w.set_grad({});
    buffer.sum().backward();
    expect_same_bits(w.grad(), rows(call), "gradient");
  }
  EXPECT_EQ(leaves.report().replays, 0);
  EXPECT_NE(leaves.report().why_not.find("a recorded value is assigned to"), std::string::npos)
      << leaves.report().why_not;
}

TEST(Guards, ResultsOfInferenceMode) {
  for (bool outside : {false, true}) {
    auto program = [&](const Tensor& x) {
      std::optional<InferenceMode> inside;
      if (!outside) inside.emplace();
      return x * 2.0;
    };
    auto step = compile(program);
    Tensor w = numbers(1).requires_grad_();
    for (int k = 0; k < 4; ++k) {
      Tensor y;
      {
        std::optional<InferenceMode> mode;
        if (outside) mode.emplace();
        y = step(numbers(k));
      }
      EXPECT_THROW(sum(y * w).backward(), UserError) << "call " << k << ", outside " << outside;
    }
    EXPECT_EQ(step.report().replays, 2) << step.report().why_not;
  }
}

}  // namespace
}  // namespace tessera::compiler
