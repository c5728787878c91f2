// The text of a drawing, and what happens without Graphviz.
#include "compile/debug/draw.h"

#include <cstdlib>

#include "core/nn/scope.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/compile/passes/graphs.h"
#include "tests/support/temp_folder.h"

namespace tessera::compiler {
namespace {

Graph small() {
  Tensor x = ones({2, 3}), state = zeros({2, 3});
  return test::graph_of({x}, [&] {
    nn::Scope scope("block");
    Tensor y = gelu(x);
    add_(state, y);
    return Tensors{transpose(state, 0, 1)};
  });
}

TEST(Draw, Dot) {
  EXPECT_EQ(to_dot(small()),
            "digraph step {\n"
            "  node [shape=box, fontname=\"monospace\", style=filled];\n"
            "  subgraph cluster_1 {\n"
            "  label=\"block\";\n"
            "  n0 [label=\"gelu\n%1 f32[2, 3]\", fillcolor=lightblue];\n"
            "  n1 [label=\"add\n%3 f32[2, 3]\", fillcolor=lightblue];\n"
            "  n2 [label=\"permute(order=[1, 0])\n%4 f32[3, 2]\", fillcolor=lightblue];\n"
            "  }\n"
            "  in0 [label=\"%0 input\nf32[2, 3]\", shape=ellipse, fillcolor=white];\n"
            "  in2 [label=\"%2 state\nf32[2, 3]\", shape=ellipse, fillcolor=white];\n"
            "  in0 -> n0;\n"
            "  in2 -> n1;\n"
            "  n0 -> n1;\n"
            "  n1 -> in2 [style=dashed, constraint=false];\n"
            "  n1 -> n2;\n"
            "  out0 [label=\"output 0\", shape=ellipse];\n"
            "  n2 -> out0;\n"
            "}\n");
}

TEST(Draw, SvgWhereGraphvizIs) {
  TempFolder folder;
  if (std::system("command -v dot > /dev/null") != 0) {
    expect_contains(error_of([&] { draw_svg(small(), folder / "step.svg"); }), "install graphviz");
    EXPECT_EQ(folder.count(), 1u);  // the source stays
    return;
  }
  draw_svg(small(), folder / "step.svg");
  expect_contains(folder.read("step.svg"), "<svg");
  EXPECT_EQ(folder.count(), 1u);
}

TEST(Draw, RefusesAPlaceThatCannotBeWritten) {
  expect_contains(error_of([] { draw_svg(small(), "/nowhere/step.svg"); }), "cannot write");
}

}  // namespace
}  // namespace tessera::compiler
