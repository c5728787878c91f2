// Pointwise ops, casts and copies: geometry here, loops in kernels/. Dtypes without a loop of their
// own (16-bit floats, narrow integers) are widened block by block into a buffer that stays in the
// nearest cache.
#include <cstring>

#include "core/backend/cpu/convert.h"
#include "core/backend/cpu/elementwise.h"
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/register.h"
#include "core/base/boundary.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kBlock = limit("pointwise.block");

Loop loop_for(const PointwiseLoops& f, DType compute) {
  return compute == kF32 ? f.f32 : compute == kF64 ? f.f64 : f.i64;
}

// Widens operands, runs, narrows: for dtypes that are storage formats only.
struct Blocked {
  Loop loop;
  ConvertLoop widen, narrow;
  int arity;
  int64_t in_bytes, out_bytes;  // of the compute type, of what the loop writes
  void operator()(char* const* p, const int64_t* s, int64_t n) const {
    alignas(64) char buffer[kMaxWalked][kBlock * 8];
    for (int64_t at = 0; at < n; at += kBlock) {
      int64_t m = std::min(kBlock, n - at);
      char* q[kMaxWalked];
      int64_t qs[kMaxWalked];
      for (int i = 1; i <= arity; ++i) {
        bool scalar = s[i] == 0;
        widen(buffer[i], in_bytes, p[i] + at * s[i], s[i], scalar ? 1 : m);
        q[i] = buffer[i], qs[i] = scalar ? 0 : in_bytes;
      }
      char* out = p[0] + at * s[0];
      q[0] = narrow ? buffer[0] : out, qs[0] = narrow ? out_bytes : s[0];
      loop(q, qs, m);
      if (narrow) narrow(out, s[0], buffer[0], out_bytes, m);
    }
  }
};

// A permuted dense operand gives a result of the same layout, so that nothing is read across its
// grain.
void plan_layout(const Primitive&, std::span<const Tensor> in, std::span<Meta> out, Plan&) {
  for (const Tensor& t : in)
    if (t.shape() == out[0].shape) {
      if (t.is_contiguous()) return;
      Dims sorted = t.strides();
      std::sort(sorted.begin(), sorted.end());
      int64_t dense = 1;
      bool permuted = true;
      Dims extents = t.shape();
      for (int64_t stride : sorted) {
        int d = 0;
        while (d < extents.size() && !(t.strides()[d] == stride && extents[d] >= 0)) ++d;
        permuted = permuted && stride == dense;
        dense *= extents[d];
        extents[d] = -1;
      }
      if (permuted) out[0].strides = t.strides();
      return;
    }
}

void plan_in_place(const Primitive& prim, std::span<const Tensor> in, std::span<Meta> out,
                   Plan& plan) {
  plan.in_place = true;
  plan_layout(prim, in, out, plan);
}

const PointwiseLoops& loops_of(OpId op) {
  static const std::vector<const PointwiseLoops*> by_op = [] {
    const PointwiseTable& t = simd<PointwiseTable>();
    std::vector<const PointwiseLoops*> v;
    for (size_t i = 0; i < t.count; ++i) {
      OpId id = intern_op(t.rows[i].name);
      if (v.size() <= id) v.resize(size_t(id) + 1);
      v[id] = &t.rows[i];
    }
    return v;
  }();
  return *by_op[op];
}

void run_pointwise(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                   Workspace, const Stream&) {
  const PointwiseLoops& f = loops_of(prim.id());
  const Tensor* tensors[kMaxWalked] = {&out[0]};
  for (size_t i = 0; i < in.size(); ++i) tensors[i + 1] = &in[i];
  Walk walk = make_walk({tensors, in.size() + 1});
  DType stored = in[0].dtype(), compute = compute_dtype(stored);
  Loop loop = loop_for(f, compute);
  TESSERA_ASSERT(loop, "{}: no loop for {}", prim.name(), name_of(compute));
  if (stored == compute) return run_walk(walk, loop);
  meet("pointwise.block", walk.n);
  ConvertLoop narrow = f.to_bool ? nullptr : convert_loop(compute, stored);
  const Blocked blocked{loop,    convert_loop(stored, compute), narrow,
                        f.arity, int64_t(size_of(compute)),     int64_t(size_of(compute))};
  if (stored != kBF16 || !f.bf16) return run_walk(walk, blocked);
  run_walk(walk, [&](char* const* p, const int64_t* s, int64_t n) {
    const bool dense = std::all_of(s, s + f.arity + 1, [](int64_t step) { return step == 2; });
    dense ? f.bf16(p, s, n) : blocked(p, s, n);
  });
}

