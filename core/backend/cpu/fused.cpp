// Softmax, cross-entropy, norms and embedding on the CPU: rows are dealt to threads, loops live in
// kernels/rows.cpp. 16-bit floats are widened to f32 as whole tensors around the f32 loops.
#include <algorithm>
#include <cstring>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/boundary.h"
#include "core/ops/fused_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cpu {
namespace {

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;
constexpr int64_t kGrain = 16384;

int64_t row_grain(int64_t n) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(n, 1)); }
template <class T>
const RowFns<T>& rows_of();
template <>
const RowFns<float>& rows_of() {
  return simd<RowTable>().f32;
}
template <>
const RowFns<double>& rows_of() {
  return simd<RowTable>().f64;
}

// Calls run<float> or run<double> on operands and results; 16-bit floats go through f32 copies.
template <class F>
void in_compute_type(In in, Out out, DType t, F run) {
  if (t == kF64) return run(double(), in, out);
  if (t == kF32) return run(float(), in, out);
  through_f32(in, out, t, [&](In i, Out o) { run(float(), i, o); });
}

void plan_dense_in_place(const Primitive&, In in, std::span<Meta>, Plan& plan) {
  plan.dense_in = (1u << in.size()) - 1;
  plan.in_place = true;
}
void plan_dense(const Primitive&, In in, std::span<Meta>, Plan& plan) {
  plan.dense_in = (1u << in.size()) - 1;
}

template <bool kLog>
void run_softmax(const Primitive&, In in, Out out, Workspace, const Stream&) {
  in_compute_type(in, out, in[0].dtype(), [](auto zero, In in, Out out) {
    using T = decltype(zero);
    int64_t n = in[0].size(-1), rows = n ? in[0].numel() / n : 0;
    auto fn = kLog ? rows_of<T>().log_softmax : rows_of<T>().softmax;
    const T* x = in[0].values<T>();
    T* y = out[0].data<T>();
    meet("rows.lanes", n);
    parallel_for("softmax.threads", rows, row_grain(n),
                 [&](int64_t b, int64_t e) { fn(x + b * n, y + b * n, n, e - b); });
  });
}

template <bool kLog>
void run_softmax_grad(const Primitive&, In in, Out out, Workspace, const Stream&) {
  in_compute_type(in, out, in[0].dtype(), [](auto zero, In in, Out out) {
    using T = decltype(zero);
    int64_t n = in[0].size(-1), rows = n ? in[0].numel() / n : 0;
    auto fn = kLog ? rows_of<T>().log_softmax_grad : rows_of<T>().softmax_grad;
    const T *y = in[0].values<T>(), *g = in[1].values<T>();
    T* dx = out[0].data<T>();
    parallel_for("softmax_grad.threads", rows, row_grain(n),
                 [&](int64_t b, int64_t e) { fn(y + b * n, g + b * n, dx + b * n, n, e - b); });
  });
}

int64_t count_targets(const int64_t* targets, int64_t rows, int64_t classes, int64_t ignore) {
  int64_t counted = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (targets[r] == ignore) continue;
    TESSERA_CHECK(
        targets[r] >= 0 && targets[r] < classes,
        "cross_entropy: target {} at row {} is not a class; expected 0 to {} or ignore_index {}",
        targets[r], r, classes - 1, ignore);
    ++counted;
  }
  return counted;
}

// Rows of one thread; the whole operand is of so many elements.
void cross_entropy_rows(const float* x, const int64_t* targets, int64_t ignored, float scale,
                        float* term, float* grad, int64_t n, int64_t rows, int64_t of) {
  Tensor buffer = empty({n + 64}, kF32);
  simd<CrossEntropyTable>().f32(x, targets, ignored, scale, term, grad, n, rows,
                                buffer.data<float>(), of > limit("cross_entropy.streams"));
}
void cross_entropy_rows(const double* x, const int64_t* targets, int64_t ignored, double scale,
                        double* term, double* grad, int64_t n, int64_t rows, int64_t) {
  const RowFns<double>& fns = rows_of<double>();
  for (int64_t r = 0; r < rows; ++r, x += n, grad += grad ? n : 0) {
    term[r] = 0;
    if (targets[r] == ignored) {
      if (grad) std::fill_n(grad, n, 0.0);
      continue;
    }
    double lse;
    if (grad) {
      lse = fns.softmax_scaled(x, grad, n, scale);
      grad[targets[r]] -= scale;
    } else {
      fns.logsumexp(x, &lse, n, 1);
    }
    term[r] = lse - x[targets[r]];
  }
}

