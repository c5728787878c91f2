// Assignment to a part of what is recorded: every spelling has the values and the gradients, first
// and second, of a functional one; what came before keeps its history; what cannot be right throws.
#include "core/autograd/assigned.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/autograd/recompute.h"
#include "core/autograd/transforms.h"
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using Numbers = std::vector<double>;
using Two = std::function<Tensor(const Tensor& x, const Tensor& u)>;

const TensorOptions kDouble{.dtype = kF64};

Numbers numbers(const Tensor& t) {
  Tensor dense = contiguous(t.detach()).to(kF64);
  return Numbers(dense.values<double>(), dense.values<double>() + dense.numel());
}
Tensor numbered(const Shape& shape, double from, DType dtype = kF64) {
  return (reshape(arange(0, numel(shape), 1, kDouble), shape) * 0.25 + from).to(dtype);
}
Tensor positions(std::initializer_list<int64_t> list) {
  return from_values<int64_t>(list, {int64_t(list.size())});
}
Tensor put(const Tensor& x, std::initializer_list<Tensor> at, const Tensor& v, bool add = false) {
  return index_put(x, std::span<const Tensor>(at.begin(), at.size()), v, add);
}

// Values, gradients and second derivatives of `f`, on leaves of the given shapes.
std::vector<Numbers> results_of(const Two& f, const Shape& x_shape, const Shape& u_shape,
                                DType u_type) {
  Tensor x = numbered(x_shape, 1).requires_grad_();
  Tensor u = numbered(u_shape, -2, u_type).requires_grad_();
  Tensor out = f(x, u);
  Tensor weights = numbered(out.shape(), 0.5);
  const Tensor inputs[] = {x, u};
  Tensors first =
      grad({&(out = sum(out * out * out * weights)), 1}, inputs, {}, {.create_graph = true});
  Tensor norm;
  for (const Tensor& g : first) {
    if (!g.defined()) continue;
    Tensor square = sum((g * g).to(kF64));
    norm = norm.defined() ? norm + square : square;
  }
  std::vector<Numbers> all{numbers(out)};
  for (const Tensor& g : first) all.push_back(g.defined() ? numbers(g) : Numbers{});
  for (const Tensor& g : grad({&norm, 1}, inputs))
    all.push_back(g.defined() ? numbers(g) : Numbers{});
  return all;
}

// A gradient that is zero may also be undefined.
void expect_alike(const Numbers& a, const Numbers& b, size_t what) {
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i)
    EXPECT_NEAR(i < a.size() ? a[i] : 0, i < b.size() ? b[i] : 0, 1e-11)
        << (what == 0  ? "value"
            : what < 3 ? "gradient"
                       : "second derivative")
        << ", element " << i;
}

void expect_equal(const Two& in_place, const Two& functional, const Shape& x, const Shape& u,
                  DType u_type = kF64) {
  const auto got = results_of(in_place, x, u, u_type), want = results_of(functional, x, u, u_type);
  for (size_t i = 0; i < want.size(); ++i) expect_alike(got[i], want[i], i);
  EXPECT_FALSE(Storage::any_assigned()) << "a graph keeps its own memory";
}

// ---- spellings

TEST(Assigned, APositionTakesAValue) {
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0;
        y[0] = u;
        return y;
      },
      [](const Tensor& x, const Tensor& u) { return select_scatter(x * 2.0, u, 0, 0); }, {2, 3},
      {3});
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0;
        y[0][1] = u;
        y[1].assign_(y[0]);
        return y;
      },
      [](const Tensor& x, const Tensor& u) {
        Tensor row = select_scatter((x * 2.0)[0], u, 0, 1);
        return stack({row, row});
      },
      {2, 3}, {});
  expect_equal(
      [](const Tensor& x, const Tensor&) {
        Tensor y = x * 2.0;
        y[1] = 2.5;
        return y;
      },
      [](const Tensor& x, const Tensor&) {
        return select_scatter(x * 2.0, full({3}, 2.5, kDouble), 0, 1);
      },
      {2, 3}, {1});
}

