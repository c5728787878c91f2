// Pointwise ops, casts, copies and selections. A result of an op on integers that refuses operands
// (division by zero) is waited for, since the refusal has to be thrown.
#include "core/backend/cuda/ops/pointwise.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/backend/cuda/kernels/transpose.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/refusals.h"
#include "core/backend/cuda/runtime.h"
#include "core/base/error.h"
#include "core/tensor/element.h"

namespace tessera::cuda {
namespace {

// The value of a host number as kernels take it.
uint64_t value_of(const Tensor& number, bool bits) {
  uint64_t value = 0;
  if (bits) {
    std::memcpy(&value, number.raw_values(), size_of(number.dtype()));
    return value;
  }
  const DType t = number.dtype();
  if (!is_floating(t)) return uint64_t(read_integer(number.raw_values(), t));
  const double real = read_real(number.raw_values(), t);
  return t == kF64 ? std::bit_cast<uint64_t>(real) : std::bit_cast<uint32_t>(float(real));
}

// A permuted dense operand gives a result of the same layout, so that nothing is read across its
// grain.
void plan_layout(const Primitive&, std::span<const Tensor> in, std::span<Meta> out, Plan&) {
  for (const Tensor& t : in) {
    if (t.shape() != out[0].shape) continue;
    if (t.is_contiguous()) return;
    SmallVector<int, kMaxDims> order;
    for (int d = 0; d < t.ndim(); ++d) order.push_back(d);
    std::ranges::stable_sort(order, {}, [&](int d) { return t.strides()[d]; });
    int64_t dense = 1;
    for (int d : order) {
      if (t.strides()[d] != dense) return;
      dense *= t.shape()[d];
    }
    out[0].strides = t.strides();
    return;
  }
}

void plan_in_place(const Primitive& prim, std::span<const Tensor> in, std::span<Meta> out,
                   Plan& plan) {
  plan.in_place = true;
  plan_layout(prim, in, out, plan);
}

const PointwiseOp& op_of(OpId id) {
  static const std::vector<const PointwiseOp*> by_op = [] {
    std::vector<const PointwiseOp*> v;
    for (const PointwiseOp& op : pointwise_ops()) {
      const OpId number = intern_op(op.name);
      if (v.size() <= number) v.resize(size_t(number) + 1);
      v[number] = &op;
    }
    return v;
  }();
  return *by_op[id];
}

using TensorPointers = SmallVector<const Tensor*, kWalkOperands>;
TensorPointers walked(std::span<const Tensor> in, const Tensor& out) {
  TensorPointers tensors{&out};
  for (const Tensor& t : in) tensors.push_back(&t);
  return tensors;
}

void run_pointwise(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                   Workspace, const Stream& stream) {
  const PointwiseOp& op = op_of(prim.id());
  const DType t = in[0].dtype();
  run_walk(pointwise_instance(op, t), shape_of(op, t), walked(in, out[0]), false, nullptr, stream);
}

void run_trapping(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace w, const Stream& stream) {
  const PointwiseOp& op = op_of(prim.id());
  const DType t = in[0].dtype();
  if (!is_integral(t)) return run_pointwise(prim, in, out, w, stream);
  const RefusalWord refused(stream, {prim.name(), "{0}: integer division by zero at element {2}"});
  run_walk(pointwise_instance(op, t), shape_of(op, t), walked(in, out[0]), false, refused.data(),
           stream);
  refused.launched();
}

void run_cast(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
              const Stream& stream) {
  convert(in[0], out[0], stream);
}

void run_where(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
               const Stream& stream) {
  const int bytes = int(size_of(in[1].dtype()));
  run_walk(where_instance(bytes), shape_of_copy(bytes), walked(in, out[0]), true, nullptr, stream);
}

// Copies by tiles; false where that is no way for this copy.
bool transposed(const Tensor& in, const Tensor& out, const Stream& stream) {
  if (in.dtype() != out.dtype() || in.device().is_cpu()) return false;
  const int bytes = int(size_of(in.dtype()));
  const Strides strides = broadcast_strides(in.shape(), in.strides(), out.shape());
  if (strides == out.strides()) return false;
  const auto launches = transpose_launches(out.shape(), {out.device_data(), bytes, out.strides()},
                                           {in.device_data(), bytes, strides});
  for (const TransposeLaunch& l : launches)
    launch(transpose_instance(bytes).name, "tiles", l.geometry, stream, l.call);
  return !launches.empty();
}

}  // namespace

void run_walk(const Instance& instance, PointwiseShape shape,
              std::span<const Tensor* const> tensors, bool bits, Report* report,
              const Stream& stream) {
  const Tensor& out = *tensors[0];
  SmallVector<Strides, kWalkOperands> strides;
  SmallVector<Strided, kWalkOperands> operands;
  SmallVector<unsigned long long, kWalkOperands> values;
  for (const Tensor* t : tensors)
    strides.push_back(broadcast_strides(t->shape(), t->strides(), out.shape()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = *tensors[i];
    const bool by_value = i > 0 && t.device().is_cpu();
    if (i > 0) values.push_back(by_value ? value_of(t, bits) : 0);
    operands.push_back({by_value ? nullptr : t.device_data(), int(size_of(t.dtype())), strides[i]});
  }
  for (const PointwiseLaunch& l : pointwise_launches(
           shape, out.shape(), std::span<const Strided>(operands.begin(), operands.size()),
           std::span<const unsigned long long>(values.begin(), values.size()), report))
    launch(instance.name, l.entry, l.geometry, stream, l.call);
}

void fill(const Tensor& out, Scalar value, const Stream& stream) {
  const Tensor number = empty({}, out.dtype());
  write_scalar(number.raw(), number.dtype(), value);
  const int bytes = int(size_of(number.dtype()));
  const Tensor* tensors[] = {&out, &number};
  run_walk(copy_instance(bytes), shape_of_copy(bytes), tensors, true, nullptr, stream);
}

void convert(const Tensor& in, const Tensor& out, const Stream& stream) {
  const Tensor* tensors[] = {&out, &in};
  const int bytes = int(size_of(in.dtype()));
  if (transposed(in, out, stream)) return;
  if (in.dtype() == out.dtype())
    run_walk(copy_instance(bytes), shape_of_copy(bytes), tensors, true, nullptr, stream);
  else
    run_walk(cast_instance(in.dtype(), out.dtype()), shape_of_cast(in.dtype(), out.dtype()),
             tensors, false, nullptr, stream);
}

void register_pointwise(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  for (const PointwiseOp& op : pointwise_ops())
    table.add(cuda, op.name,
              {.plan = plan_in_place,
               .run = op.traps ? run_trapping : run_pointwise,
               .host_scalars = true});
  table.add(cuda, "cast", {.plan = plan_layout, .run = run_cast});
  table.add(cuda, "copy", {.run = run_cast});
  table.add(cuda, "where", {.run = run_where, .host_scalars = true});
}

}  // namespace tessera::cuda
