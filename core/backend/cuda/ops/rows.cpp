// Ops on rows of the last dim: softmax, norms, cross-entropy, and their gradients.
#include "core/backend/cuda/kernels/rows.h"

#include "core/backend/cuda/kernels/reduce.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/pointwise.h"
#include "core/backend/cuda/ops/reduce.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/refusals.h"
#include "core/backend/cuda/runtime.h"
#include "core/base/error.h"
#include "core/ops/fused_attributes.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/device_runtime.h"

namespace tessera::cuda {
namespace {

using In = std::span<const Tensor>;

void plan_dense(const Primitive&, In in, std::span<Meta>, Plan& plan) {
  plan.dense_in = (1u << in.size()) - 1;
}
void plan_dense_in_place(const Primitive& prim, In in, std::span<Meta> out, Plan& plan) {
  plan_dense(prim, in, out, plan);
  plan.in_place = true;
}

// The part of a call that follows from x, whose rows are those of the launch.
RowsCall call_for(const Tensor& x) {
  RowsCall c{};
  c.in = x.device_data();
  c.n = unsigned(x.size(-1));
  c.rows = unsigned(c.n ? x.numel() / c.n : 0);
  TESSERA_CHECK(x.size(-1) < int64_t(1) << 31 && (c.n == 0 || x.numel() / c.n < int64_t(1) << 31),
                "cuda: {} has more rows or columns than 31 bits count", describe(x));
  return c;
}

bool aligned(const RowsCall& c) {
  for (const void* p : {c.in, c.other, c.weight, c.bias, static_cast<const void*>(c.out)})
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  return true;
}
bool in_packs(DType t, RowHold hold, const RowsCall& c) {
  return rows_in_packs(t, hold, c.n) && aligned(c);
}

void launch_rows(const char* entry, DType t, RowsCall c, const Stream& stream) {
  if (c.rows == 0 || c.n == 0) return;
  const RowHold hold = hold_of(row_holds(t), c.n);
  c.packs = in_packs(t, hold, c);
  launch(rows_instance(t, hold).name, entry, rows_geometry(hold, c.rows), stream, c);
}

void run_softmax(const Primitive& prim, In in, std::span<const Tensor> out, Workspace,
                 const Stream& stream) {
  RowsCall c = call_for(in[0]);
  c.out = out[0].device_data();
  launch_rows(std::string(prim.name()).c_str(), in[0].dtype(), c, stream);
}

void run_softmax_grad(const Primitive& prim, In in, std::span<const Tensor> out, Workspace,
                      const Stream& stream) {
  RowsCall c = call_for(in[0]);
  c.other = in[1].device_data(), c.out = out[0].device_data();
  launch_rows(std::string(prim.name()).c_str(), in[0].dtype(), c, stream);
}

void run_norm(const Primitive& prim, In in, std::span<const Tensor> out, Workspace,
              const Stream& stream) {
  const auto& a = attributes_of<NormAttributes>(prim);
  RowsCall c = call_for(in[0]);
  if (a.has_weight) c.weight = in[1].device_data();
  if (a.has_bias) c.bias = in[a.has_weight ? 2 : 1].device_data();
  c.out = out[0].device_data(), c.mean = out[1].device_data(), c.rstd = out[2].device_data();
  c.eps = a.eps;
  launch_rows(std::string(prim.name()).c_str(), in[0].dtype(), c, stream);
  if (!a.centred) fill(out[1], 0, stream);
}

// Operands g, x, mean, rstd and perhaps weight.
void run_norm_grad(const Primitive& prim, In in, std::span<const Tensor> out, Workspace,
                   const Stream& stream) {
  const auto& a = attributes_of<NormAttributes>(prim);
  const DType t = in[1].dtype();
  RowsCall c = call_for(in[1]);
  const DType partial = t == kF64 ? kF64 : kF32;
  Tensor statistics[] = {in[2], in[3]};
  for (Tensor& s : statistics)
    if (s.dtype() != partial) {
      const Tensor wide = empty(s.shape(), partial, stream.device);
      convert(s, wide, stream);
      s = wide;
    }
  c.other = in[0].device_data(), c.out = out[0].device_data();
  c.mean = a.centred ? statistics[0].device_data() : nullptr, c.rstd = statistics[1].device_data();
  if (a.has_weight) c.weight = in[4].device_data();
  const RowHold hold = norm_grad_hold(t, c.n, aligned(c));
  const std::string name = norm_grad_instance(t, hold).name, entry(prim.name());
  const NormSums sums = norm_sums(hold, c.rows, c.n);
  auto part = [&](bool wanted) {
    return wanted ? empty({int64_t(sums.pieces), int64_t(c.n)}, partial, stream.device) : Tensor();
  };
  const Tensor dw = part(a.has_weight), db = part(a.has_bias);
  c.piece = sums.piece, c.pieces = sums.pieces;
  c.dw = a.has_weight ? dw.device_data() : nullptr, c.db = a.has_bias ? db.device_data() : nullptr;
  if (hold.items != 0) {
    if (c.n > 0) launch(name, entry.c_str(), sums.geometry, stream, c);
  } else {
    if (c.rows > 0) launch(name, entry.c_str(), rows_geometry(hold, c.rows), stream, c);
    if (c.n > 0 && (a.has_weight || a.has_bias))
      launch(name, "norm_sums", sums.geometry, stream, c);
  }
  if (a.has_weight) reduce_to("sum", dw, out[1], 1, sums.pieces, c.n, stream);
  if (a.has_bias) reduce_to("sum", db, out[a.has_weight ? 2 : 1], 1, sums.pieces, c.n, stream);
}

void run_cross_entropy(const Primitive& prim, In in, std::span<const Tensor> out, Workspace,
                       const Stream& stream) {
  const auto& a = attributes_of<CrossEntropyAttributes>(prim);
  const DType t = in[0].dtype(), compute = t == kF64 ? kF64 : kF32;
  RowsCall shape = call_for(in[0]);
  shape.rows = countable(in[0].size(0), "rows of logits");  // rows without a class are refused
  const RowHold hold = hold_of(loss_holds(t), shape.n);
  const Tensor terms = empty({std::max<int64_t>(shape.rows, 1)}, compute, stream.device),
               scale = empty({1}, compute, stream.device);
  LossCall c{};
  c.in = in[0].device_data(), c.targets = static_cast<const long*>(in[1].device_data());
  c.terms = terms.device_data(), c.scale = scale.device_data();
  c.grad = a.with_grad ? out[1].device_data() : nullptr, c.loss = out[0].device_data();
  const RefusalWord refused(
      stream,
      {prim.name(),
       "{0}: the target {1} at row {2} is not a class; expected 0 to {3} or ignore_index {4}",
       int64_t(shape.n) - 1, a.ignore_index});
  c.report = refused.data();
  c.ignored = a.ignore_index, c.rows = shape.rows, c.n = shape.n, c.mean = a.mean;
  RowsCall packed = shape;
  packed.out = c.grad;
  c.packs = in_packs(t, hold, packed);
  const std::string name = loss_instance(t, hold).name;
  const Geometry one{{1, 1, 1}, {256, 1, 1}, 0};
  if (c.grad) launch(name, "count", one, stream, c);
  if (c.rows > 0) launch(name, "rows", rows_geometry(hold, c.rows), stream, c);
  launch(name, "finish", one, stream, c);
  refused.launched();
}

}  // namespace

void register_rows(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  for (const char* op : {"softmax", "log_softmax"})
    table.add(cuda, op, {.plan = plan_dense_in_place, .run = run_softmax});
  for (const char* op : {"softmax_grad", "log_softmax_grad"})
    table.add(cuda, op, {.plan = plan_dense_in_place, .run = run_softmax_grad});
  for (const char* op : {"layer_norm", "rms_norm"})
    table.add(cuda, op, {.plan = plan_dense, .run = run_norm});
  for (const char* op : {"layer_norm_grad", "rms_norm_grad"})
    table.add(cuda, op, {.plan = plan_dense, .run = run_norm_grad});
  table.add(cuda, "cross_entropy", {.plan = plan_dense, .run = run_cross_entropy});
}

}  // namespace tessera::cuda