void run_cross_entropy(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = attributes_of<CrossEntropyAttributes>(prim);
  in_compute_type(in, out, in[0].dtype(), [&](auto zero, In in, Out out) {
    using T = decltype(zero);
    const int64_t rows = in[0].size(0), n = in[0].size(1);
    const T* x = in[0].values<T>();
    const int64_t* targets = in[1].values<int64_t>();
    int64_t counted = count_targets(targets, rows, n, a.ignore_index);
    const T scale = a.mean ? T(1) / T(counted) : T(1);
    T* grad = a.with_grad ? out[1].data<T>() : nullptr;
    Tensor terms = empty({rows}, dtype_of<T>);
    T* term = terms.data<T>();
    meet("cross_entropy.block", n), meet("cross_entropy.streams", rows * n);
    parallel_for("cross_entropy.threads", rows, row_grain(n), [&](int64_t b, int64_t e) {
      cross_entropy_rows(x + b * n, targets + b, a.ignore_index, scale, term + b,
                         grad ? grad + b * n : nullptr, n, e - b, rows * n);
    });
    T* loss = out[0].data<T>();
    if constexpr (sizeof(T) == 4)
      simd<ReduceTable>().f32[0](term, loss, rows, 1, 0, 1);
    else
      simd<ReduceTable>().f64[0](term, loss, rows, 1, 0, 1);
    *loss *= scale;  // no target counted: 0 * inf, NaN as the mean of nothing is
  });
}

void run_norm(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = attributes_of<NormAttributes>(prim);
  in_compute_type(in, out, in[0].dtype(), [&](auto zero, In in, Out out) {
    using T = decltype(zero);
    const int64_t n = in[0].size(-1), rows = n ? in[0].numel() / n : 0;
    const T *x = in[0].values<T>(), *w = a.has_weight ? in[1].values<T>() : nullptr,
            *b = a.has_bias ? in[a.has_weight ? 2 : 1].values<T>() : nullptr;
    T *y = out[0].data<T>(), *mean = out[1].data<T>(), *rstd = out[2].data<T>();
    parallel_for("norm.threads", rows, row_grain(n), [&](int64_t begin, int64_t end) {
      rows_of<T>().norm(x + begin * n, w, b, y + begin * n, mean + begin, rstd + begin, n,
                        end - begin, T(a.eps), a.centred);
    });
  });
}

// dw and db are sums over rows: blocks of kRowBlock rows are summed in order, then the blocks meet
// in the column tree.
constexpr int64_t kRowBlock = limit("norm_grad.rows");

template <class T>
void run_norm_grad_as(const NormAttributes& a, In in, Out out) {
  const int64_t n = in[1].size(-1), rows = n ? in[1].numel() / n : 0,
                blocks = (rows + kRowBlock - 1) / kRowBlock;
  const T *g = in[0].values<T>(), *x = in[1].values<T>(), *mean = in[2].values<T>(),
          *rstd = in[3].values<T>(), *w = a.has_weight ? in[4].values<T>() : nullptr;
  T* dx = out[0].data<T>();
  int sums = int(a.has_weight) + int(a.has_bias);
  Tensor partial = empty({std::max(sums, 1), blocks, n}, dtype_of<T>);
  T *pw = a.has_weight ? partial.data<T>() : nullptr,
    *pb = a.has_bias ? partial.data<T>() + (a.has_weight ? blocks * n : 0) : nullptr;
  meet("norm_grad.rows", rows);
  parallel_for("norm_grad.threads", blocks, std::max<int64_t>(1, row_grain(n) / kRowBlock),
               [&](int64_t begin, int64_t end) {
                 for (int64_t k = begin; k < end; ++k) {
                   int64_t r = k * kRowBlock, count = std::min(kRowBlock, rows - r);
                   if (pw) std::fill_n(pw + k * n, n, T(0));
                   if (pb) std::fill_n(pb + k * n, n, T(0));
                   rows_of<T>().norm_grad(g + r * n, x + r * n, w, mean + r, rstd + r, dx + r * n,
                                          pw ? pw + k * n : nullptr, pb ? pb + k * n : nullptr, n,
                                          count, a.centred);
                 }
               });
  auto meet = [&](const T* p, const Tensor& to) {
    if constexpr (sizeof(T) == 4)
      simd<ReduceTable>().f32[0](p, to.data<T>(), blocks, n, 0, 1);
    else
      simd<ReduceTable>().f64[0](p, to.data<T>(), blocks, n, 0, 1);
  };
  if (pw) meet(pw, out[1]);
  if (pb) meet(pb, out[a.has_weight ? 2 : 1]);
}

