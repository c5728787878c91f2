// Adds sparse gradients to dense ones in place. The gradient of an embedding is zero except in the
// rows that were looked up. Where it is added to another tensor (the gradient of a tied head), only
// those rows are added to that tensor, and two passes over a table become one over a batch.
// Invariant: a row's terms are summed, in the order of embedding_grad, before they are added to the
// tensor, so sums have the bits that they have without the pass (except that a -0 in other rows
// stays -0).
#include <algorithm>
#include <utility>
#include <vector>

#include "compile/ir/rewrite.h"
#include "compile/passes/passes.h"
#include "core/base/boundary.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/kernel.h"
#include "core/ops/fused_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::compiler {
namespace {

constexpr int64_t kGrain = 16384;  // elements worth a thread

// Operands: the sum so far [V, D], cotangents [.., D], ids [..]. Result: [V, D]. The attributes are
// those of the gradient that joins, of a table that is not split. Cards have a kernel for it
// (core/backend/cuda/ops/indexing.cpp).
class AddEmbeddingGrad final : public PrimitiveOf<AddEmbeddingGrad, EmbeddingAttributes> {
 public:
  static inline const OpInfo kOp{"add_embedding_grad", {OpKind::kOther, Precision::kAsGiven, 3}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK_AS(ShapeError,
                     in[0]->shape.size() == 2 && in[0]->shape[0] == rows &&
                         in[0]->shape[1] == in[1]->shape.back() && in[0]->dtype == in[1]->dtype,
                     "add_embedding_grad: {} for a table of {} rows", describe(in), rows);
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  bool differentiable() const override { return false; }
  const Kernel* own_kernel(DeviceKind) const override;
};

// The pass ensures that no other operand has the sum's layout, so the result can only be put over
// the sum.
void plan(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.all_dense = true, plan.in_place = true;
}

int64_t row_at(const Tensor& ids, int64_t i) {
  return ids.dtype() == kI64 ? ids.values<int64_t>()[i] : ids.values<int32_t>()[i];
}

constexpr int64_t kNone = -1;

// The positions in a list of ids, grouped by the row that they look up, in ascending order.
struct Lookups {
  std::vector<int64_t> firsts;  // the first position of each row that is looked up
  std::vector<int64_t> next;    // by position: the row's next position; kNone after its last
};

Lookups lookups(const EmbeddingAttributes& a, const Tensor& ids) {
  const int64_t count = ids.numel();
  std::vector<int64_t> last(size_t(a.rows), kNone);
  Lookups found{.firsts = {}, .next = std::vector<int64_t>(size_t(count), kNone)};
  for (int64_t i = 0; i < count; ++i) {
    int64_t id = row_at(ids, i);
    TESSERA_CHECK(id >= 0 && id < a.rows,
                  "embedding: id {} at position {} is outside the table of {} rows", id, i, a.rows);
    if (id == a.padding_idx) continue;
    int64_t before = std::exchange(last[size_t(id)], i);
    if (before == kNone)
      found.firsts.push_back(i);
    else
      found.next[size_t(before)] = i;
  }
  return found;
}

// Each thread takes some of the columns.
template <class T>
void add_rows(const Lookups& found, const Tensor& g, const Tensor& ids, const Tensor& out) {
  const int64_t d = out.size(1), count = ids.numel();
  const T* from = g.values<T>();
  T* to = out.data<T>();
  parallel_for("accumulate.threads", d, std::max<int64_t>(16, kGrain / std::max<int64_t>(count, 1)),
               [&](int64_t begin, int64_t end) {
                 std::vector<T> sum(size_t(end - begin));
                 for (int64_t first : found.firsts) {
                   std::ranges::fill(sum, T(0));
                   for (int64_t i = first; i != kNone; i = found.next[size_t(i)])
                     for (int64_t k = begin; k < end; ++k)
                       sum[size_t(k - begin)] += from[i * d + k];
                   T* row = to + row_at(ids, first) * d;
                   for (int64_t k = begin; k < end; ++k) row[k] += sum[size_t(k - begin)];
                 }
               });
}

void run(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
         const Stream&) {
  const Lookups found = lookups(static_cast<const AddEmbeddingGrad&>(prim), in[2]);
  if (out[0].raw() != in[0].raw_values()) copy_values(out[0], in[0]);
  in[0].dtype() == kF32 ? add_rows<float>(found, in[1], in[2], out[0])
                        : add_rows<double>(found, in[1], in[2], out[0]);
}

const Kernel* AddEmbeddingGrad::own_kernel(DeviceKind device) const {
  static const Kernel kernel{plan, run};
  return device == DeviceKind::kCPU ? &kernel : nullptr;
}

class Accumulator {
 public:
  explicit Accumulator(Graph& g) : g_(g), uses_(g) {}

  void run() {
    for (size_t k = 0; k < g_.nodes.size(); ++k) {
      Node& n = g_.nodes[k];
      if (n.prim->name() != "add" || !n.into.empty()) continue;
      for (size_t sparse : {size_t(1), size_t(0)})
        if (int32_t e = gradient_behind(n, int32_t(k), sparse); e != kNoNode) {
          n.in = {ValueId(n.in[1 - sparse]), ValueId(g_.nodes[size_t(e)].in[0]),
                  ValueId(g_.nodes[size_t(e)].in[1])};
          const auto& grad = attributes_of<EmbeddingAttributes>(*g_.nodes[size_t(e)].prim);
          n.prim = add_embedding_grad_op(grad.rows, grad.padding_idx);
          g_.nodes[size_t(e)].prim = {};
          break;
        }
    }
    Rewrite(g_).apply();
  }

 private:
  // The embedding_grad that makes operand `sparse` of `add`, has no other use and could run there.
  int32_t gradient_behind(const Node& add, int32_t at, size_t sparse) const {
    ValueId id = add.in[sparse], dense = add.in[1 - sparse];
    int32_t e = uses_.producer[size_t(id)];
    if (e == kNoNode || dense == id || !g_.nodes[size_t(e)].prim) return kNoNode;
    const Node& n = g_.nodes[size_t(e)];
    if (n.prim->name() != "embedding_grad" || !n.into.empty() || uses_.output[size_t(id)] ||
        uses_.readers[size_t(id)].size() != 1 ||
        attributes_of<EmbeddingAttributes>(*n.prim).extent != 0)
      return kNoNode;
    const Meta &a = g_[dense].meta, &sum = g_[add.out[0]].meta, &g = g_[n.in[0]].meta;
    bool fits = a.shape == sum.shape && g_[id].meta.shape == sum.shape && g.shape != sum.shape &&
                is_contiguous(sum.shape, sum.strides) && has_kernel(a.device.kind) &&
                (a.dtype == kF32 || a.dtype == kF64) && g_[dense].buffer != kNoBuffer;
    return fits && operands_unchanged(g_, n, e, at) ? e : kNoNode;
  }

  static bool has_kernel(DeviceKind device) {
    return device == DeviceKind::kCPU ||
           bool(kernel_table().find(device, AddEmbeddingGrad::kOp.id));
  }

  Graph& g_;
  Uses uses_;
};

}  // namespace

void accumulate(Graph& graph) {
  if (!graph.deterministic) Accumulator(graph).run();
}

PrimRef add_embedding_grad_op(int64_t rows, int64_t padding_idx) {
  return PrimRef(new AddEmbeddingGrad({rows, padding_idx}));
}

}  // namespace tessera::compiler