void run_cast(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
              const Stream&) {
  const Tensor* tensors[] = {&out[0], &in[0]};
  ConvertLoop convert = convert_loop(in[0].dtype(), out[0].dtype());
  run_walk(make_walk(tensors), [&](char* const* p, const int64_t* s, int64_t n) {
    convert(p[0], s[0], p[1], s[1], n);
  });
}

template <class T>
void copy_row(char* const* p, const int64_t* s, int64_t n) {
  if (s[0] == sizeof(T) && s[1] == sizeof(T)) {
    if (p[0] != p[1]) std::memcpy(p[0], p[1], size_t(n) * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    *reinterpret_cast<T*>(p[0] + i * s[0]) = *reinterpret_cast<const T*>(p[1] + i * s[1]);
}

void run_copy(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
              const Stream&) {
  const Tensor* tensors[] = {&out[0], &in[0]};
  Walk walk = make_walk(tensors);
  switch (size_of(in[0].dtype())) {
    case 1: return run_walk(walk, copy_row<uint8_t>);
    case 2: return run_walk(walk, copy_row<uint16_t>);
    case 4: return run_walk(walk, copy_row<uint32_t>);
    default: return run_walk(walk, copy_row<uint64_t>);
  }
}

template <class T>
void where_row(char* const* p, const int64_t* s, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    T a = *reinterpret_cast<const T*>(p[2] + i * s[2]),
      b = *reinterpret_cast<const T*>(p[3] + i * s[3]);
    *reinterpret_cast<T*>(p[0] + i * s[0]) = p[1][i * s[1]] ? a : b;
  }
}

void run_where(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
               const Stream&) {
  const Tensor* tensors[] = {&out[0], &in[0], &in[1], &in[2]};
  Walk walk = make_walk(tensors);
  switch (size_of(in[1].dtype())) {
    case 1: return run_walk(walk, where_row<uint8_t>);
    case 2: return run_walk(walk, where_row<uint16_t>);
    case 4: return run_walk(walk, where_row<uint32_t>);
    default: return run_walk(walk, where_row<uint64_t>);
  }
}

// Integer division by zero has no value to return: refuse it before the loop runs.
void run_integer_checked(const Primitive& prim, std::span<const Tensor> in,
                         std::span<const Tensor> out, Workspace w, const Stream& s) {
  if (is_integral(in[1].dtype())) {
    const Tensor* tensors[] = {&in[1]};
    int64_t size = int64_t(size_of(in[1].dtype()));
    run_walk(make_walk(tensors), [&](char* const* p, const int64_t* st, int64_t n) {
      for (int64_t i = 0; i < n; ++i) {
        bool zero = true;
        for (int64_t b = 0; b < size; ++b) zero = zero && p[0][i * st[0] + b] == 0;
        TESSERA_CHECK(!zero, "{}: integer division by zero", prim.name());
      }
    });
  }
  run_pointwise(prim, in, out, w, s);
}

}  // namespace

ConvertLoop convert_loop(DType from, DType to) {
  return simd<ConvertTable>().rows[int(from)][int(to)];
}

void register_pointwise(KernelTable& t) {
  const PointwiseTable& loops = simd<PointwiseTable>();
  for (size_t i = 0; i < loops.count; ++i)
    t.add(DeviceKind::kCPU, loops.rows[i].name,
          {plan_in_place,
           op_info(loops.rows[i].name).traits.may_trap ? run_integer_checked : run_pointwise});
  t.add(DeviceKind::kCPU, "cast", {plan_layout, run_cast});
  t.add(DeviceKind::kCPU, "copy", {nullptr, run_copy});
  t.add(DeviceKind::kCPU, "where", {nullptr, run_where});
}

}  // namespace tessera::cpu
