// Ops of a program's own: values, derivatives, batches, and each thing that an op may do wrong.
#include "core/autograd/custom_op.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/autograd/batching.h"
#include "core/autograd/transforms.h"
#include "core/dispatch/context.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

Tensor values(const Shape& s, uint64_t key) { return sample_values(s, -1, 1, key); }

void expect_close(const Tensor& got, const Tensor& want, double tolerance = 1e-12) {
  ASSERT_EQ(describe(got), describe(want));
  EXPECT_LE(amax(abs(got.detach() - want.detach())).item<double>(), tolerance)
      << to_string(got) << "\ninstead of\n"
      << to_string(want);
}
template <class E = UserError>
std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "no such error";
}
void expect_says(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

// ---- opaque ops

std::atomic<int> softcaps = 0;

// cap tanh(x / cap), of f64.
void softcap_values(const Tensor& x, double cap, Tensor& y) {
  ++softcaps;
  const double* from = x.values<double>();
  double* to = y.data<double>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = cap * std::tanh(from[i] / cap);
}
Meta softcap_type(const Meta& x, double) {
  TESSERA_CHECK(x.dtype == kF64, "softcap: takes f64, got {}", name_of(x.dtype));
  return x;
}
Tensor softcap_vjp(const Meta&, double cap, const Tensor& y, const Tensor& dy) {
  return dy * (1.0 - square(y / cap));
}
const CustomOp<Tensor(const Tensor&, double)> softcap =
    custom_op("test::softcap", softcap_type, softcap_values, softcap_vjp);
// The same, whose loops are known.
const auto split_softcap = custom_op("test::split_softcap", softcap_type, softcap_values,
                                     softcap_vjp, {.axes = elementwise_axes});

Tensor composed(const Tensor& x, double cap) { return tanh(x / cap) * cap; }

TEST(OpaqueOp, HasItsValuesAndTwoDerivatives) {
  const Tensor x = values({3, 4}, 1) * 5.0;
  expect_close(softcap(x, 2), composed(x, 2));
  expect_close(softcap(transpose(x, 0, 1), 2), composed(transpose(x, 0, 1), 2));  // made dense
  expect_close(softcap(select(x, 1, 2), 2), composed(select(x, 1, 2), 2));
  auto once = [](auto f) { return grad([f](const Tensor& t) { return sum(f(t, 3)); }); };
  expect_close(once(softcap)(x), once(composed)(x));
  auto twice = [&](auto f) {
    return grad([=](const Tensor& t) { return sum(square(once(f)(t))); });
  };
  expect_close(twice(softcap)(x), twice(composed)(x));
  Tensor leaf = x.clone().requires_grad_();
  sum(softcap(leaf * 2.0, 3)).backward();
  expect_close(leaf.grad(), grad([](const Tensor& t) { return sum(composed(t * 2.0, 3)); })(x));
}

TEST(OpaqueOp, KeepsForBackwardWhatTheVjpReads) {
  const Tensor x = values({3}, 1).requires_grad_();
  const uint32_t owners = x.storage()->use_count();
  const Tensor y = softcap(x, 2);
  EXPECT_EQ(x.storage()->use_count(), owners) << "the vjp asks for the Meta of x";
  EXPECT_GT(y.storage()->use_count(), 1u);
}

TEST(OpaqueOp, RunsOnEachSampleOrOnTheBatchWhereItsLoopsAreKnown) {
  const Tensor x = values({4, 3}, 1);
  auto f = [](const Tensor& t) { return softcap(t, 2); };
  auto g = [](const Tensor& t) { return split_softcap(t, 2); };
  int before = softcaps;
  expect_close(vmap(f)(x), composed(x, 2));
  EXPECT_EQ(softcaps - before, 4);
  before = softcaps;
  expect_close(vmap(g)(x), composed(x, 2));
  EXPECT_EQ(softcaps - before, 1);
  auto slope = [](auto f) { return vmap(grad([f](const Tensor& t) { return sum(f(t)); })); };
  expect_close(slope(f)(x), slope([](const Tensor& t) { return composed(t, 2); })(x));
  expect_close(slope(g)(x), slope(f)(x));
}

TEST(OpaqueOp, SeveralOperandsAndResults) {
  // sums and differences of x [n] and y [n], as often as k says, and how often.
  static const auto both = custom_op(
      "test::both",
      [](const Meta& x, int, const Meta&) {
        return Metas{x, x, Meta::contiguous({}, kI64, x.device)};
      },
      [](const Tensor& x, int k, Tensor& plus, const Tensor& y, Tensor& minus, Tensor& times) {
        for (int64_t i = 0; i < x.numel(); ++i) {
          plus.data<double>()[i] = k * (x.values<double>()[i] + y.values<double>()[i]);
          minus.data<double>()[i] = k * (x.values<double>()[i] - y.values<double>()[i]);
        }
        *times.data<int64_t>() = k;
      },
      [](const Meta& x, int k, const Meta&, const Meta&, const Meta&, const Meta&,
         const Tensor& plus, const Tensor& minus, const Tensor& times) {
        EXPECT_FALSE(times.defined()) << "integers have no gradient";
        Tensor dx = zeros(x.shape, {.dtype = kF64}), dy = dx;
        if (plus.defined()) dx = dx + plus, dy = dy + plus;
        if (minus.defined()) dx = dx + minus, dy = dy - minus;
        return Tensors{dx * double(k), dy * double(k)};
      });
  const Tensor x = values({3}, 1), y = values({3}, 2);
  auto [plus, minus, times] = both(x, 3, y);
  expect_close(plus, (x + y) * 3.0);
  expect_close(minus, (x - y) * 3.0);
  EXPECT_EQ(times.item<int64_t>(), 3);
  auto f = [](const Tensor& x, const Tensor& y) {
    auto [plus, minus, times] = both(x, 3, y);
    return sum(plus * plus) + sum(minus);
  };
  expect_close(grad(f)(x, y), (x + y) * 18.0 + 3.0);
  expect_close(grad<1>(f)(x, y), (x + y) * 18.0 - 3.0);
}

TEST(OpaqueOp, ForwardMayCallOpsAndReplaceResults) {
  // The softmax of each row, by ops; its vjp is another opaque op.
  static const auto backward = custom_op(
      "test::rows_vjp", [](const Meta& y, const Meta&) { return y; },
      [](const Tensor& y, const Tensor& dy, Tensor& dx) {
        dx = transpose(transpose(y * (dy - sum(y * dy, {-1}, true)), 0, 1), 0, 1);
      });
  static const auto rows = custom_op(
      "test::rows", [](const Meta& x) { return x; },
      [](const Tensor& x, Tensor& y) {
        EXPECT_EQ(context().backend, nullptr);
        Tensor e = exp(x);
        EXPECT_FALSE(e.requires_grad());
        y = e / sum(e, {-1}, true);
      },
      [](const Meta&, const Tensor& y, const Tensor& dy) { return backward(y, dy); });
  const Tensor x = values({3, 4}, 1), w = values({3, 4}, 2);
  expect_close(rows(x), x.softmax(-1));
  auto loss = [&](auto f) { return grad([&, f](const Tensor& t) { return sum(f(t) * w); }); };
  expect_close(loss(rows)(x), loss([](const Tensor& t) { return t.softmax(-1); })(x));
  expect_says(error_of<NotDifferentiable>(
                  [&] { grad([&](const Tensor& t) { return sum(loss(rows)(t)); })(x); }),
              "test::rows_vjp: it was defined without a vjp");
}

TEST(OpaqueOp, IsInferredWithoutValues) {
  const int before = softcaps;
  const Tensor y = softcap(empty({2, 3}, kF64, kMeta), 2);
  EXPECT_EQ(describe(y), "f64[2, 3] meta");
  EXPECT_EQ(softcaps, before);
}

TEST(OpaqueOp, RefusesWhatDoesNotFit) {
  const Tensor x = values({3}, 1);
  expect_says(error_of([&] { softcap(x.to(kF32), 2); }), "softcap: takes f64, got f32");
  expect_says(error_of([&] { softcap(Tensor(), 2); }), "test::softcap: operand 0 is undefined");
  expect_says(error_of([] { custom_op("test::softcap", softcap_type, softcap_values); }),
              "there is an op test::softcap already");
  expect_says(error_of([] { custom_op("softmax", softcap_type, softcap_values); }),
              "there is an op softmax already");

  auto same = [](const Meta& x) { return x; };
  auto copy = [](const Tensor& x, Tensor& y) { y = x; };
  static const auto wrong_shape =
      custom_op("test::wrong_shape", same, [](const Tensor& x, Tensor& y) { y = sum(x); });
  expect_says(error_of<ShapeError>([&] { wrong_shape(x); }),
              "test::wrong_shape: forward left f64[] cpu in result 0, infer said f64[3] cpu");
  static const auto wrong_dtype =
      custom_op("test::wrong_dtype", same, [](const Tensor& x, Tensor& y) { y = x.to(kF32); });
  expect_says(error_of<ShapeError>([&] { wrong_dtype(x); }), "forward left f32[3] cpu");
  static const auto no_result =
      custom_op("test::no_result", same, [](const Tensor&, Tensor& y) { y = Tensor(); });
  expect_says(error_of<ShapeError>([&] { no_result(x); }), "forward left an undefined tensor");
  static const auto wrong_count = custom_op(
      "test::wrong_count",
      [](const Meta& x) {
        return Metas{x, x};
      },
      copy);
  expect_says(error_of<ShapeError>([&] { wrong_count(x); }),
              "test::wrong_count: infer gave 2 results, forward has 1");
  static const auto negative = custom_op(
      "test::negative", [](const Meta& x) { return Meta::contiguous({-1}, x.dtype, x.device); },
      copy);
  expect_says(error_of<ShapeError>([&] { negative(x); }), "infer gave a result of shape [-1]");

  using Vjp = std::function<Tensors(const Tensor& x, const Meta& y, const Tensor& dy)>;
  static Vjp wrong;
  static const auto wrong_vjp =
      custom_op("test::wrong_vjp", same, copy,
                [](const Tensor& x, const Meta& y, const Tensor& dy) { return wrong(x, y, dy); });
  auto gradient = grad([](const Tensor& t) { return sum(wrong_vjp(t)); });
  wrong = [](const Tensor& x, const Meta&, const Tensor& dy) { return Tensors{dy, x}; };
  expect_says(error_of([&] { gradient(x); }),
              "test::wrong_vjp: vjp returned 2 gradients for 1 operands");
  wrong = [](const Tensor&, const Meta&, const Tensor&) { return Tensors{ones({2})}; };
  expect_says(error_of<ShapeError>([&] { gradient(x); }),
              "vjp returned f32[2] cpu as the gradient of input 0, f64[3]");
  wrong = [](const Tensor&, const Meta&, const Tensor& dy) {  // summed and cast
    return Tensors{expand(unsqueeze(dy, 0), {2, 3}).to(kF32)};
  };
  expect_close(gradient(x), full({3}, 2.0, {.dtype = kF64}));
}

// ---- elementwise ops

const auto squareplus = elementwise(
    "test::squareplus", [](const Tensor& x) { return (x + sqrt(square(x) + 4.0)) * 0.5; },
    [](const Tensor& x, const Tensor& dy) { return dy * (x / sqrt(square(x) + 4.0) + 1.0) * 0.5; });
// p x^2 + q y, whose derivative is ten times too large where it is given.
Tensor mixed(const Tensor& x, double p, const Tensor& y, int q) {
  return square(x) * p + y * double(q);
}
const auto stated =
    elementwise("test::stated", mixed,
                [](const Tensor& x, double p, const Meta&, int q, const Meta&, const Tensor& g) {
                  return Tensors{g * x * (20 * p), g * (10.0 * q)};
                });
const auto derived = elementwise("test::derived", mixed);

TEST(ElementwiseOp, HasItsValuesAndTwoDerivatives) {
  const Tensor x = from_values<double>({-1.5, 0, 1.5}, {3});
  auto total = [](const Tensor& t) { return sum(squareplus(t)); };
  expect_close(squareplus(x), from_values<double>({0.5, 1, 2}, {3}));
  expect_close(grad(total)(x), from_values<double>({0.2, 0.5, 0.8}, {3}));
  expect_close(grad([&](const Tensor& t) { return sum(grad(total)(t)); })(x),
               from_values<double>({0.128, 0.25, 0.128}, {3}));
}

TEST(ElementwiseOp, OperandsBroadcastAndGradientsAreSummed) {
  const Tensor x = values({3, 4}, 1), y = values({4}, 2);
  expect_close(stated(x, 2.0, y, 3), square(x) * 2.0 + y * 3.0);
  auto of = [](auto op) {
    return [op](const Tensor& x, const Tensor& y) { return sum(op(x, 2.0, y, 3)); };
  };
  expect_close(grad(of(derived))(x, y), x * 4.0);
  expect_close(grad<1>(of(derived))(x, y), full({4}, 9.0, {.dtype = kF64}));
  expect_close(grad(of(stated))(x, y), x * 40.0);
  expect_close(grad<1>(of(stated))(x, y), full({4}, 90.0, {.dtype = kF64}));
}

TEST(ElementwiseOp, OperandsMeetInOneFloatingDtype) {
  auto dtype = [](const Tensor& x, const Tensor& y) { return derived(x, 1, y, 1).dtype(); };
  EXPECT_EQ(dtype(ones({2}), ones({2}, {.dtype = kF64})), kF64);
  EXPECT_EQ(dtype(ones({2}), full({}, 1.0, {.dtype = kF64})), kF32);  // as result_type says
  EXPECT_EQ(dtype(ones({2}, {.dtype = kBF16}), ones({2}, {.dtype = kI64})), kBF16);
  EXPECT_EQ(squareplus(ones({2}, {.dtype = kI64})).dtype(), kF32);
  static const auto wide = elementwise(
      "test::wide", [](const Tensor& x) { return exp(x); }, nullptr, Precision::kWide);
  const Tensor x = ones({2}, {.dtype = kBF16});
  Autocast scope(kBF16);
  EXPECT_EQ(wide(x).dtype(), kF32);
  EXPECT_EQ(squareplus(x).dtype(), kBF16);
}

TEST(ElementwiseOp, RunsOnABatchAtOnce) {
  const Tensor x = values({4, 3}, 1), y = values({3}, 2);
  auto f = [](const Tensor& x, const Tensor& y) { return stated(x, 2, y, 3); };
  expect_close(vmap(f, {.in_dims = {0, std::nullopt}})(x, y), f(x, y));
  auto slow = ops_batched_one_by_one();
  EXPECT_EQ(std::ranges::count(slow, "test::stated"), 0);
}

// Its result has memory of its own, and its derivative is the one stated.
TEST(ElementwiseOp, MayBeTheIdentity) {
  static const auto reversed = elementwise(
      "test::reversed", [](const Tensor& x) { return x; },
      [](const Meta&, const Tensor& dy) { return -dy; });
  const Tensor x = values({3}, 1), y = reversed(x);
  y.fill_(0);
  EXPECT_GT(amax(abs(x)).item<double>(), 0);
  expect_close(grad([](const Tensor& t) { return sum(reversed(t) * 2.0); })(x),
               full({3}, -2.0, {.dtype = kF64}));
  Tensor leaf = x.clone().requires_grad_();
  sum(reversed(leaf)).backward();
  expect_close(leaf.grad(), full({3}, -1.0, {.dtype = kF64}));
}

TEST(ElementwiseOp, RefusesWhatIsNone) {
  static const auto total = elementwise("test::total", [](const Tensor& x) { return sum(x); });
  expect_says(error_of<ShapeError>([] { total(values({3}, 1)); }),
              "test::total: its formula gives f64[] cpu for operands f64[3]");
  static const auto positive = elementwise("test::positive", [](const Tensor& x) { return x > 0; });
  expect_says(error_of<ShapeError>([] { positive(values({3}, 1)); }), "gives bool[3] cpu");
  expect_says(error_of<ShapeError>([] { stated(ones({3}), 1, ones({2}), 1); }), "test::stated");
  expect_says(error_of([] { elementwise("test::total", [](const Tensor& x) { return x; }); }),
              "there is an op test::total already");
}

// With numbers of zero, from which others are made.
TEST(CustomOp, IsFoundByItsName) {
  EXPECT_EQ(find_custom_op("test::nobody").get(), nullptr);
  EXPECT_EQ(find_custom_op("add").get(), nullptr);
  const PrimRef like = find_custom_op("test::stated");
  ASSERT_TRUE(like);
  EXPECT_EQ(to_string(*like), "test::stated(number0=0, number1=0)");
  EXPECT_EQ(to_string(*find_custom_op("test::squareplus")), "test::squareplus");
  EXPECT_EQ(like->operand_count(), 2);
}

}  // namespace
}  // namespace tessera
