// Pointwise ops, casts, copies and selections. An op on integers that refuses operands (division by
// zero) notes it, and the error is thrown later (refusals.h).
#include "core/backend/cuda/ops/pointwise.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/backend/cuda/kernels/pointwise.h"
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
void plan_layout(std::span<const Tensor> in, std::span<Meta> out) {
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

// What a call launches: kernels, and walks over operands of the layouts that it was planned for.
struct PlannedWalk final : RefCounted {
  PlannedWalk(const Instance& instance, PointwiseShape shape, std::span<const Tensor> in,
              const Meta& out)
      : packs(find_kernel(instance.name, "packs")),
        elements(find_kernel(instance.name, "elements")) {
    SmallVector<Strides, kWalkOperands> strides{out.strides};
    for (const Tensor& t : in)
      strides.push_back(broadcast_strides(t.shape(), t.strides(), out.shape));
    SmallVector<Strided, kWalkOperands> layouts{{nullptr, int(size_of(out.dtype)), strides[0]}};
    for (size_t k = 0; k < in.size(); ++k)
      layouts.push_back({nullptr, int(size_of(in[k].dtype())), strides[k + 1]});
    walks = pointwise_walks(shape, out.shape, {layouts.begin(), layouts.size()});
  }

  UntypedKernel &packs, &elements;
  PointwiseWalks walks;
};

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

// Enqueues what was planned. Operands that are host numbers are read now and go by value: as bits
// of the compute type, or as they lie in memory where `bits`.
void run_planned(const PlannedWalk& plan, std::span<const Tensor> in, const Tensor& out, bool bits,
                 Report* report, const Stream& stream) {
  SmallVector<Strided, kWalkOperands> operands{{out.device_data(), int(size_of(out.dtype())), {}}};
  unsigned long long values[kWalkOperands] = {};
  for (size_t k = 0; k < in.size(); ++k) {
    const bool by_value = in[k].device().is_cpu();
    if (by_value) values[k] = value_of(in[k], bits);
    operands.push_back({by_value ? nullptr : in[k].device_data(), int(size_of(in[k].dtype())), {}});
  }
  for (PointwiseLaunch& l :
       pointwise_launches(plan.walks, {operands.begin(), operands.size()}, values, report)) {
    void* parameters[] = {&l.call, nullptr};
    (l.packed ? plan.packs : plan.elements).launch(l.geometry, stream, parameters);
  }
}

void plan_pointwise(const Primitive& prim, std::span<const Tensor> in, std::span<Meta> out,
                    Plan& plan) {
  plan.in_place = true;
  plan_layout(in, out);
  const PointwiseOp& op = op_of(prim.id());
  const DType t = in[0].dtype();
  plan.state = make_ref<PlannedWalk>(pointwise_instance(op, t), shape_of(op, t), in, out[0]);
}

void run_pointwise(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out,
                   Workspace w, const Stream& stream) {
  run_planned(w.planned<PlannedWalk>(), in, out[0], false, nullptr, stream);
}

void run_trapping(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace w, const Stream& stream) {
  if (!is_integral(in[0].dtype())) return run_pointwise(prim, in, out, w, stream);
  const RefusalWord refused(stream, {prim.name(), "{0}: integer division by zero at element {2}"});
  run_planned(w.planned<PlannedWalk>(), in, out[0], false, refused.data(), stream);
  refused.launched();
}

// A copy, or a cast where the dtypes differ.
Ref<PlannedWalk> planned_conversion(const Tensor& in, const Meta& out) {
  const int bytes = int(size_of(in.dtype()));
  if (in.dtype() == out.dtype)
    return make_ref<PlannedWalk>(copy_instance(bytes), shape_of_copy(bytes), std::span(&in, 1),
                                 out);
  return make_ref<PlannedWalk>(cast_instance(in.dtype(), out.dtype),
                               shape_of_cast(in.dtype(), out.dtype), std::span(&in, 1), out);
}

void plan_cast(const Primitive&, std::span<const Tensor> in, std::span<Meta> out, Plan& plan) {
  plan_layout(in, out);
  plan.state = planned_conversion(in[0], out[0]);
}

void plan_where(const Primitive&, std::span<const Tensor> in, std::span<Meta> out, Plan& plan) {
  const int bytes = int(size_of(in[1].dtype()));
  plan.state = make_ref<PlannedWalk>(where_instance(bytes), shape_of_copy(bytes), in, out[0]);
}

void run_where(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out,
               Workspace w, const Stream& stream) {
  run_planned(w.planned<PlannedWalk>(), in, out[0], true, nullptr, stream);
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

void run_cast(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out,
              Workspace w, const Stream& stream) {
  run_planned(w.planned<PlannedWalk>(), in, out[0], false, nullptr, stream);
}

// Copies are also made without a plan (core/dispatch/copy.h).
void run_copy(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
              const Stream& stream) {
  convert(in[0], out[0], stream);
}

}  // namespace

void fill(const Tensor& out, Scalar value, const Stream& stream) {
  const Tensor number = empty({}, out.dtype());
  write_scalar(number.raw(), number.dtype(), value);
  run_planned(*planned_conversion(number, out.meta()), {&number, 1}, out, true, nullptr, stream);
}

void convert(const Tensor& in, const Tensor& out, const Stream& stream) {
  if (transposed(in, out, stream)) return;
  run_planned(*planned_conversion(in, out.meta()), {&in, 1}, out, in.dtype() == out.dtype(),
              nullptr, stream);
}

void compute(std::string_view name, std::initializer_list<Tensor> in, const Tensor& out,
             const Stream& stream) {
  const PointwiseOp& op = op_of(intern_op(name));
  const PlannedWalk plan(pointwise_instance(op, out.dtype()), shape_of(op, out.dtype()),
                         std::span(in.begin(), in.size()), out.meta());
  run_planned(plan, std::span(in.begin(), in.size()), out, false, nullptr, stream);
}

void register_pointwise(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  for (const PointwiseOp& op : pointwise_ops())
    table.add(cuda, op.name,
              {.plan = plan_pointwise,
               .run = op.traps ? run_trapping : run_pointwise,
               .keeps_plan = true,
               .host_scalars = true});
  table.add(cuda, "cast", {.plan = plan_cast, .run = run_cast, .keeps_plan = true});
  table.add(cuda, "copy", {.run = run_copy});
  table.add(cuda, "where",
            {.plan = plan_where, .run = run_where, .keeps_plan = true, .host_scalars = true});
}

}  // namespace tessera::cuda
