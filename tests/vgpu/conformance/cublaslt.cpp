// Statements about cuBLASLt's descriptors, which need neither a driver nor a handle.
#include "tests/vgpu/support/client.h"

namespace vgpu_test {
namespace {

using namespace tessera::cuda::blas;  // NOLINT: the tests speak the library's language

class CublasLtObjects : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_cublaslt(); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_F(CublasLtObjects, VersionIs13) {
  EXPECT_GE(cublaslt().version(), 130000u);
  EXPECT_LT(cublaslt().version(), 140000u);
}

TEST_F(CublasLtObjects, LayoutsKeepWhatTheyAreGiven) {
  Layout l = nullptr;
  ASSERT_EQ(cublaslt().layout_create(&l, kR16BF, 5, 7, 8), Status::kSuccess);
  const auto number = [&](int attribute, size_t bytes) {
    int64_t value = 0;
    size_t written = 0;
    EXPECT_EQ(cublaslt().layout_get(l, attribute, nullptr, 0, &written), Status::kSuccess);
    EXPECT_EQ(written, bytes) << "attribute " << attribute;
    EXPECT_EQ(cublaslt().layout_get(l, attribute, &value, bytes, &written), Status::kSuccess);
    return value;
  };
  EXPECT_EQ(number(kLayoutType, 4), kR16BF);
  EXPECT_EQ(number(kLayoutOrder, 4), kOrderColumn);
  EXPECT_EQ(number(kLayoutRows, 8), 5);
  EXPECT_EQ(number(kLayoutColumns, 8), 7);
  EXPECT_EQ(number(kLayoutLeading, 8), 8);
  EXPECT_EQ(number(kLayoutBatchCount, 4), 1);
  EXPECT_EQ(number(kLayoutBatchStride, 8), 0);
  const int32_t order = kOrderRow;
  EXPECT_EQ(cublaslt().layout_set(l, kLayoutOrder, &order, 4), Status::kSuccess);
  EXPECT_EQ(number(kLayoutOrder, 4), kOrderRow);
  EXPECT_EQ(cublaslt().layout_destroy(l), Status::kSuccess);
}
TEST_F(CublasLtObjects, AttributesHaveSizesAndNames) {
  Layout l = nullptr;
  ASSERT_EQ(cublaslt().layout_create(&l, kR32F, 5, 7, 5), Status::kSuccess);
  const int64_t value = 1;
  int64_t to = 0;
  size_t written = 0;
  EXPECT_EQ(cublaslt().layout_set(l, kLayoutOrder, &value, 8), Status::kInvalidValue);
  EXPECT_EQ(cublaslt().layout_set(l, kLayoutLeading, &value, 4), Status::kInvalidValue);
  EXPECT_EQ(cublaslt().layout_set(l, kLayoutLeading, nullptr, 8), Status::kInvalidValue);
  EXPECT_EQ(cublaslt().layout_set(l, 55, &value, 4), Status::kInvalidValue);
  EXPECT_EQ(cublaslt().layout_get(l, kLayoutLeading, &to, 4, &written), Status::kInvalidValue);
  EXPECT_EQ(cublaslt().layout_get(l, kLayoutLeading, nullptr, 0, nullptr), Status::kInvalidValue);
  EXPECT_EQ(cublaslt().layout_get(l, kLayoutLeading, &to, 8, nullptr), Status::kSuccess);
  EXPECT_EQ(cublaslt().layout_create(nullptr, kR32F, 5, 7, 5), Status::kInvalidValue);
  EXPECT_EQ(cublaslt().layout_destroy(l), Status::kSuccess);
}
// Descriptors take any value: what cannot be computed is refused when it is asked for.
TEST_F(CublasLtObjects, DescriptorsTakeValuesThatNoProductHas) {
  Layout l = nullptr;
  EXPECT_EQ(cublaslt().layout_create(&l, kR32F, 5, 7, 2), Status::kSuccess);
  EXPECT_EQ(cublaslt().layout_destroy(l), Status::kSuccess);
  Product p = nullptr;
  EXPECT_EQ(cublaslt().product_create(&p, kCompute64F, kR32F), Status::kSuccess);
  const int32_t nonsense = 99999;
  EXPECT_EQ(cublaslt().product_set(p, kProductEpilogue, &nonsense, 4), Status::kSuccess);
  EXPECT_EQ(cublaslt().product_destroy(p), Status::kSuccess);
}
TEST_F(CublasLtObjects, ProductsBeginPlain) {
  Product p = nullptr;
  ASSERT_EQ(cublaslt().product_create(&p, kCompute32F, kR32F), Status::kSuccess);
  struct Row {
    int attribute;
    size_t bytes;
    int64_t value;
  };
  for (const Row& r : {Row{kProductCompute, 4, kCompute32F},
                       {kProductScaleType, 4, kR32F},
                       {kProductPointerMode, 4, kPointerModeHost},
                       {kProductTransposeA, 4, kAsIs},
                       {kProductTransposeB, 4, kAsIs},
                       {kProductTransposeC, 4, kAsIs},
                       {kProductFill, 4, kFillFull},
                       {kProductEpilogue, 4, kEpilogueDefault},
                       {kProductBias, 8, 0},
                       {kProductBiasBatchStride, 8, 0},
                       {kProductAux, 8, 0},
                       {kProductAuxLeading, 8, 0},
                       {kProductAuxBatchStride, 8, 0},
                       {kProductScaleA, 8, 0},
                       {kProductScaleB, 8, 0},
                       {kProductAuxType, 4, 0xffffffff},
                       {kProductBiasType, 4, 0xffffffff}}) {
    int64_t value = 0;
    size_t written = 0;
    EXPECT_EQ(cublaslt().product_get(p, r.attribute, &value, r.bytes, &written), Status::kSuccess);
    EXPECT_EQ(written, r.bytes) << "attribute " << r.attribute;
    EXPECT_EQ(value, r.value) << "attribute " << r.attribute;
  }
  EXPECT_EQ(cublaslt().product_destroy(p), Status::kSuccess);
}
TEST_F(CublasLtObjects, PreferencesBeginWithoutWorkspaceAndWithAlignedOperands) {
  Preference p = nullptr;
  ASSERT_EQ(cublaslt().preference_create(&p), Status::kSuccess);
  const auto number = [&](int attribute, size_t bytes) {
    int64_t value = 0;
    size_t written = 0;
    EXPECT_EQ(cublaslt().preference_get(p, attribute, &value, bytes, &written), Status::kSuccess);
    return value;
  };
  EXPECT_EQ(number(kPreferenceSearchMode, 4), 0);
  EXPECT_EQ(number(kPreferenceWorkspaceBytes, 8), 0);
  EXPECT_EQ(number(kPreferenceReductions, 4), kReductionMask);
  for (int a :
       {kPreferenceAlignmentA, kPreferenceAlignmentB, kPreferenceAlignmentC, kPreferenceAlignmentD})
    EXPECT_EQ(number(a, 4), 256);
  EXPECT_EQ(cublaslt().preference_destroy(p), Status::kSuccess);
}
TEST_F(CublasLtObjects, NothingIsComputedWithoutAHandle) {
  Product p = nullptr;
  Layout l = nullptr;
  Preference wanted = nullptr;
  ASSERT_EQ(cublaslt().product_create(&p, kCompute32F, kR32F), Status::kSuccess);
  ASSERT_EQ(cublaslt().layout_create(&l, kR32F, 8, 8, 8), Status::kSuccess);
  ASSERT_EQ(cublaslt().preference_create(&wanted), Status::kSuccess);
  Suggestion s;
  int count = -1;
  const float one = 1;
  EXPECT_EQ(cublaslt().heuristic(nullptr, p, l, l, l, l, wanted, 1, &s, &count),
            Status::kNotInitialized);
  EXPECT_EQ(count, -1);
  EXPECT_EQ(cublaslt().matmul(nullptr, p, &one, nullptr, l, nullptr, l, &one, nullptr, l, nullptr,
                              l, nullptr, nullptr, 0, nullptr),
            Status::kNotInitialized);
  EXPECT_EQ(cublaslt().destroy(nullptr), Status::kInvalidValue);
  cublaslt().preference_destroy(wanted), cublaslt().layout_destroy(l),
      cublaslt().product_destroy(p);
}

}  // namespace
}  // namespace vgpu_test
