#include "examples/bench/cases.h"

#include <fmt/core.h>

#include <memory>

#include "core/autograd/autograd.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "examples/bench/measure.h"

namespace tessera::bench {
namespace {

template <class F>
Batch repeat(F once) {
  return [once](int64_t n) mutable {
    for (int64_t i = 0; i < n; ++i) once();
  };
}
template <class F>
Case make_case(std::string name, F once, double bytes = 0, double flops = 0) {
  return {std::move(name), [once] { return repeat(once); }, bytes, flops};
}

constexpr int64_t kVocabulary = 50304;

}  // namespace

std::vector<Case> small_cases() {
  Tensor x = ones({16}), y = ones({16}), square = ones({4, 4}), tall = ones({16, 4}),
         one = ones({}), two = ones({});
  Tensor leaf = ones({16}), seed = ones({16});
  leaf.requires_grad_();
  return {
      make_case("empty", [] { keep(empty({16}).defined()); }),
      make_case("add", [=] { keep(add(x, y).defined()); }),
      make_case("add_grad", [=] { keep(add(leaf, y).defined()); }),
      make_case("add_backward",
                [=]() mutable {
                  backward(add(leaf, y), seed);
                  leaf.set_grad({});
                }),
      make_case("contract 16 x 4 x 4",
                [=] { keep(contract("ij,kj->ik", tall, square).defined()); }),
      make_case("mul_number", [=] { keep((x * 2.0).defined()); }),
      make_case("sum", [=] { keep(sum(x).defined()); }),
      make_case("add_0d", [=] { keep(add(one, two).defined()); }),
      make_case("item", [=] { keep(one.item<double>()); }),
      make_case("view",
                [=] {
                  keep(x.reshape({4, 4}).defined());
                }),
      make_case("transpose", [=] { keep(square.transpose(0, 1).defined()); }),
      make_case("slice", [=] { keep(slice(x, 0, 2, 10).defined()); }),
      make_case("select", [=] { keep(square[1].defined()); }),
      make_case("view_grad",
                [=] {
                  keep(leaf.reshape({4, 4}).defined());
                }),
  };
}

std::vector<Case> sharded_cases(const DeviceMesh& mesh) {
  const size_t axes = size_t(mesh.ndim());
  auto named = [&](const char* op) { return fmt::format("{} over {}", op, mesh.to_string()); };
  const Layout rows(axes, Shard(0)), whole(axes, Replicate());
  Tensor x = distribute(ones({16}), mesh, rows), y = distribute(ones({16}), mesh, rows),
         a = distribute(ones({16, 4}), mesh, rows), w = distribute(ones({4, 4}), mesh, whole);
  Tensor leaf = distribute(ones({16}), mesh, rows);
  leaf.requires_grad_();
  return {
      make_case(named("add"), [=] { keep(add(x, y).defined()); }),
      make_case(named("add_grad"), [=] { keep(add(leaf, y).defined()); }),
      make_case(named("mul_number"), [=] { keep((x * 2.0).defined()); }),
      make_case(named("sum"), [=] { keep(sum(x).defined()); }),
      make_case(named("contract 16 x 4 x 4"), [=] { keep(contract("ij,kj->ik", a, w).defined()); }),
  };
}

std::vector<Case> throughput_cases() {
  std::vector<Case> cases;
  for (int64_t rows : {int64_t(64), int64_t(16384)}) {
    constexpr int64_t kColumns = 1024;
    Tensor x = randn({rows, kColumns}), y = randn({rows, kColumns}), w = ones({kColumns});
    double n = double(x.nbytes());
    auto named = [&](const char* op) { return fmt::format("{} [{}, {}]", op, rows, kColumns); };
    cases.push_back(make_case(
        named("add"), [=] { keep(add(x, y).defined()); }, 3 * n));
    cases.push_back(make_case(
        named("exp"), [=] { keep(exp(x).defined()); }, 2 * n));
    cases.push_back(make_case(
        named("tanh"), [=] { keep(tanh(x).defined()); }, 2 * n));
    cases.push_back(make_case(
        named("gelu"), [=] { keep(gelu(x).defined()); }, 2 * n));
    cases.push_back(make_case(
        named("softmax"), [=] { keep(softmax(x).defined()); }, 2 * n));
    cases.push_back(make_case(
        named("layer_norm"), [=] { keep(layer_norm(x, w).defined()); }, 2 * n));
    cases.push_back(make_case(
        named("sum rows"), [=] { keep(sum(x, {-1}).defined()); }, n));
    cases.push_back(make_case(
        named("sum columns"), [=] { keep(sum(x, {0}).defined()); }, n));
    Tensor t = transpose(x, 0, 1);
    cases.push_back(make_case(
        named("dense copy of transpose"), [=] { keep(t.contiguous().defined()); }, 2 * n));
  }
  cases.push_back(cross_entropy_case(2048));
  cases.push_back(adamw_case());
  return cases;
}

std::vector<Case> matmul_cases() {
  std::vector<Case> cases;
  for (int64_t n : {16, 32, 64, 128, 256, 512, 1024}) {
    Tensor a = randn({n, n}), b = randn({n, n});
    cases.push_back(make_case(
        fmt::format("matmul {0} x {0} x {0}", n), [=] { keep(matmul(a, b).defined()); },
        3 * double(a.nbytes()), 2 * double(n * n * n)));
  }
  constexpr int64_t kRows = 768;
  const int64_t shapes[][2] = {{384, 128}, {128, 128}, {512, 128}, {128, 512}, {65, 128}};
  for (auto [n, k] : shapes) {
    Tensor x = randn({kRows, k}), w = randn({n, k}), g = randn({kRows, n});
    double flops = 2 * double(kRows * n * k), bytes = 4 * double(kRows * n + n * k + kRows * k);
    std::string size = fmt::format("{} x {} x {}", kRows, n, k);
    cases.push_back(make_case(
        "linear forward " + size, [=] { keep(linear(x, w).defined()); }, bytes, flops));
    cases.push_back(make_case(
        "linear dx " + size, [=] { keep(contract("bn,nk->bk", g, w).defined()); }, bytes, flops));
    cases.push_back(make_case(
        "linear dw " + size, [=] { keep(contract("bn,bk->nk", g, x).defined()); }, bytes, flops));
  }
  Tensor q = randn({12, 4, 64, 32}), k = randn({12, 4, 64, 32}), p = randn({12, 4, 64, 64});
  double flops = 2.0 * 48 * 64 * 64 * 32, bytes = 4.0 * 48 * (2 * 64 * 32 + 64 * 64);
  cases.push_back(make_case(
      "q k^T 48 x 64 x 64 x 32", [=] { keep(contract("bhtd,bhsd->bhts", q, k).defined()); }, bytes,
      flops));
  cases.push_back(make_case(
      "p v 48 x 64 x 32 x 64", [=] { keep(contract("bhts,bhsd->bhtd", p, k).defined()); }, bytes,
      flops));
  return cases;
}

Case cross_entropy_case(int64_t rows) {
  auto prepare = [rows] {
    Tensor logits = randn({rows, kVocabulary}), targets = randint(0, kVocabulary, {rows});
    logits.requires_grad_();
    return repeat([logits, targets]() mutable {
      logits.set_grad({});
      backward(cross_entropy(logits, targets));
    });
  };
  return {fmt::format("cross_entropy [{}, {}] and backward", rows, kVocabulary), prepare,
          2 * 4 * double(rows * kVocabulary)};
}

Case adamw_case() {
  constexpr int64_t kWidth = 768, kContext = 1024, kLayers = 12;
  std::vector<Shape> shapes = {{kVocabulary, kWidth}, {kContext, kWidth}};
  for (int64_t l = 0; l < kLayers; ++l)
    for (const Shape& s :
         {Shape{kWidth}, Shape{kWidth}, Shape{3 * kWidth, kWidth}, Shape{3 * kWidth},
          Shape{kWidth, kWidth}, Shape{kWidth}, Shape{kWidth}, Shape{kWidth},
          Shape{4 * kWidth, kWidth}, Shape{4 * kWidth}, Shape{kWidth, 4 * kWidth}, Shape{kWidth}})
      shapes.push_back(s);
  shapes.push_back({kWidth}), shapes.push_back({kWidth});
  double values = 0;
  for (const Shape& s : shapes) values += double(numel(s));
  auto prepare = [shapes] {
    std::vector<Tensor> parameters;
    for (const Shape& s : shapes) {
      Tensor p = randn(s);
      p.requires_grad_();
      p.set_grad(randn(s));
      parameters.push_back(p);
    }
    auto optimizer = std::make_shared<optim::AdamW>(
        parameters, optim::AdamWOptions{.lr = 1e-4, .betas = {0.9, 0.95}, .weight_decay = 0.1});
    return repeat([optimizer] { optimizer->step(); });
  };
  // Parameter, gradient and two moments are read; all but the gradient are written.
  return {fmt::format("AdamW step, {:.1f} M parameters", values * 1e-6), prepare, 7 * 4 * values};
}

}  // namespace tessera::bench
