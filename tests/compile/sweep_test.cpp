// Every registered op: the graph of its samples, forward and gradients, replayed equals eager bit
// for bit, on the values it was traced with and on others.
#include <gtest/gtest.h>

#include "compile/replay.h"
#include "compile/trace.h"
#include "compile/verify.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "tests/compile/bits.h"

namespace tessera::compile {
namespace {

using test::expect_same_bits;

// Fresh memory in the same layout.
Tensor copy_of(const Tensor& t) {
  Tensor c = empty(t.meta());
  if (numel(t.shape()) > 0) {
    c = Tensor(t.meta(), make_ref<Storage>(t.storage()->bytes(), t.device(), cpu_allocator()),
               t.offset());
    std::memcpy(c.storage()->data(), t.storage()->data(), t.storage()->bytes());
  }
  return c;
}

std::vector<Tensor> copies(const std::vector<Tensor>& list) {
  std::vector<Tensor> out;
  for (const Tensor& t : list) out.push_back(copy_of(t));
  return out;
}

// Results of the op and, where it has one, the gradient of the sum of their squares.
Tensors evaluate(const Sample& s, std::vector<Tensor> in) {
  bool differentiate = s.prim->differentiable();
  Tensors leaves;
  if (differentiate)
    for (Tensor& t : in)
      if (is_floating(t.dtype())) leaves.push_back(t = t.detach().requires_grad_());
  std::vector<Tensor> operands = in;
  Tensors out = dispatch(s.prim, operands), roots;
  for (const Tensor& t : out)
    if (t.requires_grad()) roots.push_back(square(t));
  Tensors result;
  for (const Tensor& t : out) result.push_back(t.detach());
  if (roots.empty() || leaves.empty()) return result;
  // Of some ops only the first result has a derivative, of some samples none.
  for (size_t count : {roots.size(), size_t(1)}) {
    Tensors some(roots.begin(), roots.begin() + int64_t(count)), ones;
    for (const Tensor& r : some) ones.push_back(ones_like(r));
    try {
      for (const Tensor& g : grad(some, leaves, ones, {.retain_graph = true})) result.push_back(g);
      break;
    } catch (const Error&) {
    }
  }
  return result;
}

Tensors defined_only(const Tensors& list) {
  Tensors out;
  for (const Tensor& t : list)
    if (t.defined()) out.push_back(t);
  return out;
}

TEST(TraceSweep, TracedEqualsEager) {
  for (const OpEntry& op : op_registry().entries()) {
    int number = 0;
    for (const Sample& s : op.samples()) {
      std::string what = op.name + " sample " + std::to_string(number++);
      SCOPED_TRACE(what);
      Tensors eager = defined_only(evaluate(s, s.in));
      std::vector<Tensor> in = copies(s.in);
      Trace trace({.inputs = in});
      Tensors traced = defined_only(evaluate(s, in));
      Graph graph = trace.finish(traced);
      expect_same_bits(traced, eager, what + " while traced");
      expect_same_bits(replay(graph, copies(s.in)), eager, what + " replayed");
      for (size_t i = 0; i < in.size(); ++i)
        expect_same_bits(in[i], s.in[i], what + " wrote its operand");
      EXPECT_FALSE(to_string(graph).empty());
    }
  }
}

TEST(TraceSweep, ReplayFollowsItsInputs) {
  for (const char* name : {"mul", "contract", "softmax", "layer_norm", "sum", "gelu"}) {
    for (const OpEntry& op : op_registry().entries()) {
      if (op.name != name) continue;
      Sample s = op.samples()[0];
      std::vector<Tensor> in = copies(s.in), other = copies(s.in);
      Trace trace({.inputs = in});
      Graph graph = trace.finish(defined_only(evaluate(s, in)));
      for (Tensor& t : other)
        for (int64_t i = 0; t.dtype() == kF64 && i < t.numel(); ++i)
          t.data<double>()[i] = 0.25 + 0.5 * t.data<double>()[i];
      expect_same_bits(replay(graph, other), defined_only(evaluate(s, other)), name);
    }
  }
}

}  // namespace
}  // namespace tessera::compile
