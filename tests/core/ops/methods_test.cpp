// Methods and operators of Tensor: each gives the bits of the function of its name, those in place
// the bits of the function out of place, and refuses what the functions refuse.
#include <gtest/gtest.h>

#include <sstream>

#include "core/autograd/autograd.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/products.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/scan.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

void expect_same(const Tensor& got, const Tensor& want, const std::string& what = "") {
  ASSERT_EQ(got.shape(), want.shape()) << what;
  ASSERT_EQ(got.dtype(), want.dtype()) << what;
  EXPECT_TRUE(equal(got, want)) << what << ": " << got << " instead of " << want;
}
void expect_same(const ValuesAndIndices& got, const ValuesAndIndices& want) {
  expect_same(got.values, want.values), expect_same(got.indices, want.indices);
}
void expect_same(const Tensors& got, const Tensors& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) expect_same(got[i], want[i]);
}

TEST(Methods, ViewsAreThoseOfTheFunctions) {
  const Tensor x = randn({2, 3, 4}), m = randn({3, 4}), thin = randn({2, 1, 4, 1});
  expect_same(x.view({6, 4}), reshape(x, {6, 4}));
  expect_same(x.view({2, -1}), reshape(x, {2, 12}));
  expect_same(x.flatten(1), flatten(x, 1));
  expect_same(x.unflatten(2, {2, 2}), unflatten(x, 2, {2, 2}));
  expect_same(x.permute({2, 0, 1}), permute(x, {2, 0, 1}));
  expect_same(m.t(), transpose(m, 0, 1));
  expect_same(m[0].t(), m[0]);
  expect_same(x.mT(), transpose(x, 1, 2));
  expect_same(x.unsqueeze(-1), unsqueeze(x, -1));
  expect_same(thin.squeeze(1), squeeze(thin, 1));
  expect_same(thin.squeeze(), reshape(thin, {2, 4}));
  expect_same(m.expand({2, 3, 4}), expand(m, {2, 3, 4}));
  expect_same(m.expand_as(x), expand(m, {2, 3, 4}));
  expect_same(m.repeat({2, 1}), repeat(m, {2, 1}));
  expect_same(x.slice(1, 0, 2), slice(x, 1, 0, 2));
  expect_same(x.narrow(1, 1, 2), narrow(x, 1, 1, 2));
  expect_same(x.select(2, -1), select(x, 2, -1));
  expect_same(x.flip(1), flip(x, {1}));
  expect_same(x.split(2, 1), split(x, {2, 1}, 1));
  expect_same(x.split({1, 2}, 1), split(x, {1, 2}, 1));
  expect_same(x.chunk(2, 2), chunk(x, 2, 2));
  expect_same(x.unbind(1), unbind(x, 1));
  EXPECT_EQ(x.sizes(), x.shape());
  EXPECT_EQ(x.dim(), 3);
  EXPECT_EQ(x.data_ptr<float>(), x.data<float>());
  expect_contains(error_of([&] { x.t(); }), "more than 2 dims");
}

TEST(Methods, AViewSharesMemoryOrIsRefused) {
  const Tensor x = zeros({2, 3});
  x.view(6).fill_(1);
  EXPECT_EQ(x.sum().item<float>(), 6);
  const Tensor turned = x.t();
  EXPECT_EQ(turned.reshape(6).shape(), Shape{6});
  expect_contains(error_of([&] { turned.view(6); }), "cannot be seen as [6] without a copy");
  expect_contains(error_of([&] { x.view({4, -1}); }), "do not fit");
}

