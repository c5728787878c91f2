// What products compute beside themselves, on devices that do that for nothing: GELU, its gradient
// and gradients of biases.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include "compile/compile.h"
#include "compile/ir/interpreter.h"
#include "compile/passes/passes.h"
#include "compile/record/trace.h"
#include "core/core.h"
#include "core/tensor/device_runtime.h"
#include "tests/compile/training.h"
#include "tests/support/on_card.h"

namespace tessera::compiler {
namespace {

class EpiloguesOnCard : public test::OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (!IsSkipped() && !runtime_of(card_).has_epilogues())
      GTEST_SKIP() << "products of this device have no epilogues";
  }
  Tensor drawn(const Shape& shape, int64_t key, DType t = kBF16) {
    return (rand(shape, {.device = kCPU}, from_values<int64_t>({key, 1}, {2})) - 0.5)
        .to(t)
        .to(card_);
  }
  /// x [2, 5, 16], a layer of `width` and its bias, and the weight of the next layer.
  std::vector<Tensor> layers(int64_t width = 24, DType t = kBF16) {
    return {drawn({2, 5, 16}, 1, t), drawn({width, 16}, 2, t), drawn({width}, 3, t),
            drawn({16, width}, 4, t)};
  }
  static int count(const Graph& g, std::string_view op) {
    int n = 0;
    for (const Node& node : g.nodes) n += node.prim->name() == op;
    return n;
  }
  /// The graph that the passes make of `f`, which computes what `f` does.
  Graph joined(const std::vector<Tensor>& in, const std::function<Tensors()>& f) {
    Trace trace({.inputs = in});
    const Graph before = trace.finish(f());
    Graph after = before;
    run_passes(after);
    const Tensors want = interpret(before, in), got = interpret(after, in);
    for (size_t i = 0; i < want.size(); ++i) {
      // Roundings, of which sums over rows have as many as terms.
      const double bound = want[i].dtype() == kBF16  ? 1.6e-2
                           : want[i].dtype() == kF16 ? 2e-3
                                                     : 2e-6;
      EXPECT_TRUE(allclose(got[i].cpu().to(kF64), want[i].cpu().to(kF64), bound, bound))
          << "result " << i << to_string(after);
    }
    return after;
  }
  int gelus(const std::vector<Tensor>& in, const std::function<Tensors()>& f) {
    return count(joined(in, f), "contract_gelu");
  }
};

Tensor up(const std::vector<Tensor>& in) { return linear(in[0], in[1], in[2]); }

TEST_F(EpiloguesOnCard, GeluBetweenProducts) {
  for (DType t : {kBF16, kF16}) {
    const std::vector<Tensor> in = layers(24, t);
    EXPECT_EQ(gelus(in, [&]() -> Tensors { return {linear(gelu_tanh(up(in)), in[3])}; }), 1);
    // What GELU reads is a result too.
    EXPECT_EQ(gelus(in,
                    [&]() -> Tensors {
                      const Tensor x = up(in);
                      return {linear(gelu_tanh(x), in[3]), x};
                    }),
              1);
  }
}
TEST_F(EpiloguesOnCard, GeluStaysWhereTheLibraryHasAnotherOrKernelsReadIt) {
  const std::vector<Tensor> in = layers(), whole = layers(24, kF32), odd = layers(20);
  const auto second = [](const std::vector<Tensor>& of, const Tensor& y) -> Tensors {
    return {linear(y, of[3])};
  };
  EXPECT_EQ(gelus(in, [&] { return second(in, gelu(up(in))); }), 0) << "the erf form";
  EXPECT_EQ(gelus(whole, [&] { return second(whole, gelu_tanh(up(whole))); }), 0) << "f32";
  EXPECT_EQ(gelus(odd, [&] { return second(odd, gelu_tanh(up(odd))); }), 0) << "rows of 20";
  EXPECT_EQ(gelus(in, [&] { return second(in, gelu_tanh(up(in)) * 2.0); }), 0) << "a factor";
  EXPECT_EQ(gelus(in, [&] { return second(in, gelu_tanh(linear(in[0], in[1]))); }), 0) << "no bias";
  const DeterministicScope deterministic;
  EXPECT_EQ(gelus(in, [&] { return second(in, gelu_tanh(up(in))); }), 0);
}

