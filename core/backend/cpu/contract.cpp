// Contractions on the CPU: letters are sorted into batch, m, n and k, neighbours that lie densely
// behind each other are merged, and what remains is one batched Gemm. Operands whose strides do not
// allow it are copied once. Invariant: all of this depends on letters and layouts alone, so it is
// worked out by the plan, and a run only copies and multiplies.
#include <algorithm>

#include "core/backend/cpu/gemm.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/backend/cpu/zero_rows.h"
#include "core/base/isa.h"
#include "core/base/log.h"
#include "core/dispatch/copy.h"
#include "core/ops/contract_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cpu {
namespace {

// One loop of the nest with its stride in A, B and C; 0 where the operand lacks it.
struct LoopDim {
  int64_t extent, a, b, c;
};
using LoopDims = SmallVector<LoopDim, 6>;

struct Nest {
  LoopDims batch, m, n, k;
};

// The letters of operands and result, where these may have been reordered.
struct Words {
  std::string a, b, out;
};

int64_t stride_of(const std::string& word, char letter, const Meta& t) {
  size_t d = word.find(letter);
  return d == std::string::npos ? 0 : t.strides[int(d)];
}

void push_merged(LoopDims& dims, LoopDim d) {
  if (d.extent == 1) return;
  if (!dims.empty()) {
    LoopDim& o = dims.back();
    if (o.a == d.a * d.extent && o.b == d.b * d.extent && o.c == d.c * d.extent) {
      o = {o.extent * d.extent, d.a, d.b, d.c};
      return;
    }
  }
  dims.push_back(d);
}

Nest make_nest(const Words& s, const Meta& a, const Meta& b, const Meta& c) {
  Nest nest;
  auto has = [](const std::string& w, char l) { return w.find(l) != std::string::npos; };
  for (size_t i = 0; i < s.out.size(); ++i) {
    char l = s.out[i];
    LoopDim d{c.shape[int(i)], stride_of(s.a, l, a), stride_of(s.b, l, b), c.strides[int(i)]};
    bool in_a = has(s.a, l), in_b = has(s.b, l);
    push_merged(in_a && in_b ? nest.batch : in_a ? nest.m : nest.n, d);
  }
  for (size_t i = 0; i < s.a.size(); ++i)
    if (!has(s.out, s.a[i]))
      push_merged(nest.k, {a.shape[int(i)], a.strides[int(i)], stride_of(s.b, s.a[i], b), 0});
  return nest;
}

// The dims of a class beyond the one that Gemm takes become batch dims: the one that keeps unit
// strides stays.
LoopDim keep_one(LoopDims& dims, LoopDims& batch, int64_t LoopDim::*unit) {
  if (dims.empty()) return {1, 0, 0, 0};
  size_t best = 0;
  for (size_t i = 0; i < dims.size(); ++i)
    if (dims[i].*unit == 1 || (dims[best].*unit != 1 && dims[i].extent > dims[best].extent))
      best = i;
  for (size_t i = 0; i < dims.size(); ++i)
    if (i != best) batch.push_back(dims[i]);
  return dims[best];
}

// The letters of an operand in the order batch, own, k: then every class of a dense copy merges as
// far as the result allows.
std::string canonical(const Words& s, const std::string& word, const std::string& other) {
  auto has = [](const std::string& w, char l) { return w.find(l) != std::string::npos; };
  std::string order;
  for (char l : s.out)
    if (has(word, l) && has(other, l)) order += l;
  for (char l : s.out)
    if (has(word, l) && !has(other, l)) order += l;
  for (char l : s.a)  // the same order of k letters in both operands
    if (has(word, l) && !has(s.out, l)) order += l;
  return order;
}

// The dims of a tensor with the letters `word`, as the letters of `order` follow each other.
Dims dims_in(const std::string& order, const std::string& word) {
  Dims dims;
  for (char l : order) dims.push_back(int64_t(word.find(l)));
  return dims;
}

Dims reordered(const Dims& extents, const Dims& order) {
  Dims result;
  for (int64_t d : order) result.push_back(extents[int(d)]);
  return result;
}

Meta dense_in_order(const Meta& m, const Dims& order) {
  return Meta::contiguous(reordered(m.shape, order), m.dtype, m.device);
}

Tensor dense_in_order(const Tensor& t, const Dims& order) {
  return dense_copy(
      Tensor({reordered(t.shape(), order), reordered(t.strides(), order), t.dtype(), t.device()},
             t.storage(), t.offset()));
}

// True when elements are read more than once (expand): libraries want every stride to move.
bool repeats(const Meta& t) {
  for (int d = 0; d < t.shape.size(); ++d)
    if (t.shape[d] > 1 && t.strides[d] == 0) return true;
  return false;
}

// One Gemm that computes the whole contraction, or what stands in its way.
struct Direct {
  enum { kYes, kOperands, kResult } fits;  // no: the strides of the operands, or of the result
  Gemm g;
  bool swapped = false;  // the operands, for the transposed result
};

Direct direct(const Words& s, const Meta& a, const Meta& b, const Meta& c) {
  Direct d;
  Nest nest = make_nest(s, a, b, c);
  auto unit = [](const LoopDims& x, const LoopDims& y, int64_t LoopDim::*stride) {
    for (const LoopDims* dims : {&x, &y})
      for (const LoopDim& l : *dims)
        if (l.*stride == 1) return true;
    return x.empty() && y.empty();
  };
  d.fits = Direct::kOperands;
  bool a_ok = unit(nest.m, nest.k, &LoopDim::a), b_ok = unit(nest.k, nest.n, &LoopDim::b);
  if (nest.k.size() > 1 || !a_ok || !b_ok || repeats(a) || repeats(b)) return d;
  // C needs unit stride in its columns: where the rows have it, compute the transpose with the
  // operands swapped.
  bool n_unit = nest.n.empty();
  for (const LoopDim& l : nest.n) n_unit |= l.c == 1;
  bool m_unit = false;
  for (const LoopDim& l : nest.m) m_unit |= l.c == 1;
  if (!n_unit && m_unit) {
    d.swapped = true;
    std::swap(nest.m, nest.n);
    for (LoopDims* dims : {&nest.batch, &nest.m, &nest.n, &nest.k})
      for (LoopDim& l : *dims) std::swap(l.a, l.b);
  }
  Gemm& g = d.g;
  g.dtype = c.dtype;
  LoopDims batch = nest.batch;
  LoopDim m = keep_one(nest.m, batch, &LoopDim::a), n = keep_one(nest.n, batch, &LoopDim::c),
          k = nest.k.empty() ? LoopDim{1, 1, 1, 0} : nest.k[0];
  d.fits = Direct::kResult;
  if ((n.extent > 1 && n.c != 1) || int(batch.size()) > kMaxBatch) return d;
  // The letter with an operand's unit stride may have become a batch letter.
  auto readable = [](const LoopDim& x, int64_t x_stride, const LoopDim& y, int64_t y_stride) {
    return x.extent == 1 || y.extent == 1 || x_stride == 1 || y_stride == 1;
  };
  d.fits = Direct::kOperands;
  if (!readable(m, m.a, k, k.a) || !readable(k, k.b, n, n.b)) return d;
  g.batch = int(batch.size());
  for (int i = 0; i < g.batch; ++i) {
    const LoopDim& l = batch[size_t(i)];
    g.extent[i] = l.extent, g.a_batch[i] = l.a, g.b_batch[i] = l.b, g.c_batch[i] = l.c;
  }
  g.m = m.extent, g.n = n.extent, g.k = k.extent;
  // A dim of extent 1 may have any stride; give it the one a dense matrix would have.
  g.a_m = g.m == 1 ? g.k * k.a : m.a, g.a_k = g.k == 1 ? 1 : k.a;
  g.b_k = g.k == 1 ? g.n : k.b, g.b_n = g.n == 1 ? (g.k == 1 ? 1 : k.b == 1 ? g.k : 1) : n.b;
  g.c_m = g.m == 1 ? g.n : m.c;
  if (g.m == 1 && g.a_k != 1) g.a_m = 1;
  if (g.k == 1 && g.m > 1 && g.a_m != 1) g.a_k = 1;
  if (g.k == 1 && g.b_n != 1) g.b_k = 1;
  d.fits = Direct::kYes;
  return d;
}

// How a contraction is computed: by one product, or by another contraction of operands that are
// copied first, into a result that is copied afterwards.
struct ContractPlan final : RefCounted {
  enum class Way : uint8_t {
    kProduct,
    kCopied,     // the operands are copied into an order that suits a product
    kReordered,  // C's unit stride lies in a batch letter: the result is computed with its letters
                 // ordered batch, m, n
    kConverted,  // operands and result have a dtype that is computed in another
  };
  Way way = Way::kProduct;
  size_t workspace_bytes = 0;
  // kProduct
  bool swapped = false;
  Gemm g;
  int64_t leaves = 0;
  PlannedGemm gemm;  // without leaves
  GemmWithoutZeroRows without_zero_rows;
  // The others: what is computed in the middle, and the order of dims, or the dtype, to get there.
  Ref<const ContractPlan> inner;
  Dims order_a, order_b, order_c;
  DType dtype = kF32;
};
using PlanRef = Ref<const ContractPlan>;

PlanRef plan_words(const ContractAttributes& s, const Words& w, const Meta& a, const Meta& b,
                   const Meta& c);

PlanRef plan_product(const ContractAttributes& s, const Direct& d) {
  Ref<ContractPlan> p = make_ref<ContractPlan>();
  p->swapped = d.swapped, p->g = d.g;
  if (s.leaves) {
    p->leaves = s.leaves_of(d.g.k);
    p->workspace_bytes = packed_gemm_workspace(d.g, p->leaves);
  } else {
    p->gemm = PlannedGemm(d.g);
    p->without_zero_rows = GemmWithoutZeroRows(d.g);
    p->workspace_bytes = p->gemm.workspace_bytes();
  }
  return p;
}

PlanRef plan_around(Ref<ContractPlan> p, ContractPlan::Way way, PlanRef inner) {
  p->way = way, p->workspace_bytes = inner->workspace_bytes, p->inner = std::move(inner);
  return p;
}

std::string describe(const Meta& a, const Meta& b) {
  const Meta* const both[] = {&a, &b};
  return tessera::describe(both);
}

PlanRef plan_copied(const ContractAttributes& s, const Words& w, const Meta& a, const Meta& b,
                    const Meta& c) {
  auto dense = [](const Meta& m) { return is_contiguous(m.shape, m.strides); };
  Words to{canonical(w, w.a, w.b), canonical(w, w.b, w.a), w.out};
  TESSERA_ASSERT(to.a != w.a || to.b != w.b || !dense(a) || !dense(b),
                 "contract {},{}->{}: no order of {} suits", w.a, w.b, w.out, describe(a, b));
  Ref<ContractPlan> p = make_ref<ContractPlan>();
  p->order_a = dims_in(to.a, w.a), p->order_b = dims_in(to.b, w.b);
  PlanRef inner =
      plan_words(s, to, dense_in_order(a, p->order_a), dense_in_order(b, p->order_b), c);
  return plan_around(std::move(p), ContractPlan::Way::kCopied, std::move(inner));
}

PlanRef plan_reordered(const ContractAttributes& s, const Words& w, const Meta& a, const Meta& b,
                       const Meta& c) {
  Words to{w.a, w.b, {}};
  for (int pass = 0; pass < 3; ++pass)
    for (char l : w.out) {
      bool in_a = w.a.find(l) != std::string::npos, in_b = w.b.find(l) != std::string::npos;
      if (pass == (in_a && in_b ? 0 : in_a ? 1 : 2)) to.out += l;
    }
  TESSERA_CHECK(to.out != w.out, "contract {},{}->{}: {} leave more than {} batch dims", w.a, w.b,
                w.out, describe(a, b), kMaxBatch);
  Ref<ContractPlan> p = make_ref<ContractPlan>();
  p->order_c = dims_in(to.out, w.out);
  PlanRef inner = plan_words(s, to, a, b, dense_in_order(c, p->order_c));
  return plan_around(std::move(p), ContractPlan::Way::kReordered, std::move(inner));
}

PlanRef plan_words(const ContractAttributes& s, const Words& w, const Meta& a, const Meta& b,
                   const Meta& c) {
  const Direct d = direct(w, a, b, c);
  if (d.fits == Direct::kOperands) return plan_copied(s, w, a, b, c);
  if (d.fits == Direct::kResult) return plan_reordered(s, w, a, b, c);
  return plan_product(s, d);
}

PlanRef plan_converted(const ContractAttributes& s, const Meta& a, const Meta& b, const Meta& c) {
  Ref<ContractPlan> p = make_ref<ContractPlan>();
  p->dtype = c.dtype == kF16 || c.dtype == kBF16 ? kF32 : kF64;
  auto wide = [&](const Meta& m) { return Meta::contiguous(m.shape, p->dtype, m.device); };
  PlanRef inner = plan_words(s, {s.a, s.b, s.out}, wide(a), wide(b), wide(c));
  return plan_around(std::move(p), ContractPlan::Way::kConverted, std::move(inner));
}

void run_product(const ContractPlan& p, const Tensor& a, const Tensor& b, const Tensor& c,
                 void* work) {
  const Tensor &left = p.swapped ? b : a, &right = p.swapped ? a : b;
  if (p.leaves)
    return run_packed_gemm(p.g, p.leaves, left.raw_values(), right.raw_values(), c.raw(), work);
  if (p.without_zero_rows.run(left.raw_values(), right.raw_values(), c.raw())) return;
  p.gemm.run(left.raw_values(), right.raw_values(), c.raw(), work);
}

// `work` is scratch of p.workspace_bytes.
void run_planned(const ContractPlan& p, const Tensor& a, const Tensor& b, const Tensor& c,
                 void* work) {
  switch (p.way) {
    case ContractPlan::Way::kProduct: return run_product(p, a, b, c, work);
    case ContractPlan::Way::kCopied:
      return run_planned(*p.inner, dense_in_order(a, p.order_a), dense_in_order(b, p.order_b), c,
                         work);
    case ContractPlan::Way::kReordered: {
      const Tensor dense = empty(dense_in_order(c.meta(), p.order_c));
      run_planned(*p.inner, a, b, dense, work);
      Strides strides = c.strides();
      for (int i = 0; i < p.order_c.size(); ++i) strides[int(p.order_c[i])] = dense.strides()[i];
      return copy_values(c, Tensor({c.shape(), strides, c.dtype(), c.device()}, dense.storage()));
    }
    case ContractPlan::Way::kConverted: {
      const Tensor wide = empty(c.shape(), p.dtype, c.device());
      run_planned(*p.inner, converted(a, p.dtype), converted(b, p.dtype), wide, work);
      return convert_into(wide, c);
    }
  }
}

// The library computes bf16 by instructions for it, or hardly at all: said once, since the same
// program is then several times as slow.
bool bf16_products() {
  static const bool by_instruction = [] {
    if (has_bf16_dot())
      logging::info("products of bf16: by the CPU's bf16 dot instructions, summed in f32");
    else
      logging::warn(
          "products of bf16: converted to f32 first; this CPU (or TESSERA_ISA) has no bf16 dot "
          "instructions, so bf16 saves memory and no time");
    return has_bf16_dot();
  }();
  return by_instruction;
}

// True when `t` is computed as it is: 16-bit floats may go through f32, integers through f64 (exact
// below 2^53).
bool computed_in(const ContractAttributes& s, DType t) {
  return t == kF32 || t == kF64 || (t == kBF16 && !s.leaves && bf16_products());
}

void plan_contract(const Primitive& prim, std::span<const Tensor> in, std::span<Meta> out,
                   Plan& plan) {
  const auto& s = attributes_of<ContractAttributes>(prim);
  const Meta &a = in[0].meta(), &b = in[1].meta(), &c = out[0];
  if (numel(c.shape) == 0 || in[0].numel() == 0) return;
  PlanRef p = computed_in(s, c.dtype) ? plan_words(s, {s.a, s.b, s.out}, a, b, c)
                                      : plan_converted(s, a, b, c);
  plan.workspace_bytes = p->workspace_bytes;
  plan.state = std::move(p);
}

void run_contract(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace work, const Stream&) {
  if (out[0].numel() == 0) return;
  if (in[0].numel() == 0) {  // an empty sum
    std::fill_n(static_cast<char*>(out[0].raw()), out[0].nbytes(), char(0));
    return;
  }
  run_planned(work.planned<ContractPlan>(), in[0], in[1], out[0], work.data);
}

}  // namespace

void register_contract(KernelTable& t) {
  t.add(DeviceKind::kCPU, "contract",
        {.plan = plan_contract, .run = run_contract, .keeps_plan = true});
}

}  // namespace tessera::cpu