TEST(Methods, ReductionsAndOrder) {
  const Tensor x = randn({3, 4}), b = x > 0;
  expect_same(x.sum(), sum(x));
  expect_same(x.sum(1), sum(x, {1}));
  expect_same(x.sum({0, 1}, true), sum(x, {0, 1}, true));
  expect_same(x.mean(-1, true), mean(x, {-1}, true));
  expect_same(x.prod(0), prod(x, {0}));
  expect_same(x.amax(1), amax(x, {1}));
  expect_same(x.amin(1), amin(x, {1}));
  expect_same(b.any(1), any(b, {1}));
  expect_same(b.all(1), all(b, {1}));
  expect_same(x.var(1), var(x, {1}));
  expect_same(x.std(1, 0), stddev(x, {1}, 0));
  expect_same(x.logsumexp(1), logsumexp(x, {1}));
  expect_same(x.norm(1, 0), norm(x, 1, {0}));
  expect_same(x.max(), max(x));
  expect_same(x.min(), min(x));
  expect_same(x.max(1), max(x, 1));
  expect_same(x.min(0, true), min(x, 0, true));
  expect_same(x.argmax(), argmax(x));
  expect_same(x.argmin(), argmin(x));
  expect_same(x.argmax(1), argmax(x, 1));
  expect_same(x.argmin(1, true), argmin(x, 1, true));
  expect_same(x.sort(1, true), sort(x, 1, true));
  expect_same(x.argsort(0), argsort(x, 0));
  expect_same(x.topk(2), topk(x, 2));
  expect_same(x.cumsum(1), cumsum(x, 1));
}

TEST(Methods, ElementsProductsPositions) {
  const Tensor x = rand({3, 4}) + 0.5, y = rand({3, 4}) + 0.5, w = randn({4, 2}), mask = x > 1.0,
               rows = from_values<int64_t>({2, 0}, {2});
  using Function = Tensor (*)(Tensor);
  using Method = Tensor (Tensor::*)() const;
  const std::pair<Method, Function> unary[] = {
      {&Tensor::exp, exp},           {&Tensor::log, log},
      {&Tensor::sqrt, sqrt},         {&Tensor::rsqrt, rsqrt},
      {&Tensor::square, square},     {&Tensor::abs, abs},
      {&Tensor::neg, neg},           {&Tensor::sign, sign},
      {&Tensor::floor, floor},       {&Tensor::ceil, ceil},
      {&Tensor::round, round},       {&Tensor::sin, sin},
      {&Tensor::cos, cos},           {&Tensor::tanh, tanh},
      {&Tensor::sigmoid, sigmoid},   {&Tensor::relu, relu},
      {&Tensor::isnan, isnan},       {&Tensor::isinf, isinf},
      {&Tensor::isfinite, isfinite}, {&Tensor::logical_not, logical_not}};
  const Tensor signs = x - 1.0;
  for (size_t i = 0; i < std::size(unary); ++i) {
    const Tensor& in = i >= 1 && i <= 3 ? x : signs;  // log and roots of positive numbers
    const auto& [method, function] = unary[i];
    expect_same((in.*method)(), function(in), std::to_string(i));
  }
  expect_same(x.softmax(1), softmax(x, 1));
  expect_same(x.log_softmax(0), log_softmax(x, 0));
  expect_same(x.pow(2), pow(x, 2));
  expect_same(x.pow(y), pow(x, y));
  expect_same(x.clamp(0.7, 1.2), clamp(x, 0.7, 1.2));
  expect_same(x.clamp_min(0.7), clamp_min(x, 0.7));
  expect_same(x.clamp_max(1.2), clamp_max(x, 1.2));
  expect_same(x.add(y), x + y);
  expect_same(x.sub(y), x - y);
  expect_same(x.mul(y), x * y);
  expect_same(x.div(y), x / y);
  expect_same(x.add(2), x + 2);
  expect_same(x.sub(0.5), x - 0.5);
  expect_same(x.mul(3), x * 3);
  expect_same(x.div(3), x / 3);
  expect_same(x.lt(y), x < y);
  expect_same(x.le(y), x <= y);
  expect_same(x.gt(y), x > y);
  expect_same(x.ge(y), x >= y);
  expect_same(x.lt(1), x < 1);
  expect_same(x.le(1), x <= 1);
  expect_same(x.gt(1), x > 1);
  expect_same(x.ge(1), x >= 1);
  expect_same(x.eq(x), x == x);
  expect_same(x.ne(y), x != y);
  expect_same(x.eq(1), x == 1);
  expect_same(x.ne(1), x != 1);
  expect_same(x.matmul(w), matmul(x, w));
  expect_same(x.mm(w), matmul(x, w));
  expect_same(x.unsqueeze(0).bmm(w.unsqueeze(0)), matmul(x, w).unsqueeze(0));
  expect_same(x.dot(y), dot(x, y));
  expect_same(x.index_select(0, rows), index_select(x, 0, rows));
  expect_same(x.gather(1, mask.to(kI64)), gather(x, 1, mask.to(kI64)));
  expect_same(x.masked_fill(mask, 0), masked_fill(x, mask, 0));
  expect_same(x.masked_select(mask), masked_select(x, mask));
}

