// Which result may lie over which operand, and which value may be kept in the row of which result:
// each answer, and that kernels which use it give the same bits.
#include "compile/codegen/access_order.h"

#include "tests/compile/codegen/compare.h"

namespace tessera::test {

using namespace compiler;
namespace {

TEST(AccessOrder, OnlyWithTheSameDTypeAndTheSameAddressOfEachElement) {
  BodyBuilder b({8, 12});
  InstrId x = b.load(3), turned = b.load({kF32, {1, 8}}), gaps = b.load({kF32, {24, 2}});
  InstrId row = b.load(1), column = b.load(2), wide = b.load(3, kI32);
  InstrId sum = b.op("add", {b.op("add", {x, turned}), b.op("add", {gaps, row})});
  b.store(b.op("add", {b.op("add", {sum, column}), b.cast(wide, kF32)}));
  b.store(x, {kF32, {24, 2}});
  for (int operand = 0; operand < 6; ++operand) {
    EXPECT_EQ(may_overwrite(b.body, operand, 0), operand == 0) << operand;
    EXPECT_EQ(may_overwrite(b.body, operand, 1), operand == 2) << operand;
  }
  compare_with_interpreter({b.body});
}

// Every nest that reads x again comes before the one that writes.
TEST(AccessOrder, NothingIsReadAfterItIsWritten) {
  for (auto [rows, n] : {std::pair<int64_t, int64_t>{7, 100}, {70, 300}}) {  // beside each other
    BodyBuilder b({rows, n});
    InstrId x = b.load(3), first = b.sum(x, 2), centered = b.op("sub", {x, first});
    InstrId second = b.sum(b.op("square", {centered}), 2);
    b.store(b.op("neg", {x}));
    b.store(b.op("add", {x, first}));
    b.store(b.op("mul", {centered, second}));
    EXPECT_FALSE(may_overwrite(b.body, 0, 0));
    EXPECT_FALSE(may_overwrite(b.body, 0, 1));
    EXPECT_TRUE(may_overwrite(b.body, 0, 2));
    compare_with_interpreter({b.body});
  }
}

TEST(AccessOrder, NumbersOfRowsAreStoredLast) {
  BodyBuilder b({70, 300});
  InstrId x = b.load(3), r = b.load(1);
  b.store(b.op("mul", {b.op("add", {x, r}), b.sum(x, 2)}));
  b.store(b.op("add", {r, b.sum(x, 2)}));
  EXPECT_TRUE(may_overwrite(b.body, 1, 1));
  EXPECT_TRUE(may_overwrite(b.body, 0, 0));
  compare_with_interpreter({b.body});
}

// All rows read g before the sum over them is stored; h is read beside the sums that are stored.
TEST(AccessOrder, SumsOverRowsAreStoredWhenAllRowsAreDone) {
  BodyBuilder b({2000, 100});
  InstrId x = b.load(3), g = b.load(2), h = b.load(2);
  b.store(b.sum(b.op("mul", {x, g}), 1)), b.store(b.op("mul", {b.sum(x, 1), h}));
  for (int result : {0, 1}) {
    EXPECT_TRUE(may_overwrite(b.body, 1, result)) << result;
    EXPECT_FALSE(may_overwrite(b.body, 2, result)) << result;
  }
  compare_with_interpreter({b.body});
}

// A value that is kept in the row of a result is written there by the nest that computes it.
Body waiting_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), z = b.load(3), v = b.op("gelu", {x});
  b.store(b.op("mul", {v, b.sum(v, 2)}));
  b.store(b.op("add", {z, b.sum(v, 2)}));
  return b.body;
}
TEST(AccessOrder, AValueThatWaitsInAResultIsWrittenEarly) {
  std::vector<Body> bodies = {waiting_body(7, 100), waiting_body(70, 300)};
  for (const Body& body : bodies) {
    const Schedule s = make_schedule(body).value();
    const InstrId v = 2;
    ASSERT_TRUE(s.at(v).buffered);
    EXPECT_EQ(s.at(v).kept_in, 0);
    EXPECT_TRUE(may_overwrite(body, 0, 0));   // x, in the nest that reads it
    EXPECT_FALSE(may_overwrite(body, 1, 0));  // z, which the next nest reads
    EXPECT_TRUE(may_overwrite(body, 1, 1));
    EXPECT_TRUE(may_overwrite(body, 0, 1));
    Schedule in_a_buffer = s;
    in_a_buffer.values[size_t(v)].kept_in = -1;
    EXPECT_TRUE(AccessOrder(in_a_buffer).may_overwrite(1, 0));
  }
  compare_with_interpreter(bodies);
}