TEST(Assigned, SlicesTakeValues) {
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0;
        y.index({Slice(), 1}) = u;
        return y;
      },
      [](const Tensor& x, const Tensor& u) { return select_scatter(x * 2.0, u, 1, 1); }, {4, 3},
      {4});
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0;
        slice(y, 1, 0, 5, 2) = u;  // broadcast and cast
        return y;
      },
      [](const Tensor& x, const Tensor& u) {
        return index_copy(x * 2.0, 1, positions({0, 2, 4}), expand(u.to(kF64), {2, 3}));
      },
      {2, 5}, {3}, kF32);
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0;
        y.index({Slice(1, 3), Slice(1, 4)}) = u;
        y.slice(0, 0, 2).narrow(1, 0, 2) = u.slice(1, 1, 3);
        return y;
      },
      [](const Tensor& x, const Tensor& u) {
        Tensor rows = positions({1, 1, 1, 2, 2, 2}), columns = positions({1, 2, 3, 1, 2, 3});
        Tensor y = put(x * 2.0, {rows, columns}, reshape(u, {6}));
        return put(y, {positions({0, 0, 1, 1}), positions({0, 1, 0, 1})},
                   reshape(u.slice(1, 1, 3), {4}));
      },
      {4, 5}, {2, 3});
}

TEST(Assigned, ViewsOfAnyLayoutTakeValues) {
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = transpose(x * 2.0, 0, 1);
        y.view({3, 1, 2})[1] = u;
        transpose(y, 0, 1)[1].narrow(0, 0, 2) = u;
        return y;
      },
      [](const Tensor& x, const Tensor& u) {
        Tensor y = select_scatter(x * 2.0, u, 1, 1);
        return transpose(put(y, {positions({1, 1}), positions({0, 1})}, u), 0, 1);
      },
      {2, 3}, {2});
  expect_equal(  // across rows
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0;
        y.view({-1}).slice(0, 2, 5) = u;
        return y;
      },
      [](const Tensor& x, const Tensor& u) {
        Tensor flat = reshape(x * 2.0, {6});
        return reshape(cat({flat.slice(0, 0, 2), u, flat.slice(0, 5, 6)}), {2, 3});
      },
      {2, 3}, {3});
}

TEST(Assigned, MethodsThatWriteAreRecorded) {
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0;
        y.index_put_({positions({2, 0})}, u);
        y.index_put_({positions({1, 1})}, u, true);
        return y;
      },
      [](const Tensor& x, const Tensor& u) {
        return put(put(x * 2.0, {positions({2, 0})}, u), {positions({1, 1})}, u, true);
      },
      {3, 2}, {2, 2});
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0;
        y += u;
        y *= u;  // saves y as it was
        y[0] -= u;
        y[1] /= u;
        y.clamp_(-1e6, 1e6);
        y[2].zero_();
        return y;
      },
      [](const Tensor& x, const Tensor& u) {
        Tensor y = (x * 2.0 + u) * u;
        return stack({y[0] - u, y[1] / u, y[2] * 0.0});
      },
      {3, 2}, {2});
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0;
        y.copy_(u);  // all of it: nothing is left of x
        return y;
      },
      [](const Tensor&, const Tensor& u) { return u * 1.0; }, {3}, {3});
}

TEST(Assigned, APlainTensorTakesRecordedValues) {
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor buffer = zeros({3, 2}, kDouble);
        buffer[0] = x.sum() * u;
        for (int64_t i = 1; i < 3; ++i) buffer[i] = buffer[i - 1] + x[i];
        return buffer;
      },
      [](const Tensor& x, const Tensor& u) {
        Tensor first = x.sum() * u, second = first + x[1];
        return stack({first, second, second + x[2]});
      },
      {3, 2}, {2});
  Tensor x = numbered({2}, 1).requires_grad_(), total = zeros({}, kDouble);
  for (int i = 0; i < 3; ++i) total += (x * double(i)).sum();
  total.backward();
  EXPECT_EQ(numbers(x.grad()), (Numbers{3, 3}));
}

// ---- what sees it