TEST(Methods, DevicesAndDtypes) {
  const Tensor x = randn({2, 3});
  EXPECT_TRUE(x.to(kCPU).is_same(x));
  EXPECT_TRUE(x.cpu().is_same(x));
  const Tensor shape_only = x.to(kMeta);
  EXPECT_TRUE(shape_only.device().is_meta());
  EXPECT_EQ(shape_only.shape(), x.shape());
  expect_contains(error_of([&] { shape_only.to(kCPU); }), "could be copied to cpu");
}

TEST(Operators, OutOfPlace) {
  const Tensor a = from_values<int64_t>({-7, 6, 5}, {3}), b = from_values<int64_t>({3, 4, -3}, {3});
  expect_same(a % b, from_values<int64_t>({2, 2, -1}, {3}));
  expect_same(a % 4, from_values<int64_t>({1, 2, 1}, {3}));
  expect_same(a & b, from_values<int64_t>({-7 & 3, 6 & 4, 5 & -3}, {3}));
  expect_same(a | b, from_values<int64_t>({-7 | 3, 6 | 4, 5 | -3}, {3}));
  expect_same(a ^ b, from_values<int64_t>({-7 ^ 3, 6 ^ 4, 5 ^ -3}, {3}));
  expect_same(a & 1, from_values<int64_t>({1, 0, 1}, {3}));
  expect_same(a | 1, from_values<int64_t>({-7, 7, 5}, {3}));
  expect_same(a ^ 1, from_values<int64_t>({-8, 7, 4}, {3}));
  expect_same(~a, from_values<int64_t>({6, -7, -6}, {3}));
  expect_same(!a, from_values<bool>({false, false, false}, {3}));
  const Tensor p = a > 0, q = b > 0;
  expect_same(p & ~q, from_values<bool>({false, false, true}, {3}));
  expect_same(p | q, from_values<bool>({true, true, true}, {3}));
  expect_same(p ^ q, from_values<bool>({true, false, true}, {3}));
  EXPECT_TRUE(allclose(pow(2.0, tensor({0., 1., 3.})), tensor({1., 2., 8.})));
  expect_contains(error_of([] { ones({2}) & ones({2}); }), "bitwise_and: takes integers or bool");
  expect_contains(error_of([] { ones({2}) | 1; }), "bitwise_or: takes integers or bool");
  expect_contains(error_of([] { arange(2) ^ 0.5; }), "bitwise_xor: takes integers or bool");
}

TEST(Operators, InPlaceIsWhatOutOfPlaceGives) {
  const Tensor x = randn({3, 4}), y = rand({3, 4}) + 0.5, row = rand({4}) + 0.5;
  auto run = [&](auto f) {
    Tensor t = x.clone();
    f(t);
    return t;
  };
  expect_same(run([&](Tensor& t) { t += y; }), x + y);
  expect_same(run([&](Tensor& t) { t -= row; }), x - row);
  expect_same(run([&](Tensor& t) { t *= y; }), x * y);
  expect_same(run([&](Tensor& t) { t /= row; }), x / row);
  expect_same(run([&](Tensor& t) { t += 2; }), x + 2);
  expect_same(run([&](Tensor& t) { t -= 0.5; }), x - 0.5);
  expect_same(run([&](Tensor& t) { t *= 3; }), x * 3);
  expect_same(run([&](Tensor& t) { t /= 4; }), x / 4);
  expect_same(run([&](Tensor& t) { t.clamp_(-0.5, 0.5); }), clamp(x, -0.5, 0.5));
  expect_same(run([&](Tensor& t) { t.copy_(row); }), expand(row, {3, 4}));
  expect_same(run([&](Tensor& t) { t.zero_().add_(1).mul_(y); }), y);
  // A row of it is a view: what is written there is written in it.
  expect_same(run([&](Tensor& t) { t[1] += 1; })[1], x[1] + 1);
  Tensor i = arange(4);
  i -= 1;
  expect_same(i, arange(-1, 3));
}