// With loops that the result does not vary with, a nest writes each element several times: the
// value varies with the middle loop, and is kept in the result, which does not.
TEST(AccessOrder, WhatIsWrittenAgainAndAgainIsNotOverAnOperandOfItsNest) {
  BodyBuilder b({64, 17, 2});
  InstrId v = b.op("silu", {b.op("sin", {b.op("rsqrt", {b.op("log1p", {b.load(5)})})})});
  b.store(v), b.store(v, b.dense(7, kF32));
  const Schedule s = make_schedule(b.body).value();
  ASSERT_EQ(s.at(v).kept_in, 0);
  EXPECT_FALSE(may_overwrite(b.body, 0, 0));
  compare_with_interpreter({b.body});
}

// The first piece of a row is read, and what is computed of it kept, before elements are picked.
TEST(AccessOrder, PiecesBeginWithARowBeforeItsElementsArePicked) {
  for (int64_t n : {1000, 8200}) {
    BodyBuilder b({100, n});
    InstrId x = b.load(3), z = b.load(3), v = b.op("gelu", {x});
    InstrId hit = b.op("eq", {b.index(1), b.load(1, kI64)}, true);
    InstrId e = b.op("exp", {b.op("sub", {v, b.reduce(ReduceKind::kMax, v, 2)})});
    b.store(b.op("div", {e, b.sum(e, 2)}));
    b.store(b.sum(b.op("where", {hit, z, b.constant(0.0)}), 2));
    Schedule s = make_schedule(b.body).value();
    const bool in_pieces = n > 8192;
    ASSERT_EQ(s.pieces.size > 0, in_pieces);
    EXPECT_TRUE(may_overwrite(b.body, 1, 0));
    for (Placed& p : s.values) p.kept_in = -1;
    s.values[size_t(v)].kept_in = 0;
    EXPECT_EQ(AccessOrder(s).may_overwrite(1, 0), !in_pieces);
    EXPECT_TRUE(AccessOrder(s).may_overwrite(0, 0));
  }
}

TEST(AccessOrder, AValueWaitsAsItIsAloneAndUntilNobodyReadsIt) {
  BodyBuilder b({70, 300});
  InstrId x = b.load(3), v = b.op("gelu", {x}), w = b.op("tanh", {x}), s = b.sum(v, 2);
  InstrId t = b.sum(b.op("mul", {b.op("mul", {v, w}), s}), 2);
  b.store(b.op("neg", {x}));                       // where v is computed
  b.store(b.op("add", {x, s}));                    // while v is read again, after it is
  b.store(b.op("mul", {b.op("sub", {v, w}), t}));  // when it is read for the last time
  b.store(b.cast(b.op("add", {x, t}), kF64));      // of another width
  b.store(t);                                      // no row of elements
  Schedule schedule = make_schedule(b.body).value();
  for (Placed& p : schedule.values) p.kept_in = -1;
  const AccessOrder order(schedule);
  EXPECT_EQ(order.computed_in(v), 0);
  EXPECT_EQ(order.last_reread_in(v), 2);
  for (int result = 0; result < 5; ++result)
    EXPECT_EQ(order.may_wait_in(v, result), result == 2) << result;
  schedule.values[size_t(w)].kept_in = 2;
  EXPECT_FALSE(order.may_wait_in(v, 2));
}

}  // namespace
}  // namespace tessera::test
