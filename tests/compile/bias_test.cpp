// Biases that are added by the products before them, on devices that do that for nothing.
#include <gtest/gtest.h>

#include "tests/support/joined_on_card.h"

namespace tessera::compiler {
namespace {

class BiasesOnCard : public test::ProductsOnCard {
 protected:
  /// How many products with a bias the passes make of `f`.
  static int biases(const std::vector<Tensor>& in, const std::function<Tensors()>& f,
                    std::optional<double> tolerance = {}) {
    const Graph g = joined(in, f, tolerance);
    return test::count(g, "contract_bias") + int(std::ranges::count_if(g.nodes, [](const Node& n) {
             return n.prim->name() == "scaled_matmul" && n.in.size() == 5;
           }));
  }
};

TEST_F(BiasesOnCard, OfLayers) {
  for (DType t : {kF32, kBF16, kF16}) {
    const std::vector<Tensor> in{drawn({2, 5, 16}, 1, t), drawn({24, 16}, 2, t), drawn({24}, 3, t)};
    const double bound = t == kF32 ? 2e-6 : t == kF16 ? 2e-3 : 1.6e-2;
    EXPECT_EQ(biases(
                  in, [&]() -> Tensors { return {linear(in[0], in[1], in[2])}; }, bound),
              1);
    EXPECT_EQ(biases(
                  in, [&]() -> Tensors { return {gelu(linear(in[0], in[1], in[2]))}; }, bound),
              1);
    EXPECT_EQ(biases(
                  in, [&]() -> Tensors { return {in[2] + matmul(in[0], transpose(in[1], 0, 1))}; },
                  bound),
              1);
  }
}
// The bias is cast after the product has been made.
TEST_F(BiasesOnCard, OfLayersUnderAutocast) {
  const std::vector<Tensor> in{drawn({6, 16}, 1, kF32), drawn({24, 16}, 2, kF32),
                               drawn({24}, 3, kF32)};
  const auto f = [&]() -> Tensors {
    const Autocast cast(kBF16);
    return {linear(in[0], in[1], in[2])};
  };
  EXPECT_EQ(biases(in, f, 1.6e-2), 1);
}
TEST_F(BiasesOnCard, OfLayersInEightBits) {
  const std::vector<Tensor> in{drawn({16, 32}, 1, kF32).to(kF8E4M3),
                               drawn({48, 32}, 2, kF32).to(kF8E4M3), full({}, 0.5, {kF32, card_}),
                               drawn({48}, 3, kBF16)};
  const auto f = [&]() -> Tensors {
    return {scaled_matmul(in[0], in[1], in[2], in[2], kBF16) + in[3]};
  };
  EXPECT_EQ(biases(in, f, 1.6e-2), 1);
}
TEST_F(BiasesOnCard, NotWhereTheProductIsReadOrIsNone) {
  const std::vector<Tensor> in{drawn({6, 16}, 1, kF32), drawn({24, 16}, 2, kF32),
                               drawn({24}, 3, kF32), drawn({6, 1}, 4, kF32),
                               drawn({6, 24}, 5, kF32)};
  const auto product = [&] { return matmul(in[0], transpose(in[1], 0, 1)); };
  const auto with = [&](const Tensor& more) {
    return biases(in, [&]() -> Tensors { return {product() + more}; });
  };
  EXPECT_EQ(with(in[2]), 1);
  EXPECT_EQ(with(in[3]), 0) << "a number for each row";
  EXPECT_EQ(with(in[4]), 0) << "a matrix";
  EXPECT_EQ(with(narrow(drawn({24, 1}, 6, kF32), 0, 0, 24).reshape({24})), 1);
  EXPECT_EQ(biases(in,
                   [&]() -> Tensors {
                     const Tensor p = product();
                     return {p + in[2], p * 2.0};
                   }),
            0);
  EXPECT_EQ(biases(in,
                   [&]() -> Tensors {
                     const Tensor p = product();
                     return {p + in[2], p};
                   }),
            0);
}
TEST_F(BiasesOnCard, NotInDoublesNorInDeterministicMode) {
  const std::vector<Tensor> in{drawn({6, 16}, 1, kF32), drawn({24, 16}, 2, kF32),
                               drawn({24}, 3, kF32)};
  const auto f = [&]() -> Tensors { return {linear(in[0], in[1], in[2])}; };
  EXPECT_EQ(
      biases({in[0].to(kF64), in[1].to(kF64), in[2].to(kF64)},
             [&]() -> Tensors { return {linear(in[0].to(kF64), in[1].to(kF64), in[2].to(kF64))}; }),
      0);
  const DeterministicScope deterministic;
  EXPECT_EQ(biases(in, f, 0), 0);
}
// An operand is overwritten between the product and the addition.
TEST_F(BiasesOnCard, NotPastAWrite) {
  const std::vector<Tensor> in{drawn({6, 16}, 1, kF32), drawn({24, 16}, 2, kF32),
                               drawn({24}, 3, kF32)};
  Trace trace({.inputs = in});
  const Tensor p = matmul(in[0], transpose(in[1], 0, 1));
  fill_(in[0], 1);
  Graph g = trace.finish(Tensors{p + in[2]});
  run_passes(g);
  EXPECT_EQ(test::count(g, "contract_bias"), 0) << to_string(g);
}

}  // namespace
}  // namespace tessera::compiler
