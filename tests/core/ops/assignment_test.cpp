// The left side of an assignment: a variable takes another tensor, a view takes values, and a
// temporary whose values no other tensor sees is refused, as is a view of one.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/autograd/transforms.h"
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using Numbers = std::vector<double>;

Numbers numbers(const Tensor& t) {
  Tensor dense = contiguous(t).to(kF64);
  return Numbers(dense.values<double>(), dense.values<double>() + dense.numel());
}
Tensor range(int64_t n) { return arange(0, n, 1, {.dtype = kF64}); }

static_assert(std::is_nothrow_move_assignable_v<Tensor> && std::is_copy_assignable_v<Tensor>);
static_assert(std::is_nothrow_move_constructible_v<Tensor> && std::movable<Tensor>);

TEST(Assignment, AViewTakesValues) {
  Tensor t = reshape(range(6), {3, 2});
  const Tensor same = t;
  t[0] = from_values<double>({7, 8}, {2});
  EXPECT_EQ(numbers(t), (Numbers{7, 8, 2, 3, 4, 5}));
  slice(t, 0, 1, 3) = from_values<float>({-1, -2}, {2});  // broadcast, and cast
  EXPECT_EQ(numbers(t), (Numbers{7, 8, -1, -2, -1, -2}));
  t[2] = 1.5;
  t[1][1] = 9;
  EXPECT_EQ(numbers(same), (Numbers{7, 8, -1, 9, 1.5, 1.5}));
  transpose(t, 0, 1)[0] = t[0][1];
  EXPECT_EQ(numbers(t), (Numbers{8, 8, 8, 9, 8, 1.5}));
  slice(t, 0, 0, 3) = 0;  // all of it is t itself
  EXPECT_EQ(numbers(t), (Numbers(6, 0)));
  EXPECT_TRUE(t.is_same(same));
}

TEST(Assignment, AnElementOfATemporaryListTakesValues) {
  const Tensor t = range(6);
  t.chunk(2)[0] = -1;
  t.split(4)[1] = from_values<double>({7, 8}, {2});
  EXPECT_EQ(numbers(t), (Numbers{-1, -1, -1, 3, 7, 8}));
  auto pieces = t.chunk(2);
  pieces[0] = range(1);  // a variable's element takes another tensor
  EXPECT_EQ(numbers(t), (Numbers{-1, -1, -1, 3, 7, 8}));
}

TEST(Assignment, TheTwoSidesMayOverlap) {
  Tensor t = range(5);
  slice(t, 0, 1, 5) = slice(t, 0, 0, 4);
  EXPECT_EQ(numbers(t), (Numbers{0, 0, 1, 2, 3}));
  slice(t, 0, 0, 4) = slice(t, 0, 1, 5);
  EXPECT_EQ(numbers(t), (Numbers{0, 1, 2, 3, 3}));
}

TEST(Assignment, MethodsWriteToo) {
  Tensor t = reshape(range(6), {3, 2});
  t[0].assign_(t[2]);
  EXPECT_EQ(numbers(t), (Numbers{4, 5, 2, 3, 4, 5}));
  t.index_put_({from_values<int64_t>({2, 1}, {2})}, from_values<double>({1, 2}, {2}));
  EXPECT_EQ(numbers(t), (Numbers{4, 5, 1, 2, 1, 2}));
  Tensor twice[] = {from_values<int64_t>({0, 0}, {2})};
  index_put_(t, twice, ones({2}, {.dtype = kF64}), true);
  EXPECT_EQ(numbers(t), (Numbers{6, 7, 1, 2, 1, 2}));
}

