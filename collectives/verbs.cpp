// The verbs of a process group, each of which fills one Collective and submits it.
#include <fmt/format.h>

#include "collectives/process_group.h"

namespace tessera {
namespace {

constexpr std::string_view kKindNames[kNumCollKinds] = {
    "all_reduce",     "reduce",     "broadcast", "all_gather", "gather", "scatter",
    "reduce_scatter", "all_to_all", "barrier",   "send",       "recv"};
constexpr std::string_view kOpNames[kNumReduceOps] = {"sum", "avg",     "product", "min",
                                                      "max", "bit_and", "bit_or",  "bit_xor"};

using TensorSpan = std::span<const Tensor>;

TensorSpan one(const Tensor& t) { return {&t, 1}; }

}  // namespace

std::string_view name_of(CollKind kind) { return kKindNames[int(kind)]; }
std::string_view name_of(ReduceOp op) { return kOpNames[int(op)]; }

CollKind parse_coll_kind(std::string_view name) {
  for (int k = 0; k < kNumCollKinds; ++k)
    if (kKindNames[k] == name) return CollKind(k);
  throw UserError(fmt::format("collective \"{}\": unknown; use one of {}", name.substr(0, 64),
                              fmt::join(kKindNames, ", ")));
}

void ProcessGroup::all_reduce(const Tensor& t, ReduceOp op, Millis timeout, CallSite site) {
  submit({.kind = CollKind::kAllReduce,
          .op = op,
          .in = one(t),
          .out = one(t),
          .timeout = timeout,
          .site = site});
}
Ref<Work> ProcessGroup::all_reduce_async(const Tensor& t, ReduceOp op, Millis timeout,
                                         CallSite site) {
  return submit({.kind = CollKind::kAllReduce,
                 .op = op,
                 .in = one(t),
                 .out = one(t),
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::reduce(const Tensor& t, int root, ReduceOp op, Millis timeout, CallSite site) {
  submit({.kind = CollKind::kReduce,
          .op = op,
          .peer = root,
          .in = one(t),
          .out = rank() == root ? one(t) : TensorSpan{},
          .timeout = timeout,
          .site = site});
}
Ref<Work> ProcessGroup::reduce_async(const Tensor& t, int root, ReduceOp op, Millis timeout,
                                     CallSite site) {
  return submit({.kind = CollKind::kReduce,
                 .op = op,
                 .peer = root,
                 .in = one(t),
                 .out = rank() == root ? one(t) : TensorSpan{},
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::broadcast(const Tensor& t, int root, Millis timeout, CallSite site) {
  submit({.kind = CollKind::kBroadcast,
          .peer = root,
          .in = rank() == root ? one(t) : TensorSpan{},
          .out = rank() == root ? TensorSpan{} : one(t),
          .timeout = timeout,
          .site = site});
}
Ref<Work> ProcessGroup::broadcast_async(const Tensor& t, int root, Millis timeout, CallSite site) {
  return submit({.kind = CollKind::kBroadcast,
                 .peer = root,
                 .in = rank() == root ? one(t) : TensorSpan{},
                 .out = rank() == root ? TensorSpan{} : one(t),
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::all_gather(const Tensor& out, const Tensor& in, Millis timeout, CallSite site) {
  submit({.kind = CollKind::kAllGather,
          .in = one(in),
          .out = one(out),
          .timeout = timeout,
          .site = site});
}
Ref<Work> ProcessGroup::all_gather_async(const Tensor& out, const Tensor& in, Millis timeout,
                                         CallSite site) {
  return submit({.kind = CollKind::kAllGather,
                 .in = one(in),
                 .out = one(out),
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::all_gather(TensorSpan out, const Tensor& in, Millis timeout, CallSite site) {
  submit(
      {.kind = CollKind::kAllGather, .in = one(in), .out = out, .timeout = timeout, .site = site});
}
Ref<Work> ProcessGroup::all_gather_async(TensorSpan out, const Tensor& in, Millis timeout,
                                         CallSite site) {
  return submit({.kind = CollKind::kAllGather,
                 .in = one(in),
                 .out = out,
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::gather(TensorSpan out, const Tensor& in, int root, Millis timeout,
                          CallSite site) {
  submit({.kind = CollKind::kGather,
          .peer = root,
          .in = one(in),
          .out = out,
          .timeout = timeout,
          .site = site});
}
Ref<Work> ProcessGroup::gather_async(TensorSpan out, const Tensor& in, int root, Millis timeout,
                                     CallSite site) {
  return submit({.kind = CollKind::kGather,
                 .peer = root,
                 .in = one(in),
                 .out = out,
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::scatter(const Tensor& out, TensorSpan in, int root, Millis timeout,
                           CallSite site) {
  submit({.kind = CollKind::kScatter,
          .peer = root,
          .in = in,
          .out = one(out),
          .timeout = timeout,
          .site = site});
}
Ref<Work> ProcessGroup::scatter_async(const Tensor& out, TensorSpan in, int root, Millis timeout,
                                      CallSite site) {
  return submit({.kind = CollKind::kScatter,
                 .peer = root,
                 .in = in,
                 .out = one(out),
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::reduce_scatter(const Tensor& out, const Tensor& in, ReduceOp op, Millis timeout,
                                  CallSite site) {
  submit({.kind = CollKind::kReduceScatter,
          .op = op,
          .in = one(in),
          .out = one(out),
          .timeout = timeout,
          .site = site});
}
Ref<Work> ProcessGroup::reduce_scatter_async(const Tensor& out, const Tensor& in, ReduceOp op,
                                             Millis timeout, CallSite site) {
  return submit({.kind = CollKind::kReduceScatter,
                 .op = op,
                 .in = one(in),
                 .out = one(out),
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::reduce_scatter(const Tensor& out, TensorSpan in, ReduceOp op, Millis timeout,
                                  CallSite site) {
  submit({.kind = CollKind::kReduceScatter,
          .op = op,
          .in = in,
          .out = one(out),
          .timeout = timeout,
          .site = site});
}
Ref<Work> ProcessGroup::reduce_scatter_async(const Tensor& out, TensorSpan in, ReduceOp op,
                                             Millis timeout, CallSite site) {
  return submit({.kind = CollKind::kReduceScatter,
                 .op = op,
                 .in = in,
                 .out = one(out),
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::all_to_all(const Tensor& out, const Tensor& in, Millis timeout, CallSite site) {
  submit({.kind = CollKind::kAllToAll,
          .in = one(in),
          .out = one(out),
          .timeout = timeout,
          .site = site});
}
Ref<Work> ProcessGroup::all_to_all_async(const Tensor& out, const Tensor& in, Millis timeout,
                                         CallSite site) {
  return submit({.kind = CollKind::kAllToAll,
                 .in = one(in),
                 .out = one(out),
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::all_to_all(const Tensor& out, const Tensor& in,
                              std::span<const int64_t> out_splits,
                              std::span<const int64_t> in_splits, Millis timeout, CallSite site) {
  submit({.kind = CollKind::kAllToAll,
          .in = one(in),
          .out = one(out),
          .in_splits = in_splits,
          .out_splits = out_splits,
          .timeout = timeout,
          .site = site});
}
Ref<Work> ProcessGroup::all_to_all_async(const Tensor& out, const Tensor& in,
                                         std::span<const int64_t> out_splits,
                                         std::span<const int64_t> in_splits, Millis timeout,
                                         CallSite site) {
  return submit({.kind = CollKind::kAllToAll,
                 .in = one(in),
                 .out = one(out),
                 .in_splits = in_splits,
                 .out_splits = out_splits,
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::all_to_all(TensorSpan out, TensorSpan in, Millis timeout, CallSite site) {
  submit({.kind = CollKind::kAllToAll, .in = in, .out = out, .timeout = timeout, .site = site});
}
Ref<Work> ProcessGroup::all_to_all_async(TensorSpan out, TensorSpan in, Millis timeout,
                                         CallSite site) {
  return submit({.kind = CollKind::kAllToAll,
                 .in = in,
                 .out = out,
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::barrier(Millis timeout, CallSite site) {
  submit({.kind = CollKind::kBarrier, .timeout = timeout, .site = site});
}
Ref<Work> ProcessGroup::barrier_async(Millis timeout, CallSite site) {
  return submit({.kind = CollKind::kBarrier, .timeout = timeout, .async = true, .site = site});
}

void ProcessGroup::send(const Tensor& t, int to, Millis timeout, CallSite site) {
  submit({.kind = CollKind::kSend, .peer = to, .in = one(t), .timeout = timeout, .site = site});
}
Ref<Work> ProcessGroup::send_async(const Tensor& t, int to, Millis timeout, CallSite site) {
  return submit({.kind = CollKind::kSend,
                 .peer = to,
                 .in = one(t),
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

void ProcessGroup::recv(const Tensor& t, int from, Millis timeout, CallSite site) {
  submit({.kind = CollKind::kRecv, .peer = from, .out = one(t), .timeout = timeout, .site = site});
}
Ref<Work> ProcessGroup::recv_async(const Tensor& t, int from, Millis timeout, CallSite site) {
  return submit({.kind = CollKind::kRecv,
                 .peer = from,
                 .out = one(t),
                 .timeout = timeout,
                 .async = true,
                 .site = site});
}

}  // namespace tessera
