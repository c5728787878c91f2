// Handles, views, shapes, dtypes and the words of their errors.
#include "core/tensor/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/tensor/element.h"

namespace tessera {
namespace {

std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST(Tensor, CopiesShareAndViewsAlias) {
  Tensor x = arange(0, 12, 1, {.dtype = kF64}), copy = x;
  Tensor m = reshape(x, {3, 4}), t = transpose(m, 0, 1), row = m[1], strided = slice(m, 1, 1, 4, 2);
  fill_(row, -1);
  EXPECT_EQ(copy.data<double>()[4], -1);
  EXPECT_EQ(contiguous(t).data<double>()[1], -1);
  EXPECT_EQ(contiguous(strided).data<double>()[2], -1);
  EXPECT_EQ(strided.storage().get(), x.storage().get());
  EXPECT_EQ(expand(row, {5, 4}).storage().get(), x.storage().get());
  EXPECT_NE(clone(m).storage().get(), x.storage().get());
  EXPECT_NE(reshape(t, {12}).storage().get(), x.storage().get())
      << "this order of elements takes a copy";
  EXPECT_EQ(contiguous(m).storage().get(), x.storage().get()) << "dense already";
}

TEST(Tensor, EmptyHoldsLayoutsWithGaps) {
  Tensor t = empty(Meta{{3, 2}, {8, 1}, kF32, kCPU});
  EXPECT_EQ(t.storage()->bytes(), (2 * 8 + 1 + 1) * sizeof(float));
  EXPECT_EQ(empty(Meta{{3, 0}, {8, 1}, kF32, kCPU}).storage()->bytes(), 0u);
  EXPECT_EQ(empty(Meta{{3, 2}, {0, 0}, kF32, kCPU}).storage()->bytes(), 6 * sizeof(float));
}

TEST(Tensor, DetachedHandlesStaySharded) {
  struct Payload final : RefCounted {};
  Tensor x = ones({3});
  x.impl()->shard = make_ref<Payload>();
  x.impl()->layers |= bit(Layer::kSharding) | bit(Layer::kAutograd);
  Tensor y = x.detach();
  EXPECT_EQ(y.impl()->shard.get(), x.impl()->shard.get());
  EXPECT_EQ(y.layers(), bit(Layer::kSharding));
}

TEST(Tensor, AssignBumpsTheVersionOfTheStorage) {
  Tensor x = zeros({2, 3}), view = x[1];
  uint32_t before = x.storage()->version();
  add_(view, ones({3}));
  EXPECT_EQ(x.storage()->version(), before + 1);
  assign_(x, ones({3}));  // broadcasts
  EXPECT_EQ(view.storage()->version(), before + 2);
  EXPECT_EQ(x.data<float>()[0], 1);
  Tensor pure = x + x;
  EXPECT_EQ(x.storage()->version(), before + 2) << "pure ops write nothing of others";
}

TEST(Tensor, AssignFromOverlappingMemory) {
  Tensor x = arange(0, 6);
  assign_(slice(x, 0, 1, 6), slice(x, 0, 0, 5));
  for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(x.data<int64_t>()[i], std::max<int64_t>(i - 1, 0));
  Tensor m = reshape(arange(0, 9), {3, 3});
  assign_(m, transpose(m, 0, 1));
  EXPECT_EQ(m.data<int64_t>()[1], 3);
  EXPECT_EQ(m.data<int64_t>()[3], 1);
  Tensor y = arange(0, 4);
  add_(y, flip(y, {0}));
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(y.data<int64_t>()[i], 3);
}

TEST(Tensor, TemporariesAreReusedAndHeldTensorsAreNot) {
  Tensor x = ones({1024}), held = x;
  Tensor y = x + 1;
  EXPECT_EQ(held.data<float>()[0], 1);
  void* memory = y.raw();
  Tensor z = std::move(y) * 2;
  EXPECT_EQ(z.raw(), memory) << "the temporary's memory becomes the result's";
  Tensor view = z[0];
  Tensor w = std::move(z) * 2;
  EXPECT_NE(w.raw(), memory) << "a view still looks at it";
  EXPECT_EQ(view.item<float>(), 4);
}

TEST(Tensor, ErrorsSayWhatToDo) {
  EXPECT_EQ(message([] { (void)Tensor().shape(); }), "tensor: used before it was given a value");
  EXPECT_EQ(message([] {
              (void)zeros({2, 3}).data<double>();
            }),
            "data: f32[2, 3] cpu was read as f64; convert it with .to() first");
  EXPECT_EQ(message([] {
              zeros({2, 3}) + zeros({2, 4});
            }),
            "add: shapes [2, 3] and [2, 4] do not broadcast: dim 1 from the end is 3 and 4");
  EXPECT_EQ(message([] {
              (void)zeros({2, 3}).size(2);
            }),
            "size: dim 2 of a tensor with 2 dims; expected -2 to 1");
  EXPECT_EQ(message([] { (void)zeros({2}).item<float>(); }),
            "item: f32[2] cpu has 2 elements, not one");
  EXPECT_EQ(message([] { empty({2, -1}); }), "empty: shape [2, -1] has a negative extent");
  EXPECT_EQ(message([] {
              reshape(zeros({2, 3}), {4, -1});
            }),
            "reshape: 6 elements of [2, 3] do not fit [4, -1]");
  EXPECT_EQ(message([] {
              permute(zeros({2, 3}), {0, 0});
            }),
            "permute: order [0, 0] for shape [2, 3]; name every dim once");
  EXPECT_EQ(message([] {
              from_values<float>({1, 2, 3}, {2});
            }),
            "from_values: 3 values for shape [2]");
  EXPECT_THROW(empty({1, 1, 1, 1, 1, 1, 1, 1, 1}), ShapeError);
}

TEST(Shape, BroadcastAndStrides) {
  EXPECT_EQ(broadcast({3, 1}, {2, 1, 4}, "test"), (Shape{2, 3, 4}));
  EXPECT_EQ(broadcast({}, {2}, "test"), (Shape{2}));
  EXPECT_EQ(broadcast({0, 1}, {1, 3}, "test"), (Shape{0, 3}));
  EXPECT_THROW(broadcast({0}, {2}, "test"), ShapeError);
  EXPECT_EQ(contiguous_strides({2, 3, 4}), (Strides{12, 4, 1}));
  EXPECT_TRUE(is_contiguous({2, 1, 4}, {4, 99, 1}));
  EXPECT_FALSE(is_contiguous({2, 4}, {1, 2}));
  EXPECT_TRUE(is_contiguous({0, 4}, {1, 2}));
  EXPECT_EQ(broadcast_strides({3, 1}, {1, 1}, {2, 3, 4}), (Strides{0, 1, 0}));
}

// Every 16-bit pattern, there and back, by the single-element functions and by the kernels.
TEST(DType, SixteenBitFloatsRoundTripExhaustively) {
  for (DType t : {kF16, kBF16}) {
    Tensor bits = cast(arange(0, 65536), kI32), x = empty({65536}, t);
    for (int i = 0; i < 65536; ++i) static_cast<uint16_t*>(x.raw())[i] = uint16_t(i);
    Tensor wide = cast(x, kF32), back = cast(wide, t);
    for (int i = 0; i < 65536; ++i) {
      float one = t == kF16 ? to_float(Half{uint16_t(i)}) : to_float(BFloat16{uint16_t(i)});
      float got = wide.data<float>()[i];
      ASSERT_TRUE(got == one || (std::isnan(got) && std::isnan(one))) << i;
      ASSERT_EQ(std::signbit(got), std::signbit(one)) << i;
      uint16_t again = static_cast<uint16_t*>(back.raw())[i];
      ASSERT_TRUE(again == i || std::isnan(one)) << i;
      uint16_t alone = t == kF16 ? to_half(one).bits : to_bfloat16(one).bits;
      ASSERT_EQ(again, alone) << i;
    }
  }
}

// A value between two neighbours of the 16-bit format: below the middle it is rounded down, above
// it up, and the middle to the even one.
TEST(DType, RoundingToSixteenBitsIsToNearestEven) {
  for (DType t : {kF16, kBF16}) {
    auto narrow_one = [&](float f) { return t == kF16 ? to_half(f).bits : to_bfloat16(f).bits; };
    auto widen_one = [&](int b) {
      return t == kF16 ? to_float(Half{uint16_t(b)}) : to_float(BFloat16{uint16_t(b)});
    };
    int infinity = t == kF16 ? 0x7c00 : 0x7f80;
    std::vector<float> values;
    std::vector<uint16_t> want;
    for (int b = 0; b < infinity; ++b) {
      double low = widen_one(b),
             high = b + 1 == infinity ? 2 * low - widen_one(b - 1) : widen_one(b + 1);
      float middle = float((low + high) / 2);
      if (double(middle) != (low + high) / 2 || std::isinf(middle))
        continue;  // bf16's top, f32's own denormals
      for (float sign : {1.0f, -1.0f}) {
        uint16_t s = sign < 0 ? 0x8000 : 0;
        values.insert(values.end(), {sign * middle, sign * std::nextafter(middle, 0.0f),
                                     sign * std::nextafter(middle, INFINITY)});
        want.insert(want.end(),
                    {uint16_t(s | (b % 2 ? b + 1 : b)), uint16_t(s | b), uint16_t(s | (b + 1))});
      }
    }
    Tensor out = cast(from_values<float>(values, {int64_t(values.size())}), t);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(static_cast<uint16_t*>(out.raw())[i], want[i]) << name_of(t) << " of " << values[i];
      ASSERT_EQ(narrow_one(values[i]), want[i]) << values[i];
    }
  }
}

TEST(DType, ConversionsBetweenAllPairs) {
  for (DType from : kAllDTypes)
    for (DType to : kAllDTypes) {
      Tensor x = cast(from_values<double>({0, 1, 2, 96}, {4}), from), y = cast(x, to);
      Tensor twice = empty({4, 2}, from);
      twice.select(1, 0) = x;
      const Tensor strided = cast(twice.select(1, 0), to);
      for (int64_t i = 0; i < 4; ++i) {
        double v = read_real(static_cast<char*>(x.raw()) + i * int64_t(size_of(from)), from);
        double want = to == kBool ? v != 0 : v;
        EXPECT_EQ(read_real(static_cast<char*>(y.raw()) + i * int64_t(size_of(to)), to), want)
            << name_of(from) << " to " << name_of(to);
      }
      EXPECT_EQ(strided.dtype(), to);
    }
  Tensor cut = cast(from_values<double>({-1.9, 1.9, 300.5, -0.5}, {4}), kI32);
  EXPECT_EQ(cut.data<int32_t>()[0], -1);
  EXPECT_EQ(cut.data<int32_t>()[1], 1);
  EXPECT_EQ(cut.data<int32_t>()[3], 0);
  EXPECT_EQ(cast(from_values<int64_t>({(int64_t(1) << 53) + 1}, {1}), kI64).item<int64_t>(),
            (int64_t(1) << 53) + 1);
}

TEST(Print, LooksLikeNumPy) {
  EXPECT_EQ(to_string(from_values<int64_t>({1, -20, 3, 4}, {2, 2})),
            "[[  1, -20],\n [  3,   4]] i64[2, 2]");
  EXPECT_EQ(to_string(from_values<float>({1, 2.5}, {2})), "[1.0000, 2.5000] f32[2]");
  EXPECT_EQ(to_string(from_values<double>({1, 2}, {2})), "[1., 2.] f64[2]");
  EXPECT_EQ(to_string(cast(from_values<double>({1, INFINITY, NAN}, {3}), kBF16)),
            "[ 1., inf, nan] bf16[3]");
  EXPECT_EQ(to_string(from_values<bool>({true, false}, {2})), "[ true, false] bool[2]");
  EXPECT_EQ(to_string(full({}, 1e-9, {.dtype = kF64})), "1.0000e-09 f64[]");
  EXPECT_EQ(to_string(zeros({2, 0})), "[[],\n []] f32[2, 0]");
  EXPECT_EQ(to_string(arange(0, 2000)), "[   0,    1,    2, ..., 1997, 1998, 1999] i64[2000]");
  EXPECT_EQ(to_string(Tensor()), "undefined");
  EXPECT_EQ(to_string(empty({2}, kF32, kMeta)), "f32[2] meta");
  EXPECT_EQ(to_string(transpose(reshape(arange(0, 4), {2, 2}), 0, 1)),
            "[[0, 2],\n [1, 3]] i64[2, 2]");
}

}  // namespace
}  // namespace tessera
