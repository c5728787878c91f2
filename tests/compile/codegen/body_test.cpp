// Bodies: what check refuses, how they print, and that interpreting them gives the results of the
// ops run one by one.
#include <gtest/gtest.h>

#include "compile/codegen/samples.h"
#include "core/core.h"
#include "tests/compile/bits.h"
#include "tests/compile/codegen/compare.h"

namespace tessera::test {

using namespace compiler;
namespace {

Tensors run_fused(const Body& body, Tensors in) {
  PrimRef op(new Fused("test", body, results_of(body)));
  return eager_backend().run(op, in);
}

TEST(Body, PrintsAndEqualBodiesPrintEqually) {
  std::string text = to_string(softmax_body(4, 8));
  EXPECT_EQ(text,
            "loops[4, 8]\n"
            "operand 0: f32[8, 1]\n"
            "v0 = load 0 : f32 loops 11\n"
            "v1 = amax(v0) over 10 : f32 loops 1\n"
            "v2 = sub(v0, v1) : f32 loops 11\n"
            "v3 = exp(v2) : f32 loops 11\n"
            "v4 = sum(v3) over 10 : f32 loops 1\n"
            "v5 = div(v3, v4) : f32 loops 11\n"
            "store v5 to f32[8, 1]\n");
  EXPECT_EQ(text, to_string(softmax_body(4, 8)));
  EXPECT_NE(text, to_string(softmax_body(4, 9)));
}

TEST(Body, ConstantsThatDifferInTheLastBitPrintDifferently) {
  BodyBuilder a({2}), b({2});
  a.store(a.op("add", {a.load(1), a.constant(0.1)}));
  b.store(b.op("add", {b.load(1), b.constant(0.1 + 1e-17 * 2)}));
  EXPECT_NE(to_string(a.body), to_string(b.body));
}

void expect_refused(const Body& body, const std::string& why) {
  try {
    check(body);
    FAIL() << "accepted: " << to_string(body);
  } catch (const BugError& e) {
    EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
  }
}

TEST(Body, CheckRefusesWhatBreaksTheInvariants) {
  Body good = softmax_body(4, 8);
  check(good);
  Body b = good;
  b.instrs[2].in[1] = 2;
  expect_refused(b, "v2: reads v2");
  b = good, b.instrs[2].loops = 1;
  expect_refused(b, "varies with loops");
  b = good, b.instrs[2].op = "substract";
  expect_refused(b, "there is no pointwise op substract");
  b = good, b.instrs[2].in.pop_back();
  expect_refused(b, "sub of 1 operands");
  b = good, b.instrs[2].dtype = kF64;
  expect_refused(b, "sub of f32 is f32, not f64");
  b = good, b.instrs[1].dtype = kI64;
  expect_refused(b, "amax of f32 is f32, not i64");
  b = good, b.instrs[0].operand = 1;
  expect_refused(b, "loads operand 1");
  b = good, b.extents[1] = 0;
  expect_refused(b, "extent 0");
  b = good, b.stores[0].to.strides[0] = 7;
  expect_refused(b, "stored in one place");
  b = good, b.stores[0].to.strides[1] = 0;
  expect_refused(b, "where it is stored does not");
  b = good, b.stores.clear();
  expect_refused(b, "nothing is stored");
  b = good, b.operands[0].strides[0] = -8;
  expect_refused(b, "stride -8");
}

TEST(Interpret, SoftmaxIsTheOpsOneByOne) {
  Tensor x = randn({5, 7});
  Tensor e = exp(x - amax(x, {1}, true)), y = e / sum(e, {1}, true);
  expect_same_bits(run_fused(softmax_body(5, 7), {x})[0], y, "softmax");
}

TEST(Interpret, LayerNormAndItsDerivative) {
  Tensor x = randn({6, 9}), w = randn({9}), b = randn({9}), g = randn({6, 9});
  Tensors y = run_fused(layer_norm_body(6, 9), {x, w, b});
  Tensor mean = sum(x, {1}) * (1.0 / 9);
  expect_same_bits(y[1], mean, "mean");
  Tensor h = (x - reshape(y[1], {6, 1})) * reshape(y[2], {6, 1});
  expect_same_bits(y[0], h * w + b, "y");
  Tensors d = run_fused(layer_norm_grad_body(6, 9), {g, x, w, y[1], y[2]});
  expect_same_bits(d[1], sum(g * h, {0}), "dw");
  expect_same_bits(d[2], sum(g, {0}), "db");
}

TEST(Interpret, LossOverRowsAndIndices) {
  Tensor x = randn({6, 9});
  Tensor target = from_values<int64_t>({0, 8, 3, 3, 1, 5}, {6});
  Tensors out = run_fused(cross_entropy_body(6, 9), {x, target});
  EXPECT_NEAR(out[0].item<double>(), cross_entropy(x, target).item<double>(), 1e-6);
  EXPECT_NEAR(sum(out[1]).item<double>(), 0.0, 1e-6);
}

TEST(Interpret, TransposedReadsRepeatedWritesAndReductionsOfRepeatedValues) {
  BodyBuilder b({3, 4});
  InstrId x = b.load({kF32, {1, 3}}), r = b.load(1);
  b.store(b.op("add", {x, r}));
  b.store(r, b.dense(3, kF32));  // repeated over loop 1
  b.store(b.sum(r, 2));          // four times r
  Tensor t = from_values<float>({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {4, 3});
  Tensor rows = from_values<float>({10, 20, 30}, {3});
  Tensors out = run_fused(b.body, {t, rows});
  expect_same_bits(out[0], contiguous(transpose(t, 0, 1)) + reshape(rows, {3, 1}), "transposed");
  expect_same_bits(out[1], contiguous(expand(reshape(rows, {3, 1}), {3, 4})), "repeated");
  expect_same_bits(out[2], rows * 4.0, "sum of equals");
}

TEST(Fused, ResultsHaveTheirLayoutAndOperandsAreChecked) {
  Body body = softmax_body(4, 8);
  Metas results = results_of(body);
  results[0].shape = {2, 2, 8}, results[0].strides = {16, 8, 1};
  PrimRef op(new Fused("h_0_softmax", body, results));
  Tensors in{zeros({4, 8})};
  EXPECT_EQ(eager_backend().run(op, in)[0].shape(), Shape({2, 2, 8}));
  Tensors wrong{zeros({4, 8}, {kF64})};
  EXPECT_THROW(eager_backend().run(op, wrong), ShapeError);
  EXPECT_EQ(compiler::as_fused(*op)->name, "h_0_softmax");
  EXPECT_EQ(compiler::as_fused(*pointwise_primitive("add")), nullptr);
}

TEST(Fused, TakesOverAnOperandOnlyWhereElementsAreReadAndWrittenInOnePlace) {
  BodyBuilder same({4, 4}), turned({4, 4});
  same.store(same.op("neg", {same.load(3)}));
  turned.store(turned.op("neg", {turned.load({kF32, {1, 4}})}));
  EXPECT_TRUE(may_overwrite(same.body, 0, 0));
  EXPECT_FALSE(may_overwrite(turned.body, 0, 0));
  Tensors in{ones({4, 4})};
  void* memory = in[0].raw();
  PrimRef op(new Fused("neg", same.body, results_of(same.body)));
  EXPECT_EQ(eager_backend().run(op, in)[0].raw(), memory);
  Tensors other{ones({4, 4})};
  PrimRef turn(new Fused("turn", turned.body, results_of(turned.body)));
  EXPECT_NE(eager_backend().run(turn, other)[0].raw(), other[0].raw());
}

}  // namespace
}  // namespace tessera::test
