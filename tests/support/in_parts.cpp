#include "tests/support/in_parts.h"

#include <algorithm>

#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/contract.h"
#include "core/ops/contract_attributes.h"
#include "core/ops/create.h"
#include "core/ops/dim_attributes.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/reduce_attributes.h"
#include "tests/support/loops.h"

namespace tessera::test {
namespace {

SmallVector<const Meta*, 8> pointers(const std::vector<Tensor>& in) {
  SmallVector<const Meta*, 8> m;
  for (const Tensor& t : in) m.push_back(&t.meta());
  return m;
}

int64_t longest_of(const Shape& shape) {
  return shape.empty() ? 0 : *std::max_element(shape.begin(), shape.end());
}
int64_t longest_dim(const std::vector<Tensor>& in) {
  int64_t longest = 0;
  for (const Tensor& t : in) longest = std::max(longest, longest_of(t.shape()));
  return longest;
}
// Results count too: an op that draws has one operand, a key of two numbers, however much it draws.
int64_t longest_dim(const Primitive& prim, const std::vector<Tensor>& in) {
  int64_t longest = longest_dim(in);
  for (const Meta& m : prim.infer(pointers(in))) longest = std::max(longest, longest_of(m.shape));
  return longest;
}

// Handles of its own for a call, which may take operands over.
Tensors copies(const std::vector<Tensor>& in) { return Tensors(in.begin(), in.end()); }

// Two terms of a result, or two of its parts, made one.
Tensor joined(const Tensor& a, const Tensor& b, int dim, Factor::Kind kind) {
  if (dim >= 0) {
    const DType computed = is_storage_only(a.dtype()) ? kF32 : a.dtype();
    Tensor parts[] = {cast(a, computed), cast(b, computed)};
    return cast(cat(parts, dim), a.dtype());
  }
  return kind == Factor::kMax ? maximum(a, b) : a + b;
}

}  // namespace

Tensors InParts::run(const PrimRef& prim, Inputs in) {
  if (prim->is_view()) return eager_backend().run(prim, in);
  // Below all layers, and what parts are cut and joined by is computed as ever.
  Scoped<LayerMask> below(context().enabled, 0);
  EagerScope eager;
  const bool called = !inside_;
  Scoped<bool> inside(inside_, true);
  const std::vector<Tensor> operands(in.begin(), in.end());
  Tensors out = run_in(prim, operands);
  const auto is_large = [](const Tensor& t) { return t.numel() > 1000; };
  if (called && (std::ranges::any_of(operands, is_large) || std::ranges::any_of(out, is_large)))
    large_.emplace(prim->name());
  return out;
}

Tensors InParts::run_in(const PrimRef& prim, const std::vector<Tensor>& in) {
  if (prim->is_view() || longest_dim(*prim, in) <= longest_)
    return eager_backend().run(prim, copies(in));
  if (prim->name() == "global_norm") {
    Tensor total = scalar_tensor(0.0, kF64);
    for (const Tensor& x : in) {
      BackendScope mine({.backend = this});
      total = total + sum(x * x);
    }
    return {sqrt(total)};
  }
  if (prim->name() == "norm_of_rows") {
    Tensor total = scalar_tensor(0.0, kF64);
    for (const Tensor& squares : in) {
      BackendScope mine({.backend = this});
      total = total + sum(squares);
    }
    return {sqrt(total)};
  }
  if (const auto* c = dynamic_cast<const CatAttributes*>(prim.get())) {
    Tensor out = empty(prim->infer(pointers(in))[0]);
    int64_t at = 0;
    for (const Tensor& t : in) {
      copy_values(narrow(out, c->dim, at, t.shape()[c->dim]), t);
      at += t.shape()[c->dim];
    }
    return {out};
  }
  if (const auto* c = dynamic_cast<const ContractAttributes*>(prim.get()); c && c->leaves) {
    Scoped<bool> any_order(context().exact_contraction, false);  // its sums may not be cut anywhere
    BackendScope mine({.backend = this});
    return {contract(c->a + "," + c->b + "->" + c->out, in[0], in[1])};
  }
  Call call{prim, in, prim->axes(pointers(in))};
  if (call.map.empty()) return run_whole(prim, in);
  std::vector<Range> loops;
  for (const Factor& x : call.map.factors) loops.push_back({0, x.extent, x.extent});
  return part(call, loops);
}

Tensors InParts::part(const Call& call, const std::vector<Range>& loops) {
  const AxisMap& map = call.map;
  int f = -1;
  for (int i = 0; i < int(loops.size()); ++i) {
    const bool cuts = map.factors[size_t(i)].kind != Factor::kWhole && leads_everywhere(map, i);
    if (!cuts || loops[size_t(i)].size <= longest_) continue;
    if (f < 0 || loops[size_t(i)].size > loops[size_t(f)].size) f = i;
  }
  if (f < 0) {
    std::vector<Tensor> in = call.in;
    for (size_t i = 0; i < in.size(); ++i)
      for (int l = 0; l < int(loops.size()); ++l)
        if (loops[size_t(l)].size < loops[size_t(l)].extent)
          in[i] = part_of(in[i], place_of(map, map.in[i], l), loops[size_t(l)]);
    const PrimRef local = call.prim->localize(map, loops);
    return run_whole(local ? local : call.prim, in);
  }
  const Range all = loops[size_t(f)];
  const int64_t cut = all.size / 2;
  std::vector<Range> mine = loops;
  mine[size_t(f)] = {all.begin, cut, all.extent};
  const Tensors first = part(call, mine);
  mine[size_t(f)] = {all.begin + cut, all.size - cut, all.extent};
  const Tensors second = part(call, mine);
  Tensors out;
  for (size_t k = 0; k < first.size(); ++k)
    out.push_back(
        joined(first[k], second[k], place_of(map, map.out[k], f).dim, map.factors[size_t(f)].kind));
  return out;
}

Tensors InParts::run_whole(const PrimRef& prim, const std::vector<Tensor>& in) {
  if (longest_dim(in) > longest_) {
    if (Tensors out = cut_reduction(prim, in); !out.empty()) return out;
    if (prim->decomposable()) {
      BackendScope mine({.backend = this});
      return prim->decompose(in);
    }
    whole_.insert(std::string(prim->name()));
  }
  return eager_backend().run(prim, copies(in));
}

// Reductions that no rank may hold a part of: products, minima, any, all.
Tensors InParts::cut_reduction(const PrimRef& prim, const std::vector<Tensor>& in) {
  const auto* a = dynamic_cast<const ReduceAttributes*>(prim.get());
  if (!a) return {};
  for (int d = 0; d < in[0].ndim(); ++d) {
    const int64_t extent = in[0].shape()[d];
    if (!(a->mask >> d & 1) || extent <= longest_) continue;
    const Tensor x = run_in(prim, {narrow(in[0], d, 0, extent / 2)})[0],
                 y = run_in(prim, {narrow(in[0], d, extent / 2, extent - extent / 2)})[0];
    switch (a->kind) {
      case ReduceKind::kProd: return {x * y};
      case ReduceKind::kMin: return {minimum(x, y)};
      case ReduceKind::kAny: return {logical_or(x, y)};
      case ReduceKind::kAll: return {logical_and(x, y)};
      default: return {};
    }
  }
  return {};
}

void InParts::assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) {
  const Tensors results = run(prim, in);
  for (size_t i = 0; i < dst.size(); ++i) {
    copy_values(dst[i], results[i]);
    dst[i].storage()->bump_version();
  }
}

}  // namespace tessera::test