TEST(Assigned, UsesBeforeKeepTheirOwnHistory) {
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0, before = y + 1.0;
        y[0] = u;
        Tensor between = y + before;
        y[1] = u;
        return stack({before, between, y});
      },
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0, z = select_scatter(y, u, 0, 0);
        return stack({y + 1.0, z + (y + 1.0), select_scatter(z, u, 0, 1)});
      },
      {3}, {});
}

TEST(Assigned, OtherViewsOfTheMemorySeeIt) {
  auto functional = [](const Tensor& x, const Tensor& u) {
    Tensor y = select_scatter(x * 2.0, u, 0, 1);
    return cat({reshape(y, {6}), y[1], y[0]});
  };
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = x * 2.0, flat = y.view({6}), row = y[1], other = y[0];
        y[1] = u;
        return cat({flat, row, other});
      },
      functional, {2, 3}, {3});
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensor y = zeros({2, 3}, kDouble), flat = y.view({6}), row = y[1], other = y[0];
        y.assign_(x * 2.0);
        row.assign_(u);
        EXPECT_TRUE(y.requires_grad() && flat.requires_grad() && !y.is_leaf());
        return cat({flat, row, other});
      },
      functional, {2, 3}, {3});
  expect_equal(
      [](const Tensor& x, const Tensor& u) {
        Tensors parts = split(x * 2.0, 1, 0);
        Tensors rows = unbind(parts[1], 0);
        parts[1][0] = u;
        return cat({parts[0][0], parts[1][0], rows[0], parts[0][0]});
      },
      [](const Tensor& x, const Tensor& u) {
        return cat({x[0] * 2.0, u, u, x[0] * 2.0});
      },
      {2, 3}, {3});
}

TEST(Assigned, WhatIsDetachedDoesNot) {
  Tensor x = numbered({3}, 1).requires_grad_();
  Tensor y = x * 2.0, apart = y.detach(), part = apart[0], view;
  {
    NoGrad off;
    view = y[0];
  }
  y[0] = x[2];
  EXPECT_EQ(numbers(part), (Numbers{1.5})) << "the values are shared";
  EXPECT_FALSE((apart + 1.0).requires_grad());
  EXPECT_FALSE((part + 1.0).requires_grad());
  EXPECT_FALSE((view + 1.0).requires_grad());
  Tensor buffer = zeros({2}, kDouble);
  buffer[0] = x[0];
  {
    NoGrad off;
    view = buffer[0];
    buffer[1] = x[1];  // values only
  }
  EXPECT_FALSE(view.requires_grad());
  buffer.sum().backward();
  EXPECT_EQ(numbers(x.grad()), (Numbers{1, 0, 0}));
}

// What is not recorded may be written through what detach() gave, as in PyTorch.
TEST(Assigned, WhatIsDetachedIsWritten) {
  Tensor x = numbered({3}, 1).requires_grad_(), w = numbered({3}, 2).requires_grad_();
  Tensor y = x.detach(), loss = (x * w).sum();
  y[0] = 3;
  EXPECT_EQ(numbers(x), (Numbers{3, 1.25, 1.5})) << "the memory is shared";
  expect_contains(error_of([&] { loss.backward(); }),
                  "mul: input 0 (f64[3] cpu) was overwritten after it was saved for backward");
  x.detach() *= 2.0;
  (x * w).sum().backward();
  EXPECT_EQ(numbers(w.grad()), (Numbers{6, 2.5, 3}));
  EXPECT_EQ(numbers(x.grad()), (Numbers{2, 2.25, 2.5}));
  Tensor h = exp(x), part = h.detach()[1];
  part += 1.0;
  expect_contains(error_of([&] { h.sum().backward(); }), "exp: result 0");
}

// Nor do views of it, also inside of a transform.
TEST(Assigned, ViewsOfWhatIsDetachedDoNot) {
  auto f = [](const Tensor& x) {
    Tensor buffer = zeros({2}, kDouble);
    buffer[0] = x[0];
    Tensor apart = buffer.detach();
    Tensor expanded = apart.expand({3, 2});
    return apart[0] * x[1] + (apart.slice(0, 0, 1) * x[1]).sum() + apart.unbind(0)[0] +
           apart.split(1)[0].sum() + apart.reshape({2, 1}).sum() + expanded.sum();
  };
  Tensor x = numbered({2}, 1).requires_grad_();
  f(x).backward();
  EXPECT_EQ(numbers(x.grad()), (Numbers{0, 2}));
  EXPECT_EQ(numbers(grad(f)(x.detach())), (Numbers{0, 2}));
}