/// Gradients of two layers, of which the first has a bias.
Tensors gradients(const std::vector<Tensor>& in, const std::function<Tensor(Tensor)>& activation) {
  std::vector<Tensor> leaves;
  for (const Tensor& t : in) leaves.push_back(t.detach().requires_grad_());
  const Tensor root[] = {linear(activation(up(leaves)), leaves[3]).to(kF32).square().sum()};
  return grad(root, leaves);
}
TEST_F(EpiloguesOnCard, GradientsOfGeluAndItsBias) {
  const auto tanh_form = [](Tensor x) { return gelu_tanh(x); };
  for (DType t : {kBF16, kF16}) {
    const std::vector<Tensor> in = layers(24, t);
    const Graph g = joined(in, [&] { return gradients(in, tanh_form); });
    EXPECT_EQ(count(g, "contract_gelu"), 1) << to_string(g);
    EXPECT_EQ(count(g, "contract_gelu_grad"), 1) << to_string(g);
    EXPECT_EQ(count(g, "contract_sums"), 0) << "the sum is that of the result above";
  }
  const auto joined_of = [&](const std::vector<Tensor>& in, auto activation) {
    return count(joined(in, [&] { return gradients(in, activation); }), "contract_gelu_grad");
  };
  EXPECT_EQ(joined_of(layers(), [](Tensor x) { return gelu(x); }), 0) << "the erf form";
  EXPECT_EQ(joined_of(layers(24, kF32), tanh_form), 0) << "f32";
  EXPECT_EQ(joined_of(layers(20), tanh_form), 0) << "rows of 20";
  const DeterministicScope deterministic;
  EXPECT_EQ(joined_of(layers(), tanh_form), 0);
}

TEST_F(EpiloguesOnCard, GradientsOfBiasesBesideThoseOfWeights) {
  for (DType t : {kF32, kBF16, kF16}) {
    std::vector<Tensor> in = layers(24, t);
    in.push_back(drawn({2, 5, 24}, 5, t)), in.push_back(drawn({24, 24}, 6, t));
    const auto sums = [&](const std::function<Tensor()>& cotangent) {
      const Graph g = joined(in, [&] {
        const Tensor leaves[] = {in[1].detach().requires_grad_(), in[2].detach().requires_grad_()};
        const Tensor root[] = {linear(in[0], leaves[0], leaves[1])}, from[] = {cotangent()};
        return grad(root, leaves, from);
      });
      return count(g, "contract_sums");
    };
    EXPECT_EQ(sums([&] { return in[4]; }), 1);
    EXPECT_EQ(sums([&] { return matmul(in[4], in[5]); }), 1);
    EXPECT_EQ(sums([&] { return in[4] * 2.0; }), 0) << "the kernel of the factor sums it";
    const DeterministicScope deterministic;
    EXPECT_EQ(sums([&] { return in[4]; }), 0);
  }
}

