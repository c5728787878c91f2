// What the statements about products of cuBLASLt share: a product as a few fields, and a fixture
// that runs it by each algorithm that the library suggests.
#pragma once
#include <cstring>
#include <functional>

#include "tests/vgpu/conformance/fixture.h"

namespace vgpu_test {

using namespace tessera::cuda::blas;  // NOLINT: the tests speak the library's language

/// A product of column-major matrices of one type, C as D; fields may be changed before it runs.
struct Plan {
  int type = kR32F, compute = kCompute32F, scale = kR32F;
  int type_b = -1;  // -1: that of A
  int result = -1;  // the type of C and D; -1: that of A and B
  uint64_t m = 8, n = 12, k = 16;
  bool transpose_a = false, transpose_b = false;
  int64_t lda = 0, ldb = 0, ldd = 0;  // 0: dense
  int order = kOrderColumn;           // of all
  int32_t batch = 1;
  int64_t stride_a = 0, stride_b = 0, stride_d = 0;
  int epilogue = kEpilogueDefault;
  DevicePtr bias = 0, aux = 0;
  int64_t aux_leading = 0;
  int bias_type = -1;                  // -1: not said
  DevicePtr scale_a = 0, scale_b = 0;  // of factors of eight bits
  uint64_t workspace_bytes = 32 << 20;
  int32_t alignment = 256, reductions = kReductionMask;
  double alpha = 1, beta = 0;
};

class CublasLtProducts : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (const std::string why = why_no_cublaslt(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_EQ(cublaslt().create(&handle), Status::kSuccess);
    workspace = allocate(32 << 20);
  }
  void TearDown() override {
    OnDevice::TearDown();
    if (!handle) return;
    check(cuda().memory_free(workspace), "free");
    EXPECT_EQ(cublaslt().destroy(handle), Status::kSuccess);
  }

  struct Made {
    Product product = nullptr;
    Layout a = nullptr, b = nullptr, d = nullptr;
    ~Made() {
      cublaslt().product_destroy(product);
      for (Layout l : {a, b, d}) cublaslt().layout_destroy(l);
    }
  };
  template <class T>
  static void set(Product p, int attribute, T value) {
    ASSERT_EQ(cublaslt().product_set(p, attribute, &value, sizeof(value)), Status::kSuccess);
  }
  static void make(const Plan& p, Made& to) {
    ASSERT_EQ(cublaslt().product_create(&to.product, p.compute, p.scale), Status::kSuccess);
    set<int32_t>(to.product, kProductTransposeA, p.transpose_a ? kTransposed : kAsIs);
    set<int32_t>(to.product, kProductTransposeB, p.transpose_b ? kTransposed : kAsIs);
    set<int32_t>(to.product, kProductEpilogue, p.epilogue);
    set<DevicePtr>(to.product, kProductBias, p.bias);
    set<DevicePtr>(to.product, kProductAux, p.aux);
    set<int64_t>(to.product, kProductAuxLeading, p.aux_leading);
    set<DevicePtr>(to.product, kProductScaleA, p.scale_a);
    set<DevicePtr>(to.product, kProductScaleB, p.scale_b);
    if (p.bias_type >= 0) set<int32_t>(to.product, kProductBiasType, p.bias_type);
    const auto layout = [&p](Layout& l, int type, uint64_t rows, uint64_t columns, int64_t leading,
                             int64_t stride) {
      const auto dense = static_cast<int64_t>(p.order == kOrderRow ? columns : rows);
      ASSERT_EQ(cublaslt().layout_create(&l, type, rows, columns, leading ? leading : dense),
                Status::kSuccess);
      const int32_t order = p.order;
      cublaslt().layout_set(l, kLayoutOrder, &order, sizeof(order));
      cublaslt().layout_set(l, kLayoutBatchCount, &p.batch, sizeof(p.batch));
      cublaslt().layout_set(l, kLayoutBatchStride, &stride, sizeof(stride));
    };
    layout(to.a, p.type, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.lda, p.stride_a);
    layout(to.b, p.type_b < 0 ? p.type : p.type_b, p.transpose_b ? p.n : p.k,
           p.transpose_b ? p.k : p.n, p.ldb, p.stride_b);
    layout(to.d, p.result < 0 ? p.type : p.result, p.m, p.n, p.ldd, p.stride_d);
  }
  /// What the library suggests; empty where it refuses.
  std::vector<Suggestion> suggestions(const Plan& p, int most = 8) {
    Made made;
    make(p, made);
    return suggestions(p, made, most);
  }
  std::vector<Suggestion> suggestions(const Plan& p, const Made& made, int most = 8) {
    Preference wanted = nullptr;
    EXPECT_EQ(cublaslt().preference_create(&wanted), Status::kSuccess);
    cublaslt().preference_set(wanted, kPreferenceWorkspaceBytes, &p.workspace_bytes, 8);
    cublaslt().preference_set(wanted, kPreferenceReductions, &p.reductions, 4);
    for (int a : {kPreferenceAlignmentA, kPreferenceAlignmentB, kPreferenceAlignmentC,
                  kPreferenceAlignmentD})
      cublaslt().preference_set(wanted, a, &p.alignment, 4);
    std::vector<Suggestion> all(static_cast<size_t>(most));
    int count = 0;
    const Status s = cublaslt().heuristic(handle, made.product, made.a, made.b, made.d, made.d,
                                          wanted, most, all.data(), &count);
    EXPECT_EQ(cublaslt().preference_destroy(wanted), Status::kSuccess);
    all.resize(s == Status::kSuccess ? static_cast<size_t>(count) : 0);
    std::erase_if(all, [](const Suggestion& one) { return one.state != Status::kSuccess; });
    return all;
  }
  Status run(const Plan& p, const Made& made, const Algorithm& algorithm, DevicePtr a, DevicePtr b,
             DevicePtr d, uint64_t workspace_bytes = 32 << 20) {
    const float alpha = static_cast<float>(p.alpha), beta = static_cast<float>(p.beta);
    const bool wide = p.scale == kR64F;
    const auto at = [](DevicePtr x) { return reinterpret_cast<void*>(x); };
    return cublaslt().matmul(
        handle, made.product, wide ? static_cast<const void*>(&p.alpha) : &alpha, at(a), made.a,
        at(b), made.b, wide ? static_cast<const void*>(&p.beta) : &beta, at(d), made.d, at(d),
        made.d, &algorithm, at(workspace), workspace_bytes, stream);
  }
  /// Runs each algorithm that is suggested; all leave in d what `check` expects.
  template <class T>
  void each(const Plan& p, const std::vector<T>& a, const std::vector<T>& b,
            const std::vector<T>& d, const std::function<void(const std::vector<T>&)>& expect) {
    Made made;
    make(p, made);
    const DevicePtr at_a = upload(a, stream), at_b = upload(b, stream), at_d = upload(d, stream);
    const std::vector<Suggestion> all = suggestions(p, made);
    ASSERT_FALSE(all.empty());
    for (const Suggestion& s : all) {
      check(cuda().copy_to_device(at_d, d.data(), d.size() * sizeof(T), stream), "upload");
      ASSERT_EQ(run(p, made, s.algorithm, at_a, at_b, at_d, s.workspace_bytes), Status::kSuccess);
      expect(download<T>(at_d, d.size(), stream));
    }
    for (DevicePtr x : {at_a, at_b, at_d}) check(cuda().memory_free(x), "free");
  }

  Handle handle = nullptr;
  DevicePtr workspace = 0;
};

/// Small whole numbers, whose products are exact in every type.
template <class T>
std::vector<T> whole(
    size_t count, int seed, T (*make)(float) = [](float x) { return T(x); }) {
  std::vector<T> v(count);
  for (size_t i = 0; i < count; ++i)
    v[i] = make(static_cast<float>((static_cast<int>(i) * 7 + seed * 13) % 5 - 2));
  return v;
}
inline float of_bf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t to_bf16(float x) {  // of numbers that it holds
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

/// The element of op(x) [rows x columns] in column-major memory.
inline size_t at(size_t row, size_t column, bool transposed, size_t leading) {
  return transposed ? column + row * leading : row + column * leading;
}
template <class T>
double element(
    const Plan& p, const std::vector<T>& a, const std::vector<T>& b, size_t i, size_t j,
    size_t offset_a = 0, size_t offset_b = 0,
    double (*value)(T) = [](T x) { return static_cast<double>(x); }) {
  const size_t lda = p.lda ? static_cast<size_t>(p.lda) : p.transpose_a ? p.k : p.m;
  const size_t ldb = p.ldb ? static_cast<size_t>(p.ldb) : p.transpose_b ? p.n : p.k;
  double sum = 0;
  for (size_t l = 0; l < p.k; ++l)
    sum += value(a[offset_a + at(i, l, p.transpose_a, lda)]) *
           value(b[offset_b + at(l, j, p.transpose_b, ldb)]);
  return sum;
}

}  // namespace vgpu_test
