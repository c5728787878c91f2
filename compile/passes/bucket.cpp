// Small reductions over the same ranks become one. A collective costs a round of messages however
// small it is, so neighbours are packed: their operands joined, reduced, and read in place.
// Invariants: reductions are element by element, so no bit changes; collectives that are not packed
// keep their order; what reads a result comes after the last operand was made.
#include <algorithm>

#include "compile/cost.h"
#include "compile/passes/passes.h"
#include "compile/record.h"
#include "compile/rewrite.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/views.h"

namespace tessera::compiler {
namespace {

// Packing is two more passes over a tensor: worth a round of messages for small ones.
constexpr size_t kMemberBytes = size_t(128) << 10, kBucketBytes = size_t(1) << 20;

class Buckets {
 public:
  explicit Buckets(Graph& g)
      : g_(g), memory_(memory_uses(g)), member_(g.nodes.size()), pending_(g.values.size()) {}

  void run() {
    for (int32_t k = 0; k < int32_t(g_.nodes.size()); ++k) visit(k);
    close();
    if (buckets_.empty()) return;
    Rewrite rewrite(g_);
    std::vector<Node> nodes;
    for (int32_t k = 0; k < int32_t(g_.nodes.size()); ++k) {
      if (!member_[size_t(k)]) nodes.push_back(std::move(g_.nodes[size_t(k)]));
      for (const std::vector<int32_t>& bucket : buckets_)
        if (bucket.back() == k) pack(bucket, nodes, rewrite);
    }
    g_.nodes = std::move(nodes);
    rewrite.apply();
  }

 private:
  void visit(int32_t k) {
    const Node& n = g_.nodes[size_t(k)];
    if (n.role == Role::kView && n.into.empty()) return;
    // A member's result is read, or the operand of one is written: what is packed has to be done.
    if (std::ranges::any_of(n.in, [&](ValueId id) { return is_pending(id); }) ||
        std::ranges::any_of(n.into, [&](ValueId id) {
          return id != kNoValue && (is_pending(id) || is_operand(id));
        }))
      close();
    if (n.role != Role::kCollective) return;
    if (!may_join(n)) return close();
    size_t bytes = bytes_of(g_, n.in[0]);
    if (!open_.empty() &&
        (!is_like(n, g_.nodes[size_t(open_[0])]) || bytes_ + bytes > kBucketBytes))
      close();
    open_.push_back(k), bytes_ += bytes;
    pending_[size_t(n.out[0])] = true;
  }

  bool may_join(const Node& n) const {
    if (n.prim->name() != "all_reduce" || !n.into.empty()) return false;
    const MemoryUse& result = memory_[size_t(n.out[0])];
    return result.writes.empty() && result.outputs == 0 && bytes_of(g_, n.in[0]) <= kMemberBytes &&
           is_contiguous(g_[n.out[0]].meta.shape, g_[n.out[0]].meta.strides);
  }
  bool is_like(const Node& a, const Node& b) const {
    const Meta &x = g_[a.in[0]].meta, &y = g_[b.in[0]].meta;
    return same_primitive(*a.prim, *b.prim) && x.dtype == y.dtype && x.device == y.device;
  }
  bool is_pending(ValueId id) const {
    ValueId b = g_[id].buffer;
    return b != kNoBuffer && pending_[size_t(b)];
  }
  bool is_operand(ValueId id) const {
    return std::ranges::any_of(
        open_, [&](int32_t k) { return g_[g_.nodes[size_t(k)].in[0]].buffer == g_[id].buffer; });
  }

  void close() {
    for (int32_t k : open_) pending_[size_t(g_.nodes[size_t(k)].out[0])] = false;
    if (open_.size() > 1) {
      for (int32_t k : open_) member_[size_t(k)] = true;
      buckets_.push_back(open_);
    }
    open_.clear(), bytes_ = 0;
  }

  void pack(const std::vector<int32_t>& bucket, std::vector<Node>& nodes, Rewrite& rewrite) {
    const Node& last = g_.nodes[size_t(bucket.back())];
    NodeWriter writer(g_, nodes, last);
    Tensors parts;
    for (int32_t k : bucket) {
      Tensor x = writer.tensor(g_.nodes[size_t(k)].in[0]);
      parts.push_back(reshape(x, {x.numel()}));
    }
    Tensors packed{cat({parts.data(), parts.size()})};
    Tensor all = dispatch1(last.prim, {packed.data(), 1});
    nodes.back().role = Role::kCollective;
    int64_t offset = 0;
    for (int32_t k : bucket) {
      ValueId result = g_.nodes[size_t(k)].out[0];
      const Shape shape = g_[result].meta.shape;
      Tensor part = reshape(narrow(all, 0, offset, numel(shape)), shape);
      rewrite.replace(result, writer.value(part));
      offset += numel(shape);
    }
  }

  Graph& g_;
  const std::vector<MemoryUse> memory_;
  std::vector<bool> member_;   // by node: packed with others
  std::vector<bool> pending_;  // by buffer: a result of an open member
  std::vector<int32_t> open_;  // members of the bucket that is being filled
  size_t bytes_ = 0;           // of their operands
  std::vector<std::vector<int32_t>> buckets_;
};

}  // namespace

void bucket_collectives(Graph& graph) { Buckets(graph).run(); }

}  // namespace tessera::compiler
