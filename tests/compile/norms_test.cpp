// Convolutions that apply the batch-norm behind them in inference, on devices with a kernel for it.
#include <gtest/gtest.h>

#include "compile/compile.h"
#include "core/dispatch/context.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/conv_stats.h"
#include "examples/models/resnet.h"
#include "tests/support/joined_on_card.h"

namespace tessera::compiler {
namespace {

using test::count, test::runs_on_card;

class NormsOnCard : public test::JoinedOnCard {
 protected:
  enum { kX, kW, kMean, kVar, kWeight, kBias, kResidual };
  std::vector<Tensor> operands(DType t = kBF16) {
    return {drawn({3, 8, 6, 5}, 1, t),
            drawn({16, 8, 3, 3}, 2, t),
            drawn({16}, 3, kF32),
            drawn({16}, 4, kF32) + 1.0,
            drawn({16}, 5, kF32) + 1.0,
            drawn({16}, 6, kF32),
            permute(drawn({3, 4, 3, 16}, 7, t), {0, 3, 1, 2})};
  }
  static Tensor norm(const std::vector<Tensor>& in, const Tensor& x, const NormThen& then = {}) {
    return batch_norm(x, in[kMean], in[kVar], {.weight = in[kWeight], .bias = in[kBias]}, then);
  }
  static Tensor conv(const std::vector<Tensor>& in) { return conv2d(in[kX], in[kW]); }
  /// What the passes make of `f`: how many convolutions that normalise.
  static int norms(const std::vector<Tensor>& in, const std::function<Tensor()>& f) {
    const Graph g = joined(
        in, [&] { return Tensors{f()}; }, in[0].dtype() == kF32 ? 1e-5 : 3e-2);
    return count(g, "conv_norm");
  }
};

TEST_F(NormsOnCard, OfLayersOfEachKind) {
  for (DType t : {kF32, kBF16, kF16})
    for (int form = 0; form < 16; ++form) {
      const std::vector<Tensor> in = operands(t);
      const BatchNormOptions o{.weight = form & 1 ? in[kWeight] : Tensor(),
                               .bias = form & 2 ? in[kBias] : Tensor()};
      const NormThen then{form & 4 ? in[kResidual] : Tensor(), bool(form & 8)};
      const Graph g = joined(
          in, [&]() -> Tensors { return {batch_norm(conv(in), in[kMean], in[kVar], o, then)}; },
          t == kF32 ? 1e-5 : 3e-2);
      EXPECT_EQ(count(g, "conv_norm"), 1) << form << to_string(g);
      EXPECT_EQ(g.nodes.size(), 1u) << "nothing is left beside it" << to_string(g);
    }
}
// What a program writes itself behind the norm, in the dtype of its result.
TEST_F(NormsOnCard, OfWhatFollowsTheNorm) {
  const std::vector<Tensor> in = operands();
  const auto one_node = [&](const std::function<Tensor()>& f) {
    const Graph g = joined(
        in, [&] { return Tensors{f()}; }, 3e-2);
    EXPECT_EQ(count(g, "conv_norm"), 1) << to_string(g);
    return g.nodes.size() == 1;
  };
  EXPECT_TRUE(one_node([&] { return relu(norm(in, conv(in))); }));
  EXPECT_TRUE(one_node([&] { return relu(in[kResidual] + norm(in, conv(in))); }));
  EXPECT_TRUE(one_node([&] { return norm(in, conv(in)) + in[kResidual]; }));
  EXPECT_FALSE(one_node([&] { return relu(norm(in, conv(in))) + in[kResidual]; }));
  EXPECT_FALSE(one_node([&] { return norm(in, conv(in)) * in[kResidual]; }));
  EXPECT_FALSE(one_node([&] {
    return norm(in, conv(in), {in[kResidual], false}) + in[kResidual];
  }));
}
TEST_F(NormsOnCard, ABranchIsTheResidualOfTheOther) {
  const std::vector<Tensor> in = operands();
  EXPECT_EQ(norms(in,
                  [&] {
                    return norm(in, conv(in), {norm(in, conv2d(in[kX], in[kW] * 0.5)), true});
                  }),
            2);
}
TEST_F(NormsOnCard, NotOfOtherValues) {
  const std::vector<Tensor> in = operands();
  EXPECT_EQ(norms(in, [&] { return norm(in, conv(in) + in[kResidual]); }), 0);
  EXPECT_EQ(norms(in, [&] { return norm(in, in[kResidual]); }), 0);
  EXPECT_EQ(norms(in,
                  [&] {
                    const Tensor y = conv(in);
                    return norm(in, y) * y;
                  }),
            0)
      << "another reads the convolution";
  // A residual that lies otherwise would be copied.
  const Tensor turned = drawn({3, 16, 4, 3}, 8);
  std::vector<Tensor> more = in;
  more.push_back(turned);
  EXPECT_EQ(norms(more, [&] { return norm(in, conv(in), {turned, true}); }), 0);
  // Scales and shifts that are no batch-norm's.
  const auto beside = [](const Tensor& t) { return reshape(t, {1, 16, 1, 1}); };
  const auto affine = [&](const Tensor& scale, const Tensor& shift) {
    return norms(
        in, [&] { return mul_add(conv(in).to(kF32), beside(scale), beside(shift)).to(kBF16); });
  };
  EXPECT_EQ(affine(in[kWeight], in[kBias]), 0);
  EXPECT_EQ(
      norms(
          in,
          [&] {
            const Tensor scale = rsqrt(in[kVar] + 1e-5), other = rsqrt(in[kVar] + 1e-3);
            return mul_add(conv(in).to(kF32), beside(scale), beside(-in[kMean] * other)).to(kBF16);
          }),
      0)
      << "the shift has another scale";
  EXPECT_EQ(norms(in, [&] { return norm(in, mul_add(conv(in), in[kResidual], in[kResidual])); }), 0)
      << "scales of single elements";
  more = in;
  more.push_back(drawn({1}, 9, kF32));
  EXPECT_EQ(
      norms(
          more,
          [&] {
            const Tensor scale = rsqrt(in[kVar] + 1e-5) * more.back();
            return mul_add(conv(in).to(kF32), beside(scale), beside(-in[kMean] * scale)).to(kBF16);
          }),
      0)
      << "one weight of all channels";
}
TEST_F(NormsOnCard, NotInF64NorInDeterministicModeNorInTraining) {
  std::vector<Tensor> wide = operands(kF64), in = operands();
  for (size_t i : {kMean, kVar, kWeight, kBias}) wide[i] = wide[i].to(kF64);
  EXPECT_EQ(norms(wide, [&] { return norm(wide, conv(wide)); }), 0);
  EXPECT_EQ(norms(in, [&] { return batch_norm_moments(conv(in), in[kWeight], {}, 1e-5).y; }), 0);
  const DeterministicScope deterministic;
  EXPECT_EQ(norms(in, [&] { return norm(in, conv(in)); }), 0);
}
// Operands that are overwritten before the residual is there: of the convolution, and a moment.
TEST_F(NormsOnCard, NotPastAWrite) {
  for (int written : {-1, int(kX), int(kVar)}) {
    const std::vector<Tensor> in = operands();
    Trace trace({.inputs = in});
    const Tensor y = norm(in, conv(in));
    if (written >= 0) fill_(in[size_t(written)], 1);
    Graph g = trace.finish(Tensors{y + in[kResidual] * 2.0});
    run_passes(g);
    EXPECT_EQ(count(g, "conv_norm"), written < 0) << written << to_string(g);
  }
}
TEST(Norms, NotOnTheCpu) {
  const std::vector<Tensor> in{randn({2, 4, 5, 5}), randn({4, 4, 3, 3}), randn({4}), rand({4})};
  Trace trace({.inputs = in});
  Graph g = trace.finish(Tensors{batch_norm(conv2d(in[0], in[1]), in[2], in[3])});
  run_passes(g);
  EXPECT_EQ(count(g, "conv_norm"), 0) << to_string(g);
}

// ---- residual networks in inference

struct Evaluated {
  Tensor y;
  int64_t runs = 0, convolutions = 0;  // of a replay
};
Evaluated evaluate(Device card, int64_t depth, const char* skip) {
  const DeviceScope scope(card);
  auto model = models::resnet({.depth = depth, .classes = 8, .width = 8, .small_images = true});
  model->init(3);
  for (const NamedTensor& b : model->named_buffers())
    if (b.tensor.dtype() == kF32)  // running moments of each its own
      assign_(b.tensor, rand(b.tensor.shape(), {}, from_values<int64_t>({5, 1}, {2})) + 0.5);
  model->eval();
  const NoGrad no_history;
  auto f = compile(
      [&](const Tensor& x) {
        const Autocast cast(kBF16);
        return (*model)(x);
      },
      {.skip = skip});
  const Tensor x = rand({2, 3, 16, 16}, {}, from_values<int64_t>({7, 1}, {2}));
  Evaluated e;
  const bool counts = runs_on_card(nullptr, card) >= 0;
  for (int i = 0; i < 4; ++i) {
    const int64_t all = runs_on_card(nullptr, card), c = runs_on_card("cudnn convolution", card);
    e.y = f(x);
    e.runs = counts ? runs_on_card(nullptr, card) - all : -1;
    e.convolutions = runs_on_card("cudnn convolution", card) - c;
  }
  EXPECT_EQ(f.report().why_not, "");
  return e;
}
TEST_F(NormsOnCard, ResidualNetworksInFewerLaunches) {
  for (int64_t depth : {18, 50}) {
    const Evaluated apart = evaluate(card_, depth, "norms"), joined = evaluate(card_, depth, "");
    EXPECT_TRUE(allclose(joined.y.cpu().to(kF64), apart.y.cpu().to(kF64), 5e-2, 5e-2)) << depth;
    if (joined.runs < 0) continue;  // a card does not count
    // One for each batch-norm, but for those before additions, which one kernel did with the
    // other's.
    EXPECT_EQ(apart.runs - joined.runs, depth == 18 ? 20 - 3 : 53 - 4);
    EXPECT_EQ(joined.convolutions, depth == 18 ? 20 : 53);
  }
}

}  // namespace
}  // namespace tessera::compiler
