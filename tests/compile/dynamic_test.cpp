// Calls that differ in one size: how many recordings and runs of the compiler a hundred lengths
// need, and that each gives the results of the program.
#include <gtest/gtest.h>

#include <algorithm>

#include "compile/codegen/samples.h"
#include "compile/codegen/sized.h"
#include "compile/compile.h"
#include "compile/ir/interpreter.h"
#include "compile/ir/verify.h"
#include "compile/record/dynamic_graph.h"
#include "compile/record/trace.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/tensor/allocator.h"
#include "tests/compile/numbers.h"
#include "tests/compile/passes/close.h"
#include "tests/compile/training.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;
using test::numbers;
using test::Training;

// ids and targets [B, T]
std::pair<Tensor, Tensor> tokens(int number, int64_t b, int64_t t) {
  Generator g(uint64_t(100 + number));
  return {randint(0, 11, {b, t}, {}, g.next_key()), randint(0, 11, {b, t}, {}, g.next_key())};
}

models::GptOptions small_gpt(double dropout) {
  return {.vocab = 11,
          .context = 128,
          .layers = 2,
          .heads = 2,
          .dim = 16,
          .dropout = dropout,
          .bias = true};
}

// Trains with a hundred lengths, some of them twice. Without generated kernels results have the
// same bits; with them they are within the rounding of f32 sums in another order.
void expect_lengths(const std::string& skip, double tolerance, bool lengths_of_batch) {
  Training eager(small_gpt(0.1)), compiled(small_gpt(0.1));
  auto step =
      compile([&](const Tensor& ids, const Tensor& targets) { return compiled.step(ids, targets); },
              {.names = compiled.model->named_parameters(), .skip = skip});
  for (int k = 0; k < 120; ++k) {
    int64_t n = 20 + k * 37 % 100;  // 100 lengths: 20, 57, 94, 31, 68, 105, 42, ..
    auto [ids, targets] = lengths_of_batch ? tokens(k, n, 8) : tokens(k, 3, n);
    for (Training* t : {&eager, &compiled}) t->opt->set_lr(1e-4);
    Tensors got = step(ids, targets), want = eager.step(ids, targets);
    test::Tolerance near{.f64 = tolerance, .f32 = tolerance};
    for (size_t i = 0; i < want.size(); ++i)
      test::expect_close(got[i], want[i], near, fmt::format("result {} at {}", i, n));
    if (::testing::Test::HasFailure()) return;
  }
  if (tolerance == 0) {
    std::vector<NamedTensor> a = compiled.state(), b = eager.state();
    for (size_t i = 0; i < a.size(); ++i)
      expect_same_bits(a[i].tensor.detach(), b[i].tensor.detach(), a[i].name);
  }
  const CompileReport& r = step.report();
  EXPECT_EQ(r.recordings, 6) << r.why_not << r.why_static;  // each beyond those before it
  EXPECT_LE(r.compiled + r.size_compilations, 4);  // the graph of many sizes is one of `compiled`
  EXPECT_GE(r.compile_s * 1000, r.sizes_ms * (1 - 1e-9));  // sums of the same times
  EXPECT_EQ(r.replays, 120 - r.recordings);
  ::testing::Test::RecordProperty("ms_for_each_size", std::to_string(r.sizes_ms / r.sizes));
}
TEST(Dynamic, AHundredLengthsOfAStepToTheBit) {
  expect_lengths("decompose,accumulate,fuse", 0, false);
}
TEST(Dynamic, AHundredLengthsOfAStep) { expect_lengths("", 2e-6, false); }
TEST(Dynamic, AHundredBatchesOfAStep) { expect_lengths("", 2e-6, true); }

// Each size has an executor with memory of its own: the 128 used last are kept.
TEST(Dynamic, SizesThatWereNotUsedForLongAreForgotten) {
  auto f = compile([](const Tensor& a) { return a * 2.0 + 1.0; });
  auto planned_for = [&](int64_t n) {
    const int before = f.report().sizes;
    expect_same_bits(f(numbers(1, n)), numbers(1, n) * 2.0 + 1.0, "length " + std::to_string(n));
    return f.report().sizes - before;
  };
  for (int64_t n : {4, 400, 4, 400, 800}) planned_for(n);
  for (int64_t n = 10; n < 138; ++n) planned_for(n);
  EXPECT_EQ(planned_for(10), 0);   // the oldest of 128, now the youngest
  EXPECT_EQ(planned_for(138), 1);  // takes the place of 11
  EXPECT_EQ(planned_for(12), 0);
  EXPECT_EQ(planned_for(11), 1);
}

