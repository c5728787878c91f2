// What products compute beside themselves, on devices that do that for nothing: GELU, its gradient
// and gradients of biases.
#include <gtest/gtest.h>

#include <cmath>

#include "collectives/loopback/run_ranks.h"
#include "compile/compile.h"
#include "core/dispatch/context.h"
#include "parallel/ddp.h"
#include "tests/compile/training.h"
#include "tests/support/joined_on_card.h"

namespace tessera::compiler {
namespace {

using test::count, test::runs_on_card;

class EpiloguesOnCard : public test::ProductsOnCard {
 protected:
  /// x [2, 5, 16], a layer of `width` and its bias, and the weight of the next layer.
  std::vector<Tensor> layers(int64_t width = 24, DType t = kBF16) {
    return {drawn({2, 5, 16}, 1, t), drawn({width, 16}, 2, t), drawn({width}, 3, t),
            drawn({16, width}, 4, t)};
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

// Gradients of micro-batches: the first is the sum so far, to which products add the others.
TEST_F(EpiloguesOnCard, GradientsAreAddedByTheirProducts) {
  const std::vector<Tensor> in{drawn({2, 5, 16}, 1, kF32), drawn({2, 5, 16}, 2, kF32),
                               drawn({2, 5, 16}, 3, kF32), drawn({24, 16}, 4, kF32),
                               drawn({24, 16}, 5, kF32)};
  const auto train = [&](std::optional<DType> dtype, bool has_gradient) {
    const Tensor w = in[3].detach().requires_grad_();
    if (has_gradient) w.set_grad(in[4]);
    for (int k = 0; k < 3; ++k) {
      std::optional<Autocast> cast;
      if (dtype) cast.emplace(*dtype);
      linear(in[size_t(k)], w).to(kF32).square().sum().backward();
    }
    return Tensors{w.grad()};
  };
  for (std::optional<DType> t : {std::optional<DType>(), {kBF16}, {kF16}})
    for (bool has_gradient : {false, true}) {
      const double bound = !t ? 1e-5 : *t == kF16 ? 2e-3 : 1.6e-2;
      const Graph g = joined(
          in, [&] { return train(t, has_gradient); }, bound);
      EXPECT_EQ(count(g, "contract_add"), has_gradient ? 3 : 2) << to_string(g);
      EXPECT_EQ(count(g, "contract_wide"), t && !has_gradient ? 1 : 0) << to_string(g);
    }
  const DeterministicScope deterministic;
  const Graph g = joined(in, [&] { return train(kBF16, true); });
  EXPECT_EQ(count(g, "contract_add") + count(g, "contract_wide"), 0);
}

// A table whose rows are looked up and that is the head too, as GPT-2's. Rows that were looked up
// are added to the product, which adds to the gradients of the micro-batches before.
TEST_F(EpiloguesOnCard, GradientsOfATiedTable) {
  std::vector<Tensor> in{drawn({8, 16}, 1, kF32), drawn({8, 16}, 2, kF32)};
  for (int64_t k = 0; k < 3; ++k)
    in.push_back(from_values<int64_t>({2, 6, 2, 0, 6, 2, k}, {7}).to(card_));
  const auto train = [&](std::optional<DType> dtype, bool has_gradient, int batches) {
    const Tensor table = in[0].detach().requires_grad_();
    if (has_gradient) table.set_grad(in[1]);
    for (int k = 0; k < batches; ++k) {
      std::optional<Autocast> cast;
      if (dtype) cast.emplace(*dtype);
      linear(embedding(in[size_t(2 + k)], table), table).to(kF32).square().sum().backward();
    }
    return Tensors{table.grad()};
  };
  for (std::optional<DType> t : {std::optional<DType>(), {kBF16}, {kF16}})
    for (bool has_gradient : {false, true})
      for (int batches : {1, 3}) {
        const double bound = !t ? 1e-5 : *t == kF16 ? 2e-3 : 1.6e-2;
        const Graph g = joined(
            in, [&] { return train(t, has_gradient, batches); }, bound);
        EXPECT_EQ(count(g, "add_embedding_grad"), batches) << to_string(g);
        EXPECT_EQ(count(g, "embedding_grad"), 0) << to_string(g);
        EXPECT_EQ(count(g, "contract_add"), batches - !has_gradient) << to_string(g);
        // That of what was looked up, and of the first micro-batch that of the table.
        EXPECT_EQ(count(g, "contract_wide"), t ? batches + !has_gradient : 0) << to_string(g);
      }
  const DeterministicScope deterministic;
  const Graph g = joined(in, [&] { return train(kBF16, true, 2); });
  EXPECT_EQ(count(g, "contract_add") + count(g, "add_embedding_grad"), 0);
}

// The rows have the bits of a sum of the table and its gradient.
TEST_F(EpiloguesOnCard, RowsAreAddedToTheBit) {
  for (DType t : {kF32, kF64})
    for (int64_t width : {37, 64})
      for (int64_t padding_idx : {-1, 2}) {
        std::vector<int64_t> ids;
        for (int64_t i = 0; i < 200; ++i) ids.push_back(i * i % 7);  // never 3, 5 and 6
        const std::vector<Tensor> in{
            drawn({7, width}, 1, t), from_values<int64_t>(ids, {4, 50}).to(card_),
            (exp(drawn({4, 50, width}, 2, kF32) * 6.0) * drawn({4, 50, width}, 3, kF32)).to(t)};
        const auto f = [&] {
          const Tensor table = in[0].detach().requires_grad_();
          const Tensor root[] = {embedding(in[1], table, padding_idx)};
          return Tensors{in[0] + grad(root, {{table}}, {{in[2]}})[0]};
        };
        const Tensor want = f()[0];
        Trace trace({.inputs = in});
        Graph g = trace.finish(f());
        run_passes(g);
        EXPECT_EQ(count(g, "add_embedding_grad"), 1) << to_string(g);
        const Tensor before = in[0].clone();
        test::expect_same_bits(interpret(g, in)[0], want, "a sum");
        test::expect_same_bits(in[0], before, "what was added to");
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
  // Sums of gradients, into memory and into none.
  const auto added = [&](const std::function<void(Tensor p, Tensor a, Tensor sum)>& f,
                         Phase phase) {
    const Tensor a = in[0].clone(), sum = in[2].clone();
    Trace trace({.inputs = {a, in[1], sum}});
    const Scoped<Phase> now(context().phase, phase);
    f(matmul(a, in[1]), a, sum);
    Graph g = trace.finish(Tensors{sum});
    run_passes(g);
    return count(g, "contract_add");
  };
  const auto add_to_sum = [](Tensor p, Tensor, Tensor sum) { add_(sum, p); };
  EXPECT_EQ(added(add_to_sum, Phase::kBackward), 1);
  EXPECT_EQ(added(add_to_sum, Phase::kForward), 0) << "no gradient";
  const auto after_a_write = [](Tensor p, Tensor a, Tensor sum) { fill_(a, 1), add_(sum, p); };
  EXPECT_EQ(added(after_a_write, Phase::kBackward), 0);
  const auto read_twice = [](Tensor p, Tensor, Tensor sum) { add_(sum, p), add_(sum, p * p); };
  EXPECT_EQ(added(read_twice, Phase::kBackward), 0);
  const auto twice = [](Tensor p, Tensor, Tensor sum) {
    Tensor terms[] = {p, p};
    assign({&sum, 1}, pointwise_primitive("add"), terms);
  };
  EXPECT_EQ(added(twice, Phase::kBackward), 0);
  const auto fused = [](Tensor p, Tensor, Tensor sum) { assign_(sum, (sum + p) * 2.0); };
  EXPECT_EQ(added(fused, Phase::kBackward), 0) << "the factor's kernel adds";
  {
    Trace trace({.inputs = in});
    const Scoped<Phase> now(context().phase, Phase::kBackward);
    const Tensor first = matmul(in[0], in[1]), second = matmul(in[0] * 2.0, in[1]);
    Graph g = trace.finish(Tensors{first + second});
    run_passes(g);
    EXPECT_EQ(count(g, "contract_add"), 1) << "the second adds to the first";
    EXPECT_EQ(g.nodes.back().prim->name(), "contract_add") << to_string(g);
  }
  // Casts that are kernels of their own, and those that other kernels make.
  const auto wide = [&](double factor) {
    Trace trace({.inputs = in});
    const Scoped<Phase> now(context().phase, Phase::kBackward);
    const Tensor p = matmul(in[0], in[1]).to(kF32);
    Graph g = trace.finish(Tensors{factor == 1 ? p : p * factor});
    run_passes(g);
    return count(g, "contract_wide");
  };
  EXPECT_EQ(wide(1), 1);
  EXPECT_EQ(wide(2), 0);
  // A sum that is needed before the other operand of the product is there.
  Trace trace({.inputs = in});
  const Tensor s = sum(in[0], {0}, true), x = matmul(s, in[1]);
  Graph g = trace.finish(Tensors{contract("an,ak->nk", in[0], in[2] + x)});
  run_passes(g);
  EXPECT_EQ(count(g, "contract_sums"), 0) << to_string(g);
}

// ---- a step of training

struct Runs {
  int64_t all, gelu, gelu_grad, sums, added;
  Runs operator-(const Runs& o) const {
    return {all - o.all, gelu - o.gelu, gelu_grad - o.gelu_grad, sums - o.sums, added - o.added};
  }
};
Runs runs(Device card) {
  return {runs_on_card(nullptr, card), runs_on_card("cublasLt GELU_AUX_BIAS", card),
          runs_on_card("cublasLt DGELU_BGRAD", card), runs_on_card("cublasLt BGRADB", card),
          runs_on_card("cublasLt DEFAULT + C", card)};
}

/// What the last of some steps of a GPT of one block runs, each of `micro_batches`; `ddp`: with
/// a reducer.
struct Trained {
  std::vector<float> losses;
  Runs last{};
};
Trained train(Device card, const char* skip, std::optional<DType> dtype, int micro_batches,
              bool ddp = false) {
  const DeviceScope scope(card);
  models::GptOptions options{.vocab = 16, .context = 8, .layers = 1, .heads = 2, .dim = 16};
  options.bias = options.tanh_gelu = true;
  test::Training training(options);
  std::shared_ptr<parallel::Reducer> reducer;
  if (ddp) reducer = parallel::make_reducer(*training.model, {});
  auto step = compile(
      [&](const Tensor& ids, const Tensor& targets) {
        std::optional<Autocast> cast;
        if (dtype) cast.emplace(*dtype);
        for (int k = 1; k < micro_batches; ++k) {
          if (reducer) reducer->set_sync(false);
          const auto part = [&](const Tensor& t) { return narrow(t, 0, k - 1, 1); };
          training.model->loss(part(ids), part(targets)).backward();
        }
        if (reducer) reducer->set_sync(true);
        return training.step(ids, targets);
      },
      {.skip = skip});
  Trained t;
  for (int k = 0; k < 6; ++k) {
    const auto [ids, targets] = test::batch(k);
    const Runs before = runs(card);
    t.losses.push_back(step(ids.to(card), targets.to(card))[0].cpu().item<float>());
    t.last = runs(card) - before;
  }
  EXPECT_EQ(step.report().unoptimised, "");
  EXPECT_GE(step.report().replays, 3) << step.report().why_not;
  return t;
}
void expect_close(const Trained& a, const Trained& b, double bound) {
  for (size_t k = 0; k < a.losses.size(); ++k) EXPECT_NEAR(a.losses[k], b.losses[k], bound) << k;
}

// GELU, its gradient, the sum of the gradients of attention's bias, and casts of the gradients of
// four more weights, one of them the embedding's.
TEST_F(EpiloguesOnCard, OfAStepOfTrainingInMixedPrecision) {
  const Trained a = train(card_, "epilogues", kBF16, 1), b = train(card_, "", kBF16, 1);
  expect_close(a, b, 2e-2);
  if (a.last.all < 0) return;
  EXPECT_EQ(a.last.gelu + a.last.gelu_grad + a.last.sums + a.last.added, 0);
  EXPECT_EQ(b.last.gelu, 1);
  EXPECT_EQ(b.last.gelu_grad, 1);
  EXPECT_EQ(b.last.sums, 1);
  EXPECT_EQ(b.last.all, a.last.all - 7) << "each of them was a kernel";
}
// Three micro-batches, with five weights each, one of them the embedding's.
TEST_F(EpiloguesOnCard, OfAStepWithMicroBatches) {
  const Trained a = train(card_, "epilogues", {}, 3), b = train(card_, "", {}, 3);
  expect_close(a, b, 2e-5);
  if (a.last.all < 0) return;
  EXPECT_EQ(a.last.added, 0);
  EXPECT_EQ(b.last.added, 2 * 5);
  EXPECT_EQ(b.last.sums, 1);
  EXPECT_EQ(b.last.all, a.last.all - 5 - 1) << "a kernel added three gradients of each weight";
}
// Gradients lie in buckets, to which products add, but not the embedding's: its rows are added too.
TEST_F(EpiloguesOnCard, OfAStepWithBuckets) {
  run_ranks(1, [&](ProcessGroup&) {
    const Trained a = train(card_, "epilogues", {}, 3, true), b = train(card_, "", {}, 3, true);
    expect_close(a, b, 2e-5);
    if (a.last.all < 0) return;
    EXPECT_EQ(a.last.added, 0);
    EXPECT_EQ(b.last.added, 2 * 4);
    EXPECT_LE(b.last.all, a.last.all - 2 * 4) << "each of them was a kernel";
  });
}

// The precision of f32 products changes between two runs of a graph.
TEST_F(EpiloguesOnCard, TF32IsFollowedByCompiledFunctions) {
  const Tensor a = full({8, 16}, 1 + std::ldexp(1.0, -12), {.dtype = kF32, .device = card_}),
               one = eye(16, {.dtype = kF32, .device = card_});
  auto f = compile([&](const Tensor& x) { return matmul(matmul(x, one), one); });
  const auto first = [&] { return f(a).cpu().values<float>()[0]; };
  for (int k = 0; k < 5; ++k) EXPECT_GT(first(), 1);
  EXPECT_EQ(f.report().device_graphs, 1);
  set_float32_matmul_precision("high");
  for (int k = 0; k < 5; ++k) EXPECT_EQ(first(), 1) << k;
  set_float32_matmul_precision("highest");
  EXPECT_GT(first(), 1);
}

}  // namespace
}  // namespace tessera::compiler
