// Ops on a card against the CPU at sizes and layouts where kernels go another way than for the
// registry's samples: sorted indices, sums in parts, several pieces of rows, structures that are
// none.
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/dispatch/call.h"
#include "core/ops/batch_norm.h"
#include "core/ops/contract.h"
#include "core/ops/conv.h"
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/scan.h"
#include "core/ops/sparse.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/core/ops/sweep.h"
#include "tests/cuda/card.h"
#include "tests/support/in_parts.h"

namespace tessera::cuda {
namespace {

using sweep::List;

class CudaLargeOps : public OnCard {
 protected:
  // The same function of the same operands there and here, with gradients of `wanted` operands.
  template <class F>
  void compare(F f, const List& in, double tolerance, size_t wanted = 0) {
    auto results = [&](const List& operands) {
      List all(operands);
      for (size_t i = 0; i < wanted; ++i) all[i] = all[i].detach(), all[i].requires_grad_();
      List out{f(all)};
      if (wanted) {
        const Tensor g = weights(out[0]);
        for (const Tensor& t : grad({&out[0], 1}, std::span(all).first(wanted), {&g, 1}))
          out.push_back(t);
      }
      for (Tensor& t : out) t = t.detach().cpu();
      return out;
    };
    List there;
    for (const Tensor& t : in) there.push_back(t.to(device_of(0)));
    const List got = results(there), want = results(in);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i].dtype(), want[i].dtype());
      if (tolerance > 0) {
        sweep::expect_close(got[i], want[i], tolerance, "result " + std::to_string(i));
        continue;
      }
      const Tensor a = contiguous(got[i]), b = contiguous(want[i]);
      ASSERT_EQ(a.shape(), b.shape());
      EXPECT_EQ(std::memcmp(a.raw_values(), b.raw_values(), a.nbytes()), 0) << "result " << i;
    }
  }
  static Tensor weights(const Tensor& like) {
    return sweep::weights_like(Tensor(empty(like.shape(), like.dtype())), 9).to(like.device());
  }
  static Tensor values(const Shape& s, DType t, int64_t seed = 1) {
    return rand(s, {kF32}, from_values<int64_t>({seed, 3}, {2})).to(t) - 0.5;
  }
  static Tensor places(const Shape& s, int64_t extent) {
    return randint(0, extent, s, {kI64}, from_values<int64_t>({5, 3}, {2}));
  }
};

double tolerance(DType t) { return t == kF32 ? 2e-5 : t == kF64 ? 1e-12 : 2e-2; }

// A vector, rows of a table by a vector, few long lines, many lines. Sources meet in the CPU's
// order, and are rounded once.
TEST_F(CudaLargeOps, ScattersHaveTheBitsOfTheCpu) {
  for (DType t : {kF32, kBF16, kI32})
    for (ScatterReduce how : {ScatterReduce::kSum, ScatterReduce::kProd, ScatterReduce::kAmax}) {
      auto scatter = [&](int64_t dim) {
        return [=](const List& in) { return scatter_reduce(in[0], dim, in[1], in[2], how); };
      };
      auto source = [&](const Shape& s) {
        return t == kI32 ? places(s, 7).to(kI32) : values(s, t, 2);
      };
      compare(scatter(0), {source({37}), places({3000}, 37), source({3000})}, 0);
      compare(scatter(1), {source({2, 11, 3}), places({2, 300, 3}, 11), source({2, 300, 3})}, 0);
      compare(scatter(0), {source({5, 8200}), places({40, 8200}, 5), source({40, 8200})}, 0);
    }
  compare([](const List& in) { return index_add(in[0], 1, in[1], in[2]); },
          {values({2, 9, 33}, kF32), places({500}, 9), values({2, 500, 33}, kF32, 2)}, 0);
}

TEST_F(CudaLargeOps, IndicesOutsideAreErrors) {
  const Device card = device_of(0);
  const Tensor x = zeros({4}, {kF32, card});
  for (int64_t n : {3, 300}) {
    const Tensor at = arange(0, n, 1, {kI64, card}) + 2;  // 4 at element 2
    EXPECT_NE(error_of([&] {                              // it comes with the wait for the copy
                scatter_add(x, 0, at, ones({n}, {kF32, card})).cpu().raw();
              })
                  .find("at element 2 is outside dim"),
              std::string::npos);
  }
}