TEST(Assigned, AResultThatTakesTheMemoryOverHasItsOwnHistory) {
  Tensor x = numbered({4}, 1).requires_grad_();
  Tensor y = x * 2.0;
  y[0] = x[1];
  {
    NoGrad off;
    y = exp(std::move(y));
  }
  EXPECT_FALSE((y + 1.0).requires_grad());
  EXPECT_FALSE(Storage::any_assigned());
}

TEST(Assigned, AGraphThatIsDroppedIsFreed) {
  Tensor w = numbered({}, 2).requires_grad_();
  {
    Tensor buffer = ones({4}, kDouble);
    for (int64_t i = 1; i < 4; ++i) buffer[i] = buffer[i - 1] * w;  // saves what is overwritten
    EXPECT_TRUE(buffer.requires_grad());
  }
  {
    Tensor a = ones({2}, kDouble), b = ones({2}, kDouble);
    a[0] = (b * w).sum();
    b[0] = (a * w).sum();
    a[1] = (b * w).sum();
  }
  EXPECT_FALSE(Storage::any_assigned());
}

// ---- what throws

TEST(Assigned, ALeafIsRefused) {
  Tensor x = numbered({3}, 1).requires_grad_();
  const std::string why = "a leaf that requires grad is changed in place";
  expect_contains(error_of([&] { x[0] = 1.0; }), why);
  expect_contains(error_of([&] { x += 1.0; }), why);
  expect_contains(error_of([&] { x.index_put_({positions({0})}, zeros({1}, kDouble)); }), why);
  Tensor row = x.slice(0, 0, 2);
  expect_contains(error_of([&] { row[1] = 1.0; }), "a view of it");
  EXPECT_EQ(numbers(x), numbers(numbered({3}, 1)));
  NoGrad off;
  row[1] = 7;
  EXPECT_EQ(numbers(x)[1], 7);
}

TEST(Assigned, ASavedValueThatIsOverwrittenIsNoticed) {
  Tensor x = numbered({3}, 1).requires_grad_();
  Tensor y = exp(x);
  y[0] = x[1];
  expect_contains(error_of([&] { y.sum().backward(); }),
                  "exp: result 0 (f64[3] cpu) was overwritten after it was saved for backward");
  Tensor buffer = numbered({2}, 1), product = (buffer * x[0]).sum();
  buffer[0] = product;
  expect_contains(error_of([&] { buffer.sum().backward(); }), "was overwritten after it was saved");
}

// To overwrite what a derivative does not need is no error.
TEST(Assigned, ASavedValueThatIsNotNeededMayBeOverwritten) {
  expect_equal(
      [](const Tensor& x, const Tensor&) {
        Tensor buffer = x * 2.0;
        for (int64_t i = 1; i < 3; ++i) buffer[i] = buffer[i - 1] * 3.0;
        return buffer;
      },
      [](const Tensor& x, const Tensor&) {
        Tensor first = x[0] * 2.0;
        return stack({first, first * 3.0, first * 9.0});
      },
      {3}, {});
  Tensor x = numbered({3}, 1);
  auto f = [](const Tensor& t) {
    Tensor y = t * t;
    y[1] = y[0] * 3.0;
    return y.sum();
  };
  EXPECT_EQ(numbers(grad(f)(x)), (Numbers{8, 0, 3}));
}

