// Statements about what cuBLASLt computes, what it suggests, and what it refuses.
#include <cmath>

#include "tests/vgpu/conformance/cublaslt.h"

namespace vgpu_test {
namespace {

TEST_F(CublasLtProducts, TransposesAndLeadingDimensions) {
  for (bool ta : {false, true})
    for (bool tb : {false, true})
      for (bool padded : {false, true}) {
        Plan p{.transpose_a = ta, .transpose_b = tb};
        if (padded) p.lda = 20, p.ldb = 24, p.ldd = 12;
        const size_t ldd = padded ? 12 : p.m;
        const auto a = whole<float>(20 * 16, 1), b = whole<float>(24 * 16, 2);
        std::vector<float> d(ldd * p.n, -77);
        each<float>(p, a, b, d, [&](const std::vector<float>& got) {
          for (size_t i = 0; i < ldd; ++i)
            for (size_t j = 0; j < p.n; ++j)
              ASSERT_EQ(got[i + j * ldd], i < p.m ? element(p, a, b, i, j) : -77) << i << " " << j;
        });
      }
}
TEST_F(CublasLtProducts, OrderOfRows) {
  const Plan p{.order = kOrderRow};
  const auto a = whole<float>(p.m * p.k, 1), b = whole<float>(p.k * p.n, 2);
  each<float>(p, a, b, std::vector<float>(p.m * p.n), [&](const std::vector<float>& got) {
    for (size_t i = 0; i < p.m; ++i)
      for (size_t j = 0; j < p.n; ++j) {
        double sum = 0;
        for (size_t l = 0; l < p.k; ++l) sum += double(a[i * p.k + l]) * double(b[l * p.n + j]);
        ASSERT_EQ(got[i * p.n + j], sum);
      }
  });
}
TEST_F(CublasLtProducts, BatchesWithStridesAndOneOperandForAll) {
  const Plan p{.batch = 3, .stride_a = 8 * 16, .stride_b = 0, .stride_d = 8 * 12};
  const auto a = whole<float>(3 * 8 * 16, 1), b = whole<float>(16 * 12, 2);
  each<float>(p, a, b, std::vector<float>(3 * 96), [&](const std::vector<float>& got) {
    for (size_t z = 0; z < 3; ++z)
      for (size_t j = 0; j < p.n; ++j)
        for (size_t i = 0; i < p.m; ++i)
          ASSERT_EQ(got[z * 96 + i + j * 8], element(p, a, b, i, j, z * 128));
  });
}
TEST_F(CublasLtProducts, AlphaAndBeta) {
  const Plan p{.alpha = 0.5, .beta = -2};
  const auto a = whole<float>(p.m * p.k, 1), b = whole<float>(p.k * p.n, 2),
             d = whole<float>(p.m * p.n, 3);
  each<float>(p, a, b, d, [&](const std::vector<float>& got) {
    for (size_t i = 0; i < p.m; ++i)
      for (size_t j = 0; j < p.n; ++j)
        ASSERT_EQ(got[i + j * 8], 0.5 * element(p, a, b, i, j) - 2 * d[i + j * 8]);
  });
}
// A gradient of 16 bits is added to one in single.
TEST_F(CublasLtProducts, SixteenBitsAreAddedToSingles) {
  for (int type : {kR16BF, kR16F}) {
    const Plan p{.type = type, .result = kR32F, .beta = 1};
    Made made;
    make(p, made);
    const uint16_t one = type == kR16BF ? 0x3f80 : 0x3c00;
    const DevicePtr a = upload(std::vector<uint16_t>(p.m * p.k, one), stream),
                    b = upload(std::vector<uint16_t>(p.k * p.n, one), stream),
                    d = upload(std::vector<float>(p.m * p.n), stream);
    const std::vector<Suggestion> all = suggestions(p, made);
    ASSERT_FALSE(all.empty());
    const float begin = 1 + std::ldexp(1.0f, -20);  // of no 16-bit type
    for (const Suggestion& s : all) {
      const std::vector<float> before(p.m * p.n, begin);
      check(cuda().copy_to_device(d, before.data(), before.size() * 4, stream), "upload");
      ASSERT_EQ(run(p, made, s.algorithm, a, b, d, s.workspace_bytes), Status::kSuccess);
      for (float x : download<float>(d, p.m * p.n, stream)) ASSERT_EQ(x, 16 + begin);
    }
    for (DevicePtr x : {a, b, d}) check(cuda().memory_free(x), "free");
  }
}
TEST_F(CublasLtProducts, ABetaOfZeroDoesNotReadTheResult) {
  const Plan p;
  const auto a = whole<float>(p.m * p.k, 1), b = whole<float>(p.k * p.n, 2);
  each<float>(p, a, b, std::vector<float>(p.m * p.n, std::nanf("")),
              [&](const std::vector<float>& got) {
                for (float x : got) ASSERT_FALSE(std::isnan(x));
              });
}
TEST_F(CublasLtProducts, SingleProductsKeepSinglePrecision) {
  const Plan p{.k = 16};
  std::vector<float> a(p.m * p.k), b(p.k * p.n);
  for (size_t i = 0; i < p.m; ++i) a[i] = 1 + std::ldexp(1.0f, -20);  // one term a sum
  for (size_t j = 0; j < p.n; ++j) b[j * p.k] = 1;
  each<float>(p, a, b, std::vector<float>(p.m * p.n), [&](const std::vector<float>& got) {
    for (float x : got) ASSERT_EQ(x, 1 + std::ldexp(1.0f, -20));
  });
}
TEST_F(CublasLtProducts, TF32KeepsTenBits) {
  const Plan p{.compute = kCompute32FFastTF32};
  std::vector<float> a(p.m * p.k, 1 + std::ldexp(1.0f, -9)), b(p.k * p.n, 1);
  each<float>(p, a, b, std::vector<float>(p.m * p.n), [&](const std::vector<float>& got) {
    for (float x : got) ASSERT_EQ(x, 16 * (1 + std::ldexp(1.0f, -9)));
  });
}
TEST_F(CublasLtProducts, DoubleProductsAreSummedInDouble) {
  const Plan p{.type = kR64F, .compute = kCompute64F, .scale = kR64F};
  std::vector<double> a(p.m * p.k, 1 + std::ldexp(1.0, -40)), b(p.k * p.n, 1);
  each<double>(p, a, b, std::vector<double>(p.m * p.n), [&](const std::vector<double>& got) {
    for (double x : got) ASSERT_EQ(x, 16 * (1 + std::ldexp(1.0, -40)));
  });
}
// 256 ones make 257 with one more, which 8 bits of mantissa do not hold.
TEST_F(CublasLtProducts, SixteenBitsAreSummedInSingle) {
  for (int type : {kR16BF, kR16F}) {
    const Plan p{.type = type, .k = 4104};
    const uint16_t one = type == kR16BF ? 0x3f80 : 0x3c00, sum = type == kR16BF ? 0x4580 : 0x6c02;
    each<uint16_t>(p, std::vector<uint16_t>(p.m * p.k, one), std::vector<uint16_t>(p.k * p.n, one),
                   std::vector<uint16_t>(p.m * p.n), [&](const std::vector<uint16_t>& got) {
                     for (uint16_t x : got) ASSERT_EQ(x, sum);
                   });
  }
}

TEST_F(CublasLtProducts, SuggestionsKeepToWhatIsPreferred) {
  Plan p;
  p.workspace_bytes = 0;
  for (const Suggestion& s : suggestions(p)) EXPECT_EQ(s.workspace_bytes, 0u);
  p.workspace_bytes = 32 << 20, p.reductions = kReductionNone;
  const auto all = suggestions(p);
  ASSERT_FALSE(all.empty());
  for (const Suggestion& s : all) {
    int32_t splits = -1, reduction = -1;
    size_t written = 0;
    EXPECT_EQ(cublaslt().algorithm_get(&s.algorithm, kAlgorithmSplits, &splits, 4, &written),
              Status::kSuccess);
    EXPECT_EQ(cublaslt().algorithm_get(&s.algorithm, kAlgorithmReduction, &reduction, 4, &written),
              Status::kSuccess);
    EXPECT_LE(splits, 1);
    EXPECT_EQ(reduction, kReductionNone);
  }
  EXPECT_LE(suggestions(p, 1).size(), 1u);
}
TEST_F(CublasLtProducts, ASuggestionPassesItsCheckForItsProductOnly) {
  const Plan p;
  Made made, other;
  make(p, made);
  make({.type = kR16BF}, other);
  const auto all = suggestions(p, made);
  ASSERT_FALSE(all.empty());
  Suggestion found{};
  EXPECT_EQ(cublaslt().check(handle, made.product, made.a, made.b, made.d, made.d,
                             &all[0].algorithm, &found),
            Status::kSuccess);
  EXPECT_EQ(found.workspace_bytes, all[0].workspace_bytes);
  EXPECT_NE(cublaslt().check(handle, other.product, other.a, other.b, other.d, other.d,
                             &all[0].algorithm, &found),
            Status::kSuccess);
}
TEST_F(CublasLtProducts, WhatIsNoProductGetsNoSuggestion) {
  EXPECT_TRUE(suggestions({.type = kR64F}).empty()) << "doubles in single";
  EXPECT_TRUE(suggestions({.type = kR16BF, .compute = kCompute32FFastTF32}).empty());
  EXPECT_TRUE(suggestions({.lda = 4}).empty()) << "a leading dimension below the rows";
  EXPECT_TRUE(suggestions({.epilogue = 3}).empty());
  const Plan p;
  Made made, other;
  make(p, made);
  make({.k = 24}, other);
  const Layout before = made.b;
  made.b = other.b;
  EXPECT_TRUE(suggestions(p, made).empty()) << "operands of different sums";
  made.b = before;
}
TEST_F(CublasLtProducts, ASmallWorkspaceIsRefused) {
  const Plan p{.m = 64, .n = 64, .k = 8192};
  Made made;
  make(p, made);
  const DevicePtr x = allocate(64 * 8192 * 4);
  for (const Suggestion& s : suggestions(p, made)) {
    if (!s.workspace_bytes) continue;
    EXPECT_EQ(run(p, made, s.algorithm, x, x, x, s.workspace_bytes - 1), Status::kInvalidValue);
  }
  check(cuda().memory_free(x), "free");
}
TEST_F(CublasLtProducts, ProductsAreCapturedInGraphs) {
  const Plan p;
  Made made;
  make(p, made);
  const auto a = whole<float>(p.m * p.k, 1), b = whole<float>(p.k * p.n, 2);
  const DevicePtr at_a = upload(a, stream), at_b = upload(b, stream),
                  at_d = upload(std::vector<float>(p.m * p.n), stream);
  const auto all = suggestions(p, made);
  ASSERT_FALSE(all.empty());
  GraphHandle graph;
  GraphExecHandle exec;
  check(cuda().begin_capture(stream, kCaptureThreadLocal), "capture");
  EXPECT_EQ(run(p, made, all[0].algorithm, at_a, at_b, at_d), Status::kSuccess);
  check(cuda().end_capture(stream, &graph), "capture");
  check(cuda().graph_instantiate(&exec, graph, 0), "instantiate");
  EXPECT_EQ(download<float>(at_d, 1, stream)[0], 0);
  check(cuda().graph_launch(exec, stream), "launch");
  EXPECT_EQ(download<float>(at_d, 1, stream)[0], element(p, a, b, 0, 0));
  check(cuda().graph_exec_destroy(exec), "destroy");
  check(cuda().graph_destroy(graph), "destroy");
  for (DevicePtr x : {at_a, at_b, at_d}) check(cuda().memory_free(x), "free");
}

}  // namespace
}  // namespace vgpu_test