// Rows that are moved in words of up to 16 bytes, and rows that cannot be.
TEST_F(CudaLargeOps, SelectedRows) {
  for (DType t : {kF64, kF32, kBF16, kU8})
    for (const Shape& s : {Shape{9, 64}, Shape{9, 33}, Shape{3, 9, 20}, Shape{9}})
      for (int64_t dim = 0; dim < s.size(); ++dim)
        compare([=](const List& in) { return index_select(in[0], dim, in[1]); },
                {places(s, 200).to(t), places({300}, s[int(dim)])}, 0);
}

// Tiles of elements of every width, at sizes, strides and offsets that fit words and that do not.
TEST_F(CudaLargeOps, DenseCopiesOfTransposes) {
  const auto copied = [](auto view) {
    return [=](const List& in) { return contiguous(view(in[0])); };
  };
  for (DType t : {kF64, kF32, kBF16, kU8})
    for (const Shape& s : {Shape{3, 128, 64}, Shape{3, 70, 133}, Shape{40, 5, 70}}) {
      const Tensor x = places(s, 250).to(t);
      compare(copied([](const Tensor& x) { return transpose(x, 1, 2); }), {x}, 0);
      compare(copied([](const Tensor& x) { return transpose(x, 0, 2); }), {x}, 0);
      compare(copied([](const Tensor& x) { return transpose(narrow(x, 2, 3, 59), 0, 2); }), {x}, 0);
      compare(copied([](const Tensor& x) { return transpose(transpose(x, 0, 1), 1, 2); }), {x}, 0);
    }
}

// What is drawn in packs for whole tensors and rows that fit them, and element by element else, is
// the same: parts of tensors have the numbers of the whole.
TEST_F(CudaLargeOps, DrawsOfPartsAreThoseOfTheWhole) {
  const Tensor key = from_values<int64_t>({7, 3}, {2});
  const auto same = [&](auto draw, const List& in) {
    compare(draw, in, 0);
    compare(
        [&](const List& operands) {
          std::optional<test::InParts> parts;
          if (!operands[0].device().is_cpu()) parts.emplace(64);
          return draw(operands);
        },
        in, 0);
  };
  for (DType t : {kF32, kBF16, kF16, kF64})
    for (const Shape& s : {Shape{40, 256}, Shape{40, 200}, Shape{6, 5, 67}, Shape{5001}}) {
      const Tensor x = values(s, t);
      same([&](const List& in) { return rand(s, {t, in[0].device()}, key); }, {x});
      if (t != kF64) same([&](const List& in) { return randn(s, {t, in[0].device()}, key); }, {x});
      same([&](const List& in) { return dropout(in[0], 0.3, key); }, {x});
      if (s[0] % 2 == 0)
        same([&](const List& in) { return dropout(in[0], 0.3, key, in[1]); },
             {x, places({s[0] / 2}, 90)});
    }
}

TEST_F(CudaLargeOps, LongRecurrences) {
  for (DType t : {kF32, kF64})
    for (const Shape& s : {Shape{3, 700}, Shape{3, 40}})
      for (bool reverse : {false, true})
        compare([=](const List& in) { return linear_scan(in[0], in[1], 1, reverse); },
                {values(s, t), values(s, t, 2)}, tolerance(t), 2);
}

// Lines that warps scan; gradients are scans from the end.
TEST_F(CudaLargeOps, SumsOfManyLines) {
  for (DType t : {kF32, kBF16})
    for (const Shape& s : {Shape{1026, 516}, Shape{1030, 517}})
      compare([=](const List& in) { return cumsum(in[0], 1); }, {values(s, t)}, tolerance(t), 1);
}

TEST_F(CudaLargeOps, StructuresThatAreNone) {
  const Device card = device_of(0);
  const Tensor x = ones({5, 2}, {kF32, card});
  auto offsets = [&](std::vector<int64_t> v) {
    return from_values<int64_t>(v, {int64_t(v.size())}).to(card);
  };
  auto failure = [&](std::vector<int64_t> v) {
    return error_of([&] { segment_reduce(x, offsets(std::move(v)), ScatterReduce::kSum); });
  };
  EXPECT_EQ(failure({0, 2, 5}), "no error");
  EXPECT_NE(failure({1, 2, 5}).find("offsets[0]"), std::string::npos);
  EXPECT_NE(failure({0, 3, 2, 5}).find("offsets[2]"), std::string::npos);
  EXPECT_NE(failure({0, 3, 4}).find("offsets[2]"), std::string::npos);
  const Csr a{offsets({0, 1, 2}), offsets({3, 5})};
  EXPECT_NE(error_of([&] { spmm_reduce(a, {}, x); }).find("col[1] is 5, outside 5 columns"),
            std::string::npos);
}

