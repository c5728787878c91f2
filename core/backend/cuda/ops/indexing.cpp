// Ops that read and write by position, on [outer, n, inner] around the indexed dim, and embeddings,
// which are rows of a table. A position that is not there is refused (refusals.h): reads of it give
// zeros, writes to it are left out.
#include "core/backend/cuda/kernels/indexing.h"

#include <algorithm>

#include "core/backend/cuda/kernels/reduce.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/pointwise.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/ops/sort.h"
#include "core/backend/cuda/refusals.h"
#include "core/backend/cuda/runtime.h"
#include "core/base/error.h"
#include "core/ops/dim_attributes.h"
#include "core/ops/fused_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;

int dim_of(const Primitive& p) { return attributes_of<DimAttributes>(p).dim; }

// True when only `dim` moves through the storage of the index.
bool is_vector(const Tensor& index, int dim) {
  for (int d = 0; d < index.ndim(); ++d)
    if (d != dim && index.shape()[d] != 1 && index.strides()[d] != 0) return false;
  return true;
}

// The values of an index that is a vector along `dim`, dense.
Tensor line_of(const Tensor& index, int dim, const Stream& stream) {
  const Tensor dense = empty({index.size(dim)}, index.dtype(), stream.device);
  convert(Tensor({dense.shape(), {index.strides()[dim]}, index.dtype(), index.device()},
                 index.storage(), index.offset()),
          dense, stream);
  return dense;
}

template <uint32_t kDense>
void plan_index(const Primitive& p, In in, std::span<Meta>, Plan& plan) {
  plan.dense_in = kDense | (is_vector(in[1], dim_of(p)) ? 0u : 2u);
}
template <uint32_t kDense>
void plan_dense(const Primitive&, In, std::span<Meta>, Plan& plan) {
  plan.dense_in = kDense;
}

// The call on the elements that `index` spans, of a tensor whose dim has `rows` rows.
IndexCall call_for(const Tensor& index, int dim, int64_t rows) {
  const Around a(index.shape(), dim);
  TESSERA_CHECK(index.numel() < int64_t(1) << 31,
                "cuda: an index of {} elements is more than 31 bits count", index.numel());
  IndexCall c{};
  c.index = index.device_data();
  c.vector = is_vector(index, dim);
  c.index_stride = index.strides()[dim];
  c.rows = c.extent = rows;
  c.inner = make_divisor(uint32_t(std::max<int64_t>(a.inner, 1)));
  c.n = make_divisor(uint32_t(std::max<int64_t>(a.n, 1)));
  c.count = unsigned(index.numel());
  return c;
}

Refusal outside_dim(const Primitive& p, int dim, int64_t extent) {
  return {p.name(), "{0}: the index {1} at element {2} is outside dim {3} of extent {4}", dim,
          extent};
}
Refusal outside_table(const Primitive& p, int64_t rows) {
  return {p.name(), "{0}: the id {1} at position {2} is outside the table of {3} rows", rows};
}

// A vector takes whole lines of what is inside of the dim, in the widest elements that fit.
void run_gather(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const int dim = dim_of(prim);
  if (out[0].numel() == 0) return;
  IndexCall c = call_for(in[1], dim, in[0].size(dim));
  const RefusalWord refused(stream, outside_dim(prim, dim, c.extent));
  c.in = in[0].device_data(), c.out = out[0].device_data(), c.report = refused.data();
  int bytes = int(size_of(in[0].dtype()));
  if (c.vector) bytes = widen_lines(c, bytes);
  launch(indexing_instance(bytes, in[1].dtype()).name, "gather", cover(c.count, 256), stream, c);
  refused.launched();
}

// out = x, but src at the index.
void run_scatter(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const int dim = dim_of(prim);
  convert(in[0], out[0], stream);
  if (in[1].numel() == 0) return;
  const Tensor winner = empty(out[0].shape(), kI32, stream.device);
  fill(winner, 0, stream);
  IndexCall c = call_for(in[1], dim, out[0].size(dim));
  const RefusalWord refused(stream, outside_dim(prim, dim, c.extent));
  c.in = in[2].device_data(), c.out = out[0].device_data(), c.report = refused.data();
  c.winner = winner.device_data();
  const std::string name = indexing_instance(int(size_of(in[0].dtype())), in[1].dtype()).name;
  for (const char* entry : {"claim", "scatter"})
    launch(name, entry, cover(c.count, 256), stream, c);
  refused.launched();
}

