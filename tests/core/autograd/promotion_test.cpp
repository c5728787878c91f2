// Operands of several dtypes: ops whose traits ask for it bring them to one, after autocast and
// under every layer below it.
#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/autograd/transforms.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/primitive/registry.h"
#include "core/tensor/random.h"

namespace tessera {
namespace {

Tensor drawn(const Shape& shape, uint64_t seed) {
  manual_seed(seed);
  return randn(shape);
}
void expect_same(const Tensor& a, const Tensor& b, std::string_view what) {
  ASSERT_EQ(a.dtype(), b.dtype()) << what;
  ASSERT_EQ(a.shape(), b.shape()) << what;
  Tensor x = contiguous(a.detach()), y = contiguous(b.detach());
  EXPECT_EQ(std::memcmp(x.raw_values(), y.raw_values(), x.nbytes()), 0) << what;
}
Tensor run(const PrimRef& prim, std::vector<Tensor> in) { return dispatch1(prim, in); }

// Every pointwise op of several operands asks for it, and every op that asks for it gives what it
// gives for operands that were converted by hand.
TEST(MixedOperands, MeetInOpsThatAskForIt) {
  std::set<std::string_view> asking;
  for (const OpEntry& entry : op_registry().entries())
    for (const Sample& s : entry.samples()) {
      const OpTraits& traits = s.prim->traits();
      if (traits.promotion == Promotion::kNone) {
        EXPECT_FALSE(traits.kind == OpKind::kPointwise && traits.operands > 1) << entry.name;
        continue;
      }
      const size_t first = traits.promotion == Promotion::kAfterFirst;
      asking.insert(entry.name);
      for (size_t narrow = first; narrow < s.in.size(); ++narrow) {
        std::vector<Tensor> mixed = s.in, by_hand;
        mixed[narrow] = cast(mixed[narrow], is_floating(mixed[narrow].dtype()) ? kF32 : kI32);
        const DType t = result_type(std::span(mixed).subspan(first));
        for (size_t i = 0; i < mixed.size(); ++i)
          by_hand.push_back(i < first ? mixed[i] : cast(mixed[i], t));
        expect_same(run(s.prim, mixed), run(s.prim, by_hand), entry.name);
      }
    }
  for (std::string_view name : {"add", "pow", "clamp", "where", "contract", "cat"})
    EXPECT_TRUE(asking.contains(name)) << name;
}

TEST(MixedOperands, GradientsHaveTheDtypesOfTheOperands) {
  Tensor x = drawn({3, 4}, 1).requires_grad_(), y = drawn({4, 2}, 2).to(kF64).requires_grad_();
  Tensor z = matmul(x, y) * drawn({3, 1}, 3).to(kBF16);
  EXPECT_EQ(z.dtype(), kF64);
  sum(z).backward();
  EXPECT_EQ(x.grad().dtype(), kF32);
  EXPECT_EQ(y.grad().dtype(), kF64);
  Tensor wide = x.detach().to(kF64).requires_grad_();
  sum(matmul(wide, y.detach()) * drawn({3, 1}, 3).to(kBF16)).backward();
  expect_same(x.grad(), wide.grad().to(kF32), "rounded once");
}

// A sample has the dims of a sample: as a number it yields, though its batch has a dim.
TEST(MixedOperands, OfAVmapAreThoseOfOneSample) {
  const Tensor numbers = drawn({3}, 1), row = drawn({4}, 2);
  auto each =
      vmap([](const Tensor& a, const Tensor& b) { return a * b; }, {.in_dims = {0, std::nullopt}});
  expect_same(each(numbers.to(kF64), row), unsqueeze(numbers, 1) * row, "f32 of a row decides");
  expect_same(each(numbers, row.to(kF64)), unsqueeze(numbers.to(kF64), 1) * row.to(kF64),
              "f64 of a row decides");
  auto product = vmap([](const Tensor& a, const Tensor& b) { return matmul(a, b); });
  const Tensor a = drawn({3, 2, 4}, 3), b = drawn({3, 4, 5}, 4).to(kF64);
  EXPECT_EQ(product(a, b).dtype(), kF64);
  expect_same(product(a, b), product(a.to(kF64), b), "products");
}

TEST(MixedOperands, AreCastByAutocastFirst) {
  const Tensor x = abs(drawn({8}, 1)).to(kBF16), w = drawn({8, 8}, 2);
  const Tensor power = from_values<float>({2.3f}, {});
  Autocast scope(kBF16);
  expect_same(pow(x, power), pow(x.to(kF32), power), "a number keeps its digits");
  expect_same(matmul(x, w), matmul(x, w.to(kBF16)), "low precision does not widen");
  EXPECT_EQ((x + w).dtype(), kF32) << "as given: the wider of two";
}

// A letter of one operand alone is summed before the product, in the dtype of the product.
TEST(MixedOperands, SumsOfOneOperandAreOfTheProductsDtype) {
  const Tensor x = drawn({5, 300}, 1).to(kBF16), y = drawn({5}, 2);
  expect_same(contract("ab,a->a", x, y), contract("ab,a->a", x.to(kF32), y), "sum over b");
}

}  // namespace
}  // namespace tessera
