// What the CUDA printer prints compiles to cubins for several architectures, without a word from
// the compiler and without local memory. Needs NVRTC and no GPU.
#include "core/backend/cuda/cubins.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "compile/codegen/generate.h"
#include "compile/codegen/samples.h"
#include "core/backend/cuda/library.h"
#include "core/base/error.h"
#include "tests/cuda/cubin_use.h"

namespace tessera::test {
namespace {

using namespace compiler;

TEST(PrintCuda, CompilesToCubins) {
  if (!cuda::why_no_nvrtc().empty()) GTEST_SKIP() << cuda::why_no_nvrtc();
  std::string text = prologue_cuda();
  int n = 0;
  auto add = [&](const Body& body) {
    std::string kernel = print_cuda(body, "k" + std::to_string(n++));
    EXPECT_NE(kernel, "") << to_string(body);
    text += kernel;
  };
  for (DType t : {kF32, kF64, kBF16, kF16})
    add(softmax_body(64, 1000, t)), add(bias_gelu_body(64, 768, t));
  add(layer_norm_body(64, 768)), add(adamw_body(100000));
  add(layer_norm_grad_body(64, 768)), add(cross_entropy_body(64, 50257));
  BodyBuilder b({64, 5, 7});
  InstrId x = b.load(7, kI32), y = b.load(7, kU8), z = b.load(4, kBool);
  InstrId wide = b.op("add", {b.cast(x, kI64), b.index(2)});
  b.store(b.op("mul", {x, b.cast(y, kI32)})), b.store(b.op("where", {z, wide, b.index(1)}));
  b.store(b.op("logical_or", {z, b.op("gt", {wide, b.constant(3, kI64)}, true)}, true));
  add(b.body);
  BodyBuilder r({64, 700});
  InstrId f = r.load(3), positive = r.op("gt", {f, r.constant(0.0)}, true);
  r.store(r.sum(positive, 2)), r.store(r.reduce(ReduceKind::kAny, positive, 2));
  r.store(r.reduce(ReduceKind::kMin, r.cast(positive, kI32), 2));
  r.store(r.reduce(ReduceKind::kProd, f, 2)), r.store(r.reduce(ReduceKind::kAll, positive, 2));
  add(r.body);
  for (int64_t columns : {1024, 3000, 4096, 8192, 40000})  // of each size of a unit
    add(softmax_body(64, columns)), add(softmax_body(64, columns, kBF16)),
        add(layer_norm_body(64, columns));
  for (int64_t columns : {1024, 3000, 4096}) add(layer_norm_grad_body(64, columns));
  for (const char* architecture : {"sm_80", "sm_90", "sm_100"}) {
    const cuda::Compiled compiled = cuda::compile("kernels", text, architecture);
    EXPECT_EQ(compiled.log, "") << text;
    EXPECT_GT(compiled.cubin.size(), 10000u) << architecture;
    for (const cuda::test::Use& use : cuda::test::uses_of(compiled.cubin)) {
      if (use.kernel.starts_with("$")) continue;  // a function of the compiler's own
      EXPECT_EQ(use.frame_bytes, 0u) << use.kernel << " has local memory, " << architecture;
      if (std::getenv("TESSERA_KERNEL_REGISTERS"))
        std::printf("%s: %3u registers %s\n", architecture, use.registers, use.kernel.c_str());
    }
  }
  EXPECT_THROW(cuda::compile("kernels", text + "int nonsense = ;", "sm_90"), UserError);
}

}  // namespace
}  // namespace tessera::test