TEST(Operators, InPlaceRefusesWhatItsDtypeCannotHold) {
  Tensor i = arange(4), b = ones({2}, {.dtype = kBool});
  expect_contains(error_of([&] { i *= 0.5; }), "cannot hold");
  expect_contains(error_of([&] { i /= 2; }), "div_: the result is f32");
  expect_contains(error_of([&] { i /= arange(1, 5); }), "cannot hold");
  expect_contains(error_of([&] { i += rand({4}); }), "cannot hold");
  expect_contains(error_of([&] { i.clamp_(0.5, 2); }), "cannot hold");
  const Tensor same = b;
  expect_contains(error_of([&] { b -= same; }), "bool has no such operation");
  expect_contains(error_of([&] { b -= true; }), "bool has no such operation");
  expect_same(i, arange(4));
}

// In place means for autograd what it means for assign_: it is recorded, and a leaf is refused.
TEST(Operators, InPlaceIsRecordedAndRefusesLeaves) {
  Tensor leaf = ones({2}).requires_grad_(), result = leaf * 2.0, plain = ones({2});
  expect_contains(error_of([&] { leaf += 1; }), "compute a new tensor (x = x + y;");
  expect_contains(error_of([&] { leaf *= plain; }), "requires grad");
  expect_contains(error_of([&] { leaf[0] += 1; }), "requires grad");
  expect_contains(error_of([&] { leaf.zero_(); }), "requires grad");
  expect_same(leaf.detach(), ones({2}));
  result += 1;
  result *= plain * 3.0;
  result[0] += 1;
  plain += result;
  expect_same(plain.detach(), from_values<float>({11, 10}, {2}));
  plain.sum().backward();
  expect_same(leaf.grad(), full({2}, 6.0));
  NoGrad update;
  leaf -= 0.5;
  expect_same(leaf.detach(), full({2}, 0.5));
}

// What was saved for backward and then overwritten is noticed.
TEST(Operators, InPlaceOnWhatBackwardNeedsIsNoticed) {
  Tensor w = ones({2}).requires_grad_(), x = ones({2});
  Tensor loss = (w * x).sum();
  x += 1;
  expect_contains(error_of([&] { loss.backward(); }), "mul");
}

TEST(Methods, GraphAndGradients) {
  Tensor w = ones({3}).requires_grad_();
  EXPECT_TRUE(w.is_leaf());
  Tensor y = w * tensor({1., 2., 3.});
  EXPECT_FALSE(y.is_leaf());
  EXPECT_TRUE(y.detach().is_leaf());
  const int hook = w.register_hook([](const Tensor& g) { return g * 10.0; });
  y.backward(tensor({1., 0., 1.}), true);
  expect_same(w.grad(), tensor({10., 0., 30.}));
  remove_hook(w, hook);
  y.backward(ones({3}));
  expect_same(w.grad(), tensor({11., 2., 33.}));
  expect_contains(error_of([&] { y.register_hook([](const Tensor& g) { return g; }); }),
                  "not a leaf");
  {
    NoGradGuard off;
    EXPECT_TRUE((w * 2.0).is_leaf());
  }
}

TEST(Methods, GradientsFlowThroughMethods) {
  Tensor w = randn({2, 3}).requires_grad_();
  w.t().reshape({2, 3}).square().sum(1).mean().backward();
  EXPECT_TRUE(allclose(w.grad(), w.detach()));
}

TEST(Methods, Printing) {
  const Tensor x = tensor({{1., 2.}, {3., 4.}});
  std::ostringstream out;
  out << x << " " << x.shape();
  EXPECT_EQ(out.str(), to_string(x) + " [2, 2]");
  EXPECT_EQ(fmt::format("{}", x), to_string(x));
}

TEST(Dims, AreOneNumberOrAList) {
  EXPECT_EQ(Dims(3), (Dims{3}));
  EXPECT_EQ(zeros(5).shape(), (Shape{5}));
  EXPECT_EQ(Dims{}.size(), 0);
  const Tensor x = randn({2, 3});
  expect_same(sum(x, {}), sum(x));  // no dims are all of them
  expect_same(sum(x, 0), sum(x, {0}));
}

}  // namespace
}  // namespace tessera
