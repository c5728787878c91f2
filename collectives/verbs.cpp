// The verbs of a process group. One function for each verb returns its Collective; the synchronous
// and the asynchronous form of the verb differ only in whether the caller waits.
#include <fmt/format.h>

#include <algorithm>

#include "collectives/plan.h"
#include "collectives/process_group.h"
#include "core/dispatch/observer.h"

namespace tessera {
namespace {

constexpr CollTraits kTraits[] = {
    {.name = "all_reduce", .reduces = true},
    {.name = "reduce", .reduces = true, .rooted = true},
    {.name = "broadcast", .rooted = true},
    {.name = "all_gather"},
    {.name = "gather", .rooted = true},
    {.name = "scatter", .rooted = true},
    {.name = "reduce_scatter", .reduces = true},
    {.name = "all_to_all"},
    {.name = "barrier"},
    {.name = "send", .p2p = true},
    {.name = "recv", .p2p = true},
};
static_assert(std::size(kTraits) == kNumCollKinds);
constexpr std::string_view kOpNames[kNumReduceOps] = {"sum", "avg",     "product", "min",
                                                      "max", "bit_and", "bit_or",  "bit_xor"};

using TensorSpan = std::span<const Tensor>;
using Splits = std::span<const int64_t>;

TensorSpan one(const Tensor& t) { return {&t, 1}; }

// Submits both forms of a verb: fills in the rest of a Collective, which lives until submit
// returns. Verbs of a group are no ops: a recording backend does not see them.
struct Call {
  Millis timeout;
  CallSite site;
  const Collective& waiting(Collective&& c) const {
    notify(events::LeavesOps{[&] {
      return fmt::format("{} on a process group ({})", name_of(c.kind), detail::describe(site));
    }});
    c.timeout = timeout, c.site = site;
    return c;
  }
  const Collective& pending(Collective&& c) const {
    c.async = true;
    return waiting(std::move(c));
  }
};

Collective all_reduce_of(const Tensor& t, ReduceOp op) {
  return {.kind = CollKind::kAllReduce, .op = op, .in = one(t), .out = one(t)};
}
Collective reduce_of(const Tensor& t, int root, ReduceOp op, bool is_root) {
  return {.kind = CollKind::kReduce,
          .op = op,
          .peer = root,
          .in = one(t),
          .out = is_root ? one(t) : TensorSpan{}};
}
Collective broadcast_of(const Tensor& t, int root, bool is_root) {
  return {.kind = CollKind::kBroadcast,
          .peer = root,
          .in = is_root ? one(t) : TensorSpan{},
          .out = is_root ? TensorSpan{} : one(t)};
}
Collective all_gather_of(TensorSpan out, const Tensor& in) {
  return {.kind = CollKind::kAllGather, .in = one(in), .out = out};
}
Collective gather_of(TensorSpan out, const Tensor& in, int root) {
  return {.kind = CollKind::kGather, .peer = root, .in = one(in), .out = out};
}
Collective scatter_of(const Tensor& out, TensorSpan in, int root) {
  return {.kind = CollKind::kScatter, .peer = root, .in = in, .out = one(out)};
}
Collective reduce_scatter_of(const Tensor& out, TensorSpan in, ReduceOp op) {
  return {.kind = CollKind::kReduceScatter, .op = op, .in = in, .out = one(out)};
}
Collective all_to_all_of(TensorSpan out, TensorSpan in, Splits out_splits = {},
                         Splits in_splits = {}) {
  return {.kind = CollKind::kAllToAll,
          .in = in,
          .out = out,
          .in_splits = in_splits,
          .out_splits = out_splits};
}
Collective send_of(const Tensor& t, int to) {
  return {.kind = CollKind::kSend, .peer = to, .in = one(t)};
}
Collective recv_of(const Tensor& t, int from) {
  return {.kind = CollKind::kRecv, .peer = from, .out = one(t)};
}

}  // namespace

const CollTraits& traits(CollKind kind) { return kTraits[int(kind)]; }
std::string_view name_of(CollKind kind) { return traits(kind).name; }
std::string_view name_of(ReduceOp op) { return kOpNames[int(op)]; }

CollKind parse_coll_kind(std::string_view name) {
  std::string all;
  for (int k = 0; k < kNumCollKinds; ++k) {
    if (kTraits[k].name == name) return CollKind(k);
    all += fmt::format("{}{}", k ? ", " : "", kTraits[k].name);
  }
  throw UserError(
      fmt::format("collective \"{}\": unknown; use one of {}", name.substr(0, 64), all));
}

void ProcessGroup::all_reduce(const Tensor& t, ReduceOp op, Millis timeout, CallSite site) {
  submit(Call{timeout, site}.waiting(all_reduce_of(t, op)));
}
Ref<Work> ProcessGroup::all_reduce_async(const Tensor& t, ReduceOp op, Millis timeout,
                                         CallSite site) {
  return submit(Call{timeout, site}.pending(all_reduce_of(t, op)));
}

void ProcessGroup::reduce(const Tensor& t, int root, ReduceOp op, Millis timeout, CallSite site) {
  submit(Call{timeout, site}.waiting(reduce_of(t, root, op, rank() == root)));
}
Ref<Work> ProcessGroup::reduce_async(const Tensor& t, int root, ReduceOp op, Millis timeout,
                                     CallSite site) {
  return submit(Call{timeout, site}.pending(reduce_of(t, root, op, rank() == root)));
}

void ProcessGroup::broadcast(const Tensor& t, int root, Millis timeout, CallSite site) {
  submit(Call{timeout, site}.waiting(broadcast_of(t, root, rank() == root)));
}
Ref<Work> ProcessGroup::broadcast_async(const Tensor& t, int root, Millis timeout, CallSite site) {
  return submit(Call{timeout, site}.pending(broadcast_of(t, root, rank() == root)));
}

void ProcessGroup::all_gather(const Tensor& out, const Tensor& in, Millis timeout, CallSite site) {
  submit(Call{timeout, site}.waiting(all_gather_of(one(out), in)));
}
Ref<Work> ProcessGroup::all_gather_async(const Tensor& out, const Tensor& in, Millis timeout,
                                         CallSite site) {
  return submit(Call{timeout, site}.pending(all_gather_of(one(out), in)));
}

void ProcessGroup::all_gather(TensorSpan out, const Tensor& in, Millis timeout, CallSite site) {
  submit(Call{timeout, site}.waiting(all_gather_of(out, in)));
}
Ref<Work> ProcessGroup::all_gather_async(TensorSpan out, const Tensor& in, Millis timeout,
                                         CallSite site) {
  return submit(Call{timeout, site}.pending(all_gather_of(out, in)));
}

void ProcessGroup::gather(TensorSpan out, const Tensor& in, int root, Millis timeout,
                          CallSite site) {
  submit(Call{timeout, site}.waiting(gather_of(out, in, root)));
}
Ref<Work> ProcessGroup::gather_async(TensorSpan out, const Tensor& in, int root, Millis timeout,
                                     CallSite site) {
  return submit(Call{timeout, site}.pending(gather_of(out, in, root)));
}

void ProcessGroup::scatter(const Tensor& out, TensorSpan in, int root, Millis timeout,
                           CallSite site) {
  submit(Call{timeout, site}.waiting(scatter_of(out, in, root)));
}
Ref<Work> ProcessGroup::scatter_async(const Tensor& out, TensorSpan in, int root, Millis timeout,
                                      CallSite site) {
  return submit(Call{timeout, site}.pending(scatter_of(out, in, root)));
}

void ProcessGroup::reduce_scatter(const Tensor& out, const Tensor& in, ReduceOp op, Millis timeout,
                                  CallSite site) {
  submit(Call{timeout, site}.waiting(reduce_scatter_of(out, one(in), op)));
}
Ref<Work> ProcessGroup::reduce_scatter_async(const Tensor& out, const Tensor& in, ReduceOp op,
                                             Millis timeout, CallSite site) {
  return submit(Call{timeout, site}.pending(reduce_scatter_of(out, one(in), op)));
}

void ProcessGroup::reduce_scatter(const Tensor& out, TensorSpan in, ReduceOp op, Millis timeout,
                                  CallSite site) {
  submit(Call{timeout, site}.waiting(reduce_scatter_of(out, in, op)));
}
Ref<Work> ProcessGroup::reduce_scatter_async(const Tensor& out, TensorSpan in, ReduceOp op,
                                             Millis timeout, CallSite site) {
  return submit(Call{timeout, site}.pending(reduce_scatter_of(out, in, op)));
}

void ProcessGroup::all_to_all(const Tensor& out, const Tensor& in, Millis timeout, CallSite site) {
  submit(Call{timeout, site}.waiting(all_to_all_of(one(out), one(in))));
}
Ref<Work> ProcessGroup::all_to_all_async(const Tensor& out, const Tensor& in, Millis timeout,
                                         CallSite site) {
  return submit(Call{timeout, site}.pending(all_to_all_of(one(out), one(in))));
}

void ProcessGroup::all_to_all(const Tensor& out, const Tensor& in, Splits out_splits,
                              Splits in_splits, Millis timeout, CallSite site) {
  submit(Call{timeout, site}.waiting(all_to_all_of(one(out), one(in), out_splits, in_splits)));
}
Ref<Work> ProcessGroup::all_to_all_async(const Tensor& out, const Tensor& in, Splits out_splits,
                                         Splits in_splits, Millis timeout, CallSite site) {
  return submit(
      Call{timeout, site}.pending(all_to_all_of(one(out), one(in), out_splits, in_splits)));
}

void ProcessGroup::all_to_all(TensorSpan out, TensorSpan in, Millis timeout, CallSite site) {
  submit(Call{timeout, site}.waiting(all_to_all_of(out, in)));
}
Ref<Work> ProcessGroup::all_to_all_async(TensorSpan out, TensorSpan in, Millis timeout,
                                         CallSite site) {
  return submit(Call{timeout, site}.pending(all_to_all_of(out, in)));
}

void ProcessGroup::barrier(Millis timeout, CallSite site) {
  submit(Call{timeout, site}.waiting({.kind = CollKind::kBarrier}));
}
Ref<Work> ProcessGroup::barrier_async(Millis timeout, CallSite site) {
  return submit(Call{timeout, site}.pending({.kind = CollKind::kBarrier}));
}

void ProcessGroup::send(const Tensor& t, int to, Millis timeout, CallSite site) {
  submit(Call{timeout, site}.waiting(send_of(t, to)));
}
Ref<Work> ProcessGroup::send_async(const Tensor& t, int to, Millis timeout, CallSite site) {
  return submit(Call{timeout, site}.pending(send_of(t, to)));
}

void ProcessGroup::recv(const Tensor& t, int from, Millis timeout, CallSite site) {
  submit(Call{timeout, site}.waiting(recv_of(t, from)));
}
Ref<Work> ProcessGroup::recv_async(const Tensor& t, int from, Millis timeout, CallSite site) {
  return submit(Call{timeout, site}.pending(recv_of(t, from)));
}

Ref<ProcessGroup> ProcessGroup::new_group(std::span<const int> ranks, CallSite site) {
  int place = -1;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const bool twice = std::ranges::count(ranks, ranks[i]) > 1;
    TESSERA_CHECK(ranks[i] >= 0 && ranks[i] < size() && !twice,
                  "new_group: rank {} {}; name ranks of this group, 0 to {}, once each", ranks[i],
                  twice ? "is named twice" : "is not there", size() - 1);
    if (ranks[i] == rank()) place = int(i);
  }
  return split(place < 0 ? -1 : 0, std::max(place, 0), site);
}

}  // namespace tessera
