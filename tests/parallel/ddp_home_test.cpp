// Gradients that backward writes into their buckets: they have the values of gradients that are
// copied there, and no copy is made where an op can write.
#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/base/profile.h"
#include "core/ops/contract.h"
#include "core/ops/conv.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "parallel/ddp.h"

namespace tessera {
namespace {

using Loss = std::function<Tensor(const Tensor& w, int rank)>;

Tensor values(const Shape& shape, int64_t seed) {
  return randn(shape, {kF32}, from_values<int64_t>({seed, 1}, {2}));
}
std::vector<float> list(const Tensor& t) {
  Tensor c = contiguous(t);
  return {c.data<float>(), c.data<float>() + c.numel()};
}

// The mean over two ranks of the gradient of `loss` by a weight of `shape`, computed without a
// reducer.
std::vector<float> expected(const Shape& shape, const Loss& loss) {
  std::vector<std::vector<float>> each(2);
  run_ranks(2, [&](ProcessGroup& group) {  // with as many threads as ranks have
    Tensor w = values(shape, 5).requires_grad_();
    loss(w, group.rank()).backward();
    each[size_t(group.rank())] = list(w.grad());
  });
  for (size_t i = 0; i < each[0].size(); ++i) each[0][i] = (each[0][i] + each[1][i]) / 2;
  return each[0];
}

// Runs `body` on two ranks with a weight of `shape` that a reducer owns.
void on_two_ranks(const Shape& shape,
                  const std::function<void(const Tensor& w, parallel::Reducer&, int rank)>& body) {
  run_ranks(2, [&](ProcessGroup& group) {
    Tensor w = values(shape, 5).requires_grad_();
    parallel::Reducer reducer({{"w", w}}, {.group = Ref<ProcessGroup>(&group)});
    body(w, reducer, group.rank());
  });
}

void expect_mean(const Shape& shape, const Loss& loss) {
  std::vector<float> want = expected(shape, loss);
  on_two_ranks(shape, [&](const Tensor& w, parallel::Reducer&, int rank) {
    for (int step = 0; step < 2; ++step) {
      loss(w, rank).backward();
      EXPECT_EQ(list(w.grad()), want);
      w.set_grad({});
    }
  });
}

int copies_of_backward(const Tensor& loss) {
  Profiler profiler;
  loss.backward();
  int n = 0;
  for (const ProfileEvent& e : profiler.profile()->events())
    n += e.category == "op" && e.name == "copy";
  return n;
}

Tensor rows(int rank) { return values({6, 4}, 10 + rank); }

TEST(DdpHome, OpsWriteTheirGradientsWhereTheyAreReduced) {
  struct Case {
    const char* name;
    Shape shape;
    Loss loss;
  };
  auto ids = [](int rank) { return from_values<int64_t>({rank, 3, 3, 0}, {4}); };
  const std::vector<Case> cases = {
      {"contract", {3, 4}, [](const Tensor& w, int r) { return sum(square(linear(rows(r), w))); }},
      {"embedding",
       {5, 3},
       [&](const Tensor& w, int r) { return sum(square(embedding(ids(r), w))); }},
      {"conv",
       {2, 3, 3, 3},
       [](const Tensor& w, int r) {
         return sum(square(conv2d(values({2, 3, 5, 5}, r + 1), w)));
       }},
      {"cast", {3, 4}, [](const Tensor& w, int r) {
         Autocast scope(kBF16);
         return sum(square(cast(linear(rows(r), w), kF32)));
       }}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    expect_mean(c.shape, c.loss);
    on_two_ranks(c.shape, [&](const Tensor& w, parallel::Reducer&, int rank) {
      Tensor free = values(c.shape, 5).requires_grad_();
      c.loss(w, rank).backward();  // after which buckets are built again
      w.set_grad({});
      EXPECT_EQ(copies_of_backward(c.loss(w, rank)), copies_of_backward(c.loss(free, rank)));
    });
  }
}

TEST(DdpHome, AWeightThatIsUsedTwiceGetsTheSumOfBoth) {
  expect_mean({4, 4}, [](const Tensor& w, int r) {
    Tensor hidden = linear(rows(r), w);
    return sum(square(contract("ni,ij->nj", hidden, w)));  // once as it is, once transposed
  });
  expect_mean({4, 4}, [](const Tensor& w, int r) {  // both operands of one op
    return sum(contract("ij,jk->ik", w, w) * values({4, 4}, r + 1));
  });
  expect_mean({4, 4}, [](const Tensor& w, int r) {  // an op that writes elsewhere comes first
    return sum(square(linear(rows(r), w))) + sum(w * w);
  });
}

// The gradient of the activation has the weight's shape, but must not be written to its place.
TEST(DdpHome, AnActivationOfTheWeightsShapeKeepsItsOwnMemory) {
  expect_mean({4, 4}, [](const Tensor& w, int r) {
    Tensor x = values({4, 4}, r + 1);
    return sum(square(linear(linear(linear(x, w), w * 2.0), w)));
  });
}

TEST(DdpHome, WhatAHookKeepsIsNotReduced) {
  Loss loss = [](const Tensor& w, int r) { return sum(square(linear(rows(r), w))); };
  on_two_ranks({3, 4}, [&](const Tensor& w, parallel::Reducer&, int rank) {
    Tensor alone = values({3, 4}, 5).requires_grad_(), kept;
    loss(alone, rank).backward();
    add_hook(w, [&](const Tensor& g) {
      kept = g;
      return Tensor();
    });
    loss(w, rank).backward();
    EXPECT_NE(list(w.grad()), list(alone.grad()));
    EXPECT_EQ(list(kept), list(alone.grad()));
  });
}

TEST(DdpHome, GradientsOfEarlierBackwardsAreAddedTo) {
  Loss loss = [](const Tensor& w, int r) { return sum(square(linear(rows(r), w))); };
  std::vector<float> want = expected({3, 4}, loss);
  for (float& x : want) x += x;
  on_two_ranks({3, 4}, [&](const Tensor& w, parallel::Reducer& reducer, int rank) {
    reducer.set_sync(false);
    loss(w, rank).backward();
    reducer.set_sync(true);
    loss(w, rank).backward();
    EXPECT_EQ(list(w.grad()), want);
  });
}

// The last step's gradient, which the program has moved from the leaf, still uses the bucket's
// memory.
TEST(DdpHome, AGradientThatTheUserKeepsIsReadBeforeItIsOverwritten) {
  const Shape shape{4, 4};
  Loss first = [](const Tensor& w, int) { return sum(square(linear(values({6, 4}, 3), w))); };
  for (bool as_factor : {false, true}) {
    auto second = [&](const Tensor& w, const Tensor& v) {
      Tensor a = matmul(values(shape, 7), w);
      if (as_factor) return (sum(w * v) + sum(square(a))).backward();
      Tensor root = a + matmul(values(shape, 8), w);
      backward(std::span(&root, 1), std::span(&v, 1));
    };
    auto steps = [&](const Tensor& w) {
      first(w, 0).backward();
      w.set_grad({});
      first(w, 0).backward();  // buckets were built again after the first
      Tensor v = w.grad();
      w.set_grad({});
      second(w, v);
      return list(w.grad());
    };
    const std::vector<float> want = steps(values(shape, 5).requires_grad_());
    on_two_ranks(shape,
                 [&](const Tensor& w, parallel::Reducer&, int) { EXPECT_EQ(steps(w), want); });
  }
}

// grad() delivers nothing, and a graph of the backward keeps its values.
TEST(DdpHome, OtherDerivativesLeaveBucketsAlone) {
  on_two_ranks({3, 4}, [&](const Tensor& w, parallel::Reducer&, int rank) {
    auto loss = [&] { return sum(square(linear(rows(rank), w))); };
    loss().backward();
    std::vector<float> before = list(w.grad());
    Tensor root = loss();
    Tensors g = grad(std::span(&root, 1), std::span(&w, 1), {}, {.create_graph = true});
    EXPECT_NE(list(g[0]), before);
    Tensor norm = sum(square(g[0]));
    Tensors second = grad(std::span(&norm, 1), std::span(&w, 1), {}, {});
    EXPECT_EQ(second[0].shape(), w.shape());
    EXPECT_EQ(list(w.grad()), before);
  });
}

}  // namespace
}  // namespace tessera
