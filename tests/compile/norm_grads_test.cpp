// Gradients of convolutions that mask and sum for the derivative of the batch-norm in front of
// them, on devices with a kernel for that.
#include <gtest/gtest.h>

#include "compile/compile.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/conv_grad_norm.h"
#include "core/primitive/primitive_of.h"
#include "examples/models/resnet.h"
#include "tests/support/checkpointed.h"
#include "tests/support/joined_on_card.h"

namespace tessera::compiler {
namespace {

using test::count, test::counts_on_card, test::runs_on_card;

class NormGradsOnCard : public test::JoinedOnCard {
 protected:
  enum { kX, kFirst, kSecond, kWeight, kBias, kResidual, kSeed };
  std::vector<Tensor> operands(DType t = kBF16) {
    const auto last = [&](int64_t key) {
      return permute(drawn({3, 6, 5, 8}, key, t), {0, 3, 1, 2});
    };
    return {last(1),
            drawn({8, 8, 3, 3}, 2, t),
            drawn({8, 8, 3, 3}, 3, t),
            drawn({8}, 4, kF32) + 1.0,
            drawn({8}, 5, kF32),
            last(6),
            last(7)};
  }
  static Tensor conv(const Tensor& x, const Tensor& w) { return conv2d(x, w, {}, {.padding = 1}); }
  static Tensor norm(const std::vector<Tensor>& in, const NormThen& then = {}) {
    return batch_norm_moments(conv(in[kX], in[kFirst]), in[kWeight], in[kBias], 1e-5, then).y;
  }
  /// What the passes make of the gradients of f by all that it reads.
  static Graph after(std::vector<Tensor> in,
                     const std::function<Tensor(const std::vector<Tensor>&)>& f) {
    for (size_t i = 0; i < kSeed; ++i) in[i] = in[i].detach().requires_grad_();
    const Graph g = joined(
        in,
        [&] {
          Tensors all;
          const std::vector<Tensor> leaves(in.begin(), in.begin() + kSeed);
          for (const Tensor& g : grad({{f(in)}}, leaves, {{in[kSeed]}}))
            if (g.defined()) all.push_back(g);
          return all;
        },
        3e-2);
    EXPECT_EQ(count(g, "batch_norm_grad_apply"), count(g, "conv_grad_norm")) << to_string(g);
    return g;
  }
  /// What they make of norm()'s derivative by the `sum` of the gradient of a convolution behind it.
  static Graph by_sum(std::vector<Tensor> in, const std::function<Tensor(const Tensor&)>& sum) {
    Trace trace({.inputs = in});
    const Tensor of_z = dispatch1(conv_grad_input_op({{{1, 1}, {1, 1}, {1, 1}, {1, 1}, 1}, {6, 5}}),
                                  tessera::operands(Tensor(in[kSeed]), Tensor(in[kSecond])));
    for (size_t i : {kX, kWeight, kResidual}) in[i] = in[i].detach().requires_grad_();
    const Tensor z = norm(in, {in[kResidual], true});
    Graph g = trace.finish(grad({{z}}, {{in[kX], in[kWeight], in[kResidual]}}, {{sum(of_z)}}));
    run_passes(g);
    return g;
  }
  /// How many gradients of convolutions sum, and how many of them add another gradient.
  using Joined = std::pair<int, int>;
  static Joined grads(const std::vector<Tensor>& in,
                      const std::function<Tensor(const std::vector<Tensor>&)>& f) {
    Joined n;
    for (const Node& node : after(in, f).nodes)
      if (node.prim->name() == "conv_grad_norm")
        ++n.first, n.second += attributes_of<ConvNormAttributes>(*node.prim).norm.form.residual;
    return n;
  }
};

TEST_F(NormGradsOnCard, OfNormsOfEachKind) {
  for (DType t : {kBF16, kF16})
    for (int form = 0; form < 16; ++form) {
      SCOPED_TRACE(form);
      const Graph g = after(operands(t), [&](const std::vector<Tensor>& in) {
        const Tensor y = conv(in[kX], in[kFirst]);
        const NormThen then{form & 4 ? in[kResidual] : Tensor(), bool(form & 8)};
        const Tensor z = batch_norm_moments(y, form & 1 ? in[kWeight] : Tensor(),
                                            form & 2 ? in[kBias] : Tensor(), 1e-5, then)
                             .y;
        return conv(z, in[kSecond]);
      });
      // Without a relu the residual's gradient is what the convolution gives: two read it.
      const bool alone = !(form & 4) || form & 8;
      EXPECT_EQ(count(g, "conv_grad_norm"), alone) << to_string(g);
      EXPECT_EQ(count(g, "batch_norm_grad"), !alone) << to_string(g);
    }
}
// The other way of a residual block, and a second convolution.
TEST_F(NormGradsOnCard, WithAnotherGradient) {
  const std::vector<Tensor> in = operands();
  EXPECT_EQ(grads(in,
                  [](const std::vector<Tensor>& in) {
                    const Tensor z = norm(in, {in[kResidual], true});
                    return conv(z, in[kSecond]) + z;
                  }),
            (Joined{1, 1}));
  EXPECT_EQ(grads(in,
                  [](const std::vector<Tensor>& in) {
                    const Tensor z = norm(in, {in[kResidual], true});
                    return conv(z, in[kSecond]) + conv(z, in[kFirst]);
                  }),
            (Joined{1, 1}));
  EXPECT_EQ(grads(in,
                  [](const std::vector<Tensor>& in) {
                    const Tensor z = norm(in, {in[kResidual], true});
                    const Tensor y = conv(z, in[kSecond]);
                    return batch_norm_moments(conv(y, in[kFirst]), in[kWeight], in[kBias], 1e-3,
                                              {z, true})
                        .y;
                  }),
            (Joined{1, 1}))
      << "the gradient of the residual is what is added";
}
TEST_F(NormGradsOnCard, NotOfOtherGradients) {
  const std::vector<Tensor> in = operands();
  using In = const std::vector<Tensor>&;
  EXPECT_EQ(grads(in,
                  [](In in) {
                    return norm(in, {in[kResidual], true}) * in[kSecond].sum();
                  }),
            Joined())
      << "no convolution is behind it";
  EXPECT_EQ(grads(in,
                  [](In in) {
                    return conv(norm(in, {in[kResidual], true}) * 2.0, in[kSecond]);
                  }),
            Joined());
  EXPECT_EQ(grads(in,
                  [](In in) {
                    const Tensor half = norm(in, {{}, true}).to(kF32);
                    return conv(half, in[kSecond].to(kF32)).to(kBF16) + in[kResidual];
                  }),
            Joined());
}
// A gradient that is added to itself, and one that lies otherwise and would be copied.
TEST_F(NormGradsOnCard, NotWithEveryOtherGradient) {
  std::vector<Tensor> in = operands();
  EXPECT_EQ(grads(in,
                  [](const std::vector<Tensor>& in) {
                    const Tensor z = norm(in, {{}, true});
                    return conv(z, in[kSecond]) + conv(z, in[kSecond]);
                  }),
            Joined());
  in.push_back(drawn({3, 8, 6, 5}, 8));
  for (bool first : {false, true}) {
    const Graph g =
        by_sum(in, [&](const Tensor& of_z) { return first ? of_z + in.back() : in.back() + of_z; });
    EXPECT_EQ(count(g, "conv_grad_norm"), 0) << to_string(g);
  }
}
TEST_F(NormGradsOnCard, NotWhereOthersReadTheGradient) {
  std::vector<Tensor> in = operands();
  for (size_t i = 0; i < kSeed; ++i) in[i] = in[i].detach().requires_grad_();
  for (bool result : {false, true}) {
    const Graph g = joined(
        in,
        [&]() -> Tensors {
          const Tensor z = norm(in, {{}, true}), y = conv(z, in[kSecond]),
                       of_z = grad({{y}}, {{z}}, {{in[kSeed]}}, {.retain_graph = true})[0];
          return {grad({{z}}, {{in[kX]}}, {{of_z}})[0], result ? of_z : of_z * 2.0};
        },
        3e-2);
    EXPECT_EQ(count(g, "conv_grad_norm"), 0) << to_string(g);
  }
}
TEST_F(NormGradsOnCard, NotInF32NorInDeterministicMode) {
  const auto f = [](const std::vector<Tensor>& in) {
    return conv(norm(in, {in[kResidual], true}), in[kSecond]);
  };
  EXPECT_EQ(grads(operands(kF32), f), Joined());
  EXPECT_EQ(grads(operands(), f), (Joined{1, 0}));
  const DeterministicScope deterministic;
  EXPECT_EQ(grads(operands(), f), Joined());
}
// The norm's operands are there only after the gradient of the convolution behind it.
TEST_F(NormGradsOnCard, NotBeforeItsOperands) {
  EXPECT_EQ(grads(operands(),
                  [](const std::vector<Tensor>& in) {
                    const Tensor w = in[kFirst].detach();
                    const Tensor z = checkpointed(in[kX], [w](const Tensor& x) {
                      return batch_norm_moments(conv(x, w), {}, {}, 1e-5, {{}, true}).y;
                    });
                    return conv(z, in[kSecond]);
                  }),
            Joined());
}
// The weight is overwritten between the gradient of the convolution and its sum with another.
TEST_F(NormGradsOnCard, NotPastAWrite) {
  for (bool writes : {false, true}) {
    const std::vector<Tensor> in = operands();
    const Graph g = by_sum(in, [&](const Tensor& of_z) {
      if (writes) fill_(in[kSecond], 1);
      return of_z + in[kSeed];
    });
    EXPECT_EQ(count(g, "conv_grad_norm"), writes ? 0 : 1) << to_string(g);
  }
}
TEST(NormGrads, NotOnTheCpu) {
  std::vector<Tensor> in{randn({2, 4, 5, 5}).to(kBF16), randn({4, 4, 3, 3}).to(kBF16)};
  for (Tensor& t : in) t = t.requires_grad_();
  Trace trace({.inputs = in});
  const Tensor y =
      conv2d(batch_norm_moments(conv2d(in[0], in[1]), {}, {}, 1e-5, {{}, true}).y, in[1]);
  Graph g = trace.finish(grad({{y}}, in, {{ones_like(y)}}));
  run_passes(g);
  EXPECT_EQ(count(g, "batch_norm_grad"), 1) << to_string(g);
}

// ---- residual networks in training

struct Trained {
  std::vector<Tensor> gradients;
  // Of a replay: launches, gradients by the library, bytes that are read and written.
  int64_t runs = 0, convolutions = 0, bytes = 0;
};
Trained train(Device card, int64_t depth, const char* skip) {
  const DeviceScope scope(card);
  auto model = models::resnet({.depth = depth, .classes = 8, .width = 8, .small_images = true});
  model->init(3);
  const Tensor x = rand({4, 3, 16, 16}, {}, from_values<int64_t>({7, 1}, {2})),
               y = from_values<int64_t>({1, 5, 2, 7}, {4}).to(card);
  std::vector<Tensor> parameters;
  for (const NamedTensor& p : model->named_parameters()) parameters.push_back(p.tensor);
  auto f = compile(
      [&](const Tensor& x, const Tensor& y) {
        const Autocast cast(kBF16);
        const Tensor loss = model->loss(x, y);
        const Tensors all = grad({{loss}}, parameters);
        return std::vector<Tensor>(all.begin(), all.end());
      },
      {.skip = skip});
  Trained now;
  for (int i = 0; i < 3; ++i) {
    const char* convolution = "cudnn convolution_data";
    const test::CardCounts before = counts_on_card(nullptr, card);
    const int64_t convolutions = runs_on_card(convolution, card);
    now.gradients = f(x, y);
    const test::CardCounts all = counts_on_card(nullptr, card);
    now.runs = all.runs < 0 ? -1 : all.runs - before.runs, now.bytes = all.bytes - before.bytes;
    now.convolutions = runs_on_card(convolution, card) - convolutions;
  }
  EXPECT_EQ(f.report().why_not, "");
  return now;
}
// How far gradients are from others, as a part of these.
double relative_distance(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double apart = 0, all = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const Tensor x = a[i].cpu().to(kF64), y = b[i].cpu().to(kF64);
    apart += sum(square(x - y)).item<double>(), all += sum(square(y)).item<double>();
  }
  return std::sqrt(apart / all);
}
// A launch less for each batch-norm whose gradient comes from a convolution without strides, and
// one for each sum of two gradients: the first norm and the second ones of the blocks but the last
// have such a sum, three of which have a gradient by strides, which are not joined in ResNet-18.
TEST_F(NormGradsOnCard, ResidualNetworksInFewerLaunches) {
  const char* asked = std::getenv("VGPU_CHECK");
  const bool checked = asked && std::string(asked) == "1";  // which is slow
  for (int64_t depth : {18, 50}) {
    if (checked && depth == 50) continue;
    const Trained apart = train(card_, depth, "norm_grads"), now = train(card_, depth, "");
    const double distance = relative_distance(now.gradients, apart.gradients);
    std::printf("ResNet-%ld: %ld launches, %ld with sums in gradients, which are %.3g apart\n",
                long(depth), long(apart.runs), long(now.runs), distance);
    EXPECT_LE(distance, 3e-2);
    if (now.runs < 0) continue;  // a card does not count
    EXPECT_EQ(now.convolutions, apart.convolutions);
    EXPECT_EQ(apart.runs - now.runs, depth == 18 ? 21 : 61);
    if (!checked) continue;
    std::printf("%ld bytes, %ld with sums in gradients\n", long(apart.bytes), long(now.bytes));
    EXPECT_LT(double(now.bytes), 0.95 * double(apart.bytes));
  }
}

}  // namespace
}  // namespace tessera::compiler
