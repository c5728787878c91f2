// Contractions on the CPU: letters are sorted into batch, m, n and k, neighbours that lie densely
// behind each other are merged, and what remains is one batched Gemm. Operands whose strides do not
// allow it are copied once.
#include <algorithm>

#include "core/backend/cpu/gemm.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/backend/cpu/zero_rows.h"
#include "core/base/isa.h"
#include "core/base/log.h"
#include "core/dispatch/copy.h"
#include "core/ops/attributes.h"

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

Nest make_nest(const ContractAttributes& s, const Meta& a, const Meta& b, const Meta& c) {
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

// A dense copy with the letters in the order batch, own, k: then every class merges as far as the
// result allows.
Tensor canonical(const Tensor& t, const std::string& word, const ContractAttributes& s,
                 const std::string& other, std::string& order) {
  order.clear();
  for (char l : s.out)
    if (word.find(l) != std::string::npos && other.find(l) != std::string::npos) order += l;
  for (char l : s.out)
    if (word.find(l) != std::string::npos && other.find(l) == std::string::npos) order += l;
  for (char l : s.a)  // the same order of k letters in both operands
    if (word.find(l) != std::string::npos && s.out.find(l) == std::string::npos) order += l;
  Shape shape;
  Strides strides;
  for (char l : order) {
    int d = int(word.find(l));
    shape.push_back(t.shape()[d]), strides.push_back(t.strides()[d]);
  }
  return dense_copy(Tensor({shape, strides, t.dtype(), t.device()}, t.storage(), t.offset()));
}

struct Letters final : ContractAttributes {  // a spec for make_nest; only the letters matter
  using ContractAttributes::ContractAttributes;
  Metas infer(MetaSpan) const override { return {}; }
};

// True when elements are read more than once (expand): libraries want every stride to move.
bool repeats(const Meta& t) {
  for (int d = 0; d < t.shape.size(); ++d)
    if (t.shape[d] > 1 && t.strides[d] == 0) return true;
  return false;
}

void contract_in(const ContractAttributes& s, Tensor a, Tensor b, const Tensor& c, Workspace work);

// Operands whose strides do not allow a Gemm are copied into an order that does.
void contract_copied(const ContractAttributes& s, const Tensor& a, const Tensor& b,
                     const Tensor& c) {
  std::string word_a, word_b;
  Tensor x = canonical(a, s.a, s, s.b, word_a), y = canonical(b, s.b, s, s.a, word_b);
  TESSERA_ASSERT(word_a != s.a || word_b != s.b || !a.is_contiguous() || !b.is_contiguous(),
                 "contract {},{}->{}: no order of {} and {} suits", s.a, s.b, s.out, describe(a),
                 describe(b));
  contract_in(Letters(s.info(), word_a, word_b, s.out, s.leaves), x, y, c, {});
}

// C's unit stride lies in a batch letter: compute with the letters ordered batch, m, n, then copy.
void contract_reordered(const ContractAttributes& s, const Tensor& a, const Tensor& b,
                        const Tensor& c) {
  std::string order;
  for (int pass = 0; pass < 3; ++pass)
    for (char l : s.out) {
      bool in_a = s.a.find(l) != std::string::npos, in_b = s.b.find(l) != std::string::npos;
      if (pass == (in_a && in_b ? 0 : in_a ? 1 : 2)) order += l;
    }
  TESSERA_CHECK(order != s.out, "contract {},{}->{}: {} and {} leave more than {} batch dims", s.a,
                s.b, s.out, describe(a), describe(b), kMaxBatch);
  Shape shape;
  for (char l : order) shape.push_back(c.shape()[int(s.out.find(l))]);
  Tensor dense = empty(shape, c.dtype(), c.device());
  contract_in(Letters(s.info(), s.a, s.b, order, s.leaves), a, b, dense, {});
  Strides strides;
  for (char l : s.out) strides.push_back(dense.strides()[int(order.find(l))]);
  copy_values(c, Tensor({c.shape(), strides, c.dtype(), c.device()}, dense.storage()));
}

// One Gemm that computes the whole contraction, or what stands in its way.
struct Direct {
  enum { kYes, kOperands, kResult } fits;  // no: the strides of the operands, or of the result
  Gemm g;
  bool swapped = false;  // the operands, for the transposed result

  size_t workspace(const ContractAttributes& s) const {
    if (fits != kYes) return 0;
    return s.leaves ? packed_gemm_workspace(g, s.leaves_of(g.k)) : gemm_workspace(g);
  }
};

Direct direct(const ContractAttributes& s, const Meta& a, const Meta& b, const Meta& c) {
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

// `work` is what plan_contract asked for; products behind a copy take scratch of their own.
void contract_in(const ContractAttributes& s, Tensor a, Tensor b, const Tensor& c, Workspace work) {
  const Direct d = direct(s, a.meta(), b.meta(), c.meta());
  if (d.fits == Direct::kOperands) return contract_copied(s, a, b, c);
  if (d.fits == Direct::kResult) return contract_reordered(s, a, b, c);
  const Tensor &left = d.swapped ? b : a, &right = d.swapped ? a : b;
  if (!s.leaves && run_gemm_without_zero_rows(d.g, left.raw_values(), right.raw_values(), c.raw()))
    return;
  Tensor own;
  if (size_t bytes = d.workspace(s); bytes > work.bytes)  // planned with fewer threads, or not
    own = empty({int64_t(bytes)}, kU8), work = {own.raw(), bytes};
  if (s.leaves)
    run_packed_gemm(d.g, s.leaves_of(d.g.k), left.raw_values(), right.raw_values(), c.raw(),
                    work.data);
  else
    run_gemm(d.g, left.raw_values(), right.raw_values(), c.raw(), work.data);
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
  const auto& s = static_cast<const ContractAttributes&>(prim);
  if (!computed_in(s, out[0].dtype) || numel(out[0].shape) == 0 || in[0].numel() == 0) return;
  plan.workspace_bytes = direct(s, in[0].meta(), in[1].meta(), out[0]).workspace(s);
}

void run_contract(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace work, const Stream&) {
  const auto& s = static_cast<const ContractAttributes&>(prim);
  if (out[0].numel() == 0) return;
  if (in[0].numel() == 0) {  // an empty sum
    std::fill_n(static_cast<char*>(out[0].raw()), out[0].nbytes(), char(0));
    return;
  }
  DType t = out[0].dtype();
  if (computed_in(s, t)) return contract_in(s, in[0], in[1], out[0], work);
  DType compute = t == kF16 || t == kBF16 ? kF32 : kF64;
  Tensor c = empty(out[0].shape(), compute, out[0].device());
  contract_in(s, converted(in[0], compute), converted(in[1], compute), c, {});
  convert_into(c, out[0]);
}

}  // namespace

void register_contract(KernelTable& t) {
  t.add(DeviceKind::kCPU, "contract", {plan_contract, run_contract});
}

}  // namespace tessera::cpu
