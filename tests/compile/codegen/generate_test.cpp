// Each template of generated code, on bodies written by hand, compared with the interpreter.
#include <bit>
#include <cmath>
#include <limits>

#include "compile/codegen/sized.h"
#include "core/core.h"
#include "tests/compile/codegen/compare.h"

namespace tessera::test {

using namespace compiler;
namespace {

TEST(Generate, RowKernels) {
  std::vector<Body> bodies;
  for (int64_t n : {1, 3, 7, 16, 63, 64, 65, 100, 768, 1000, 5000, 50257})
    for (int64_t rows : {1, 3, 70}) {
      if (n * rows > 400000) continue;
      bodies.push_back(softmax_body(rows, n));
      bodies.push_back(layer_norm_body(rows, n));
      bodies.push_back(layer_norm_grad_body(rows, n));
      bodies.push_back(cross_entropy_body(rows, n));
    }
  compare_with_interpreter(bodies);
}

Body masked_softmax_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.op("where", {b.load(2, kBool), b.constant(-1e30), b.load(3)});
  InstrId e = b.op("exp", {b.op("sub", {x, b.reduce(ReduceKind::kMax, x, 2)})});
  b.store(b.op("div", {e, b.sum(e, 2)}));
  return b.body;
}

bool beside(const Body& body) {
  return print_cpp(body, "kernel").find("beside<") != std::string::npos;
}

// Two results, of two nests, and a total of all rows.
Body two_results_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.op("add", {b.load(3), b.load(3)}), w = b.load(2), s = b.sum(b.op("square", {x}), 2);
  b.store(x), b.store(b.op("mul", {b.op("mul", {x, b.op("rsqrt", {s})}), w}));
  b.store(s), b.store(b.sum(b.op("abs", {x}), 3));
  return b.body;
}

// Softmax times an element of a large operand of which nothing else is read.
Body scaled_by_a_pick(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), z = b.load(3), t = b.load(1, kI64);
  InstrId e = b.op("exp", {b.op("sub", {x, b.reduce(ReduceKind::kMax, x, 2)})});
  InstrId hit = b.op("eq", {b.index(1), t}, true);
  InstrId pick = b.sum(b.op("where", {hit, z, b.constant(0.0)}), 2);
  b.store(b.op("mul", {b.op("div", {e, b.sum(e, 2)}), pick}));
  return b.body;
}

TEST(Generate, NestsOfRowsThatFollowEachOther) {
  std::vector<Body> bodies;
  for (auto [rows, n] : {std::pair<int64_t, int64_t>{6, 256}, {33, 300}, {140, 1000}, {7, 4097}}) {
    bodies.push_back(softmax_body(rows, n));
    bodies.push_back(layer_norm_body(rows, n));
    bodies.push_back(layer_norm_grad_body(rows, n));
    bodies.push_back(two_results_body(rows, n));
  }
  for (DType t : {kBF16, kF64}) bodies.push_back(softmax_body(33, 300, t));
  bodies.push_back(cross_entropy_body(200, 3000));
  bodies.push_back(cross_entropy_body(130, 5000));
  bodies.push_back(scaled_by_a_pick(300, 1000));
  bodies.push_back(masked_softmax_body(70, 300));
  bodies.push_back(masked_softmax_body(20, 5000));
  for (const Body& b : bodies) EXPECT_TRUE(beside(b)) << to_string(b);
  compare_with_interpreter(bodies);
  EXPECT_FALSE(beside(softmax_body(5, 1000)));  // too few rows
  EXPECT_FALSE(beside(softmax_body(70, 255)));  // too short for it to pay
  EXPECT_TRUE(beside(cross_entropy_body(256, 50304)));
  EXPECT_FALSE(beside(cross_entropy_body(16, 50304)));  // whose rows are chunks
}