void run_wrap_index(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const int64_t extent = attributes_of<WrapIndexAttributes>(prim).extent;
  if (in[0].numel() == 0) return;
  IndexCall c{};
  const RefusalWord refused(
      stream,
      {prim.name(), "{0}: the index {1} at element {2} is outside an extent of {3}", extent});
  c.index = in[0].device_data(), c.out = out[0].device_data(), c.report = refused.data();
  c.extent = extent, c.count = countable(in[0].numel(), "an index");
  launch(indexing_instance(8, kI64).name, "wrap", cover(c.count, 256), stream, c);
  refused.launched();
}

// A gather of whole rows: [rows, bytes] by a vector, in the widest elements that fit.
void run_embedding(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const auto& a = attributes_of<EmbeddingAttributes>(prim);
  const Tensor &ids = in[0], &table = in[1];
  const int64_t row_bytes = table.size(1) * int64_t(size_of(table.dtype()));
  if (out[0].numel() == 0) return;
  const void* addresses[] = {table.device_data(), out[0].device_data()};
  const int bytes = element_bytes(row_bytes, addresses);
  const int64_t inner = row_bytes / bytes;
  TESSERA_CHECK(ids.numel() * inner < int64_t(1) << 31,
                "cuda: an embedding of {} is more than 31 bits count", describe(out[0]));
  IndexCall c{};
  c.begin = a.begin, c.rows = a.rows, c.extent = a.extent ? a.extent : a.rows;
  const RefusalWord refused(stream, outside_table(prim, c.extent));
  c.in = table.device_data(), c.index = ids.device_data(), c.out = out[0].device_data();
  c.report = refused.data();
  c.vector = 1, c.index_stride = 1;
  c.inner = make_divisor(uint32_t(inner)), c.n = make_divisor(uint32_t(ids.numel()));
  c.count = unsigned(ids.numel() * inner);
  launch(indexing_instance(bytes, ids.dtype()).name, "gather", cover(c.count, 256), stream, c);
  refused.launched();
}

// Launches `segments` for a call that has all but its counts, by packs where rows consist of them.
void launch_segments(std::string_view join, SegmentCall c, DType in, DType out, int64_t outer,
                     int64_t n, int64_t inner, const Stream& stream) {
  const void* addresses[] = {c.in, c.out};
  const int pack = segment_pack(in, out, inner, addresses);
  c.inner = make_divisor(uint32_t(inner / pack)), c.n = make_divisor(uint32_t(n));
  c.count = unsigned(outer * n * (inner / pack));
  launch(segments_instance(join, in, out).name, pack > 1 ? "segment_packs" : "segments",
         cover(c.count, 256), stream, c);
}

// Ids are sorted, and each column of a row of the table is one thread's sum over its ids, in the
// order in which they came. `adds`: to what `out` has, one addition for a row.
void sum_rows(const Primitive& prim, const Tensor& g, Tensor ids, const Tensor& out, bool adds,
              const Stream& stream) {
  const auto& a = attributes_of<EmbeddingAttributes>(prim);
  const int64_t n = ids.numel(), d = g.size(-1);
  if (n == 0 || d == 0) return;
  if (ids.dtype() != kI64) {
    const Tensor wide = empty(ids.shape(), kI64, stream.device);
    convert(ids, wide, stream);
    ids = wide;
  }
  const Sorted by_id = sorted(ids, 1, n, 1, false, stream);
  SegmentCall c{};
  c.begin = a.begin, c.rows = a.rows, c.extent = a.extent ? a.extent : a.rows;
  const RefusalWord refused(stream, outside_table(prim, c.extent));
  c.in = g.device_data(), c.out = out.device_data(), c.report = refused.data();
  c.keys = static_cast<const long*>(by_id.keys.device_data());
  c.order = static_cast<const int*>(by_id.places.device_data());
  c.ignored = a.padding_idx, c.fresh = !adds, c.apart = adds;
  c.count = countable(n * d, "a gradient of an embedding");
  launch_segments("sum", c, g.dtype(), out.dtype(), 1, n, d, stream);
  refused.launched();
}

void run_embedding_grad(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  fill(out[0], 0, stream);
  sum_rows(prim, in[0], in[1], out[0], false, stream);
}

