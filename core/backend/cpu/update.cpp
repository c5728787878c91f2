// Multi-tensor optimizer steps and the global norm. All tensors of a call are one loop over pieces
// of kPiece elements, so many small parameters cost no more than one large one.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/register.h"
#include "core/base/boundary.h"
#include "core/ops/update_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cpu {
namespace {

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;
constexpr int64_t kPiece = limit("update.piece");

void plan_lists(const Primitive&, In, std::span<Meta>, Plan& plan) {
  plan.all_dense = true;
  // One tensor is finished before the next is read: a result may lie over its own operands, which
  // the caller says by assigning to them, but not over any that happens to be free.
  plan.assign_in_place = true;
}

// Calls piece(tensor, begin, count) over all elements of `params`.
template <class F>
void for_pieces(In params, F piece) {
  auto pieces_of = [](const Tensor& t) { return (t.numel() + kPiece - 1) / kPiece; };
  int64_t pieces = 0, total = 0;
  for (const Tensor& t : params) {
    meet("update.piece", t.numel());
    pieces += pieces_of(t), total += t.numel();
  }
  parallel_for("update.threads", pieces, total < kPiece ? pieces : 1, [&](int64_t b, int64_t e) {
    size_t tensor = 0;
    int64_t first = 0;  // number of the tensor's first piece
    for (int64_t i = b; i < e; ++i) {
      while (i >= first + pieces_of(params[tensor])) first += pieces_of(params[tensor++]);
      int64_t at = (i - first) * kPiece;
      piece(int(tensor), at, std::min(kPiece, params[tensor].numel() - at));
    }
  });
}

void check_real(const Primitive& prim, const Tensor& t) {
  TESSERA_CHECK(t.dtype() == kF32 || t.dtype() == kF64,
                "{}: parameters must be f32 or f64, got {}; keep f32 master weights", prim.name(),
                describe(t));
}

template <class T>
const UpdateFns<T>& fns() {
  if constexpr (sizeof(T) == 4)
    return simd<UpdateTable>().f32;
  else
    return simd<UpdateTable>().f64;
}

// The update does not take place: results are the operands of which they are updates. `kept` are
// the lists of `count` tensors among `lists` that have results, in order.
void keep_lists(In lists, Out out, size_t count, std::initializer_list<size_t> kept) {
  size_t to = 0;
  for (size_t list : kept)
    for (size_t i = 0; i < count; ++i, ++to) {
      const Tensor& from = lists[list * count + i];
      if (out[to].raw() != from.raw_values())
        std::memcpy(out[to].raw(), from.raw_values(), from.nbytes());
    }
}

void run_adam(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = attributes_of<AdamUpdate>(prim);
  double step = *in[1].values<double>();
  AdamStep s{*in[0].values<double>(),
             a.beta1,
             a.beta2,
             a.eps,
             a.weight_decay,
             1 - std::pow(a.beta1, step),
             1 - std::pow(a.beta2, step),
             *in[2].values<double>(),
             a.decoupled};
  size_t n = size_t(a.count);
  In lists = in.subspan(3);
  for (size_t i = 0; i < n; ++i) check_real(prim, lists[i]);
  if (a.if_finite && !std::isfinite(s.grad_scale)) return keep_lists(lists, out, n, {0, 2, 3});
  for_pieces(lists.first(n), [&](int tensor, int64_t begin, int64_t count) {
    size_t i = size_t(tensor);
    auto run = [&](auto zero) {
      using T = decltype(zero);
      auto at = [&](size_t list) { return lists[list * n + i].values<T>() + begin; };
      auto to = [&](size_t list) { return out[list * n + i].data<T>() + begin; };
      fns<T>().adam(at(0), at(1), at(2), at(3), to(0), to(1), to(2), count, s);
    };
    lists[i].dtype() == kF32 ? run(float()) : run(double());
  });
}

void run_sgd(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = attributes_of<SgdUpdate>(prim);
  SgdStep s{*in[0].values<double>(), a.momentum, a.dampening, a.weight_decay,
            *in[1].values<double>(), a.nesterov, a.first};
  size_t n = size_t(a.count);
  In lists = in.subspan(2);
  for (size_t i = 0; i < n; ++i) check_real(prim, lists[i]);
  if (a.if_finite && !std::isfinite(s.grad_scale))
    return a.momentum != 0 ? keep_lists(lists, out, n, {0, 2}) : keep_lists(lists, out, n, {0});
  for_pieces(lists.first(n), [&](int tensor, int64_t begin, int64_t count) {
    size_t i = size_t(tensor);
    auto run = [&](auto zero) {
      using T = decltype(zero);
      auto at = [&](size_t list) { return lists[list * n + i].values<T>() + begin; };
      bool momentum = a.momentum != 0;
      fns<T>().sgd(at(0), at(1), momentum ? at(2) : nullptr, out[i].data<T>() + begin,
                   momentum ? out[n + i].data<T>() + begin : nullptr, count, s);
    };
    lists[i].dtype() == kF32 ? run(float()) : run(double());
  });
}

double tree_sum(const double* v, int64_t n) {
  if (n <= 2) return n == 2 ? v[0] + v[1] : n ? v[0] : 0.0;
  int64_t half = (n + 1) / 2;
  return tree_sum(v, half) + tree_sum(v + half, n - half);
}

int64_t rows_of(const Tensor& t) { return t.ndim() ? t.size(0) : 1; }

// Where rows are single elements (biases), calls would cost far more than the squares.
template <class T>
void sum_rows_of(const T* x, int64_t rows, int64_t each, double* to) {
  meet("squares.block", each);
  parallel_for("squares.threads", rows, std::max<int64_t>(1, kPiece / std::max<int64_t>(each, 1)),
               [&](int64_t b, int64_t e) {
                 if (each == 1)
                   for (int64_t r = b; r < e; ++r) to[r] = double(x[r] * x[r]);
                 else
                   for (int64_t r = b; r < e; ++r) to[r] = fns<T>().sum_squares(x + r * each, each);
               });
}

void sum_rows(const Primitive& prim, const Tensor& t, double* to) {
  check_real(prim, t);
  const int64_t rows = rows_of(t), each = rows ? t.numel() / rows : 0;
  t.dtype() == kF32 ? sum_rows_of(t.values<float>(), rows, each, to)
                    : sum_rows_of(t.values<double>(), rows, each, to);
}

// Room for a number per tensor and, with rows, for those of the tensor that has most.
template <bool kRows>
void plan_totals(const Primitive& prim, In in, std::span<Meta> out, Plan& plan) {
  plan_lists(prim, in, out, plan);
  int64_t most = 0;
  for (const Tensor& t : in) most = std::max(most, rows_of(t));
  plan.workspace_bytes = (in.size() + (kRows ? size_t(most) : 0)) * sizeof(double);
}

// Rows of dim 0 first, then rows, then tensors, each in a balanced tree: a tensor sharded by rows
// gives the same bits.
void run_global_norm(const Primitive& prim, In in, Out out, Workspace workspace, const Stream&) {
  double *totals = static_cast<double*>(workspace.data), *squares = totals + in.size();
  for (size_t i = 0; i < in.size(); ++i) {
    sum_rows(prim, in[i], squares);
    totals[i] = tree_sum(squares, rows_of(in[i]));
  }
  *out[0].data<double>() = std::sqrt(tree_sum(totals, int64_t(in.size())));
}

void run_row_squares(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  sum_rows(prim, in[0], out[0].data<double>());
}

void run_norm_of_rows(const Primitive&, In in, Out out, Workspace workspace, const Stream&) {
  double* totals = static_cast<double*>(workspace.data);
  for (size_t i = 0; i < in.size(); ++i)
    totals[i] = tree_sum(in[i].values<double>(), in[i].numel());
  *out[0].data<double>() = std::sqrt(tree_sum(totals, int64_t(in.size())));
}

// In any order: a maximum has no rounding. A NaN is larger than all.
void run_max_magnitude(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  std::atomic<double> largest = 0;
  std::atomic<bool> has_nan = false;
  for (const Tensor& t : in) check_real(prim, t);
  for_pieces(in, [&](int i, int64_t begin, int64_t count) {
    auto run = [&](const auto* x) {
      double most = 0;
      bool nan = false;
      for (int64_t k = 0; k < count; ++k) {
        double magnitude = std::abs(x[k]);
        most = magnitude > most ? magnitude : most;
        nan |= magnitude != magnitude;
      }
      if (nan) has_nan = true;
      for (double seen = largest; most > seen && !largest.compare_exchange_weak(seen, most);) {
      }
    };
    const Tensor& t = in[size_t(i)];
    t.dtype() == kF32 ? run(t.values<float>() + begin) : run(t.values<double>() + begin);
  });
  *out[0].data<double>() = has_nan ? std::numeric_limits<double>::quiet_NaN() : largest.load();
}

}  // namespace

void register_update(KernelTable& t) {
  t.add(DeviceKind::kCPU, "adam", {plan_lists, run_adam});
  t.add(DeviceKind::kCPU, "sgd", {plan_lists, run_sgd});
  t.add(DeviceKind::kCPU, "global_norm", {plan_totals<true>, run_global_norm});
  t.add(DeviceKind::kCPU, "row_squares", {plan_lists, run_row_squares});
  t.add(DeviceKind::kCPU, "max_magnitude", {plan_lists, run_max_magnitude});
  t.add(DeviceKind::kCPU, "norm_of_rows", {plan_totals<false>, run_norm_of_rows});
}

}  // namespace tessera::cpu