bool in_pieces(const Body& body) {
  return print_cpp(body, "kernel").find("join_pieces(") != std::string::npos;
}
// Softmax with another result, computed from elements that know only their piece.
Body exponentials_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), e = b.op("exp", {b.op("sub", {x, b.reduce(ReduceKind::kMax, x, 2)})});
  b.store(b.op("div", {e, b.sum(e, 2)})), b.store(b.op("mul", {e, b.constant(2.0)}));
  return b.body;
}
// Cross-entropy of a value that is costly to compute; the target is picked from that value's
// operand.
Body gelu_cross_entropy_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), hit = b.op("eq", {b.index(1), b.load(1, kI64)}, true),
          v = b.op("gelu", {x});
  InstrId m = b.reduce(ReduceKind::kMax, v, 2), e = b.op("exp", {b.op("sub", {v, m})}),
          s = b.sum(e, 2);
  b.store(b.op("div", {e, s}));
  b.store(b.op("sub", {b.op("add", {b.op("log", {s}), m}),
                       b.sum(b.op("where", {hit, x, b.constant(0.0)}), 2)}));
  return b.body;
}
// A value of each row that is used by each element, beside the softmax of the row.
Body log_sum_of_each_element_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), m = b.reduce(ReduceKind::kMax, x, 2),
          e = b.op("exp", {b.op("sub", {x, m})});
  InstrId s = b.sum(e, 2);
  b.store(b.op("div", {e, s})), b.store(b.op("add", {b.op("log", {s}), m}), b.dense(3, kF32));
  return b.body;
}
TEST(Generate, SoftmaxOfLongRowsComesInPieces) {
  std::vector<Body> bodies = {gelu_cross_entropy_body(100, 8200)};
  for (int64_t n : {8192, 8193, 12320}) {
    const int64_t rows = 96 + n % 7;
    bodies.push_back(softmax_body(rows, n));
    bodies.push_back(masked_softmax_body(rows, n));
    bodies.push_back(cross_entropy_body(rows, n));
  }
  for (const Body& b : bodies) EXPECT_TRUE(in_pieces(b)) << to_string(b);
  compare_with_interpreter(bodies);
  {
    StreamedFrom all(0);
    for (const Body& b : bodies) EXPECT_TRUE(in_pieces(b)) << to_string(b);
    compare_with_interpreter(bodies);
  }
  std::vector<Body> others = {softmax_body(96, 8191),
                              softmax_body(90, 8192),
                              scaled_by_a_pick(100, 8192),
                              exponentials_body(100, 8192),
                              softmax_body(96, 8200, kBF16),
                              softmax_body(96, 65537),
                              log_sum_of_each_element_body(100, 8200)};
  for (const Body& b : others) EXPECT_FALSE(in_pieces(b)) << to_string(b);
  compare_with_interpreter(others);
}
TEST(Generate, OneCodeForAnyNumberOfPieces) {
  std::vector<Ref<const Fused>> kernels;
  for (int64_t n : {8192, 8300, 20000}) {
    const Body b = cross_entropy_body(100, n);
    kernels.push_back(make_ref<const Fused>("rows", b, results_of(b)));
  }
  SizedKernels sized;
  const Fused* const first[] = {kernels[0].get()};
  const SizedKernels::Sizes sizes[] = {{kernels[0].get(), kernels[1].get(), kernels[2].get()}};
  sized.code_of(first, sizes, {.cache_dir = kernel_cache()});
  for (size_t k : {1, 2}) {
    const Fused* const other[] = {kernels[k].get()};
    EXPECT_TRUE(sized.have(other));
  }
  EXPECT_EQ(sized.compilations(), 1);
}
InstrId exp_below_max(BodyBuilder& b, InstrId x) {
  return b.op("exp", {b.op("sub", {x, b.reduce(ReduceKind::kMax, x, 2)})});
}
// Exponentials below a maximum that are not only used by a softmax have the bits of exp, denormals
// too.
TEST(Generate, ExponentialsBelowAMaximumHaveTheBitsOfExp) {
  std::vector<Body> bodies;
  for (auto [rows, n] : {std::pair<int64_t, int64_t>{3, 100}, {70, 300}, {100, 8200}})
    for (bool divides : {false, true}) {
      BodyBuilder b({rows, n});
      InstrId x = b.op("mul", {b.load(3), b.constant(20.0)});
      InstrId e = exp_below_max(b, x);
      if (divides) b.store(b.op("div", {e, b.sum(e, 2)}));
      b.store(divides ? b.op("mul", {e, b.constant(2.0)}) : e);
      bodies.push_back(b.body);
    }
  BodyBuilder columns({2, 100});  // whose sums may be all of denormals
  InstrId x = columns.op("mul", {columns.load(3), columns.constant(30.0)});
  InstrId e = exp_below_max(columns, x);
  columns.store(columns.op("div", {e, columns.sum(e, 1)}));
  bodies.push_back(columns.body);
  for (const Body& b : bodies)
    EXPECT_EQ(print_cpp(b, "kernel").find("exp_by_table"), std::string::npos) << to_string(b);
  BodyBuilder by_reciprocal({70, 300});
  e = exp_below_max(by_reciprocal, by_reciprocal.load(3));
  InstrId factor = by_reciprocal.op("reciprocal", {by_reciprocal.sum(e, 2)});
  by_reciprocal.store(by_reciprocal.op("mul", {e, factor}));
  const std::vector<Body> softmax = {softmax_body(70, 300), by_reciprocal.body};
  for (const Body& b : softmax)
    EXPECT_NE(print_cpp(b, "kernel").find("exp_by_table"), std::string::npos) << to_string(b);
  compare_with_interpreter(softmax);
  compare_with_interpreter(bodies);
}
TEST(Generate, PiecesOfARowMayBeInfiniteOrNan) {
  constexpr float kInf = std::numeric_limits<float>::infinity(),
                  kLowest = std::numeric_limits<float>::lowest();
  const int64_t rows = 100, n = 8200, half = n / 2;
  Tensor x = randn({rows, n});
  auto row = [&](int64_t r) { return static_cast<float*>(x.raw()) + r * n; };
  for (int64_t r : {0, 51, 99}) std::fill_n(row(r), n, -kInf);
  std::fill_n(row(1), half, -kInf), std::fill_n(row(2) + half, n - half, -kInf);
  std::fill_n(row(3), n - 1, -kInf), std::fill_n(row(4) + 1, n - 1, -kInf);
  std::fill_n(row(5), n, kLowest), std::fill_n(row(6), half, kLowest);
  row(7)[0] = row(8)[half] = row(9)[n - 1] = kInf;
  row(10)[0] = row(11)[half] = row(12)[n - 1] = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < n; ++i) row(13)[i] = float(i) * 0.05f, row(14)[i] = float(-i) * 0.05f;
  row(15)[n - 1] = std::numeric_limits<float>::max();

  const Body body = softmax_body(rows, n);
  ASSERT_TRUE(in_pieces(body));
  Fused op("rows", body, results_of(body));
  auto kernels = generate({{&op}}, {.cache_dir = kernel_cache()});
  Tensor y = result_of(body, 0), e = exp(x - amax(x, {1}, true)), expected = e / sum(e, {1}, true);
  std::vector<char*> p{static_cast<char*>(x.raw()), static_cast<char*>(y.raw())};
  run_code(kernels[0]->code, p.data(), nullptr);
  for (int64_t i = 0; i < rows * n; ++i) {
    const float got = static_cast<float*>(y.raw())[i],
                wanted = static_cast<float*>(expected.raw())[i];
    ASSERT_EQ(std::isnan(got), std::isnan(wanted)) << i / n << ", " << i % n;
    if (std::isnan(wanted)) continue;
    ASSERT_NEAR(got, wanted, 2e-6f * wanted + 1e-36f) << i / n << ", " << i % n;
  }
}