TEST(Assigned, WhatHasNoPlaceForAHistoryIsRefused) {
  Tensor x = numbered({3}, 1).requires_grad_(), held;
  Tensor y = x * 2.0, apart = y.detach();
  expect_contains(error_of([&] { apart[0] = x[1]; }), "clone() it");
  {
    InferenceMode mode;
    held = ones({3}, kDouble);
  }
  expect_contains(error_of([&] { held[0] = x[1]; }), "made in inference mode");
  expect_contains(error_of([&] { expand(x[0] * 1.0, {3}) = x; }), "its elements share memory");
  Tensor outside = zeros({3}, kDouble);
  expect_contains(error_of([&] {
                    grad([&](const Tensor& t) {
                      outside.assign_(t);
                      return t.sum();
                    })(apart);
                  }),
                  "which comes from outside of it; return the value instead");
  EXPECT_EQ(numbers(outside), (Numbers{0, 0, 0}));
  expect_contains(error_of([&] {
                    grad([&](const Tensor& t) {
                      outside[0] = t[1];
                      return (outside * 2.0).sum();
                    })(apart);
                  }),
                  "comes from outside of the function transform that is running");
  expect_contains(error_of([&] {
                    vmap(grad([&](const Tensor& t) {
                      Tensor z = t * 2.0;
                      z[0] = t[1];
                      return z.sum();
                    }))(reshape(numbered({6}, 1), {2, 3}));
                  }),
                  "is a sample of a vmap");
}

TEST(Assigned, AReleasedGraphIsNotWalkedAgain) {
  Tensor x = numbered({2}, 1).requires_grad_(), buffer = zeros({2}, kDouble);
  buffer[0] = x[0] * x[0];
  buffer.sum().backward();
  EXPECT_EQ(numbers(x.grad()), (Numbers{2, 0}));
  buffer[1] = x[1];
  expect_contains(error_of([&] { buffer.sum().backward(); }),
                  "was released by an earlier backward");
  buffer.assign_(x);  // all of it
  x.set_grad({});
  buffer.sum().backward();
  EXPECT_EQ(numbers(x.grad()), (Numbers{1, 1}));
}

// ---- under transforms

Tensor assigned_to(const Tensor& x) {
  Tensor y = x * x;
  y[0] = x[2] * 3.0;
  y.slice(0, 1, 2) = y.slice(0, 0, 1) + 0.5;
  return (y * y).sum();
}
Tensor functional(const Tensor& x) {
  Tensor y = x * x, first = x[2] * 3.0;
  y = stack({first, first + 0.5, y[2]});
  return (y * y).sum();
}

TEST(Assigned, TransformsSeeIt) {
  Tensor x = numbered({3}, 1), tangent = numbered({3}, -1);
  EXPECT_EQ(numbers(grad(assigned_to)(x)), numbers(grad(functional)(x)));
  EXPECT_EQ(numbers(grad([](const Tensor& t) { return grad(assigned_to)(t).sum(); })(x)),
            numbers(grad([](const Tensor& t) { return grad(functional)(t).sum(); })(x)));
  EXPECT_EQ(numbers(hessian(assigned_to)(x)), numbers(hessian(functional)(x)));
  // Samples are not differentiated where they are assigned to, the batch outside is.
  Tensor rows = reshape(numbered({6}, 1), {2, 3}).requires_grad_();
  auto each = [](const Tensor& row) {
    Tensor y = row * row;
    y[0] = row[2] * 3.0;
    return y;
  };
  Tensor batch = vmap(each)(rows);
  (batch * batch).sum().backward();
  Tensor got = rows.grad();
  rows.set_grad({});
  Tensor y = rows * rows;
  y = cat({slice(rows, 1, 2, 3) * 3.0, slice(y, 1, 1, 3)}, 1);
  (y * y).sum().backward();
  EXPECT_EQ(numbers(got), numbers(rows.grad()));
  // Recorded outside of the transform, and inside.
  rows.set_grad({});
  Tensor z = rows * 1.0;
  z[1] = rows[0] * 2.0;
  grad(assigned_to)(z[1]).sum().backward();
  got = rows.grad();
  rows.set_grad({});
  grad(functional)(rows[0] * 2.0).sum().backward();
  EXPECT_EQ(numbers(got), numbers(rows.grad()));
}

TEST(Assigned, RecomputationSeesIt) {
  Tensor x = numbered({3}, 1).requires_grad_();
  recompute([](const Tensor& t) { return assigned_to(t); }, x).backward();
  Tensor got = x.grad();
  x.set_grad({});
  functional(x).backward();
  EXPECT_EQ(numbers(got), numbers(x.grad()));
}

}  // namespace
}  // namespace tessera