TEST(Assignment, AVariableTakesAnotherTensor) {
  Tensor a = range(2), b = ones({3}), first = a;
  a = b;
  EXPECT_TRUE(a.is_same(b));
  EXPECT_EQ(numbers(first), (Numbers{0, 1}));
  Tensor view = first[0];
  view = b;  // a name is a variable, whatever it referred to
  EXPECT_EQ(numbers(first), (Numbers{0, 1}));
  std::swap(a, first);
  EXPECT_TRUE(first.is_same(b));
  EXPECT_TRUE(std::exchange(first, a).is_same(b));
  auto doubled = [](Tensor x) { return x + x; };
  a = doubled(std::move(a));
  EXPECT_EQ(numbers(a), (Numbers{0, 2}));
  std::tie(a, first) = std::pair(b, view);
  EXPECT_TRUE(a.is_same(b) && first.is_same(view));
  struct Pair {
    Tensor x, y;
  } from{b, view}, to;
  to = std::move(from);
  EXPECT_TRUE(to.x.is_same(b));
  from.x = view;  // moved from
  EXPECT_TRUE(from.x.is_same(view));
  std::optional<Tensor> maybe = a;
  maybe = view;
  EXPECT_TRUE(maybe->is_same(view));
  std::vector<Tensor> list{range(1), range(2), range(3)};
  list.erase(list.begin());
  list.insert(list.begin(), range(4));
  std::ranges::reverse(list);
  list[0] = range(7);
  EXPECT_EQ(list[0].numel() * 100 + list[1].numel() * 10 + list[2].numel(), 724);
}

TEST(Assignment, ATemporaryThatNobodySeesIsRefused) {
  Tensor a = ones({2}), b = ones({2});
  const std::string why = "nothing else refers to, so what is written would be lost";
  expect_contains(error_of([&] { (a + b) = a; }), why);
  expect_contains(error_of([&] { clone(a) = 1.0; }), why);
  expect_contains(error_of([&] { index_select(a, 0, from_values<int64_t>({0}, {1})) = b; }), why);
  Tensor wide = transpose(ones({2, 3}), 0, 1);
  expect_contains(error_of([&] { reshape(wide, {6}) = 1.0; }), why);  // took a copy
  expect_contains(error_of([&] { a.grad() = b; }), "undefined tensor");
  EXPECT_EQ(numbers(a), (Numbers{1, 1}));
}

TEST(Assignment, AViewOfATemporaryThatNobodySeesIsRefused) {
  Tensor a = ones({2, 2}), b = ones({2, 2}), one = ones({});
  const std::string why = "nothing else refers to, so what is written would be lost";
  expect_contains(error_of([&] { (a + b)[0] = one; }), why);
  expect_contains(error_of([&] { (a + b)[0][1] = 1.0; }), why);
  expect_contains(error_of([&] { (a + b).index({Slice(), 1}) = one; }), why);
  expect_contains(error_of([&] { (a + b).slice(0, 0, 1) = one; }), why);
  expect_contains(error_of([&] { (a + b).narrow(0, 0, 1) = one; }), why);
  expect_contains(error_of([&] { (a + b).select(1, 0) = one; }), why);
  expect_contains(error_of([&] { (a + b).view({4})[2] = one; }), why);
  expect_contains(error_of([&] { (a + b).reshape({4}).unflatten(0, {2, 2})[1] = one; }), why);
  expect_contains(error_of([&] { (a + b).t().mT().transpose(0, 1)[1] = one; }), why);
  expect_contains(error_of([&] { (a + b).permute({1, 0}).flatten()[1] = one; }), why);
  expect_contains(error_of([&] { (a + b).unsqueeze(0).squeeze(0).squeeze()[1] = one; }), why);
  expect_contains(error_of([&] { slice(a + b, 0, 0, 1) = one; }), why);
  expect_contains(error_of([&] { narrow(a + b, 0, 0, 1) = one; }), why);
  expect_contains(error_of([&] { select(a + b, 0, 0) = one; }), why);
  auto handle = [&] { return a; };  // of what a variable has
  handle()[0] = 3.0;
  slice(handle(), 0, 1, 2) = 4.0;
  EXPECT_EQ(numbers(a), (Numbers{3, 3, 4, 4}));
  EXPECT_EQ(numbers((a + b)[1]), (Numbers{5, 5})) << "to read it is as before";
}

