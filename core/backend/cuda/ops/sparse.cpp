// Segments and sparse products. A structure is looked through before anything reads by it, and the
// host waits for what was found, since a bad one has to be thrown.
#include <algorithm>

#include "core/backend/cuda/kernels/indexing.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/ops/sort.h"
#include "core/backend/cuda/refusals.h"
#include "core/backend/cuda/runtime.h"
#include "core/base/error.h"
#include "core/ops/dim_attributes.h"
#include "core/ops/sparse_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;

void plan_dense(const Primitive&, In, std::span<Meta>, Plan& plan) { plan.all_dense = true; }

void launch_sparse(DType t, std::string_view entry, const SparseCall& c, const Stream& stream) {
  launch(sparse_instance(t).name, entry, cover(c.count, 256), stream, c);
}

// What is said of offsets.
constexpr const char* kOffsets =
    "{0}: offsets[{2}] is {1}, not in order; offsets rise from 0 to the number of elements";
constexpr const char* kRows =
    "{0}: crow[{2}] is {1}, not in order; offsets rise from 0 to the number of elements";

// The call on offsets [rows + 1] over `edges` elements and, where it is defined, col [edges];
// throws where they are none.
SparseCall checked(const Primitive& p, const char* offsets_text, const Tensor& offsets,
                   int64_t edges, const Tensor& col, int64_t columns, const Stream& stream) {
  SparseCall c{};
  const RefusalWord refused(stream, {p.name(), offsets_text});
  const RefusalWord outside(stream,
                            {p.name(), "{0}: col[{2}] is {1}, outside {3} columns", columns});
  c.crow = static_cast<const long*>(offsets.device_data()), c.report = refused.data();
  c.column_report = outside.data();
  c.edges = countable(edges, "elements"), c.columns = columns;
  c.rows = countable(offsets.numel() - 1, "rows");
  c.count = countable(offsets.numel() + (col.defined() ? edges : 0), "offsets and columns");
  if (col.defined()) c.col = static_cast<const long*>(col.device_data());
  launch_sparse(kF32, "check", c, stream);
  refused.wait();
  return c;
}

void run_segment(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  const Around r(in[0].shape(), attributes_of<SegmentAttributes>(p).dim);
  SparseCall c = checked(p, kOffsets, in[1], r.n, {}, 0, stream);
  if (out[0].numel() == 0) return;
  c.values = in[0].device_data(), c.out = out[0].device_data();
  c.inner = make_divisor(countable(r.inner, "elements"));
  c.count = countable(out[0].numel(), "a result");
  launch_sparse(in[0].dtype(), p.name(), c, stream);
}

// Operands crow, col, values and dense: spmm and its extremes, where result 1 are edges, and sddmm,
// whose values are a matrix.
void run_product(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  SparseCall c = checked(p, kRows, in[0], in[1].numel(), in[1], in[3].size(0), stream);
  if (out[0].numel() == 0) return;
  c.values = in[2].device_data(), c.dense = in[3].device_data(), c.out = out[0].device_data();
  if (out.size() > 1) c.positions = static_cast<long*>(out[1].device_data());
  c.inner = make_divisor(std::max(1u, countable(in[3].size(1), "columns")));
  c.n = countable(in[3].size(1), "columns");
  const bool by_warps = p.name() == "sddmm";
  c.count = countable(out[0].numel() * (by_warps ? 32 : 1), "a result");
  launch_sparse(in[3].dtype(), p.name(), c, stream);
}

void run_csr_transpose(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  const int64_t columns = attributes_of<CsrTransposeAttributes>(p).columns;
  SparseCall c = checked(p, kRows, in[0], in[1].numel(), in[1], columns, stream);
  const Sorted by_column = sorted(in[1], 1, c.edges, 1, false, stream);
  c.keys = static_cast<const long*>(by_column.keys.device_data());
  c.order = static_cast<const int*>(by_column.places.device_data());
  c.out = out[0].device_data(), c.row = static_cast<long*>(out[1].device_data());
  c.positions = static_cast<long*>(out[2].device_data());
  c.count = countable(std::max<int64_t>(columns + 1, c.edges), "columns or edges");
  launch_sparse(kF32, "transpose", c, stream);
}

}  // namespace

void register_sparse(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  for (const char* op : {"segment_sum", "segment_prod", "segment_amax", "segment_amin"})
    table.add(cuda, op, {.plan = plan_dense, .run = run_segment, .uncapturable = true});
  for (const char* op : {"spmm", "spmm_amax", "spmm_amin", "sddmm"})
    table.add(cuda, op, {.plan = plan_dense, .run = run_product, .uncapturable = true});
  table.add(cuda, "csr_transpose",
            {.plan = plan_dense, .run = run_csr_transpose, .uncapturable = true});
}

}  // namespace tessera::cuda
