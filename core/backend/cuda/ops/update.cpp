// Optimizer steps of all parameters in one launch, and norms of all gradients in few. Tables of
// pieces and of addresses go to the device with each call.
#include <cstring>

#include "core/backend/cuda/capture.h"
#include "core/backend/cuda/kernels/random.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/pointwise.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/runtime.h"
#include "core/base/error.h"
#include "core/ops/update_attributes.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/device_runtime.h"

namespace tessera::cuda {
namespace {

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;
constexpr Geometry kOneBlock{{1, 1, 1}, {256, 1, 1}, 0};

void plan_lists(const Primitive&, In, std::span<Meta>, Plan& plan) {
  plan.all_dense = true;
  // Blocks of all tensors run at once: a result may lie over its own operands, which the caller
  // says by assigning to them, but not over any that happens to be free.
  plan.assign_in_place = true;
}

// `n` values of the host on the device, by way of memory that nobody waits for. They are the same
// at each launch of a graph, so that this is not part of it.
template <class T>
Tensor on_device(const T* values, size_t n, const Stream& stream) {
  const Device device = stream.device;
  const Shape shape{int64_t(n * sizeof(T))};
  const Tensor there = constant_memory(Meta::contiguous(shape, kU8, device));
  if (n == 0) return there;
  DeviceRuntime& runtime = runtime_of(device);
  const Tensor bytes = empty_in(Meta::contiguous(shape, kU8, kCPU), runtime.host_allocator());
  std::memcpy(bytes.raw(), values, bytes.nbytes());
  const Stream first = allocation_stream(device.index);
  if (runtime.copy(there.device_data(), device, bytes.raw_values(), kCPU, bytes.nbytes(), first))
    if (Ref<Event> read = runtime.record(first)) bytes.storage()->add_reader(std::move(read));
  return there;
}

DType one_dtype(const Primitive& prim, In tensors) {
  const DType t = tensors[0].dtype();
  for (const Tensor& x : tensors)
    TESSERA_CHECK((t == kF32 || t == kF64) && x.dtype() == t,
                  "{}: takes f32 or f64 tensors of one dtype, got {}", prim.name(), describe(x));
  return t;
}

// The pieces of `tensors`, and the addresses of all lists, one after the other.
struct Tables {
  Tables(In tensors, const std::vector<void*>& addresses, const Stream& stream) {
    std::vector<int64_t> counts;
    for (const Tensor& t : tensors) counts.push_back(t.numel());
    const std::vector<UpdatePiece> list = update_pieces(counts);
    count = unsigned(list.size());
    pieces = on_device(list.data(), list.size(), stream);
    lists = on_device(addresses.data(), addresses.size(), stream);
  }
  unsigned count;
  Tensor pieces, lists;
};

std::vector<void*> addresses_of(In in, Out out) {
  std::vector<void*> all;
  for (const Tensor& t : in) all.push_back(t.device_data());
  for (const Tensor& t : out) all.push_back(t.device_data());
  return all;
}

const double* number(const Tensor& t) { return static_cast<const double*>(t.device_data()); }

void step(const char* entry, DType t, UpdateCall call, const Tables& tables, const Stream& stream) {
  if (tables.count == 0) return;
  call.pieces = static_cast<const UpdatePiece*>(tables.pieces.device_data());
  call.lists = static_cast<void* const*>(tables.lists.device_data());
  launch(update_instance(t).name, entry, {{tables.count, 1, 1}, {256, 1, 1}, 0}, stream, call);
}

void run_adam(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const auto& a = attributes_of<AdamUpdate>(prim);
  const In lists = in.subspan(3), params = lists.first(size_t(a.count));
  const DType t = one_dtype(prim, lists);
  UpdateCall c{};
  c.lr = number(in[0]), c.step = number(in[1]), c.scale = number(in[2]);
  c.beta1 = a.beta1, c.beta2 = a.beta2, c.eps = a.eps, c.weight_decay = a.weight_decay;
  c.tensors = a.count, c.decoupled = a.decoupled, c.if_finite = a.if_finite;
  step("adam", t, c, Tables(params, addresses_of(lists, out), stream), stream);
}

void run_sgd(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const auto& a = attributes_of<SgdUpdate>(prim);
  const In lists = in.subspan(2), params = lists.first(size_t(a.count));
  const DType t = one_dtype(prim, lists);
  UpdateCall c{};
  c.lr = number(in[0]), c.scale = number(in[1]);
  c.weight_decay = a.weight_decay, c.momentum = a.momentum, c.dampening = a.dampening;
  c.tensors = a.count, c.if_finite = a.if_finite, c.nesterov = a.nesterov, c.first = a.first;
  step(a.momentum != 0 ? "sgd_momentum" : "sgd", t, c,
       Tables(params, addresses_of(lists, out), stream), stream);
}

int64_t rows_of(const Tensor& t) { return t.ndim() ? t.size(0) : 1; }

// Sums of squares of the rows of x, f64, to `values`.
void row_squares(const Primitive& prim, const Tensor& x, double* values, const Stream& stream) {
  const int64_t rows = rows_of(x);
  if (rows == 0) return;
  NormCall c{};
  c.in = x.device_data(), c.values = values;
  c.rows = rows, c.each = x.numel() / rows;
  launch(update_instance(one_dtype(prim, {&x, 1})).name, "row_squares",
         {{unsigned(std::min<int64_t>(rows, 65535)), 1, 1}, {256, 1, 1}, 0}, stream, c);
}

// The root of the sum of all values, by the tree of each tensor's rows and that of the tensors.
// `values` are those of tensor i from begin[i] on, and are overwritten.
void root_of_sums(double* values, const std::vector<int64_t>& begin, double* out,
                  const Stream& stream) {
  const size_t tensors = begin.size() - 1;
  const Tensor table = on_device(begin.data(), begin.size(), stream),
               totals = empty({int64_t(tensors)}, kF64, stream.device);
  NormCall c{};
  c.values = values, c.begin = static_cast<const long*>(table.device_data());
  c.out = static_cast<double*>(totals.device_data());
  launch(update_instance(kF64).name, "tree_sums", {{unsigned(tensors), 1, 1}, {256, 1, 1}, 0},
         stream, c);
  c.values = c.out, c.out = out, c.n = int(tensors);
  launch(update_instance(kF64).name, "norm", kOneBlock, stream, c);
}

std::vector<int64_t> begins(In in, FunctionRef<int64_t(const Tensor&)> count) {
  std::vector<int64_t> begin{0};
  for (const Tensor& t : in) begin.push_back(begin.back() + count(t));
  return begin;
}

void run_global_norm(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const std::vector<int64_t> begin = begins(in, rows_of);
  const Tensor squares = empty({std::max<int64_t>(begin.back(), 1)}, kF64, stream.device);
  auto* values = static_cast<double*>(squares.device_data());
  for (size_t i = 0; i < in.size(); ++i) row_squares(prim, in[i], values + begin[i], stream);
  root_of_sums(values, begin, static_cast<double*>(out[0].device_data()), stream);
}

void run_row_squares(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  row_squares(prim, in[0], static_cast<double*>(out[0].device_data()), stream);
}

void run_norm_of_rows(const Primitive&, In in, Out out, Workspace, const Stream& stream) {
  const std::vector<int64_t> begin = begins(in, [](const Tensor& t) { return t.numel(); });
  const Tensor all = empty({std::max<int64_t>(begin.back(), 1)}, kF64, stream.device);
  for (size_t i = 0; i < in.size(); ++i)
    convert(in[i],
            Tensor(Meta::contiguous(in[i].shape(), kF64, stream.device), all.storage(), begin[i]),
            stream);
  root_of_sums(static_cast<double*>(all.device_data()), begin,
               static_cast<double*>(out[0].device_data()), stream);
}

void run_max_magnitude(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const DType t = one_dtype(prim, in);
  const Tables tables(in, addresses_of(in, {}), stream);
  const Tensor largest = empty({std::max<int64_t>(tables.count, 1)}, kF64, stream.device);
  UpdateCall c{};
  c.pieces = static_cast<const UpdatePiece*>(tables.pieces.device_data());
  c.lists = static_cast<void* const*>(tables.lists.device_data());
  c.tensors = int(in.size());
  double* of_pieces = static_cast<double*>(largest.device_data());
  c.out = of_pieces;
  if (tables.count > 0)
    launch(update_instance(t).name, "magnitudes", {{tables.count, 1, 1}, {256, 1, 1}, 0}, stream,
           c);
  NormCall norm{};
  norm.values = of_pieces, norm.out = static_cast<double*>(out[0].device_data());
  norm.n = int(tables.count), norm.rows = 1;  // the largest, not the root of the sum
  launch(update_instance(kF64).name, "norm", kOneBlock, stream, norm);
}

}  // namespace

void register_update(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  table.add(cuda, "adam", {.plan = plan_lists, .run = run_adam});
  table.add(cuda, "sgd", {.plan = plan_lists, .run = run_sgd});
  table.add(cuda, "global_norm", {.plan = plan_lists, .run = run_global_norm});
  table.add(cuda, "row_squares", {.plan = plan_lists, .run = run_row_squares});
  table.add(cuda, "max_magnitude", {.plan = plan_lists, .run = run_max_magnitude});
  table.add(cuda, "norm_of_rows", {.plan = plan_lists, .run = run_norm_of_rows});
}

}  // namespace tessera::cuda