// Exponentials of two operands, and another use of these operands.
Body two_exponentials_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), z = b.op("neg", {b.op("square", {b.load(3)})});
  InstrId low = b.op("lt", {z, b.constant(-1.0)}, true);
  InstrId e = exp_below_max(b, x), f = exp_below_max(b, b.op("where", {low, x, z}));
  InstrId p = b.op("div", {e, b.sum(e, 2)}), q = b.op("div", {f, b.sum(f, 2)});
  b.store(b.op("where", {low, p, b.op("mul", {q, z})})), b.store(b.sum(b.op("mul", {p, q}), 2));
  return b.body;
}
// A softmax of a softmax, and the target's element of it in the same nest.
Body softmax_of_softmax_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId hit = b.op("eq", {b.index(1), b.load(1, kI64)}, true), e = exp_below_max(b, b.load(3));
  InstrId f = exp_below_max(b, b.op("div", {e, b.sum(e, 2)}));
  b.store(b.op("where", {hit, b.constant(0.0), b.op("div", {f, b.sum(f, 2)})}));
  return b.body;
}
TEST(Generate, ExponentialsOfWholeGroups) {
  std::vector<Body> bodies;
  for (int64_t n : {1, 2, 3, 8, 15, 16, 31, 33, 64, 100, 300, 5000})
    for (int64_t rows : {3, 40}) {
      bodies.push_back(two_exponentials_body(rows, n));
      bodies.push_back(softmax_of_softmax_body(rows, n));
      bodies.push_back(masked_softmax_body(rows, n));
    }
  compare_with_interpreter(bodies);
  for (const Body& b : bodies)
    EXPECT_EQ(print_cpp(b, "kernel").find("staged<") != std::string::npos, b.extents[1] > 1);
}

