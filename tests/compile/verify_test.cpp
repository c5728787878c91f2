// Invalid graphs are refused with the node and the reason.
#include "compile/ir/verify.h"

#include <gtest/gtest.h>

#include "compile/record/trace.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "core/ops/views.h"

namespace tessera::compiler {
namespace {

// %1 = permute(%0), %2 = gelu(%1), %4 = add(%3, %2) into %3, %5 = neg(%4)
struct Small {
  Tensor x = empty({2, 2}), state = empty({2, 2});
  Graph graph;
  Small() {
    zero_(x), zero_(state);
    Trace trace({.inputs = {x}});
    add_(state, gelu(transpose(x, 0, 1)));
    graph = trace.finish({neg(state)});
  }
  Node& node(size_t i) { return graph.nodes[i]; }
  Value& value(ValueId id) { return graph.values[size_t(id)]; }
};

template <class F>
void expect_refused(F breakage, std::string_view text) {
  Small s;
  verify(s.graph);
  breakage(s);
  try {
    verify(s.graph);
    ADD_FAILURE() << "accepted: " << text << "\n" << to_string(s.graph);
  } catch (const BugError& e) {
    EXPECT_NE(std::string_view(e.what()).find(text), std::string_view::npos) << e.what();
  }
}

TEST(Verify, OrderAndDefinitions) {
  expect_refused([](Small& s) { std::swap(s.node(0), s.node(1)); },
                 "node 0: operand %1 is not defined before, in %2 = gelu(%1)");
  expect_refused([](Small& s) { s.node(1).out = {1}; }, "node 1: result %1 is defined already");
  expect_refused([](Small& s) { s.node(1).out = {99}; }, "node 1: result %99 is not one of 6");
  expect_refused([](Small& s) { s.node(1).in = {-7}; }, "node 1: operand %-7 is not defined");
  expect_refused([](Small& s) { s.node(1).prim = nullptr; }, "node 1: there is no op");
  expect_refused([](Small& s) { s.graph.outputs = {99}; }, "output %99 is not defined");
  expect_refused([](Small& s) { s.graph.inputs.push_back(0); }, "input %0 is defined already");
  expect_refused([](Small& s) { s.graph.nodes.pop_back(); }, "output %5 is not defined");
}

TEST(Verify, Types) {
  expect_refused([](Small& s) { s.value(2).meta.dtype = kF64; },
                 "node 1: result %2 is f64[2, 2], infer gives f32[2, 2]");
  expect_refused([](Small& s) { s.value(2).meta.shape = {4}; }, "node 1: result %2 is f32[4]");
  expect_refused(
      [](Small& s) {
        s.node(1).in = {1, 0};
        s.node(1).out = {2, 2};
      },
      "node 1: 2 results, infer gives 1");
  expect_refused(
      [](Small& s) {
        s.value(0).meta.shape = {2, 2, 1};
        s.value(0).meta.strides = {2, 1, 1};
      },
      "node 0: operands do not fit");
}

TEST(Verify, Memory) {
  expect_refused(
      [](Small& s) {
        s.value(1).meta.strides = {2, 1};
      },
      "node 0: view %1 has strides [2, 1] and offset 0, the op gives [1, 2] and 0");
  expect_refused([](Small& s) { s.value(1).buffer = 1; }, "node 0: view %1 is in the memory of %1");
  expect_refused([](Small& s) { s.value(2).buffer = 0; },
                 "node 1: result %2 of an op that makes its memory is in that of %0");
  expect_refused([](Small& s) { s.value(0).buffer = 3; }, "input %0 is in the memory of %3");
  expect_refused([](Small& s) { s.graph.implicit[0].tensor = s.x.transpose(0, 1); },
                 "implicit input %3 is f32[2, 2], its tensor");
}

TEST(Verify, Effects) {
  expect_refused([](Small& s) { s.node(3).in = {3}; },
                 "node 3: operand %3 was overwritten before, in %5 = neg(%3)");
  expect_refused([](Small& s) { s.graph.outputs = {3}; }, "output %3 was overwritten before");
  expect_refused([](Small& s) { s.node(2).into = {2}; },
                 "node 2: result %4 is not where its destination %2 is");
  expect_refused([](Small& s) { s.node(2).into = {3, 2}; }, "node 2: 1 results go into 2 places");
}

TEST(Verify, WhereItComesFrom) {
  expect_refused([](Small& s) { s.node(1).scope = 12; }, "node 1: scope 12 is not one of 1");
  expect_refused([](Small& s) { s.node(1).phase = Phase(9); }, "node 1: phase or role is unknown");
}

}  // namespace
}  // namespace tessera::compiler
