// Scans, sorts and searches along one dim.
#include <algorithm>

#include "core/backend/cuda/kernels/indexing.h"
#include "core/backend/cuda/kernels/scan.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/ops/sort.h"
#include "core/backend/cuda/runtime.h"
#include "core/base/error.h"
#include "core/ops/dim_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;

DType compute_dtype(DType t) { return t == kF64 ? kF64 : is_floating(t) ? kF32 : kI64; }

template <uint32_t kDense>
void plan_dense(const Primitive&, In, std::span<Meta>, Plan& plan) {
  plan.dense_in = kDense;
}

void check_lines(const Primitive& p, const Tensor& x) {
  TESSERA_CHECK(x.numel() < int64_t(1) << 31, "{}: {} has more elements than 31 bits count",
                p.name(), describe(x));
}

// `other` and `positions` may be null.
void scan(const Primitive& p, const Tensor& x, const void* other, const Tensor& out,
          void* positions, int dim, bool reverse, const Stream& stream) {
  if (x.numel() == 0) return;
  check_lines(p, x);
  const Around a(x.shape(), dim);
  ScanCall c{};
  c.in = x.device_data(), c.other = other;
  c.out = out.device_data(), c.positions = static_cast<long*>(positions);
  c.outer = unsigned(a.outer), c.n = unsigned(a.n), c.inner = unsigned(a.inner),
  c.reverse = reverse;
  const ScanLaunch l = scan_launch(p.name(), x.dtype(), c);
  launch(scan_instance(p.name(), x.dtype()).name, l.entry, l.geometry, stream, c);
}

void run_scan(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  const auto& a = attributes_of<ScanAttributes>(p);
  scan(p, in[0], in.size() > 1 ? in[1].device_data() : nullptr, out[0], nullptr, a.dim, a.reverse,
       stream);
}
void run_plain_scan(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  scan(p, in[0], nullptr, out[0], nullptr, attributes_of<DimAttributes>(p).dim, false, stream);
}
void run_extreme_scan(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  scan(p, in[0], nullptr, out[0], out[1].device_data(), attributes_of<DimAttributes>(p).dim, false,
       stream);
}

void run_sort(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  const auto& a = attributes_of<SortAttributes>(p);
  const Tensor& x = in[0];
  if (out[0].numel() == 0) return;
  check_lines(p, x);
  const Around r(x.shape(), a.dim);
  const Sorted lines = sorted(x, r.outer, r.n, r.inner, a.descending, stream);
  SortCall c{};
  c.in = x.device_data(), c.places = static_cast<int*>(lines.places.device_data());
  c.values = out[0].device_data(), c.positions = static_cast<long*>(out[1].device_data());
  c.outer = unsigned(r.outer), c.n = unsigned(r.n), c.inner = unsigned(r.inner);
  c.kept = unsigned(a.count), c.count = unsigned(out[0].numel());
  launch(sort_instance(a.descending, x.dtype()).name, "finish", cover(c.count, 256), stream, c);
}

void run_search(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  const Tensor &edges = in[0], &x = in[1];
  if (x.numel() == 0) return;
  check_lines(p, x);
  SortCall c{};
  c.n = unsigned(edges.shape().back());
  c.outer = unsigned(edges.numel() / std::max<int64_t>(c.n, 1));
  c.inner = unsigned(x.numel() / std::max<int64_t>(c.outer, 1));
  c.in = edges.device_data(), c.values = x.device_data();
  c.positions = static_cast<long*>(out[0].device_data());
  c.count = unsigned(x.numel()), c.right = attributes_of<SearchAttributes>(p).right;
  launch(sort_instance(false, edges.dtype()).name, "search", cover(c.count, 256), stream, c);
}

}  // namespace

Sorted sorted(const Tensor& x, int64_t outer, int64_t n, int64_t inner, bool descending,
              const Stream& stream) {
  const DType key = compute_dtype(x.dtype());
  const Tensor keys[] = {empty({x.numel()}, key, stream.device),
                         empty({x.numel()}, key, stream.device)},
               places[] = {empty({x.numel()}, kI32, stream.device),
                           empty({x.numel()}, kI32, stream.device)};
  const std::string name = sort_instance(descending, x.dtype()).name;
  const SortLaunches all = sort_launches(outer, n, inner);
  for (const SortLaunch& l : all.launches) {
    const bool first = std::string_view(l.entry) == "blocks";
    const int from = first ? 0 : l.from;
    SortCall c = l.call;
    c.in = x.device_data();
    c.keys = keys[from].device_data(), c.places = static_cast<int*>(places[from].device_data());
    c.to_keys = keys[1 - from].device_data();
    c.to_places = static_cast<int*>(places[1 - from].device_data());
    launch(name, l.entry, l.geometry, stream, c);
  }
  return {keys[all.result], places[all.result]};
}

void register_order(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  table.add(cuda, "cumsum", {.plan = plan_dense<1>, .run = run_scan});
  table.add(cuda, "linear_scan", {.plan = plan_dense<3>, .run = run_scan});
  for (const char* op : {"cumprod", "logcumsumexp"})
    table.add(cuda, op, {.plan = plan_dense<1>, .run = run_plain_scan});
  for (const char* op : {"cummax", "cummin"})
    table.add(cuda, op, {.plan = plan_dense<1>, .run = run_extreme_scan});
  table.add(cuda, "sort", {.plan = plan_dense<1>, .run = run_sort});
  table.add(cuda, "searchsorted", {.plan = plan_dense<3>, .run = run_search});
}

}  // namespace tessera::cuda
