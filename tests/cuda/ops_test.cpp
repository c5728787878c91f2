// Every op of the registry on a card against the CPU, on every sample and in every float dtype that
// the CPU takes. Pointwise ops of f32 are of one text, so they have equal bits; sums are of another
// order, and f64 goes through another libm.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "core/autograd/autograd.h"
#include "core/dispatch/call.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/linalg.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/views.h"
#include "tests/core/ops/sweep.h"
#include "tests/cuda/card.h"

namespace tessera::cuda {
namespace {

using sweep::List;

class CudaOps : public OnCard {};

List there(const List& in, Device card) {
  List out;
  for (const Tensor& t : in) out.push_back(t.to(card));
  return out;
}
List here(const List& in) {
  List out;
  for (const Tensor& t : in) out.push_back(t.cpu());
  return out;
}

bool has_kernel(const Primitive& prim, DeviceKind kind) {
  return prim.is_view() || tessera::find_kernel(prim, {kind, 0}) || prim.decomposable();
}

double tolerance(DType t) {
  switch (t) {
    case kF64: return 1e-11;
    case kF32: return 2e-5;
    case kBF16: return 2e-2;
    default: return 4e-3;
  }
}

void expect_bits(const Tensor& got, const Tensor& want) {
  const Tensor a = contiguous(got), b = contiguous(want);
  ASSERT_EQ(a.shape(), b.shape());
  ASSERT_EQ(a.dtype(), b.dtype());
  if (!std::memcmp(a.raw_values(), b.raw_values(), a.nbytes())) return;
  for (int64_t i = 0; i < a.numel(); ++i)
    if (sweep::at(a, i) != sweep::at(b, i) &&
        !(std::isnan(sweep::at(a, i)) && std::isnan(sweep::at(b, i)))) {
      ADD_FAILURE() << "element " << i << " is " << sweep::at(a, i) << ", on the CPU "
                    << sweep::at(b, i);
      return;
    }
}

// Every code of the 8-bit floats to every dtype, and every 16-bit float to them, dense and strided.
TEST_F(CudaOps, ConversionsOfStorageFormats) {
  const Device card = device_of(0);
  const Tensor bytes = arange(0, 256).to(kU8);
  Tensor numbers = empty({1 << 16}, kBF16);
  for (int i = 0; i < 1 << 16; ++i) static_cast<uint16_t*>(numbers.raw())[i] = uint16_t(i);
  for (DType t : {kF8E4M3, kF8E5M2}) {
    Tensor codes = empty({256}, t);
    std::memcpy(codes.raw(), bytes.raw(), 256);
    const Tensor table = codes.reshape({16, 16}), turned = transpose(table.to(card), 0, 1);
    EXPECT_EQ(turned.dtype(), t);
    for (DType to : kAllDTypes) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(t), name_of(to)));
      // What integer a NaN becomes is not said.
      const Tensor from = is_integral(to) && to != kBool ? slice(codes, 0, 0, 100) : codes;
      expect_bits(cast(from.to(card), to).cpu(), cast(from, to));
      if (is_floating(to)) expect_bits(cast(turned, to).cpu(), cast(transpose(table, 0, 1), to));
      const Tensor back = is_differentiable(to) ? numbers.to(to) : from.to(to);
      expect_bits(cast(back.to(card), t).cpu(), cast(back, t));
    }
    expect_bits(contiguous(turned).cpu(), contiguous(transpose(table, 0, 1)));
    expect_bits(full({3}, 2.6, {t, card}).cpu(), full({3}, 2.6, {t}));
  }
}

void compare(const Sample& s, const List& in, Device card) {
  List want;
  try {
    want = sweep::run(s.prim, in);
  } catch (const UserError&) {
    return;  // the CPU does not take the dtype
  }
  const List got = here(sweep::run(s.prim, there(in, card)));
  const bool exact = s.prim->traits().kind == OpKind::kPointwise && in[0].dtype() == kF32;
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (exact || !is_floating(want[i].dtype()))
      expect_bits(got[i], want[i]);
    else
      sweep::expect_close(got[i], want[i], tolerance(in[0].dtype()), fmt::format("result {}", i));
  }
}

bool takes_floats(const List& in) {
  return std::ranges::any_of(in, [](const Tensor& t) { return is_floating(t.dtype()); });
}

TEST(CudaKernels, EveryOpHasOne) {
  const DeviceKind cuda = register_cuda();
  for (const OpEntry& entry : op_registry().entries())
    for (const Sample& s : entry.samples()) EXPECT_TRUE(has_kernel(*s.prim, cuda)) << entry.name;
}

TEST_F(CudaOps, AgreeWithTheCpu) {
  const Device card = device_of(0);
  int compared = 0;
  sweep::for_each_sample([&](const Sample& s) {
    const OpKind kind = s.prim->traits().kind;
    if (kind == OpKind::kFill || kind == OpKind::kDraw) return;  // they say their device: Creation
    const List in(s.in.begin(), s.in.end());
    std::vector<List> all{in};
    if (takes_floats(in))
      for (DType t : {kF32, kBF16, kF16}) all.push_back(sweep::with_dtype(in, t, true));
    for (const List& operands : all) {
      SCOPED_TRACE(std::string(name_of(operands[0].dtype())));
      compare(s, operands, card), ++compared;
      List strided;
      for (const Tensor& t : operands) strided.push_back(sweep::restrided(t));
      compare(s, strided, card), ++compared;
    }
  });
  EXPECT_GT(compared, 1000);
}