// What would be joined is read elsewhere, is overwritten in between, or is made too late.
TEST_F(EpiloguesOnCard, NotWhereAnotherReadsTheProductOrItsOperandsChange) {
  const std::vector<Tensor> in{drawn({6, 16}, 1), drawn({16, 24}, 2), drawn({6, 24}, 3)};
  using Rest = std::function<Tensors()>;
  const auto made = [&](const std::function<Tensors(const Tensor&, const Rest&)>& f) {
    const Tensor a = in[0].clone();
    Trace trace({.inputs = {a, in[1], in[2]}});
    Graph g = trace.finish([&] {
      Tensor of[] = {matmul(a, in[1]), in[2]};
      return f(of[0], [&]() -> Tensors {
        const Tensor made = dispatch1(pointwise_primitive("gelu_tanh_grad"), of);
        return {made, sum(made, {0}, true)};
      });
    }());
    run_passes(g);
    return count(g, "contract_gelu_grad");
  };
  EXPECT_EQ(made([](const Tensor&, const auto& rest) { return rest(); }), 1);
  EXPECT_EQ(made([](const Tensor& p, const auto& rest) {
              Tensors t = rest();
              t.push_back(p);
              return t;
            }),
            0);
  EXPECT_EQ(made([](const Tensor& p, const auto& rest) {
              Tensors t = rest();
              t.push_back(p * 2.0);
              return t;
            }),
            0);
  EXPECT_EQ(made([&](const Tensor&, const auto& rest) {
              fill_(in[1], 1);
              return rest();
            }),
            0);
  // A sum that is needed before the other operand of the product is there.
  Trace trace({.inputs = in});
  const Tensor s = sum(in[0], {0}, true), x = matmul(s, in[1]);
  Graph g = trace.finish(Tensors{contract("an,ak->nk", in[0], in[2] + x)});
  run_passes(g);
  EXPECT_EQ(count(g, "contract_sums"), 0) << to_string(g);
}

// ---- a step of training

/// How often the virtual driver ran an op, or any; -1 on a card, which does not count.
int64_t runs_of(const char* op, Device card) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  const auto ask =
      reinterpret_cast<int (*)(const char*, unsigned long long*)>(dlsym(driver, "vgpu_counters"));
  if (!ask) return -1;
  runtime_of(card).synchronize(stream_of(card));
  unsigned long long counters[3];
  ask(op, counters);
  return int64_t(counters[0]);
}

struct Runs {
  int64_t all, gelu, gelu_grad, sums;
  Runs operator-(const Runs& o) const {
    return {all - o.all, gelu - o.gelu, gelu_grad - o.gelu_grad, sums - o.sums};
  }
};
Runs runs(Device card) {
  return {runs_of(nullptr, card), runs_of("cublasLt GELU_AUX_BIAS", card),
          runs_of("cublasLt DGELU_BGRAD", card), runs_of("cublasLt BGRADB", card)};
}

// GELU, its gradient and the sum of the gradients of attention's bias, in each of two blocks.
TEST_F(EpiloguesOnCard, OfAStepOfTrainingInMixedPrecision) {
  const DeviceScope scope(card_);
  models::GptOptions options{.vocab = 16, .context = 8, .layers = 2, .heads = 2, .dim = 16};
  options.bias = options.tanh_gelu = true;
  constexpr int kSteps = 6;
  const auto train = [&](const CompileOptions& how, std::vector<float>& losses) {
    test::Training training(options);
    auto step = compile(
        [&](const Tensor& ids, const Tensor& targets) {
          const Autocast cast(kBF16);
          return training.step(ids, targets);
        },
        how);
    Runs last{}, before{};
    for (int k = 0; k < kSteps; ++k) {
      const auto [ids, targets] = test::batch(k);
      before = runs(card_);
      losses.push_back(step(ids.to(card_), targets.to(card_))[0].cpu().item<float>());
      last = runs(card_) - before;
    }
    EXPECT_EQ(step.report().unoptimised, "");
    return last;
  };
  std::vector<float> apart, joined;
  const Runs a = train({.skip = "epilogues"}, apart), b = train({}, joined);
  for (int k = 0; k < kSteps; ++k) EXPECT_NEAR(joined[size_t(k)], apart[size_t(k)], 2e-2) << k;
  if (a.all < 0) return;
  EXPECT_EQ(a.gelu + a.gelu_grad + a.sums, 0);
  EXPECT_EQ(b.gelu, 2);
  EXPECT_EQ(b.gelu_grad, 2);
  EXPECT_EQ(b.sums, 2);
  EXPECT_EQ(b.all, a.all - 6) << "each of them was a kernel";
}

}  // namespace
}  // namespace tessera::compiler