// If programs differ in more than one size, each has a graph for its sizes; eight of these are
// kept.
TEST(Dynamic, TheOldestOfNineGraphsIsForgotten) {
  for (int64_t graphs : {8, 9}) {
    auto f = compile([](const Tensor& a) { return a * 2.0 + 1.0; });
    auto planned_for = [&](int64_t n, int64_t graph) {
      const int before = f.report().sizes;
      const int64_t rows = graph + 1, columns = graph * 7 % 11 + 1;
      const Tensor a = reshape(numbers(1, n * rows * columns), {n, rows, columns});
      expect_same_bits(f(a), a * 2.0 + 1.0, to_string(a.shape()));
      return f.report().sizes - before;
    };
    for (int64_t graph = 1; graph <= graphs; ++graph)
      for (int64_t n : {4, 400, 4, 400, 800}) planned_for(n, graph);
    EXPECT_EQ(planned_for(100, 2), 1);
    EXPECT_EQ(planned_for(100, 1), graphs == 8 ? 1 : 0);
  }
}

// Longer rows are computed in pieces, which the sizes seen so far are not.
TEST(Dynamic, LengthsOfASoftmax) {
  auto program = [](const Tensor& x) {
    Tensor e = exp(x - amax(x, {1}, true));
    return e / sum(e, {1}, true) * 2.0;
  };
  for (const auto& lengths : {std::vector<int64_t>{4200, 5000, 4500, 4700},
                              std::vector<int64_t>{9000, 12000, 10000, 14500}}) {
    auto f = compile(program);
    for (int64_t n : lengths) {
      Tensor x = randn({200, n});
      test::expect_close(f(x), program(x), {.f32 = 1e-6}, std::to_string(n));
    }
    EXPECT_EQ(f.report().size_compilations, 1) << f.report().why_static;
  }
}

TEST(Dynamic, MemoryDoesNotPileUp) {
  auto f = compile([](const Tensor& a) { return sum(exp(a * 2.0 - amax(a)) + a, {0}); });
  auto bytes = [&](int64_t first) {
    for (int64_t n = first; n < first + 100; ++n) f(numbers(0, 1000 + n));
    return cpu_memory_stats().live_bytes;
  };
  bytes(0);
  auto before = bytes(100), after = bytes(0);
  EXPECT_LE(after, before + (int64_t(1) << 16));
}

TEST(Dynamic, NumbersInProportionAndBeside) {
  auto program = [](const Tensor& a) {
    int64_t n = a.size(0);
    Tensor left = narrow(a, 0, 0, n - 1), right = narrow(a, 0, 1, n - 1);
    return cat(std::vector{left * right / double(n), mean(a, {0}, true), expand(sum(a), {2 * n})},
               0);
  };
  auto f = compile(program, {.skip = "decompose,fuse"});
  auto at = [&](int64_t n) {
    expect_same_bits(f(numbers(double(n), n)), program(numbers(double(n), n)), "length");
  };
  at(4), at(40);
  for (int64_t n = 5; n < 40; ++n) at(n);
  EXPECT_LE(f.report().recordings, 3) << f.report().why_static;
}

// A square passes through two sizes as a line does; a third size shows the difference.
TEST(Dynamic, WhatIsNotLinearIsAGraphForEachSize) {
  auto program = [](const Tensor& a) { return a + double(a.size(0) * a.size(0)); };
  auto f = compile(program);
  for (int round = 0; round < 3; ++round)
    for (int64_t n = 4; n < 9; ++n)
      expect_same_bits(f(numbers(1, n)), program(numbers(1, n)), "length");
  EXPECT_EQ(f.report().recordings, 10);
  EXPECT_NE(f.report().why_static, "");
}

// The line through two sizes gives no valid shape at the third.
TEST(Dynamic, SquaresOfSizesThatShrink) {
  auto program = [](const Tensor& a) { return a + sum(zeros({a.size(0) * a.size(0)}, {kF64})); };
  auto f = compile(program);
  for (int64_t n : {64, 32, 8, 16})
    expect_same_bits(f(numbers(1, n)), program(numbers(1, n)), "length");
  EXPECT_NE(f.report().why_static, "");
}

