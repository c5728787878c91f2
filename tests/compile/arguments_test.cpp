// The arguments and results that a compiled function may have, and which calls they tell apart.
#include <gtest/gtest.h>

#include "compile/compile.h"
#include "core/autograd/autograd.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/compile/bits.h"
#include "tests/compile/numbers.h"

namespace tessera {
namespace {
struct Batch {
  std::map<std::string, Tensor> inputs;
  std::optional<Tensor> mask;
  std::string reduction;
};
}  // namespace
template <>
struct tree::Tree<Batch> : tree::Members<Batch, &Batch::inputs, &Batch::mask, &Batch::reduction> {};
}  // namespace tessera

namespace tessera::compiler {
namespace {

using test::expect_same_bits;
using test::numbers;

TEST(CompileArguments, TypesOfArgumentsAreGuarded) {
  int runs = 0;
  auto f = compile([&](const std::vector<Tensor>& list, int power) {
    ++runs;
    Tensor sum = list[0];
    for (size_t i = 1; i < list.size(); ++i) sum = sum + list[i];
    return std::tuple(pow(sum, power), sum);
  });
  for (int round = 0; round < 3; ++round) {
    auto [p, s] = f(std::vector{numbers(1), numbers(2)}, 2);
    expect_same_bits(p, pow(numbers(1) + numbers(2), 2), "two");
    expect_same_bits(s, numbers(1) + numbers(2), "two");
    auto [q, t] = f(std::vector{numbers(1), numbers(2), numbers(3)}, 3);
    expect_same_bits(q, pow(numbers(1) + numbers(2) + numbers(3), 3), "three");
    auto [r, u] = f(std::vector{numbers(1, 7), numbers(2, 7)}, 2);
    expect_same_bits(r, pow(numbers(1, 7) + numbers(2, 7), 2), "longer");
  }
  EXPECT_EQ(runs, 4);  // the two lengths of a list of two are one graph
}

TEST(CompileArguments, StructsMapsOptionalsAndTextAreGuarded) {
  int runs = 0;
  auto program = [&](const Batch& b, std::string_view loss) {
    ++runs;
    Tensor d = b.inputs.begin()->first == "x" ? b.inputs.at("x") : -b.inputs.begin()->second;
    d = loss == "l1" ? abs(d) : d * d;
    if (b.mask) d = d * *b.mask;
    return Batch{.inputs = {{"d", d}}, .mask = b.mask, .reduction = b.reduction};
  };
  auto f = compile(program);
  const int rounds = 6;
  for (int k = 0; k < rounds; ++k)
    for (const char* input : {"w", "x"})
      for (const char* loss : {"l1", "l2"})
        for (const char* reduction : {"mean", "sum"})
          for (bool masked : {false, true}) {
            Batch batch{.inputs = {{input, numbers(k)}}, .mask = {}, .reduction = reduction};
            if (masked) batch.mask = numbers(k + 1);
            Batch result = f(batch, loss), expected = program(batch, loss);
            expect_same_bits(result.inputs.at("d"), expected.inputs.at("d"), loss);
            ASSERT_EQ(result.mask.has_value(), masked);
            if (masked) expect_same_bits(*result.mask, *expected.mask, "mask");
            EXPECT_EQ(result.reduction, reduction);
          }
  EXPECT_LT(runs, 2 * rounds * 16);
}

// Memory that looks like an argument is replayed for other arguments only once recordings with
// different memory agreed.
TEST(CompileArguments, ArgumentsThatAreOneTensor) {
  auto product = compile([](const Tensor& a, const Tensor& b) { return a * b; });
  Tensor w = numbers(2);
  auto scaled = compile([&](const Tensor& a) { return a * w; });
  auto parts = compile([](const Tensor& a, const Tensor& b) { return exp(a) - b; });
  for (int k = 0; k < 4; ++k) {
    Tensor x = numbers(k), y = numbers(k + 9), t = numbers(k, 9);
    expect_same_bits(product(x, x), x * x, "one tensor twice");
    expect_same_bits(product(x, y), x * y, "two tensors");
    expect_same_bits(scaled(w), w * w, "the captured one");
    Tensor a = slice(t, 0, 0, 8), b = slice(t, 0, 1, 9);
    expect_same_bits(parts(a, b), exp(a) - b, "parts of one");
    expect_same_bits(parts(b, a), exp(b) - a, "the other way");
  }
  for (int k = 0; k < 3; ++k) expect_same_bits(scaled(numbers(k)), numbers(k) * w, "another");
}

TEST(CompileArguments, NumbersAreGuardedToTheLastDigit) {
  auto f = compile([](const Tensor& a, auto factor) { return a * double(factor) * 1e9; });
  for (int round = 0; round < 3; ++round) {
    for (double x : {1e-9, 2e-9})
      expect_same_bits(f(numbers(1), x), numbers(1) * x * 1e9, "double");
    expect_same_bits(f(numbers(1), 1), numbers(1) * 1.0 * 1e9, "int");
  }
}

TEST(CompileArguments, ResultsKeepTheirNumbersAndStructure) {
  auto f = compile([](const Tensor& x) { return std::pair(x * 2.0, x.numel()); });
  for (int round = 0; round < 4; ++round)
    for (int64_t n : {4, 7}) EXPECT_EQ(f(numbers(1, n)).second, n);
}

TEST(CompileArguments, AnArgumentWithGradients) {
  auto f = compile([](Tensor x) {
    x.set_grad({});
    sum(square(x)).backward();
  });
  for (int k = 0; k < 4; ++k) {
    Tensor x = numbers(k).requires_grad_();
    f(x);
    expect_same_bits(x.grad(), numbers(k) * 2.0, "grad");
  }
}

TEST(CompileArguments, AnArgumentThatIsLookedAtAndWritten) {
  auto program = [](const Tensor& a, const Tensor& b) {
    double x = a.data<double>()[0];
    add_(a, b);
    double y = a.data<double>()[0];
    return b * (x + 10 * y);
  };
  auto f = compile(program);
  for (int k = 0; k < 4; ++k)
    expect_same_bits(f(numbers(k), numbers(1)), program(numbers(k), numbers(1)), "call");
}

TEST(CompileArguments, PartsOfAnArgumentAreWritten) {
  using Program = std::function<Tensor(const Tensor&)>;
  const Program programs[] = {[](const Tensor& x) {
                                fill_(x[1], 7.0);
                                return x + 0.0;
                              },
                              [](const Tensor& x) {
                                fill_(x[1], 7.0);
                                add_(x[0], x[1]);
                                return x[1] * 2.0;
                              },
                              [](const Tensor& x) {
                                Tensor before = x[0];
                                fill_(x[1], 7.0);
                                return before + sum(x);
                              }};
  for (const Program& program : programs) {
    auto f = compile(program);
    for (int k = 0; k < 4; ++k) {
      Tensor x = reshape(numbers(k), {2, -1}), y = reshape(numbers(k), {2, -1});
      expect_same_bits(f(x), program(y), "call " + std::to_string(k));
      expect_same_bits(x, y, "argument of call " + std::to_string(k));
    }
    EXPECT_EQ(f.report().replays, 2) << f.report().why_not;
  }
}

TEST(CompileArguments, EmptyViewsAtTheEndOfAnArgument) {
  for (int64_t columns : {3, 0}) {
    auto f = compile([](const Tensor& x) {
      Tensor end = slice(x, 0, 7, 7);
      sum(x).item<double>();
      return sum(end * 2.0) + sum(x);
    });
    for (int k = 0; k < 4; ++k)
      EXPECT_EQ(f(full({7, columns}, k)).item<double>(), double(7 * columns * k));
  }
}

}  // namespace
}  // namespace tessera::compiler