// exp keeps its result for backward, which is no reader: nobody sees what is written to it.
TEST(Assignment, WhatOnlyBackwardKeepsIsRefused) {
  Tensor x = range(4).requires_grad_(), u = ones({}, {.dtype = kF64});
  const std::string why = "nothing else refers to, so what is written would be lost";
  expect_contains(error_of([&] { exp(x)[0] = u; }), why);
  expect_contains(error_of([&] { exp(x) = u; }), why);
  expect_contains(error_of([&] { exp(x).reshape({2, 2})[1][0] = 2.0; }), why);
  Tensor y = exp(x);
  auto handle = [&] { return y; };
  handle()[1] = u;  // of what a variable has
  EXPECT_EQ(y[1].item<double>(), 1);
  expect_contains(error_of([&] { y.sum().backward(); }),
                  "exp: result 0 (f64[4] cpu) was overwritten after it was saved for backward");
}

// Each level of a function transform has a handle of its own, and may keep the result.
TEST(Assignment, ATemporaryInsideOfATransformIsRefused) {
  const Tensor x = range(4) + 1.0, rows = reshape(range(12), {3, 4}), u = full({}, 7.0);
  const std::string why = "nothing else refers to, so what is written would be lost";
  using Body = std::function<void(const Tensor&)>;
  const std::vector<std::pair<const char*, Body>> lost = {
      {"sum", [&](const Tensor& t) { (t + t) = 7.0; }},
      {"row of sum", [&](const Tensor& t) { (t + t)[0] = u; }},
      {"exp", [&](const Tensor& t) { exp(t) = 7.0; }},
      {"row of exp", [&](const Tensor& t) { exp(t)[0] = u; }},
      {"view of exp",
       [&](const Tensor& t) {
         exp(t).reshape({2, 2})[1] = u;
       }},
      {"copy", [&](const Tensor& t) { clone(t) = 7.0; }},
  };
  const std::vector<std::pair<const char*, Body>> seen = {
      {"whole",
       [&](const Tensor& t) {
         const Tensor y = exp(t);
         auto handle = [&] { return y; };
         NoGrad off;
         handle() = 7.0;
       }},
      {"detached",
       [&](const Tensor& t) {
         const Tensor y = exp(t);
         y.detach() = 7.0;
       }},
      {"row",
       [&](const Tensor& t) {
         const Tensor y = exp(t);
         NoGrad off;
         y[0] = u;
       }},
  };
  auto used = [](const Body& body) {
    return [body](const Tensor& t) {
      body(t);
      return sum(t * t);
    };
  };
  const std::vector<std::pair<const char*, std::function<void(const Body&)>>> transforms = {
      {"grad", [&](const Body& b) { grad(used(b))(x); }},
      {"grad of grad",
       [&](const Body& b) { grad([&](const Tensor& t) { return sum(grad(used(b))(t)); })(x); }},
      {"jvp", [&](const Body& b) { jvp(used(b), x, x); }},
      {"vmap", [&](const Body& b) { vmap(used(b))(rows); }},
      {"vmap of grad", [&](const Body& b) { vmap(grad(used(b)))(rows); }},
      {"grad of vmap",
       [&](const Body& b) { grad([&](const Tensor& t) { return sum(vmap(used(b))(t)); })(rows); }},
  };
  for (const auto& [transform, run] : transforms) {
    for (const auto& [what, body] : lost) {
      SCOPED_TRACE(std::string(transform) + ": " + what);
      expect_contains(error_of([&] { run(body); }), why);
    }
    for (const auto& [what, body] : seen) {
      SCOPED_TRACE(std::string(transform) + ": " + what);
      EXPECT_NO_THROW(run(body));
    }
  }
}