TEST(Dynamic, OtherOpsAtOtherSizes) {
  auto program = [](const Tensor& a) { return a.size(0) % 2 ? exp(a) : a * 2.0; };
  auto f = compile(program, {.skip = "decompose,fuse"});
  for (int round = 0; round < 3; ++round)
    for (int64_t n : {4, 7}) expect_same_bits(f(numbers(1, n)), program(numbers(1, n)), "length");
  EXPECT_EQ(f.report().recordings, 4);
  EXPECT_NE(f.report().why_static, "");
}

TEST(Dynamic, SizesThatOpsRefuse) {
  Tensor table = numbers(3, 50);
  auto f = compile([&](const Tensor& a) { return a * narrow(table, 0, 0, a.size(0)); });
  for (int64_t n : {10, 20, 30, 49})
    expect_same_bits(f(numbers(1, n)), numbers(1, n) * numbers(3, n), "length");
  EXPECT_THROW(f(numbers(1, 51)), ShapeError);
  expect_same_bits(f(numbers(1, 40)), numbers(1, 40) * numbers(3, 40), "after");
  EXPECT_EQ(f.report().recordings, 5);
}

// Sizes beyond those seen may be treated differently, so they are recorded.
TEST(Dynamic, WindowsAndThresholds) {
  Tensor table = numbers(3, 1000);
  auto expect = [](auto program, std::vector<int64_t> sizes) {
    auto f = compile(program);
    for (int round = 0; round < 3; ++round)
      for (int64_t n : sizes)
        expect_same_bits(f(numbers(1, n)), program(numbers(1, n)), "length " + std::to_string(n));
    EXPECT_GT(f.report().replays, 0);
  };
  std::vector<int64_t> sizes = {10, 20, 30, 100, 25, 15, 200, 64, 65, 63, 40, 50, 51};
  expect([](const Tensor& a) { return sum(narrow(a, 0, 0, std::min<int64_t>(a.size(0), 64))); },
         sizes);
  expect([](const Tensor& a) { return a * (a.size(0) > 50 ? 3.0 : 2.0); }, sizes);
  expect([&](const Tensor& a) { return a + narrow(table, 0, a.size(0) > 50 ? 50 : 0, a.size(0)); },
         sizes);
}

// A context that grows by one at each call takes a recording for each length, and nothing of them
// is kept.
TEST(Dynamic, LengthsThatGrow) {
  auto f = compile([](const Tensor& a) { return sum(exp(a) * 2.0); });
  for (int64_t n = 10; n < 210; ++n)
    expect_same_bits(f(numbers(1, n)), sum(exp(numbers(1, n)) * 2.0), "length");
  EXPECT_EQ(f.report().recordings, 200);
  EXPECT_EQ(f.report().compiled, 0);
  for (int64_t n = 10; n < 210; ++n) f(numbers(1, n));
  EXPECT_EQ(f.report().recordings, 200);
  EXPECT_EQ(f.report().replays, 200);
  EXPECT_EQ(f.report().compiled, 1);  // for all of them
}

// Where the program says that it treats all sizes alike, lengths that only grow are replayed from
// the third call on: attention of a new token to a cache that it joins.
TEST(Dynamic, LengthsThatGrowBeyondThoseRecorded) {
  auto decode = [](const Tensor& cache, const Tensor& token) {
    const Tensor all = cat(std::vector{cache, token}, 0);                           // [n + 1, D]
    const Tensor weights = softmax(sum(all * token, {1}) * 0.25, 0);                // [n + 1]
    return std::pair(all, sum(all * reshape(weights, {weights.numel(), 1}), {0}));  // [D]
  };
  auto f = compile(decode, {.beyond_recorded = true});
  Tensor cache = reshape(numbers(1, 4 * 8), {4, 8}), expected = cache;
  for (int call = 0; call < 40; ++call) {
    const Tensor token = reshape(numbers(2 + call, 8), {1, 8});
    auto [grown, out] = f(cache, token);
    auto [want_grown, want] = decode(expected, token);
    expect_same_bits(grown, want_grown, "cache");
    test::expect_close(out, want, {.f64 = 1e-12}, "call " + std::to_string(call));
    cache = grown, expected = want_grown;
  }
  EXPECT_EQ(f.report().recordings, 2) << f.report().why_not << f.report().why_static;
  EXPECT_EQ(f.report().replays, 38);
  // A size that the graph does not accept is run by the function, which throws.
  EXPECT_THROW(f(cache, reshape(numbers(1, 7), {1, 7})), ShapeError);
}