// The sum so far, cotangents and ids (compile/passes/accumulate.cpp). The result may lie over the
// first.
void plan_add_embedding_grad(const Primitive&, In, std::span<Meta>, Plan& plan) {
  plan.dense_in = 7, plan.in_place = true;
}
void run_add_embedding_grad(const Primitive& prim, In in, Out out, Workspace,
                            const Stream& stream) {
  if (out[0].device_data() != in[0].device_data()) convert(in[0], out[0], stream);
  sum_rows(prim, in[1], in[2], out[0], true, stream);
}

// Lines that are walked from end to end are worth it where they are many or short.
constexpr int64_t kManyLines = 8192, kShortLine = 32;

// Sums begin at zero, the others at the first operand. Every place has one owner, which joins its
// sources in the order of the index: of a sorted vector, of lines that are sorted, or of lines as
// they are, where places are of the compute type until the last source came.
template <bool kSum>
void run_combine(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const int dim = dim_of(prim);
  const Tensor& index = in[1];
  const Around a(index.shape(), dim);
  const bool vector = is_vector(index, dim);
  const bool as_is = !vector && (a.outer * a.inner >= kManyLines || a.n <= kShortLine);
  const DType t = out[0].dtype(), compute = t == kF64 ? kF64 : is_floating(t) ? kF32 : kI64;
  const DType to = as_is ? compute : t;
  const Tensor all = t == to ? out[0] : empty(out[0].shape(), to, stream.device);
  if constexpr (kSum)
    fill(all, 0, stream);
  else
    convert(in[0], all, stream);
  if (index.numel() > 0) {
    SegmentCall c{};
    c.rows = c.extent = out[0].size(dim), c.ignored = -1;
    const RefusalWord refused(stream, outside_dim(prim, dim, c.extent));
    c.in = in[2].device_data(), c.out = all.device_data(), c.report = refused.data();
    c.inner = make_divisor(uint32_t(a.inner)), c.n = make_divisor(uint32_t(a.n));
    c.count = countable(index.numel(), "an index"), c.fresh = kSum;
    c.keys = static_cast<const long*>(index.device_data());
    const char* entry = "lines";
    Sorted lines;
    if (vector) {
      lines = sorted(line_of(index, dim, stream), 1, a.n, 1, false, stream);
    } else if (as_is) {
      c.count = unsigned(a.outer * a.inner);
    } else {
      entry = "sorted", lines = sorted(index, a.outer, a.n, a.inner, false, stream);
    }
    if (lines.keys.defined()) {
      c.keys = static_cast<const long*>(lines.keys.device_data());
      c.order = static_cast<const int*>(lines.places.device_data());
    }
    std::string_view join = prim.name();  // scatter_sum, ..
    join.remove_prefix(join.find('_') + 1);
    if (vector)
      launch_segments(join, c, in[2].dtype(), to, a.outer, a.n, a.inner, stream);
    else
      launch(segments_instance(join, in[2].dtype(), to).name, entry, cover(c.count, 256), stream,
             c);
    refused.launched();
  }
  if (!all.is_same(out[0])) convert(all, out[0], stream);
}

template <bool kLargest>
void run_extreme(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const Around a(in[0].shape(), dim_of(prim));
  if (out[0].numel() == 0) return;
  ReduceLaunch l = extreme_launch(a.outer, a.n, a.inner);
  l.call.in = in[0].device_data(), l.call.out = out[0].device_data();
  launch(extreme_instance(kLargest, in[0].dtype()).name, l.entry, l.geometry, stream, l.call);
}

}  // namespace

void register_indexing(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  table.add(cuda, "gather", {.plan = plan_index<1>, .run = run_gather});
  table.add(cuda, "scatter", {.plan = plan_index<4>, .run = run_scatter});
  table.add(cuda, "scatter_sum", {.plan = plan_index<4>, .run = run_combine<true>});
  for (const char* op : {"scatter_prod", "scatter_amax", "scatter_amin"})
    table.add(cuda, op, {.plan = plan_index<4>, .run = run_combine<false>});
  table.add(cuda, "wrap_index", {.plan = plan_dense<1>, .run = run_wrap_index});
  table.add(cuda, "embedding", {.plan = plan_dense<3>, .run = run_embedding});
  table.add(cuda, "embedding_grad", {.plan = plan_dense<3>, .run = run_embedding_grad});
  table.add(cuda, "add_embedding_grad",
            {.plan = plan_add_embedding_grad, .run = run_add_embedding_grad});
  table.add(cuda, "argmax", {.plan = plan_dense<1>, .run = run_extreme<true>});
  table.add(cuda, "argmin", {.plan = plan_dense<1>, .run = run_extreme<false>});
}

}  // namespace tessera::cuda