TEST(Assignment, ExpandedElementsAreRefused) {
  Tensor a = range(3), b = range(3), u = ones({3}, {.dtype = kF64});
  const std::string whole = "is expanded, its elements share memory; clone it first",
                    part = "is a part of an expanded tensor, other elements of which share its";
  expect_contains(error_of([&] { (a + b).expand({4, 3}).assign_(u); }), whole);
  Tensor wide = a.expand({4, 3}), tall = a.unsqueeze(1).expand({3, 2});
  expect_contains(error_of([&] { wide += 1.0; }), whole);
  expect_contains(error_of([&] { wide.slice(0, 1, 3) = u; }), whole);
  expect_contains(error_of([&] { wide.slice(1, 1, 3) = 1.0; }), whole);
  expect_contains(error_of([&] {
                    wide.index_put_({from_values<int64_t>({1}, {1})}, reshape(u, {1, 3}));
                  }),
                  whole);
  expect_contains(error_of([&] { wide[0] = u; }), part);
  expect_contains(error_of([&] { wide[0][1] = 1.0; }), part);
  expect_contains(error_of([&] { wide.slice(0, 1, 2) = u; }), part);
  expect_contains(error_of([&] { tall.select(1, 0).reshape({3, 1}).fill_(2); }), part);
  expect_contains(error_of([&] { wide.split(1)[2] = u; }), part);
  expect_contains(error_of([&] { wide.unbind(0)[2] = u; }), part);
  expect_contains(
      error_of([&] {
        vmap([&](const Tensor& t) { return t[0] = 1.0, t; })(ones({2, 1}).expand({2, 3}));
      }),
      part);
  EXPECT_EQ(numbers(a), (Numbers{0, 1, 2})) << "nothing was written";
  Tensor apart = wide.clone();
  apart[0] = u;
  EXPECT_EQ(numbers(apart), (Numbers{1, 1, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2}));
  wide.slice(1, 1, 3)[0].clone() += 1.0;
  a.expand({1, 3})[0] = u;  // shows each element once
  EXPECT_EQ(numbers(a), (Numbers{1, 1, 1}));
}

// A gradient that is a part of an expanded one, as that of a sum, is a tensor of its own.
TEST(Assignment, AGradientIsNoPartOfAnExpandedOne) {
  const TensorOptions doubles{.dtype = kF64};
  Tensor p = ones({1, 3}, doubles).requires_grad_(), q = ones({2, 3}, doubles);
  (cat({p, q}, 0).sum(0) * range(3)).sum().backward();
  const Tensor row = p.grad()[0];
  row *= 2.0;
  EXPECT_EQ(numbers(p.grad()), (Numbers{0, 2, 4}));
}

// tests/core/autograd/assigned_test.cpp says what is recorded.
TEST(Assignment, ALeafIsRefusedUnlessNothingIsRecorded) {
  Tensor leaf = range(3).requires_grad_(), plain = range(3);
  expect_contains(error_of([&] { leaf[0] = 1.0; }),
                  "a leaf that requires grad is changed in place");
  {
    NoGrad off;
    leaf[0] = 5;
    plain[0] = (leaf * 2.0)[1];
  }
  EXPECT_EQ(numbers(leaf), (Numbers{5, 1, 2}));
  EXPECT_EQ(numbers(plain), (Numbers{2, 1, 2}));
  EXPECT_TRUE(leaf.requires_grad());
  EXPECT_FALSE(plain.requires_grad());
}

TEST(Assignment, AWriteIntoWhatBackwardReadsIsNoticed) {
  Tensor leaf = range(3).requires_grad_(), factor = range(3);
  Tensor y = sum(leaf * factor);
  factor[0] = 4;
  expect_contains(error_of([&] { y.backward(); }), "was overwritten after it was saved");
}

TEST(Assignment, SamplesOfAVmapAreWritten) {
  Tensor x = reshape(range(6), {2, 3});
  auto f = [](const Tensor& row) {
    Tensor copy = clone(row);
    copy[0] = row[2];
    return copy;
  };
  EXPECT_EQ(numbers(vmap(f)(x)), (Numbers{2, 1, 2, 5, 4, 5}));
}

}  // namespace
}  // namespace tessera
