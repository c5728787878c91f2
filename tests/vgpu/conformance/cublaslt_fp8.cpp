// Statements about cuBLASLt's products of factors of eight bits with one scale each, on cards from
// capability 8.9 on.
#include <cmath>

#include "tests/vgpu/conformance/cublaslt.h"

namespace vgpu_test {
namespace {

// Small whole numbers of which both formats hold all.
uint8_t to_e4m3(float x) {
  constexpr uint8_t kOf[] = {0x00, 0x38, 0x40};
  return static_cast<uint8_t>(kOf[static_cast<int>(std::abs(x))] | (x < 0 ? 0x80 : 0));
}
uint8_t to_e5m2(float x) {
  constexpr uint8_t kOf[] = {0x00, 0x3c, 0x40};
  return static_cast<uint8_t>(kOf[static_cast<int>(std::abs(x))] | (x < 0 ? 0x80 : 0));
}

class CublasLtFp8 : public CublasLtProducts {
 protected:
  static constexpr Plan plain() {
    return {.type = kR8E4M3, .result = kR16BF, .m = 16, .n = 12, .k = 32, .transpose_a = true};
  }
  void SetUp() override {
    CublasLtProducts::SetUp();
    if (handle && suggestions(plain()).empty()) GTEST_SKIP() << "a card without these products";
  }
  /// Runs each algorithm on drawn factors and compares with sums in double times `factor`, plus
  /// what `bias` says of a row.
  template <class T>
  void expect(
      Plan p, double factor, const std::function<double(T)>& value,
      const std::function<double(size_t)>& bias = [](size_t) { return 0; }) {
    const auto of = [](int type) { return type == kR8E5M2 ? to_e5m2 : to_e4m3; };
    const auto a = whole<float>(p.m * p.k, 1), b = whole<float>(p.k * p.n, 2);
    const DevicePtr at_a = upload(whole<uint8_t>(p.m * p.k, 1, of(p.type)), stream),
                    at_b = upload(
                        whole<uint8_t>(p.k * p.n, 2, of(p.type_b < 0 ? p.type : p.type_b)), stream),
                    at_d = upload(std::vector<T>(p.m * p.n), stream);
    Made made;
    make(p, made);
    const std::vector<Suggestion> all = suggestions(p, made);
    ASSERT_FALSE(all.empty());
    for (const Suggestion& s : all) {
      ASSERT_EQ(run(p, made, s.algorithm, at_a, at_b, at_d, s.workspace_bytes), Status::kSuccess);
      const std::vector<T> got = download<T>(at_d, p.m * p.n, stream);
      for (size_t i = 0; i < p.m; ++i)
        for (size_t j = 0; j < p.n; ++j)
          ASSERT_EQ(value(got[i + j * p.m]), element(p, a, b, i, j) * factor + bias(i));
    }
    for (DevicePtr x : {at_a, at_b, at_d}) check(cuda().memory_free(x), "free");
  }
  static double of_single(float x) { return x; }
  static double of_bf16_bits(uint16_t x) { return of_bf16(x); }
};

TEST_F(CublasLtFp8, EachFormatButTwiceTheSecond) {
  for (const auto& [a, b] : {std::pair{kR8E4M3, kR8E4M3}, {kR8E4M3, kR8E5M2}, {kR8E5M2, kR8E4M3}}) {
    Plan p = plain();
    p.type = a, p.type_b = b;
    expect<uint16_t>(p, 1, of_bf16_bits);
    p.result = kR32F;
    expect<float>(p, 1, of_single);
    p.result = kR16F;
    EXPECT_FALSE(suggestions(p).empty());
  }
  Plan p = plain();
  p.type = kR8E5M2;
  EXPECT_TRUE(suggestions(p).empty()) << "both of the second format";
}
// A scale is a factor of the sum; one that is not given is 1.
TEST_F(CublasLtFp8, ScalesAreReadFromMemory) {
  const DevicePtr scales = upload(std::vector<float>{0.5f, 8}, stream);
  Plan p = plain();
  p.result = kR32F;
  p.scale_a = scales;
  expect<float>(p, 0.5, of_single);
  p.scale_b = scales + 4;
  expect<float>(p, 4, of_single);
  p = {.m = 16, .scale_a = scales};
  EXPECT_TRUE(suggestions(p).empty()) << "a scale of single factors";
  check(cuda().memory_free(scales), "free");
}
TEST_F(CublasLtFp8, ABiasHasTheTypeOfTheResultOrSixteenBits) {
  Plan p = plain();
  p.epilogue = kEpilogueBias;
  p.bias = upload(whole<uint16_t>(p.m, 5, to_bf16), stream);
  const auto row = [&](size_t i) { return double(whole<float>(p.m, 5)[i]); };
  p.bias_type = kR16BF;
  expect<uint16_t>(p, 1, of_bf16_bits, row);
  p.result = kR32F;
  expect<float>(p, 1, of_single, row);
  p.bias_type = kR32F;
  EXPECT_TRUE(suggestions(p).empty()) << "a single bias";
  p.result = kR16BF;
  EXPECT_TRUE(suggestions(p).empty()) << "a single bias beside a result of 16 bits";
  check(cuda().memory_free(p.bias), "free");
}
TEST_F(CublasLtFp8, OnlyTransposedTimesPlainWithDimsOfSixteenBytes) {
  for (const auto& [a, b] : {std::pair{false, false}, {false, true}, {true, true}}) {
    Plan p = plain();
    p.n = 16, p.transpose_a = a, p.transpose_b = b;
    EXPECT_TRUE(suggestions(p).empty()) << a << b;
  }
  Plan p = plain();
  p.k = 24;
  EXPECT_TRUE(suggestions(p).empty()) << "k of 24";
  p = plain(), p.m = 12;
  EXPECT_TRUE(suggestions(p).empty()) << "m of 12";
  p = plain(), p.lda = 40;
  EXPECT_TRUE(suggestions(p).empty()) << "runs of A that do not begin at 16 bytes";
  p = plain(), p.n = 7;
  EXPECT_FALSE(suggestions(p).empty()) << "any number of columns";
  p = plain(), p.alignment = 8;
  EXPECT_TRUE(suggestions(p).empty()) << "addresses of 8 bytes";
  p = plain(), p.compute = kCompute16F;
  EXPECT_TRUE(suggestions(p).empty()) << "sums in half";
}

}  // namespace
}  // namespace vgpu_test