// A value kept in a result, from which functions on groups are computed, and another operand.
Body kept_before_groups_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), kept = b.op("tanh", {x}), g = b.op("gelu", {kept});
  InstrId s = b.sum(b.op("mul", {g, x}), 2);
  b.store(b.op("div", {kept, b.op("add", {b.op("abs", {s}), b.constant(1.0)})}));
  return b.body;
}
// Two nests compute it in groups, since no row of it is kept.
Body groups_of_two_nests_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, 3, n});
  InstrId g = b.op("gelu", {b.load(5)});
  b.store(g), b.store(b.op("mul", {g, b.sum(b.load(7), 2)}));
  return b.body;
}
TEST(Generate, GroupsOfValuesThatAreKeptOrNot) {
  EXPECT_TRUE(may_overwrite(kept_before_groups_body(8, 100), 0, 0));
  compare_with_interpreter({kept_before_groups_body(8, 100), kept_before_groups_body(40, 300),
                            kept_before_groups_body(3, 1000), groups_of_two_nests_body(4, 70000)});
}

bool has(const Body& body, const char* text) {
  return print_cpp(body, "kernel").find(text) != std::string::npos;
}

// log_softmax; with `more`, a result that shows the maximum alone.
Body log_softmax_body(int64_t rows, int64_t n, bool more) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), m = b.reduce(ReduceKind::kMax, x, 2), d = b.op("sub", {x, m});
  InstrId s = b.sum(b.op("exp", {d}), 2);
  b.store(b.op("sub", {d, b.op("log", {s})}));
  if (more) b.store(b.op("mul", {m, b.constant(2.0)}));
  return b.body;
}

