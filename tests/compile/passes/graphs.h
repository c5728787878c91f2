// Small graphs for tests of passes: tracing them, printing them without what does not matter,
// replaying them.
#pragma once
#include "compile/ir/interpreter.h"
#include "compile/ir/verify.h"
#include "compile/passes/passes.h"
#include "compile/record/trace.h"
#include "tests/compile/samples.h"

namespace tessera::test {

/// The graph of `step`, whose results are its outputs.
template <class F>
compiler::Graph graph_of(const std::vector<Tensor>& in, F step) {
  compiler::Trace trace({.inputs = in});
  Tensors out = step();
  return trace.finish(out);
}

/// Nodes and outputs, without types and scopes: "%1 = neg(%0)\nreturn %1\n".
inline std::string nodes_of(const compiler::Graph& g) {
  std::string text;
  for (const compiler::Node& n : g.nodes) {
    std::string line = to_string(g, n);
    text += line.substr(0, line.find(" : ")) + "\n";
  }
  std::string all = to_string(g);
  return text + all.substr(all.rfind("return"));
}

inline int count(const compiler::Graph& g, std::string_view op) {
  int n = 0;
  for (const compiler::Node& node : g.nodes) n += node.prim->name() == op;
  return n;
}

/// Returns all that a run leaves behind: outputs, implicit inputs and inputs; then restores their
/// memory.
inline Tensors results(const compiler::Graph& g, std::span<const Tensor> in) {
  std::vector<Tensor> before, inputs = copies(in);
  for (const compiler::ImplicitInput& i : g.implicit) before.push_back(copy_of(i.tensor));
  Tensors out;
  for (const Tensor& t : compiler::interpret(g, inputs)) {
    t.storage()->wait_ready();  // a collective may be under way
    out.push_back(copy_of(t));
  }
  for (const compiler::ImplicitInput& i : g.implicit) out.push_back(copy_of(i.tensor));
  for (const Tensor& t : inputs) out.push_back(t);  // effects may write them
  for (size_t k = 0; k < before.size(); ++k)
    std::memcpy(g.implicit[k].tensor.storage()->data(), before[k].storage()->data(),
                before[k].storage()->bytes());
  return out;
}

/// Expects that outputs share memory with each other and with existing tensors in the same way.
inline void expect_same_sharing(const compiler::Graph& a, const compiler::Graph& b) {
  auto memory = [](const compiler::Graph& g, size_t i) { return g[g.outputs[i]].buffer; };
  auto external = [&](const compiler::Graph& g, size_t i) {
    bool is = std::ranges::count(g.inputs, memory(g, i)) > 0;
    for (const compiler::ImplicitInput& x : g.implicit) is = is || x.id == memory(g, i);
    return is;
  };
  for (size_t i = 0; i < b.outputs.size(); ++i) {
    EXPECT_EQ(external(a, i), external(b, i)) << "output " << i << to_string(a);
    for (size_t j = 0; j < i; ++j)
      EXPECT_EQ(memory(a, i) == memory(a, j), memory(b, i) == memory(b, j))
          << "outputs " << j << " and " << i << " of\n"
          << to_string(b) << to_string(a);
  }
}

/// Runs `pass` on a copy of `g`; the result verifies and computes the same bits.
template <class F>
compiler::Graph checked(const compiler::Graph& g, std::span<const Tensor> in, F pass) {
  compiler::Graph after = g;
  pass(after);
  compiler::verify(after);
  expect_same_sharing(after, g);
  expect_same_bits(results(after, in), results(g, in),
                   "before:\n" + to_string(g) + "after:\n" + to_string(after));
  return after;
}

}  // namespace tessera::test
