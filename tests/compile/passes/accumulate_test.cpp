// Gradients of embeddings that are added to others.
#include <gtest/gtest.h>

#include "core/autograd/autograd.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/compile/passes/close.h"
#include "tests/compile/passes/graphs.h"

namespace tessera::compiler {
namespace {

template <class F>
Graph accumulated(const std::vector<Tensor>& in, F step) {
  Graph g = test::graph_of(in, step), after = g;
  run_passes(after);
  test::expect_same_sharing(after, g);
  test::expect_close(test::results(after, in), test::results(g, in), {1e-14, 1e-6, 0, 0},
                     to_string(after));
  return after;
}

// A table that is looked up and that is the head too: [V, D], V = 7, D = 3, ids [4] with repeats.
std::vector<Tensor> inputs(DType ids) {
  return {sample_values({7, 3}, -1, 1, 1), cast(from_values<int64_t>({2, 6, 2, 0}, {4}), ids)};
}
Tensor tied_gradient(const std::vector<Tensor>& in, int64_t padding_idx = -1) {
  Tensor table = in[0].detach().requires_grad_();
  Tensor logits = matmul(embedding(in[1], table, padding_idx), transpose(table, 0, 1));
  return grad({{sum(square(logits))}}, {{table}})[0];
}

TEST(Accumulate, ATiedTable) {
  for (DType t : {kI64, kI32})
    for (int64_t padding_idx : {-1, 2}) {
      auto in = inputs(t);
      Graph g = accumulated(in, [&]() -> Tensors { return {tied_gradient(in, padding_idx)}; });
      EXPECT_EQ(test::count(g, "add_embedding_grad"), 1) << to_string(g);
      EXPECT_EQ(test::count(g, "embedding_grad") + test::count(g, "add"), 0) << to_string(g);
    }
}

// A strategy decides how gradients are stored, and so whether the pass finds its place; therefore
// the pass must not change any bit of the sum. Here a row has many terms of very different sizes.
TEST(Accumulate, ToTheBit) {
  for (DType t : {kF32, kF64})
    for (int64_t padding_idx : {-1, 2}) {
      std::vector<int64_t> ids;
      for (int64_t i = 0; i < 200; ++i) ids.push_back(i * i % 7);  // never 3, 5 and 6
      std::vector<Tensor> in = {cast(sample_values({7, 37}, -1, 1, 1), t),
                                from_values<int64_t>(ids, {4, 50}),
                                cast(exp(sample_values({4, 50, 37}, -9, 9, 2)), t)};
      Graph g = test::graph_of(in, [&]() -> Tensors {
        Tensor table = in[0].detach().requires_grad_();
        return {in[0] + grad({{embedding(in[1], table, padding_idx)}}, {{table}}, {{in[2]}})[0]};
      });
      Graph after = test::checked(g, in, [](Graph& x) { run_passes(x, "decompose,fuse"); });
      EXPECT_EQ(test::count(after, "add_embedding_grad"), 1) << to_string(after);
    }
}

TEST(Accumulate, AsPartOfAnEffect) {
  auto in = inputs(kI64);
  Tensor total = ones({7, 3}, {kF64});
  Graph g = accumulated(in, [&]() -> Tensors {
    add_(total, tied_gradient(in));
    return {};
  });
  EXPECT_EQ(test::count(g, "add_embedding_grad"), 1) << to_string(g);
}

TEST(Accumulate, NotWhatOthersRead) {
  auto in = inputs(kI64);
  auto step = [&](bool read_again) {
    Tensor table = in[0].detach().requires_grad_();
    Tensor g = grad({{embedding(in[1], table)}}, {{table}}, {{ones({4, 3}, {kF64})}})[0];
    Tensor sum_ = g + in[0] * 2.0;
    return read_again ? Tensors{sum_, g} : Tensors{sum_};
  };
  EXPECT_EQ(test::count(accumulated(in, [&] { return step(false); }), "add_embedding_grad"), 1);
  EXPECT_EQ(test::count(accumulated(in, [&] { return step(true); }), "add_embedding_grad"), 0);
}

TEST(Accumulate, NotPastAWrite) {
  auto in = inputs(kI64);
  Graph g = accumulated(in, [&]() -> Tensors {
    Tensor table = in[0].detach().requires_grad_(), cot = ones({4, 3}, {kF64});
    Tensor grad_ = grad({{embedding(in[1], table)}}, {{table}}, {{cot}})[0];
    fill_(in[1], 1);  // the ids it was made with
    return {grad_ + in[0]};
  });
  EXPECT_EQ(test::count(g, "embedding_grad"), 1) << to_string(g);
}

TEST(Accumulate, IdsAreChecked) {
  auto in = inputs(kI64);
  Graph g = accumulated(in, [&]() -> Tensors {  // the lookup itself is dead
    Tensor table = in[0].detach().requires_grad_();
    return {grad({{embedding(in[1], table)}}, {{table}}, {{ones({4, 3}, {kF64})}})[0] + in[0]};
  });
  ASSERT_EQ(test::count(g, "embedding"), 0) << to_string(g);
  try {
    interpret(g, {in[0], from_values<int64_t>({2, 7, 2, 0}, {4})});
    FAIL();
  } catch (const UserError& e) {
    EXPECT_STREQ(e.what(), "embedding: id 7 at position 1 is outside the table of 7 rows");
  }
}

}  // namespace
}  // namespace tessera::compiler
