// Ops that are decomposed: which, into what, and that only the order of sums differs.
#include <gtest/gtest.h>

#include "compile/codegen/fused.h"
#include "core/base/boundary.h"
#include "core/dispatch/context.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/compile/passes/close.h"
#include "tests/compile/passes/graphs.h"
#include "tests/support/boundaries.h"

namespace tessera::compiler {
namespace {

Tensor draw(const Shape& s, uint64_t key, DType t) { return cast(sample_values(s, -2, 2, key), t); }

int kernels(const Graph& g) {
  int n = 0;
  for (const Node& node : g.nodes) n += node.role != Role::kView && node.role != Role::kConstant;
  return n;
}

// The step computes the same to `tolerance` and becomes `expected` kernels; returns the graph.
template <class F>
Graph become(int expected, const std::vector<Tensor>& in, F step, const test::Tolerance& tolerance,
             const DecomposeOptions& options = {}) {
  Graph g = test::graph_of(in, step), after = g;
  decompose(after, options);
  verify(after);
  run_passes(after, "decompose");
  test::expect_same_sharing(after, g);
  test::expect_close(test::results(after, in), test::results(g, in), tolerance, to_string(after));
  EXPECT_EQ(kernels(after), expected) << to_string(after);
  return after;
}

// A sum of n terms of a few units in another order: n roundings; 16-bit results round once more.
constexpr test::Tolerance kSums = {1e-14, 1e-5, 2e-3, 1e-2};

constexpr DecomposeOptions kSoftmax = {.softmax = true};

TEST(Decompose, SoftmaxIsOneKernel) {
  for (DType t : {kF32, kF64, kBF16, kF16}) {
    std::vector<Tensor> in = {draw({5, 37}, 1, t), draw({5, 37}, 2, t)};
    auto one = [&](auto step) { become(1, in, step, kSums, kSoftmax); };
    one([&]() -> Tensors { return {softmax(in[0] * 2.0) + in[1]}; });
    one([&]() -> Tensors { return {log_softmax(in[0] + in[1])}; });
    for (bool log : {false, true})
      become(
          2, in,
          [&]() -> Tensors {
            Tensor x = in[0].detach().requires_grad_();
            Tensor y = (log ? log_softmax(x) : softmax(x)) * 3.0;
            Scoped<Phase> backward(context().phase, Phase::kBackward);
            return {y.detach(), grad({{y}}, {{x}}, {{in[1]}})[0]};
          },
          kSums, kSoftmax);
  }
}

TEST(Decompose, SoftmaxOfMinusInfinity) {
  std::vector<Tensor> in = {full({2, 3}, -INFINITY)};
  become(
      1, in, [&]() -> Tensors { return {softmax(in[0] * 2.0)}; }, kSums, kSoftmax);
}

TEST(Decompose, AloneAnOpStays) {
  std::vector<Tensor> in = {draw({5, 37}, 1, kF32)};
  Graph g = become(1, in, [&]() -> Tensors { return {layer_norm(reshape(in[0], {37, 5}))}; }, {});
  EXPECT_EQ(test::count(g, "layer_norm"), 1);
  g = become(
      1, in,
      [&]() -> Tensors {
        return {reshape(layer_norm(in[0]), {1, 5, 37}) + 1.0};
      },
      kSums);
  EXPECT_EQ(test::count(g, "layer_norm"), 0);
}

// Forward: the residual sum and the norm. Backward: dx, the residual's gradient, dw, db and the
// gradient of a bias before it, in one sweep.
TEST(Decompose, NormsJoinTheirNeighbours) {
  for (DType t : {kF32, kF64, kBF16}) {
    std::vector<Tensor> in = {draw({2, 3, 37}, 1, t), draw({2, 3, 37}, 2, t), draw({37}, 3, t),
                              draw({37}, 4, t), draw({2, 3, 37}, 5, t)};
    auto step = [&](bool centred) {
      return [&, centred]() -> Tensors {
        Tensor b = in[3].detach().requires_grad_(), w = in[2].detach().requires_grad_();
        Tensor x = in[0] + (in[1] + b);
        Tensor y = centred ? layer_norm(x, w, b, 1e-3) : rms_norm(x, w, 1e-3);
        Scoped<Phase> backward(context().phase, Phase::kBackward);
        Tensors g = grad({{y}}, {{w, b}}, {{in[4]}});
        return {y.detach(), g[0], g[1]};
      };
    };
    for (bool centred : {true, false}) {
      Graph g = become(2, in, step(centred), kSums);
      size_t saved = 0;  // of x's size, kept for backward: x alone
      for (const Node& n : g.nodes)
        if (n.phase == Phase::kForward)
          for (ValueId id : n.out) saved += numel(g[id].meta.shape) == 2 * 3 * 37;
      EXPECT_EQ(saved, 2u) << to_string(g);  // with y
    }
  }
}

TEST(Decompose, OptimizersAtTheirLimit) {
  CountBoundaries counting;
  const Tensor lr = scalar_tensor(0.1, kF64);
  for (int64_t n : {(1 << 23) - 1, 1 << 23, (1 << 23) + 1}) {
    const Tensors parameters = {zeros({n})}, gradients = {zeros({n})};
    Graph g = test::graph_of({}, [&]() -> Tensors {
      sgd_update_(parameters, gradients, {}, lr, {}, {});
      return {};
    });
    decompose(g);
    EXPECT_EQ(test::count(g, "sgd"), n > 1 << 23) << n << " elements";
  }
  EXPECT_EQ(test::not_met({"decompose"}), "");
}

TEST(Decompose, OptimizersOfWhatCachesHold) {
  std::vector<Tensor> in = {draw({3, 4}, 1, kF32), draw({5}, 2, kF32)};
  Tensors p = {draw({3, 4}, 3, kF32), draw({5}, 4, kF32)}, m, v;
  for (const Tensor& t : p) m.push_back(zeros(t.shape())), v.push_back(ones(t.shape()));
  Tensor lr = scalar_tensor(0.1, kF64), step = scalar_tensor(3.0, kF64);
  for (bool decoupled : {false, true}) {
    auto update = [&]() -> Tensors {
      adam_update_(p, in, m, v, lr, step, {}, {.weight_decay = 0.1, .decoupled = decoupled});
      return {};
    };
    Graph kept = become(1, in, update, {}, {.optimizers = false});
    EXPECT_EQ(test::count(kept, "adam"), 1);
    Graph apart = become(2, in, update, {}, {.least_elements = 8});
    EXPECT_EQ(test::count(apart, "adam"), 0) << to_string(apart);
    Graph small = become(1, in, update, {});  // too few on average
    EXPECT_EQ(test::count(small, "adam"), 1);
  }
  std::vector<Tensor> gradients = {draw({64, 64}, 1, kF32), draw({64, 64}, 2, kF32)};
  Tensors matrices[3];
  for (Tensors& list : matrices) list = {ones({64, 64}), ones({64, 64})};
  auto update_matrices = [&]() -> Tensors {
    adam_update_(matrices[0], gradients, matrices[1], matrices[2], lr, step, {}, {});
    return {};
  };
  become(2, gradients, update_matrices, {});
  for (bool nesterov : {false, true}) {
    auto update = [&]() -> Tensors {
      sgd_update_(p, in, m, lr, {}, {.momentum = 0.9, .weight_decay = 0.1, .nesterov = nesterov});
      return {};
    };
    become(2, in, update, {}, {.least_elements = 0});
  }
}

// Without decay, nothing is computed as a multiple of 0: an infinite parameter makes no NaN of its
// gradient, and a gradient of -0 keeps its sign.
TEST(Decompose, OptimizersWithoutDecayReadNoParameterForTheGradient) {
  std::vector<Tensor> in = {from_values<float>({1, -0.0f, 2, -INFINITY}, {4})};
  Tensors p = {from_values<float>({INFINITY, 1, -INFINITY, 2}, {4})}, m = {zeros({4})},
          v = {ones({4})};
  Tensor lr = scalar_tensor(0.1, kF64), step = scalar_tensor(3.0, kF64);
  for (bool decoupled : {false, true})
    become(1, in,
           [&]() -> Tensors {
             adam_update_(p, in, m, v, lr, step, {}, {.decoupled = decoupled});
             return {};
           },
           {}, {.least_elements = 0});
  for (bool first : {false, true})
    become(1, in,
           [&]() -> Tensors {
             sgd_update_(p, in, m, lr, {}, {.momentum = 0.5, .first = first});
             return {};
           },
           {}, {.least_elements = 0});
}

TEST(Decompose, WhatHasNoElementsStays) {
  std::vector<Tensor> in = {zeros({3, 0}), zeros({0, 3})};
  for (const Tensor& x : in)
    become(
        4, in,
        [&]() -> Tensors {
          return {softmax(x * 2.0) + 1.0, layer_norm(x * 2.0)};
        },
        kSums, kSoftmax);
}

TEST(Decompose, WhatStays) {
  std::vector<Tensor> in = {draw({4, 5}, 1, kF32), from_values<int64_t>({1, 4, -100, 0}, {4})};
  Graph g = test::graph_of(in, [&]() -> Tensors { return {cross_entropy(in[0], in[1])}; });
  decompose(g);
  EXPECT_EQ(test::count(g, "cross_entropy"), 1);  // it checks its targets
}

}  // namespace
}  // namespace tessera::compiler