TEST_F(CudaOps, Creation) {
  const Device card = device_of(0);
  for (DType t : {kF64, kF32, kBF16, kF16, kI64, kI32, kU8, kBool}) {
    expect_bits(full({3, 5}, 1, {t, card}).cpu(), full({3, 5}, 1, {t}));
    if (t != kBool) expect_bits(arange(0, 7, 1, {t, card}).cpu(), arange(0, 7, 1, {t}));
  }
  expect_bits(full({}, -2.5, {kF32, card}).cpu(), full({}, -2.5, {kF32}));
  const Tensor key = from_values<int64_t>({7, 3}, {2});
  for (DType t : {kF32, kBF16, kF16}) {
    expect_bits(rand({5, 7}, {t, card}, key).cpu(), rand({5, 7}, {t}, key));
    expect_bits(randn({5, 7}, {t, card}, key).cpu(), randn({5, 7}, {t}, key));
  }
  expect_bits(randint(-3, 9, {50}, {kI64, card}, key).cpu(), randint(-3, 9, {50}, {kI64}, key));
  const Tensor x = rand({6, 5}, {kF32}, key);
  expect_bits(dropout(x.to(card), 0.4, key).cpu(), dropout(x, 0.4, key));
  expect_bits(ones({0, 4}, {kF32, card}).cpu(), ones({0, 4}));
}

TEST_F(CudaOps, NumbersOfTheHostGoByValue) {
  const Device card = device_of(0);
  const Tensor x = arange(0, 6, 1, {kF32}), there = x.to(card);
  expect_bits((there * 2.5 + 1).cpu(), x * 2.5 + 1);
  expect_bits((1.0 / (there + 1)).cpu(), 1.0 / (x + 1));
  expect_bits(where(gt(there, 2), there, scalar_tensor(-1, kF32, kCPU)).cpu(),
              where(gt(x, 2), x, scalar_tensor(-1, kF32)));
}

TEST_F(CudaOps, FactorisationsByTheHostThrowItsErrors) {
  const Tensor minus = neg(eye(3, {kF32})).to(device_of(0));
  try {
    linalg::cholesky(minus);
    FAIL() << "-1 has no Cholesky factor";
  } catch (const UserError& e) {
    EXPECT_NE(std::string(e.what()).find("not positive-definite"), std::string::npos) << e.what();
  }
}

TEST_F(CudaOps, GradientsOfNormsOfNothing) {
  const Device card = device_of(0);
  Tensor weight = ones({0}, {kF32, card});
  weight.requires_grad_();
  const Tensor x = narrow(arange(0, 12, 1, {kF32, card}).reshape({4, 3}), 1, 1, 0);
  const Tensor y = layer_norm(x, weight, {}), seed = ones(y.shape(), {kF32, card});
  EXPECT_EQ(grad({&y, 1}, {&weight, 1}, {&seed, 1})[0].shape(), (Shape{0}));
}

TEST_F(CudaOps, GradientsOfEmbeddingsInPacks) {
  const Device card = device_of(0);
  const Tensor key = from_values<int64_t>({7, 3}, {2}), ids = randint(0, 20, {301}, {kI64}, key);
  for (DType t : {kF32, kBF16, kF16}) {
    const Tensor g = randn({301, 48}, {t}, key);
    const auto on = [&](Device device) {
      Tensor table = zeros({20, 48}, {t, device});
      table.requires_grad_();
      const Tensor y = embedding(ids.to(device), table), seed = g.to(device);
      return grad({&y, 1}, {&table, 1}, {&seed, 1})[0].cpu();
    };
    sweep::expect_close(on(card), on(kCPU), tolerance(t), std::string(name_of(t)));
  }
}

TEST_F(CudaOps, ProductsOfIntegers) {
  const Device card = device_of(0);
  const Tensor a = reshape(arange(0, 6, 1, {kI32}), {2, 3}),
               b = reshape(arange(0, 12, 1, {kI32}), {3, 4});
  expect_bits(matmul(a.to(card), b.to(card)).cpu(), matmul(a, b));
}

// More matrices than a grid has blocks along a dim.
TEST_F(CudaOps, ManySmallProducts) {
  const Device card = device_of(0);
  const Tensor key = from_values<int64_t>({7, 3}, {2});
  const Tensor a = randint(-4, 4, {70000, 2, 2}, {kI64}, key).to(kF32),
               b = randint(-4, 4, {70000, 2, 2}, {kI64}, key).to(kF32);
  expect_bits(matmul(a.to(card), b.to(card)).cpu(), matmul(a, b));
}

TEST_F(CudaOps, QuotientsOfIntegers) {
  const Device card = device_of(0);
  const Tensor x = arange(0, 4, 1, {kI64, card});
  expect_bits(floor_divide(x, x + 1).cpu(), floor_divide(x.cpu(), x.cpu() + 1));
}

}  // namespace
}  // namespace tessera::cuda
