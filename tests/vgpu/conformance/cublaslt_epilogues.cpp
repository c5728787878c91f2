// Statements about cuBLASLt's epilogues, each that Tessera may use.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "tests/vgpu/conformance/cublaslt.h"

namespace vgpu_test {
namespace {

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}
double gelu_gradient(double x) {
  constexpr double kStep = 1e-5;
  return (gelu(x + kStep) - gelu(x - kStep)) / (2 * kStep);
}

TEST_F(CublasLtProducts, BiasIsAddedToRowsOfColumnMajorResults) {
  Plan p{.epilogue = kEpilogueBias};
  const auto a = whole<float>(p.m * p.k, 1), b = whole<float>(p.k * p.n, 2),
             bias = whole<float>(p.m, 5);
  p.bias = upload(bias, stream);
  each<float>(p, a, b, std::vector<float>(p.m * p.n), [&](const std::vector<float>& got) {
    for (size_t i = 0; i < p.m; ++i)
      for (size_t j = 0; j < p.n; ++j)
        ASSERT_EQ(got[i + j * 8], element(p, a, b, i, j) + double(bias[i]));
  });
}
TEST_F(CublasLtProducts, ReluComesAfterTheBias) {
  Plan p{.epilogue = kEpilogueReluBias};
  const auto a = whole<float>(p.m * p.k, 1), b = whole<float>(p.k * p.n, 2),
             bias = whole<float>(p.m, 5);
  p.bias = upload(bias, stream);
  each<float>(p, a, b, std::vector<float>(p.m * p.n), [&](const std::vector<float>& got) {
    for (size_t i = 0; i < p.m; ++i)
      for (size_t j = 0; j < p.n; ++j)
        ASSERT_EQ(got[i + j * 8], std::max(0.0, element(p, a, b, i, j) + double(bias[i])));
  });
}
// In bf16, which every card has these for. The bounds are 8 bits of mantissa; the two forms of GELU
// are up to 5e-4 apart, and so is one of small results.
TEST_F(CublasLtProducts, GeluIsTheTanhFormAndKeepsItsOperand) {
  for (int epilogue : {kEpilogueGeluAux, kEpilogueGeluAuxBias}) {
    Plan p{.type = kR16BF, .epilogue = epilogue, .aux_leading = 8};
    const bool has_bias = epilogue == kEpilogueGeluAuxBias;
    const auto a = whole<uint16_t>(p.m * p.k, 1, to_bf16),
               b = whole<uint16_t>(p.k * p.n, 2, to_bf16), bias = whole<uint16_t>(p.m, 5, to_bf16);
    p.bias = has_bias ? upload(bias, stream) : 0;
    p.aux = upload(std::vector<uint16_t>(p.m * p.n), stream);
    each<uint16_t>(
        p, a, b, std::vector<uint16_t>(p.m * p.n), [&](const std::vector<uint16_t>& got) {
          const auto aux = download<uint16_t>(p.aux, p.m * p.n, stream);
          for (size_t i = 0; i < p.m; ++i)
            for (size_t j = 0; j < p.n; ++j) {
              const double x = element<uint16_t>(p, a, b, i, j, 0, 0,
                                                 [](uint16_t v) { return double(of_bf16(v)); }) +
                               (has_bias ? double(of_bf16(bias[i])) : 0);
              ASSERT_EQ(of_bf16(aux[i + j * 8]), x);
              ASSERT_NEAR(of_bf16(got[i + j * 8]), gelu(x), std::abs(gelu(x)) / 256 + 1e-6) << x;
            }
        });
  }
}
TEST_F(CublasLtProducts, GradientsOfGeluAndOfTheBias) {
  for (int epilogue : {kEpilogueDGelu, kEpilogueDGeluBGrad}) {
    Plan p{.type = kR16BF, .epilogue = epilogue, .aux_leading = 8};
    const auto a = whole<uint16_t>(p.m * p.k, 1, to_bf16),
               b = whole<uint16_t>(p.k * p.n, 2, to_bf16),
               aux = whole<uint16_t>(p.m * p.n, 5, to_bf16);
    p.aux = upload(aux, stream);
    p.bias = epilogue == kEpilogueDGelu ? 0 : upload(std::vector<uint16_t>(p.m), stream);
    each<uint16_t>(
        p, a, b, std::vector<uint16_t>(p.m * p.n), [&](const std::vector<uint16_t>& got) {
          std::vector<double> sums(p.m), sizes(p.m);
          for (size_t i = 0; i < p.m; ++i)
            for (size_t j = 0; j < p.n; ++j) {
              const double x = element<uint16_t>(p, a, b, i, j, 0, 0,
                                                 [](uint16_t v) { return double(of_bf16(v)); }) *
                               gelu_gradient(double(of_bf16(aux[i + j * 8])));
              ASSERT_NEAR(of_bf16(got[i + j * 8]), x, std::abs(x) / 256 + 1e-6);
              sums[i] += x, sizes[i] += std::abs(x);
            }
          if (!p.bias) return;
          const auto bias = download<uint16_t>(p.bias, p.m, stream);
          for (size_t i = 0; i < p.m; ++i)
            ASSERT_NEAR(of_bf16(bias[i]), sums[i], sizes[i] / 100) << i;
        });
  }
}
// The leading dimension of aux is a multiple of 8 and at least the rows, and its address one of 16.
TEST_F(CublasLtProducts, WhatGeluKeepsIsAligned) {
  const DevicePtr memory = upload(std::vector<uint16_t>(512), stream);
  for (int epilogue : {kEpilogueGeluAuxBias, kEpilogueDGeluBGrad}) {
    Plan p{.type = kR16BF, .m = 16, .epilogue = epilogue, .aux_leading = 16};
    p.bias = memory, p.aux = memory + 64;
    EXPECT_FALSE(suggestions(p).empty());
    for (int64_t leading : {0, 8, 20}) {
      Plan wrong = p;
      wrong.aux_leading = leading;
      EXPECT_TRUE(suggestions(wrong).empty()) << leading;
    }
    Plan wrong = p;
    wrong.aux += 2;
    EXPECT_TRUE(suggestions(wrong).empty());
    wrong = p, wrong.aux = 0;
    EXPECT_TRUE(suggestions(wrong).empty());
    wrong = p, wrong.bias = 0;
    EXPECT_TRUE(suggestions(wrong).empty());
  }
  check(cuda().memory_free(memory), "free");
}
TEST_F(CublasLtProducts, SumsOfOperandsAreGradientsOfBiases) {
  for (int epilogue : {kEpilogueBGradA, kEpilogueBGradB}) {
    Plan p{.type = kR16BF, .transpose_b = true, .epilogue = epilogue};
    const bool of_a = epilogue == kEpilogueBGradA;
    const size_t count = of_a ? p.m : p.n;
    const auto a = whole<uint16_t>(p.m * p.k, 1, to_bf16),
               b = whole<uint16_t>(p.k * p.n, 2, to_bf16);
    p.bias = upload(std::vector<uint16_t>(count), stream);
    each<uint16_t>(p, a, b, std::vector<uint16_t>(p.m * p.n), [&](const std::vector<uint16_t>&) {
      const auto bias = download<uint16_t>(p.bias, count, stream);
      for (size_t i = 0; i < count; ++i) {
        double sum = 0;
        for (size_t l = 0; l < p.k; ++l)
          sum += double(of_bf16(of_a ? a[i + l * p.m] : b[i + l * p.n]));
        ASSERT_EQ(of_bf16(bias[i]), sum) << i;
      }
    });
  }
}

}  // namespace
}  // namespace vgpu_test