// The last result of `body` for an operand whose element `at` is `value`.
Tensor result_with(const Body& body, int64_t at, float value) {
  Tensor x = operand_of(body, 0, 1);
  static_cast<float*>(x.raw())[at] = value;
  Fused op("rows", body, results_of(body));
  auto kernels = generate({{&op}}, {.cache_dir = kernel_cache()});
  std::vector<char*> p{static_cast<char*>(x.raw())};
  Tensors y;
  for (size_t k = 0; k < body.stores.size(); ++k) {
    y.push_back(result_of(body, k));
    p.push_back(static_cast<char*>(y[k].raw()));
  }
  run_code(kernels[0]->code, p.data(), nullptr);
  return y.back();
}
TEST(Generate, ANanStaysInItsRow) {
  const int64_t rows = 40;
  for (uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu, 0x7f800001u})
    for (int64_t n : {255, 300, 512})
      for (int64_t at : {int64_t(0), n - 1})
        for (const Body& body : {softmax_body(rows, n), log_softmax_body(rows, n, false)}) {
          Tensor y = result_with(body, 7 * n + at, std::bit_cast<float>(bits));
          for (int64_t i = 0; i < rows * n; ++i)
            ASSERT_EQ(std::isnan(static_cast<float*>(y.raw())[i]), i / n == 7) << i;
        }
}
TEST(Generate, AMaximumPassesOverNanWhereTheSumOfExponentialsShowsIt) {
  EXPECT_TRUE(has(softmax_body(40, 300), "Numbers<Max>"));
  EXPECT_TRUE(has(cross_entropy_body(40, 300), "Numbers<Max>"));
  EXPECT_TRUE(has(log_softmax_body(40, 300, false), "Numbers<Max>"));
  const Body shown = log_softmax_body(40, 300, true);
  EXPECT_FALSE(has(shown, "Numbers<Max>"));
  Tensor y = result_with(shown, 7 * 300 + 20, std::numeric_limits<float>::quiet_NaN());
  for (int64_t i = 0; i < 40; ++i)
    EXPECT_EQ(std::isnan(static_cast<float*>(y.raw())[i]), i == 7) << i;
}
TEST(Generate, ExponentialsFarBelowTheMaximumAreZero) {
  const int64_t rows = 40, n = 512;
  for (float low : {-std::numeric_limits<float>::infinity(), -1e30f, -200.0f}) {
    Tensor y = result_with(softmax_body(rows, n), 9 * n + 3, low);
    for (int64_t i = 0; i < rows * n; ++i)
      ASSERT_EQ(static_cast<float*>(y.raw())[i] == 0.0f, i == 9 * n + 3) << i;
  }
}

TEST(Generate, PointwiseKernels) {
  compare_with_interpreter({bias_gelu_body(3, 5), bias_gelu_body(700, 129), bias_gelu_body(1, 1),
                            bias_gelu_body(9, 40, kBF16), bias_gelu_body(9, 40, kF16),
                            bias_gelu_body(9, 40, kF64), adamw_body(1), adamw_body(100),
                            adamw_body(100001)});
}

TEST(Generate, RowsOfNarrowFloats) {
  compare_with_interpreter({softmax_body(5, 100, kBF16), softmax_body(5, 100, kF16),
                            softmax_body(5, 100, kF64), softmax_body(70, 3, kBF16)});
}

TEST(Generate, SumsOverRowsAndOverEverything) {
  std::vector<Body> bodies;
  for (int64_t rows : {1, 2, 63, 64, 65, 1000, 20000})
    for (int64_t n : {1, 5, 64, 300}) {
      if (rows * n > 2000000) continue;
      BodyBuilder b({rows, n});
      InstrId x = b.load(3), y = b.op("square", {x});
      b.store(b.op("mul", {b.sum(y, 1), b.constant(0.5)}));
      b.store(b.op("sqrt", {b.sum(y, 3)}));
      b.store(b.reduce(ReduceKind::kMax, x, 1));
      b.store(b.reduce(ReduceKind::kMin, x, 3));
      bodies.push_back(b.body);
    }
  for (int64_t n : {1, 10, 4096, 4097, 1000003}) {
    BodyBuilder b({n});
    InstrId x = b.load(1), positive = b.op("gt", {x, b.constant(0.0)}, true);
    b.store(b.sum(x, 1));
    b.store(b.sum(positive, 1));
    b.store(b.reduce(ReduceKind::kAny, b.op("isnan", {x}, true), 1));
    b.store(b.reduce(ReduceKind::kAll, positive, 1));
    bodies.push_back(b.body);
  }
  compare_with_interpreter(bodies);
}