// Rows of many edges and of none.
TEST_F(CudaLargeOps, SparseProducts) {
  const Tensor lengths = places({50}, 9) * places({50}, 2), offsets = offsets_of(lengths);
  const int64_t edges = offsets.cpu().values<int64_t>()[50];
  const Tensor col = places({edges}, 20);
  for (DType t : {kF32, kBF16, kF64})
    for (ScatterReduce how : {ScatterReduce::kSum, ScatterReduce::kAmax, ScatterReduce::kAmin})
      compare(
          [=](const List& in) {
            return spmm_reduce({in[2], in[3]}, in[0], in[1], how);
          },
          {values({edges}, t), values({20, 37}, t, 2), offsets, col}, tolerance(t), 2);
}

// More rows than a piece has, more channels than a block.
TEST_F(CudaLargeOps, BatchNorm) {
  for (DType t : {kF32, kBF16, kF64}) {
    auto norm = [](const List& in) {
      return batch_norm_moments(in[0], in[1], in[2], 1e-5, {in[3], true}).y;
    };
    compare(norm,
            {values({9, 70, 8, 5}, t), values({70}, kF32, 2), values({70}, kF32, 3),
             values({9, 70, 8, 5}, t, 4)},
            tolerance(t), 4);
  }
}

TEST_F(CudaLargeOps, ConvolutionsOfManyPlaces) {
  struct Case {
    Shape x, w;
    ConvGeometry geometry;
  };
  const Case cases[] = {{{5, 8, 16, 15}, {16, 8, 3, 3}, {.padding = 1}},     // packs of channels
                        {{5, 6, 15, 16}, {9, 6, 3, 2}, {.stride = {2, 1}}},  // none
                        {{5, 16, 16, 16}, {24, 16, 1, 1}, {}},               // a product
                        {{5, 16, 16, 16}, {8, 4, 1, 1}, {.groups = 4}},
                        {{5, 16, 16, 16}, {8, 16, 1, 1}, {.stride = 2}}};
  for (DType t : {kF32, kBF16})
    for (const Case& c : std::span(cases).first(t == kF32 ? 5 : 3))
      compare([&](const List& in) { return conv2d(in[0], in[1], {}, c.geometry); },
              {values(c.x, t), values(c.w, t, 2)}, tolerance(t), 2);
}

// Sums that are long beside their results are cut, whatever the order of the result's dims.
TEST_F(CudaLargeOps, ProductsInParts) {
  for (DType t : {kF32, kBF16, kF64})
    for (const char* spec : {"kbm,kbn->nbm", "bmk,bnk->bmn", "bkm,bk->bm"}) {
      const std::string s = spec;
      auto shape = [&](std::string word) {
        Shape shape;
        for (char l : word) shape.push_back(l == 'k' ? 1100 : l == 'b' ? 2 : l == 'm' ? 5 : 4);
        return shape;
      };
      compare([&](const List& in) { return contract(s, in[0], in[1]); },
              {values(shape(s.substr(0, 3)), t), values(shape(s.substr(4, s.find('-') - 4)), t, 2)},
              tolerance(t), 2);
    }
}

TEST_F(CudaLargeOps, ExactContractionHasTheBitsOfTheCpu) {
  const ExactContraction exact;
  for (DType t : {kF32, kF64, kBF16, kF16}) {
    compare([](const List& in) { return matmul(in[0], in[1]); },
            {values({3, 70, 200}, t), values({200, 66}, t, 2)}, 0, 2);
    compare([](const List& in) { return contract("btn,btk->nk", in[0], in[1]); },
            {values({3, 12, 5}, t), values({3, 12, 9}, t, 2)}, 0);
  }
}

TEST_F(CudaLargeOps, TheNormOfNoRowsIsZero) {
  EXPECT_EQ(norm_of_rows({}).item<double>(), 0);
  const Tensor none = zeros({0}, {kF64, device_of(0)});
  EXPECT_EQ(norm_of_rows({&none, 1}).item<double>(), 0);
}

}  // namespace
}  // namespace tessera::cuda
