// Convolutions that give moments to the batch-norm behind them, on devices with a kernel for that.
#include <gtest/gtest.h>

#include "core/dispatch/dispatch.h"
#include "core/ops/conv_stats.h"
#include "tests/support/joined_on_card.h"

namespace tessera::compiler {
namespace {

using test::count;

class StatsOnCard : public test::JoinedOnCard {
 protected:
  std::vector<Tensor> operands(DType t = kBF16) {
    return {drawn({3, 8, 6, 5}, 1, t), drawn({16, 8, 3, 3}, 2, t), drawn({16}, 3, kF32) + 1.0,
            drawn({16}, 4, kF32), drawn({3, 16, 4, 3}, 5, t)};
  }
  /// How many convolutions with moments the passes make of `f`.
  static int stats(const std::vector<Tensor>& in, const std::function<Tensors()>& f) {
    const Graph after = joined(in, f, 3e-2);
    EXPECT_EQ(count(after, "batch_norm_apply"), count(after, "conv_stats"));
    return count(after, "conv_stats");
  }
};

Tensor normalised(const std::vector<Tensor>& in, const NormThen& then = {}) {
  return batch_norm_moments(conv2d(in[0], in[1]), in[2], in[3], 1e-5, then).y;
}

TEST_F(StatsOnCard, OfLayersAndTheirGradients) {
  for (DType t : {kBF16, kF16}) {
    const std::vector<Tensor> in = operands(t);
    for (const NormThen& then : {NormThen{}, {{}, true}, {in[4], true}, {in[4], false}}) {
      EXPECT_EQ(stats(in, [&]() -> Tensors { return {normalised(in, then)}; }), 1);
      std::vector<Tensor> leaves = in;
      for (Tensor& l : leaves) l = l.detach().requires_grad_();
      EXPECT_EQ(stats(leaves,
                      [&]() -> Tensors {
                        const Tensor y = normalised(leaves, then);
                        const std::vector<Tensor> of(leaves.begin(), leaves.begin() + 4);
                        return grad({{y}}, of, {{in[4]}});
                      }),
                1);
    }
  }
}
TEST_F(StatsOnCard, OfTwoLayersAndWithRunningMoments) {
  const std::vector<Tensor> in = operands();
  EXPECT_EQ(stats(in,
                  [&]() -> Tensors {
                    const Tensor y = conv2d(in[0], in[1]);
                    const BatchMoments one = batch_norm_moments(y, in[2], {}, 1e-5),
                                       two = batch_norm_moments(y, {}, in[3], 1e-3);
                    return {one.y, one.mean, one.var, two.y, two.var};
                  }),
            1)
      << "the second norm of one result keeps its own moments";
}
TEST_F(StatsOnCard, NotInF32NorInDeterministicModeNorOfOtherValues) {
  const std::vector<Tensor> wide = operands(kF32), in = operands();
  EXPECT_EQ(stats(wide, [&]() -> Tensors { return {normalised(wide)}; }), 0);
  EXPECT_EQ(stats(in,
                  [&]() -> Tensors {
                    return {batch_norm_moments(conv2d(in[0], in[1]) + in[4], in[2], in[3], 1e-5).y};
                  }),
            0);
  const DeterministicScope deterministic;
  EXPECT_EQ(stats(in, [&]() -> Tensors { return {normalised(in)}; }), 0);
}
// The result of the convolution is overwritten before it is normalised.
TEST_F(StatsOnCard, NotPastAWrite) {
  const std::vector<Tensor> in = operands();
  Trace trace({.inputs = in});
  const Tensor y = conv2d(in[0], in[1]);
  fill_(y, 1);
  Graph g = trace.finish(Tensors{batch_norm_moments(y, in[2], in[3], 1e-5).y, y});
  run_passes(g);
  EXPECT_EQ(count(g, "conv_stats"), 0) << to_string(g);
}
// A convolution that is written over other values is no new result.
TEST_F(StatsOnCard, NotOfWhatIsWrittenInPlace) {
  std::vector<Tensor> in = operands();
  Trace trace({.inputs = in});
  const Tensor y = in[4] * 1.0;
  assign({&y, 1}, conv_op({{{1, 1}, {1, 1}, {0, 0}, {0, 0}, 1}}), {in.data(), 2});
  Graph g = trace.finish(Tensors{batch_norm_moments(y, in[2], in[3], 1e-5).y});
  run_passes(g);
  EXPECT_EQ(count(g, "conv_stats"), 0) << to_string(g);
}
TEST(Stats, NotOnTheCpu) {
  const std::vector<Tensor> in{randn({2, 4, 5, 5}).to(kBF16), randn({4, 4, 3, 3}).to(kBF16)};
  Trace trace({.inputs = in});
  Graph g = trace.finish(Tensors{batch_norm_moments(conv2d(in[0], in[1]), {}, {}, 1e-5).y});
  run_passes(g);
  EXPECT_EQ(count(g, "conv_stats"), 0) << to_string(g);
}

}  // namespace
}  // namespace tessera::compiler
