// Samples of registered ops as steps to trace: the op and, where it has one, its gradient.
#pragma once
#include "core/dispatch/dispatch.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "tests/compile/bits.h"

namespace tessera::test {

// Fresh memory in the same layout.
inline Tensor copy_of(const Tensor& t) {
  Tensor c = empty(t.meta());
  if (numel(t.shape()) > 0) {
    c = Tensor(t.meta(), make_ref<Storage>(t.storage()->bytes(), t.device(), cpu_allocator()),
               t.offset());
    std::memcpy(c.storage()->data(), t.storage()->data(), t.storage()->bytes());
  }
  return c;
}

inline std::vector<Tensor> copies(std::span<const Tensor> list) {
  std::vector<Tensor> out;
  for (const Tensor& t : list) out.push_back(copy_of(t));
  return out;
}

// Results of the op and, where it has one, the gradient of the sum of their squares.
inline Tensors evaluate(const Sample& s, std::vector<Tensor> in) {
  bool differentiate = s.prim->differentiable();
  Tensors leaves;
  if (differentiate)
    for (Tensor& t : in)
      if (is_differentiable(t.dtype())) leaves.push_back(t = t.detach().requires_grad_());
  std::vector<Tensor> operands = in;
  Tensors out = dispatch(s.prim, operands), roots;
  for (const Tensor& t : out)
    if (t.requires_grad()) roots.push_back(square(t));
  Tensors result;
  for (const Tensor& t : out) result.push_back(t.detach());
  if (roots.empty() || leaves.empty()) return result;
  // Some ops have a derivative only for the first result, some samples for none.
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

// Calls f(sample, "sum sample 2") for all samples of all registered ops.
template <class F>
void for_each_sample(F f) {
  for (const OpEntry& op : op_registry().entries()) {
    int number = 0;
    for (const Sample& s : op.samples()) {
      std::string what = op.name + " sample " + std::to_string(number++);
      SCOPED_TRACE(what);
      f(s, what);
    }
  }
}

inline Tensors defined_only(const Tensors& list) {
  Tensors out;
  for (const Tensor& t : list)
    if (t.defined()) out.push_back(t);
  return out;
}

}  // namespace tessera::test