TEST(Generate, ReductionsOfMiddleLoops) {
  std::vector<Body> bodies;
  for (LoopMask over : {1u, 2u, 4u, 3u, 5u, 6u, 7u}) {
    BodyBuilder b({5, 33, 70});  // batch norm's, softmax's over channels, ..
    InstrId x = b.load(7), s = b.sum(x, over);
    b.store(s);
    bodies.push_back(b.body);
    BodyBuilder c({5, 33, 70});
    x = c.load(7);
    InstrId d = c.op("sub", {x, c.reduce(ReduceKind::kMax, x, over)}), e = c.op("exp", {d});
    c.store(c.op("div", {e, c.sum(e, over)}));
    bodies.push_back(c.body);
  }
  compare_with_interpreter(bodies);
}

// sum(where(index == v, x, other)) of each row; v may lie outside of the row.
Body picking_body(DType dtype, bool index_first, double other) {
  BodyBuilder b({70, 9});
  InstrId x = b.load(3, dtype), v = b.load(1, kI64), index = b.index(1);
  InstrId hit = index_first ? b.op("eq", {index, v}, true) : b.op("eq", {v, index}, true);
  b.store(b.sum(b.op("where", {hit, x, b.constant(other, dtype)}), 2));
  return b.body;
}
TEST(Generate, ASumThatPicksAnElementReadsThatAlone) {
  std::vector<Body> bodies;
  for (DType dtype : {kF32, kF64, kBF16, kF16})
    for (bool index_first : {true, false}) bodies.push_back(picking_body(dtype, index_first, 0));
  for (const Body& b : bodies)
    EXPECT_EQ(print_cpp(b, "kernel").find("in_lanes"), std::string::npos) << to_string(b);
  bodies.push_back(picking_body(kF32, true, 0.5));  // all of these count
  EXPECT_NE(print_cpp(bodies.back(), "kernel").find("in_lanes"), std::string::npos);
  compare_with_interpreter(bodies);
}

// If rows are compared, or the diagonal is, all elements count.
TEST(Generate, AComparisonOfTheIndexOfRowsPicksNoElement) {
  std::vector<Body> bodies;
  for (bool index_first : {true, false})
    for (bool diagonal : {true, false}) {
      BodyBuilder b({70, 9});
      InstrId x = b.load(3), row = b.index(0), v = diagonal ? b.index(0) : b.load(1, kI64);
      InstrId hit = index_first ? b.op("eq", {row, v}, true) : b.op("eq", {v, row}, true);
      b.store(b.sum(b.op("where", {hit, x, b.constant(0.0)}), 2));
      bodies.push_back(b.body);
    }
  compare_with_interpreter(bodies);
}

TEST(Generate, MaximaAndMinimaOfRowsWithNan) {
  std::vector<Body> bodies;
  for (int64_t n : {1, 2, 7, 16, 33, 64, 100, 5000}) {
    BodyBuilder b({20, n});
    InstrId x = b.load(3), index = b.index(1);
    InstrId bad = b.op("eq", {index, b.load(1, kI64)}, true);
    InstrId y = b.op("where", {bad, b.op("log", {b.op("neg", {b.op("abs", {x})})}), x});
    b.store(b.reduce(ReduceKind::kMax, y, 2)), b.store(b.reduce(ReduceKind::kMin, y, 2));
    bodies.push_back(b.body);
  }
  compare_with_interpreter(bodies);
}

