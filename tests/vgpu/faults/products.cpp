// Wrong calls of cuBLASLt that the virtual library has to refuse, each by name, and what checked
// mode finds of products: they are ops like others.
#include <optional>

#include "tests/vgpu/faults/programs.h"

namespace vgpu_test {
namespace {

using namespace tessera::cuda::blas;  // NOLINT: the tests speak the library's language

/// 8 x 8 matrices of floats, column-major, and a product of them that is right; a fault changes it.
struct Call {
  Handle handle = nullptr;
  Product product = nullptr;
  Layout a = nullptr, b = nullptr, d = nullptr;
  Preference preference = nullptr;
  StreamHandle stream = new_stream();
  DevicePtr at_a = 0, at_b = 0, at_d = 0, workspace = 0;
  size_t workspace_bytes = 1 << 20;
  int32_t alignment = 256;
  size_t which = 0;  // of the suggestions
  std::optional<Algorithm> algorithm;
  float alpha = 1, beta = 0;

  Call() {
    good(cublaslt().create(&handle), "create");
    good(cublaslt().product_create(&product, kCompute32F, kR32F), "product");
    for (Layout* l : {&a, &b, &d}) good(cublaslt().layout_create(l, kR32F, 8, 8, 8), "layout");
    good(cublaslt().preference_create(&preference), "preference");
    at_a = written(80, stream), at_b = written(80, stream), at_d = floats(80);
    workspace = allocate(1 << 20);
  }
  static void good(Status s, const char* what) {
    if (s != Status::kSuccess) throw std::runtime_error(std::string("blas ") + what);
  }
  template <class T>
  void set(int attribute, T value) {
    good(cublaslt().product_set(product, attribute, &value, sizeof(value)), "set");
  }
  template <class T>
  static void set(Layout l, int attribute, T value) {
    good(cublaslt().layout_set(l, attribute, &value, sizeof(value)), "set");
  }
  void suggest() {
    const uint64_t most = 1 << 20;
    cublaslt().preference_set(preference, kPreferenceWorkspaceBytes, &most, sizeof(most));
    for (int at = kPreferenceAlignmentA; at <= kPreferenceAlignmentD; ++at)
      cublaslt().preference_set(preference, at, &alignment, sizeof(alignment));
    Suggestion all[8];
    int count = 0;
    good(cublaslt().heuristic(handle, product, a, b, d, d, preference, 8, all, &count),
         "heuristic");
    if (which >= static_cast<size_t>(count)) throw std::runtime_error("no such suggestion");
    algorithm = all[which].algorithm;
  }
  Status multiply(StreamHandle in) {
    if (!algorithm) suggest();
    const auto at = [](DevicePtr p) { return reinterpret_cast<void*>(p); };
    return cublaslt().matmul(handle, product, &alpha, at(at_a), a, at(at_b), b, &beta, at(at_d), d,
                             at(at_d), d, &*algorithm, at(workspace), workspace_bytes, in);
  }
  int run() { return (multiply(stream) == Status::kSuccess ? 0 : 4) + wait(stream); }
};

void refused(const std::string& words, const std::function<void(Call&)>& spoil,
             bool checked = false) {
  expect_found(checked, words, [&](const Kernels&) {
    Call call;
    spoil(call);
    return call.run();
  });
}

TEST(Products, ARightOneIsNot) {
  expect_right([](const Kernels&) {
    Call call;
    for (call.which = 0; call.which < 4; ++call.which) {
      call.algorithm.reset();
      if (const int status = call.run()) return status;
    }
    return download<float>(call.at_d, 1, call.stream)[0] == 8 ? 0 : 1;
  });
}
TEST(Products, MisalignedOperands) {
  refused("A is not aligned to 16 bytes, which algorithm 21 needs", [](Call& c) { c.at_a += 4; });
  refused("C is not aligned to 16 bytes", [](Call& c) { c.at_d += 8; });
}
TEST(Products, WorkspaceTooSmallMissingOrMisaligned) {
  refused("a workspace of 100 bytes; algorithm 21 needs 805",
          [](Call& c) { c.workspace_bytes = 100; });
  refused("algorithm 21 needs 805", [](Call& c) { c.workspace = 0; });
  refused("the workspace is not aligned to 256 bytes", [](Call& c) { c.workspace += 16; });
}
TEST(Products, LayoutsThatDoNotFit) {
  refused("the leading dimension of B is 7, less than 8",
          [](Call& c) { c.set(c.b, kLayoutLeading, int64_t{7}); });
  refused("A has 9 summed elements and B has 8",
          [](Call& c) { c.set(c.a, kLayoutColumns, uint64_t{9}); });
  refused("C is 8 x 7, the product 8 x 8", [](Call& c) {
    c.algorithm = Algorithm{};
    Call::good(cublaslt().layout_create(&c.d, kR32F, 8, 7, 8), "layout");
  });
  refused("layouts with different batches",
          [](Call& c) { c.set(c.d, kLayoutBatchCount, int32_t{2}); });
  refused("order 2 of A is not emulated", [](Call& c) { c.set(c.a, kLayoutOrder, int32_t{2}); });
}
TEST(Products, TypesOutsideOfTheTable) {
  refused("types 1, 0, 0, 0 of A, B, C, D", [](Call& c) { c.set(c.a, kLayoutType, int32_t{1}); });
  refused("compute type 64", [](Call& c) { c.set(kProductCompute, int32_t{kCompute16F}); });
  refused("scale type 1", [](Call& c) { c.set(kProductScaleType, int32_t{kR64F}); });
}
TEST(Products, EpiloguesWithoutWhatTheyNeed) {
  refused("epilogue BIAS without a bias pointer",
          [](Call& c) { c.set(kProductEpilogue, int32_t{kEpilogueBias}); });
  const auto with_aux = [](Call& c, int64_t leading) {
    c.set(kProductEpilogue, int32_t{kEpilogueGeluAux});
    c.set(kProductAux, floats(200));
    c.set(kProductAuxLeading, leading);
  };
  refused("epilogue GELU_AUX without an aux pointer",
          [](Call& c) { c.set(kProductEpilogue, int32_t{kEpilogueGeluAux}); });
  refused("the leading dimension of aux is 0", [&](Call& c) { with_aux(c, 0); });
  refused("the leading dimension of aux is 12, not 8 or more and a multiple of 8",
          [&](Call& c) { with_aux(c, 12); });
  refused("epilogue BIAS with a result in the order of rows", [](Call& c) {
    c.set(kProductEpilogue, int32_t{kEpilogueBias});
    c.set(kProductBias, floats(8));
    c.set(c.d, kLayoutOrder, int32_t{kOrderRow});
  });
}
TEST(Products, AttributesThatAreNotEmulated) {
  expect_found(false, "cublasLtMatmulDescSetAttribute: attribute 19 is not emulated",
               [](const Kernels&) {
                 Call call;
                 const DevicePtr scale = floats(1);
                 return cublaslt().product_set(call.product, 19, &scale, 8) == Status::kSuccess;
               });
  refused("pointer mode 1 is not emulated",
          [](Call& c) { c.set(kProductPointerMode, int32_t{kPointerModeDevice}); });
}
TEST(Products, AnAlgorithmOfAnotherProduct) {
  refused("no algorithm, or one of another product", [](Call& c) {
    c.suggest();
    c.set(kProductTransposeA, int32_t{kTransposed});
  });
}
TEST(Products, HandlesThatAreGoneOrOfAnotherDevice) {
  refused("cublasLtMatmulAlgoGetHeuristic: no handle",
          [](Call& c) { cublaslt().destroy(c.handle); });
  expect_found(false, "wrong device: a handle of device 0 while device 1 is current",
               [](const Kernels&) {
                 Call call;
                 call.suggest();
                 check(cuda().set_current(context_of(1)), "set current");
                 return call.multiply(new_stream()) == Status::kSuccess ? 0 : 4;
               },
               {{"VGPU_DEVICES", "2"}});
}
TEST(Products, AreAskedToFail) {
  for (const char* what : {"cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic", "cublasLtCreate"})
    expect_found(false, std::string(what) + ": fails, as VGPU_FAIL asks",
                 [](const Kernels&) { return Call().run(); }, {{"VGPU_FAIL", what}});
  expect_found(false, "cublasLt DEFAULT: fails, as VGPU_FAIL asks",
               [](const Kernels&) { return Call().run(); }, {{"VGPU_FAIL", "cublasLt DEFAULT"}});
}
TEST(Products, RaceForAnOperand) {
  expect_found(true, "race", [](const Kernels&) {
    Call call;
    const StreamHandle other = new_stream();
    check(cuda().fill_32(call.at_a, 0, 64, other), "fill");
    return call.run() + wait(other);
  });
}
TEST(Products, RaceForAWorkspace) {
  expect_found(true, "race", [](const Kernels&) {
    Call call;
    const StreamHandle other = new_stream();
    call.multiply(call.stream);
    call.at_d = floats(64);
    call.multiply(other);
    return wait(call.stream) + wait(other);
  });
}
TEST(Products, UnwrittenOperandsAndOnesThatEndTooEarly) {
  refused(
      "nobody has written", [](Call& c) { c.at_b = floats(64); }, true);
  refused(
      "out of bounds", [](Call& c) { c.at_b = written(60, c.stream); }, true);
}

}  // namespace
}  // namespace vgpu_test