void run_norm_grad(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = attributes_of<NormAttributes>(prim);
  in_compute_type(in, out, in[1].dtype(),
                  [&](auto zero, In in, Out out) { run_norm_grad_as<decltype(zero)>(a, in, out); });
}

int64_t id_at(const Tensor& ids, int64_t i) {
  return ids.dtype() == kI64 ? ids.values<int64_t>()[i] : ids.values<int32_t>()[i];
}

// Row of the part that holds `id`, or -1 when another part does.
int64_t local_row(const EmbeddingAttributes& a, int64_t id, int64_t i) {
  int64_t extent = a.extent ? a.extent : a.rows;
  TESSERA_CHECK(id >= 0 && id < extent,
                "embedding: id {} at position {} is outside the table of {} rows", id, i, extent);
  id -= a.begin;
  return id >= 0 && id < a.rows ? id : -1;
}

void run_embedding(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = attributes_of<EmbeddingAttributes>(prim);
  const size_t row = size_t(in[1].size(1)) * size_of(in[1].dtype());
  const char* table = static_cast<const char*>(in[1].raw_values());
  char* y = static_cast<char*>(out[0].raw());
  parallel_for("embedding.threads", in[0].numel(), row_grain(int64_t(row)),
               [&](int64_t b, int64_t e) {
                 for (int64_t i = b; i < e; ++i) {
                   int64_t r = local_row(a, id_at(in[0], i), i);
                   if (r >= 0)
                     std::memcpy(y + size_t(i) * row, table + size_t(r) * row, row);
                   else
                     std::memset(y + size_t(i) * row, 0, row);
                 }
               });
}

// Ids are visited in order, so each row sums its cotangents in a fixed order; threads split the
// columns.
void plan_embedding_grad(const Primitive& prim, In in, std::span<Meta> out, Plan& plan) {
  plan_dense(prim, in, out, plan);
  plan.workspace_bytes = size_t(in[1].numel()) * sizeof(int64_t);
}

void run_embedding_grad(const Primitive& prim, In in, Out out, Workspace workspace, const Stream&) {
  const auto& a = attributes_of<EmbeddingAttributes>(prim);
  in_compute_type(in, out, in[0].dtype(), [&](auto zero, In in, Out out) {
    using T = decltype(zero);
    const int64_t d = in[0].size(-1), count = in[1].numel();
    const T* g = in[0].values<T>();
    T* dt = out[0].data<T>();
    auto* target = static_cast<int64_t*>(workspace.data);  // row of each id
    for (int64_t i = 0; i < count; ++i) {
      int64_t id = id_at(in[1], i);
      target[i] = id == a.padding_idx ? -1 : local_row(a, id, i);
    }
    parallel_for("embedding_grad.threads", d,
                 std::max<int64_t>(16, kGrain / std::max<int64_t>(count, 1)),
                 [&](int64_t b, int64_t e) {
                   for (int64_t r = 0; r < a.rows; ++r)
                     std::fill(dt + r * d + b, dt + r * d + e, T(0));
                   for (int64_t i = 0; i < count; ++i) {
                     if (target[i] < 0) continue;
                     T* to = dt + target[i] * d;
                     const T* from = g + i * d;
                     for (int64_t k = b; k < e; ++k) to[k] += from[k];
                   }
                 });
  });
}

}  // namespace

void register_fused(KernelTable& t) {
  constexpr auto cpu = DeviceKind::kCPU;
  t.add(cpu, "softmax", {plan_dense_in_place, run_softmax<false>});
  t.add(cpu, "log_softmax", {plan_dense_in_place, run_softmax<true>});
  t.add(cpu, "softmax_grad", {plan_dense_in_place, run_softmax_grad<false>});
  t.add(cpu, "log_softmax_grad", {plan_dense_in_place, run_softmax_grad<true>});
  t.add(cpu, "cross_entropy", {plan_dense, run_cross_entropy});
  for (const char* op : {"layer_norm", "rms_norm"}) t.add(cpu, op, {plan_dense, run_norm});
  for (const char* op : {"layer_norm_grad", "rms_norm_grad"})
    t.add(cpu, op, {plan_dense, run_norm_grad});
  t.add(cpu, "embedding", {plan_dense, run_embedding});
  t.add(cpu, "embedding_grad", {plan_embedding_grad, run_embedding_grad});
}

}  // namespace tessera::cpu
