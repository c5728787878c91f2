// What every op of the registry states of itself (core/primitive/traits.h) against what it does on
// its samples. A trait that no call shows (that an op is worth keeping, that it draws) is compared
// with a list of the ops that have it.
#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "core/dispatch/dispatch.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce_attributes.h"
#include "tests/core/ops/sweep.h"

namespace tessera::sweep {
namespace {

using Names = std::set<std::string_view>;

TEST(SweepTraits, EveryOpStatesThem) {
  for_each_sample([](const Sample& s) {
    const OpTraits& t = s.prim->traits();
    EXPECT_EQ(op_info(s.prim->name()).id, s.prim->id());
    EXPECT_EQ(&op_info(s.prim->name()).traits, &t);
    EXPECT_NE(t.kind, OpKind::kUnstated);
    EXPECT_NE(t.precision, Precision::kUnstated);
    EXPECT_EQ(t.cost > 0, t.kind == OpKind::kPointwise) << "the cost of an element is " << t.cost;
  });
  EXPECT_THROW(op_info("no op has this name"), BugError);
  EXPECT_THROW(OpInfo("add", {}), BugError) << "a name that is taken";
}

TEST(SweepTraits, OperandsAreThoseOfTheSamples) {
  const Names of_lists = {"adam", "sgd"};  // as many lists as operand_count says, of any length
  for (const OpEntry& entry : op_registry().entries()) {
    SCOPED_TRACE(entry.name);
    int64_t fewest = std::numeric_limits<int64_t>::max();
    bool any = false;
    for (const Sample& s : entry.samples()) {
      const int64_t given = int64_t(s.in.size());
      any = s.prim->operand_count() == Primitive::kAnyNumber;
      EXPECT_EQ(any ? given : s.prim->operand_count(), given) << to_string(*s.prim);
      EXPECT_TRUE(!any || given > 0);
      fewest = std::min(fewest, given);
    }
    const int64_t stated = entry.samples()[0].prim->traits().operands;
    if (of_lists.contains(entry.name))
      EXPECT_LT(stated, fewest);
    else
      EXPECT_EQ(stated, any ? 1 : fewest);
  }
}

// ---- kinds

TEST(SweepTraits, PointwiseOpsAreTheRowsAndTwoMore) {
  OpRegistry rows;
  register_pointwise_ops(rows);
  Names names = {"cast", "where"};
  for (const OpEntry& row : rows.entries()) names.insert(row.name);
  for_each_sample([&](const Sample& s) {
    const bool pointwise = s.prim->traits().kind == OpKind::kPointwise;
    EXPECT_EQ(pointwise, names.contains(s.prim->name()));
    if (!pointwise) return;
    AxisMap map = axes(*s.prim, s.in);
    ASSERT_EQ(map.out.size(), 1u);
    EXPECT_EQ(map.factors.size(), map.out[0].size()) << "a loop that is no dim of the result";
    for (const Factor& f : map.factors) EXPECT_EQ(f.kind, Factor::kPass);
  });
}

TEST(SweepTraits, ReductionsFoldLoopsOfOneOperand) {
  for_each_sample([](const Sample& s) {
    const bool reduces = s.prim->traits().kind == OpKind::kReduce;
    EXPECT_EQ(reduces, dynamic_cast<const ReduceAttributes*>(s.prim.get()) != nullptr);
    if (!reduces) return;
    AxisMap map = axes(*s.prim, s.in);
    const auto folded = [](const Factor& f) { return f.kind != Factor::kPass; };
    EXPECT_TRUE(std::ranges::any_of(map.factors, folded));
    EXPECT_EQ(s.in.size(), 1u);
  });
}

TEST(SweepTraits, ProductsCountTheirArithmetic) {
  const Names products = {"contract",         "contract_bias",  "conv",         "conv_grad_input",
                          "conv_grad_weight", "conv_stats",     "attention",    "attention_grad",
                          "quantized_linear", "quantized_conv", "scaled_matmul"};
  Names summing;
  const Names counted = {"contract",      "contract_bias",      "conv",          "conv_grad_input",
                         "contract_gelu", "contract_gelu_grad", "contract_sums", "conv_grad_weight",
                         "contract_add",  "contract_wide",      "conv_stats",    "conv_norm",
                         "scaled_matmul", "conv_grad_norm"};
  for_each_sample([&](const Sample& s) {
    const bool product = s.prim->traits().kind == OpKind::kProduct;
    EXPECT_EQ(product, products.contains(s.prim->name()));
    SmallVector<const Meta*, 8> in;
    for (const Tensor& t : s.in) in.push_back(&t.meta());
    std::vector<Meta> out = infer(*s.prim, s.in);
    EXPECT_EQ(s.prim->flops(in, out) > 0, counted.contains(s.prim->name()));
    if (!product) return;
    AxisMap map = axes(*s.prim, s.in);
    const auto summed = [](const Factor& f) { return f.kind != Factor::kPass; };
    if (std::ranges::any_of(map.factors, summed)) summing.emplace(s.prim->name());
    EXPECT_GT(s.in.size(), 1u);
  });
  EXPECT_EQ(summing, products);  // some of their samples do; an outer product sums nothing
}

// Places of the elements of `t` in its storage.
std::set<int64_t> places(const Tensor& t) {
  std::set<int64_t> at;
  for (int64_t i = 0; i < t.numel(); ++i) {
    int64_t place = t.offset(), rest = i;
    for (int d = t.ndim() - 1; d >= 0; --d)
      place += rest % t.shape()[d] * t.strides()[d], rest /= t.shape()[d];
    at.insert(place);
  }
  return at;
}

TEST(SweepTraits, ViewsLieInTheirOperand) {
  for_each_sample([](const Sample& s) {
    const OpTraits& t = s.prim->traits();
    List out = run(s.prim, s.in);
    for (const Tensor& y : s.in.empty() ? List() : out) {
      const auto holds = [&](const Tensor& x) { return x.storage() == y.storage(); };
      EXPECT_EQ(std::ranges::any_of(s.in, holds), t.kind == OpKind::kView);
      EXPECT_EQ(holds(s.in[0]), t.kind == OpKind::kView);
    }
    const bool all =
        t.kind == OpKind::kView && out.size() == 1 && places(out[0]) == places(s.in[0]);
    EXPECT_EQ(t.shows_all, all);
  });
}

TEST(SweepTraits, FillsHaveNoOperands) {
  for_each_sample(
      [](const Sample& s) { EXPECT_EQ(s.prim->traits().kind == OpKind::kFill, s.in.empty()); });
}

TEST(SweepTraits, DrawsFollowTheirKey) {
  const Names draws = {"rand", "randn", "randint", "dropout"};
  for_each_sample([&](const Sample& s) {
    EXPECT_EQ(s.prim->traits().kind == OpKind::kDraw, draws.contains(s.prim->name()));
    if (!s.prim->draws()) return;
    const auto is_key = [](const Tensor& t) { return t.dtype() == kI64 && t.shape() == Shape{2}; };
    const size_t at =
        size_t(std::ranges::find_if(s.in, is_key) - s.in.begin());  // numbers come behind it
    ASSERT_LT(at, s.in.size());
    const List once = run(s.prim, s.in);
    expect_close(run(s.prim, s.in), once, 0, "the same key");
    List in = s.in;
    bool differs = false;
    for (int64_t key = 0; key < 16 && !differs; ++key) {  // masks of a few elements may agree
      in[at] = from_values<int64_t>({key, 5}, {2});
      const Tensor other = run(s.prim, in)[0];
      for (int64_t i = 0; i < other.numel(); ++i)
        differs = differs || sweep::at(other, i) != sweep::at(once[0], i);
    }
    EXPECT_TRUE(differs) << "sixteen other keys give the same";
  });
}

// ---- values of elements

TEST(SweepTraits, TrapsAreIntegersWithoutAResult) {
  for_each_sample([](const Sample& s) {
    const OpTraits& t = s.prim->traits();
    if (t.kind != OpKind::kPointwise || s.in[0].dtype() == kBool) {
      EXPECT_FALSE(t.may_trap);
      return;
    }
    List in;
    for (const Tensor& x : s.in) in.push_back(full(x.shape(), in.empty() ? 1 : 0, {kI64}));
    bool trapped = false;
    try {
      run(s.prim, in);
    } catch (const BugError&) {  // takes no integers
    } catch (const UserError&) {
      trapped = true;
    }
    EXPECT_EQ(trapped, t.may_trap);
  });
}

TEST(SweepTraits, WhatKeepsNanKeepsItFromEachOperand) {
  int checked = 0;
  for_each_sample([&](const Sample& s) {
    if (!s.prim->traits().keeps_nan) return;
    for (DType dtype : {kF32, kF64})
      for (size_t k = 0; k < s.in.size(); ++k) {
        List in = with_dtype(s.in, dtype, false);
        in[k] = full(in[k].shape(), std::nan(""), {dtype});
        const Tensor y = run(s.prim, in)[0];
        for (int64_t i = 0; i < y.numel(); ++i)
          EXPECT_TRUE(std::isnan(at(y, i))) << "operand " << k;
        ++checked;
      }
  });
  EXPECT_GT(checked, 0);
}

TEST(SweepTraits, BoolIsRefusedWhereItIsStated) {
  const Tensor a = from_values<uint8_t>({0, 1}, {2}).to(kBool), b = full({2}, true, {kBool});
  const std::pair<std::string_view, std::function<Tensor()>> refusing[] = {
      {"neg", [&] { return neg(a); }},
      {"abs", [&] { return abs(a); }},
      {"floor", [&] { return floor(a); }},
      {"ceil", [&] { return ceil(a); }},
      {"trunc", [&] { return trunc(a); }},
      {"round", [&] { return round(a); }},
      {"sub", [&] { return sub(a, b); }},
      {"pow", [&] { return pow(a, b); }},
      {"fmod", [&] { return fmod(a, b); }},
      {"floor_divide", [&] { return floor_divide(a, b); }},
      {"remainder", [&] { return remainder(a, b); }},
      {"bitwise_left_shift", [&] { return bitwise_left_shift(a, b); }},
      {"bitwise_right_shift", [&] { return bitwise_right_shift(a, b); }}};
  Names names;
  for (auto& [name, call] : refusing) {
    EXPECT_THROW(call(), UserError) << name;
    names.insert(name);
  }
  for_each_sample([&](const Sample& s) {
    EXPECT_EQ(s.prim->traits().refuses_bool, names.contains(s.prim->name()));
  });
}

// ---- storage formats

TEST(SweepTraits, OpsTakeStorageFormatsOrRefuseThemByName) {
  for_each_sample([](const Sample& s) {
    const auto stored = [](const Tensor& t) { return is_storage_only(t.dtype()); };
    if (std::ranges::any_of(s.in, stored)) return;  // it computes with some of them: its own test
    for (DType t : {kF8E4M3, kF8E5M2})
      for (size_t i = 0; i < s.in.size(); ++i) {
        List in = s.in;
        in[i] = cast(in[i], t);
        SCOPED_TRACE(fmt::format("operand {} in {}", i, name_of(t)));
        if (s.prim->traits().may_take_storage()) {
          if (s.prim->traits().promotion == Promotion::kAll)  // no dtype has both
            for (Tensor& x : in) x = cast(x, t);
          for (const Tensor& out : run(s.prim, in))
            EXPECT_TRUE(i > 0 || s.prim->name() == "cast" || out.dtype() == t);
          continue;
        }
        std::string error;
        try {
          run(s.prim, in);
        } catch (const UserError& e) {
          error = e.what();
        }
        EXPECT_EQ(error, fmt::format("{}: an operand is {}; {} is a storage format, convert it by "
                                     ".to(kF32) first",
                                     s.prim->name(), describe(in[i]), name_of(t)));
      }
  });
}

}  // namespace
}  // namespace tessera::sweep