// A dim of extent 1 has any stride.
TEST(Dynamic, OneRowOfALongerOne) {
  Tensor tokens = reshape(numbers(1, 40), {1, 40});
  auto f = compile([](const Tensor& a) { return sum(a * 2.0, {1}); }, {.skip = "decompose,fuse"});
  for (int round = 0; round < 3; ++round)
    for (int64_t n : {39, 16, 20, 30}) {
      Tensor x = narrow(tokens, 1, 0, n);
      expect_same_bits(f(x), sum(x * 2.0, {1}), "view");
      expect_same_bits(f(x.clone()), sum(x * 2.0, {1}), "dense");
    }
  EXPECT_LE(f.report().recordings, 4);
}

TEST(Dynamic, NumbersThatAreReturned) {
  auto f = compile([](const Tensor& x) { return std::pair(x * 2.0, x.numel()); });
  for (int64_t n : {4, 5, 6, 7, 4, 5}) EXPECT_EQ(f(numbers(1, n)).second, n);
}

// ---- graphs

Graph graph_of(int64_t n, const std::function<Tensor(const Tensor&)>& f) {
  Tensor x = numbers(1, n);
  Trace trace({.inputs = {x}});
  Tensor y = f(x);
  return trace.finish({y});
}

TEST(Dynamic, AGraphAtASizeIsTheGraphRecordedThere) {
  auto f = [](const Tensor& x) {
    Tensor rows = expand(unsqueeze(x, 0), {3, x.size(0)});
    return softmax(reshape(rows + 1.0, {3 * x.size(0)})) * double(x.size(0));
  };
  std::string why;
  auto g = DynamicGraph::unify(graph_of(6, f), 6, graph_of(10, f), 10, &why);
  ASSERT_TRUE(g) << why;
  EXPECT_TRUE(g->certain());
  for (int64_t n : {2, 3, 9, 100}) {
    Graph at = g->at(n);
    verify(at);
    EXPECT_EQ(to_string(at), to_string(graph_of(n, f)));
    expect_same_bits(interpret(at, {{numbers(5, n)}})[0], f(numbers(5, n)), "replay");
  }
}

// A text with its numbers put in is the text of the body, and bodies that differ in sizes alone
// have one text without.
TEST(Dynamic, TextsWithoutNumbers) {
  auto body_of = [](int64_t rows, int64_t columns) {
    BodyBuilder b({rows, columns});
    const InstrId x = b.load(3);
    const InstrId mean = b.op("mul", {b.sum(x, 2), b.constant(1.0 / double(columns))});
    b.store(b.op("sub", {x, mean}));
    return b.body;
  };
  const SizedText small = print_sized(body_of(6, 100), "k"),
                  large = print_sized(body_of(7, 120), "k");
  EXPECT_EQ(small.text, large.text);
  ASSERT_EQ(small.numbers.size(), large.numbers.size());
  for (const auto& [sized, body] : {std::pair(small, body_of(6, 100)), {large, body_of(7, 120)}}) {
    std::string text;
    auto number = sized.numbers.begin();
    for (char c : sized.text) {
      if (c == SizedText::kTable) continue;
      if (c == SizedText::kNumber)
        text += (number++)->digits;
      else
        text += c;
    }
    EXPECT_EQ(text, print_cpp(body, "k"));
  }
  auto has = [&](const std::string& digits, auto kind) {
    return std::ranges::any_of(large.numbers,
                               [&](auto& n) { return n.digits == digits && n.kind == kind; });
  };
  EXPECT_TRUE(has("120", SizedText::Number::kInteger));
  EXPECT_TRUE(has("0.008333334f", SizedText::Number::kFloat));
  EXPECT_EQ(std::ranges::count_if(large.numbers, [](auto& n) { return n.digits == "6"; }), 0);
}

}  // namespace
}  // namespace tessera::compiler
