#include "examples/bench/compared.h"

#include <fmt/core.h>

#include "core/autograd/autograd.h"
#include "core/ops/contract.h"
#include "core/ops/conv.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/views.h"
#include "examples/bench/measure.h"

namespace tessera::bench {
namespace {

// `make` returns one call as a function that owns its operands.
template <class Make>
Case case_of(std::string name, Make make, double bytes, double flops) {
  auto prepare = [make]() -> Batch {
    return [once = make()](int64_t calls) mutable {
      for (int64_t i = 0; i < calls; ++i) once();
    };
  };
  return {std::move(name), prepare, bytes, flops};
}

Case product(int64_t n, DType dtype) {
  auto make = [=] {
    return [a = randn({n, n}).to(dtype), b = randn({n, n}).to(dtype)] {
      keep(matmul(a, b).defined());
    };
  };
  double values = double(n * n);
  return case_of(fmt::format("matmul_{}{}", n, dtype == kBF16 ? "_bf16" : ""), make,
                 3 * values * double(size_of(dtype)), 2 * values * double(n));
}

// The scores of 12 sequences of 64 with 4 heads of 32: 48 products of 64 x 64 x 32.
Case batched_product() {
  auto make = [] {
    return [q = randn({48, 64, 32}), k = randn({48, 32, 64})] { keep(matmul(q, k).defined()); };
  };
  return case_of("matmul_batched", make, 4.0 * 48 * (2 * 64 * 32 + 64 * 64),
                 2.0 * 48 * 64 * 64 * 32);
}

// A layer of 768 x 3072 on few rows: reading the weight is most of the traffic.
Case skinny_product() {
  auto make = [] {
    return [x = randn({16, 768}), w = randn({3072, 768})] { keep(linear(x, w).defined()); };
  };
  return case_of("linear_skinny", make, 4.0 * (16 * 768 + 3072 * 768 + 16 * 3072),
                 2.0 * 16 * 768 * 3072);
}

// 3 x 3, 64 to 64 channels, 56 x 56, 8 images: ResNet-50's first stage.
Case convolution(MemoryFormat format, DType dtype) {
  auto make = [=] {
    return [x = contiguous(randn({8, 64, 56, 56}).to(dtype), format),
            w = contiguous(randn({64, 64, 3, 3}).to(dtype), format)] {
      keep(conv2d(x, w, {}, {.padding = 1}).defined());
    };
  };
  const char* layout = format == MemoryFormat::kChannelsLast ? "" : "_nchw";
  double image = 8.0 * 64 * 56 * 56;
  return case_of(fmt::format("conv3x3{}{}", layout, dtype == kBF16 ? "_bf16" : ""), make,
                 double(size_of(dtype)) * (2 * image + 9 * 64 * 64), 2 * image * 9 * 64);
}

// An op of one operand over 64 MiB.
template <class Op>
Case large(std::string name, Op op) {
  constexpr int64_t kRows = 16384, kColumns = 1024;
  auto make = [op] {
    return [op, x = randn({kRows, kColumns}), w = randn({kColumns})] { keep(op(x, w).defined()); };
  };
  return case_of(std::move(name), make, 2.0 * 4 * kRows * kColumns, 0);
}

Case large_add() {
  auto make = [] {
    return [x = randn({16384, 1024}), y = randn({16384, 1024})] { keep(add(x, y).defined()); };
  };
  return case_of("add_large", make, 3.0 * 4 * 16384 * 1024, 0);
}

// Causal attention: 4 sequences of 1024, 12 heads of 64; flops are those of the whole square, as
// other benchmarks count them.
Case attention(bool grad, DType dtype) {
  constexpr int64_t kBatch = 4, kHeads = 12, kTokens = 1024, kWidth = 64;
  auto make = [=] {
    auto operand = [&] {
      Tensor t = randn({kBatch, kHeads, kTokens, kWidth}).to(dtype);
      if (grad) t.requires_grad_();
      return t;
    };
    return [=, q = operand(), k = operand(), v = operand(),
            seed = randn({kBatch, kHeads, kTokens, kWidth}).to(dtype)]() mutable {
      Tensor out = scaled_dot_product_attention(q, k, v, {.causal = true});
      if (!grad) return;
      for (Tensor* t : {&q, &k, &v}) t->set_grad({});
      backward(out, seed);
    };
  };
  double square = double(kBatch * kHeads * kTokens) * double(kTokens * kWidth);
  return case_of(fmt::format("attention{}{}", grad ? "_grad" : "", dtype == kBF16 ? "_bf16" : ""),
                 make, double(size_of(dtype)) * 4 * kBatch * kHeads * kTokens * kWidth,
                 (grad ? 14 : 4) * square);
}

}  // namespace

std::vector<Case> compared_cases() {
  std::vector<Case> cases;
  for (int64_t n : {64, 256, 1024, 2048}) cases.push_back(product(n, kF32));
  for (int64_t n : {1024, 2048}) cases.push_back(product(n, kBF16));
  cases.push_back(batched_product());
  cases.push_back(skinny_product());
  for (DType dtype : {kF32, kBF16}) {
    cases.push_back(convolution(MemoryFormat::kChannelsLast, dtype));
    cases.push_back(convolution(MemoryFormat::kContiguous, dtype));
  }
  cases.push_back(large_add());
  cases.push_back(large("gelu_large", [](const Tensor& x, const Tensor&) { return gelu(x); }));
  cases.push_back(
      large("softmax_large", [](const Tensor& x, const Tensor&) { return softmax(x); }));
  cases.push_back(large("layer_norm_large",
                        [](const Tensor& x, const Tensor& w) { return layer_norm(x, w, w); }));
  for (DType dtype : {kF32, kBF16})
    for (bool grad : {false, true}) cases.push_back(attention(grad, dtype));
  return cases;
}

}  // namespace tessera::bench