TEST(Generate, ResultsOverOperandsWhereNothingIsReadAfterItIsWritten) {
  BodyBuilder b({7, 100});
  InstrId x = b.load(3), s = b.sum(x, 2), g = b.load(2);
  b.store(b.op("square", {x}));  // x is read again once its row is summed
  b.store(b.op("sub", {x, s}));
  b.store(b.op("mul", {b.sum(x, 1), g}));  // g is read in the end, and where the sum is written
  compare_with_interpreter({b.body});
  EXPECT_FALSE(may_overwrite(b.body, 0, 0));
  EXPECT_TRUE(may_overwrite(b.body, 0, 1));
  EXPECT_FALSE(may_overwrite(b.body, 0, 2));
  EXPECT_TRUE(may_overwrite(softmax_body(7, 100), 0, 0));
  EXPECT_TRUE(may_overwrite(cross_entropy_body(7, 100), 0, 1));
  EXPECT_TRUE(may_overwrite(layer_norm_grad_body(7, 100), 0, 0));
}

// A value is kept in the row of a result that may lie over `z`, which is read after it.
TEST(Generate, WhatIsKeptInAResultIsWrittenWhenAllIsRead) {
  std::vector<Body> bodies;
  for (int64_t rows : {5, 300})
    for (int64_t n : {61, 300})
      for (bool in_groups : {false, true}) {
        BodyBuilder b({rows, n});
        InstrId x = b.load(3), kept = b.op("floor", {b.op("mul", {x, b.constant(3.0)})});
        InstrId y = in_groups ? b.op("gelu", {kept}) : b.op("neg", {kept}), z = b.load(3);
        b.store(b.op("add", {kept, b.sum(kept, 2)}));
        b.store(b.op("mul", {y, z})), b.store(b.sum(b.op("floor", {z}), 3));
        EXPECT_TRUE(may_overwrite(b.body, 1, 0));
        bodies.push_back(b.body);
      }
  compare_with_interpreter(bodies);
}

TEST(Generate, FunctionsOfConstantsAreTheLibrarys) {
  BodyBuilder b({3});
  InstrId x = b.load(1, kF64);
  for (double v : {0.25, 0.75, 1.25, 1.75, 2.5})
    for (const char* op : {"exp", "erf", "tanh", "log", "sin", "lgamma", "atan", "cosh"})
      b.store(
          b.op("add", {b.op(op, {b.constant(v, kF64)}), b.op("mul", {x, b.constant(0, kF64)})}));
  b.store(b.op("pow", {x, b.constant(2, kF64)})), b.store(b.op("pow", {b.constant(2, kF64), x}));
  compare_with_interpreter({b.body});
}

TEST(Generate, FloatsThroughIntegersLoseTheSignOfZero) {
  std::vector<Body> bodies;
  for (DType real : {kF32, kF64, kF16, kBF16})
    for (DType integer : {kI64, kI32}) {
      BodyBuilder b({100});
      InstrId x = b.load(1, real), small = b.op("mul", {x, b.constant(0.3, real)});
      b.store(b.cast(b.cast(small, integer), real));
      bodies.push_back(b.body);
    }
  compare_with_interpreter(bodies);
}

// The second gelu ends in a product that is added to, +0 where x is not positive.
TEST(Generate, ANegatedZeroHasTheOtherSign) {
  BodyBuilder b({1000});
  InstrId x = b.op("relu", {b.load(1)});
  b.store(b.op("neg", {b.op("gelu", {b.op("gelu", {x})})}));
  compare_with_interpreter({b.body});
}

TEST(Generate, TransposedStridedAndRepeated) {
  BodyBuilder a({40, 50});
  a.store(a.op("add", {a.load({kF32, {1, 40}}), a.load({kF32, {100, 2}})}));
  BodyBuilder b({40, 50});
  InstrId r = b.load(1);
  b.store(r, b.dense(3, kF32));
  b.store(b.op("add", {b.cast(r, kI64), b.index(1)}));
  compare_with_interpreter({a.body, b.body});
}

}  // namespace
}  // namespace tessera::test
