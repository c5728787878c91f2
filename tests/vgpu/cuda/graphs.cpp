// Capture and graphs. A captured op is a node: an op that never runs. A launch makes an op of each,
// in lanes of the graph's own, between a beginning and an end in the stream; launches of one graph
// follow each other.
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "tests/vgpu/cuda/api.h"

namespace vgpu {
void capture_begins(const std::shared_ptr<Capture>& capture);
void capture_ends(const std::shared_ptr<Capture>& capture);
}  // namespace vgpu

namespace tessera::cuda {

using namespace vgpu;

namespace {

bool is_shown(const Op& op) { return op.kind != OpKind::kEvent && op.kind != OpKind::kMarker; }

NodeType type_of(const Op& op) {
  switch (op.kind) {
    case OpKind::kKernel: return NodeType::kKernel;
    case OpKind::kMemcpy: return NodeType::kMemcpy;
    case OpKind::kMemset: return NodeType::kMemset;
    case OpKind::kHost: return NodeType::kHost;
    default: return NodeType::kEmpty;
  }
}

// "" or what other streams were given and the origin does not wait for.
std::string unjoined(const Capture& c) {
  std::unordered_map<const Op*, bool> reached;
  std::vector<OpRef> open(c.origin->waits);
  if (c.origin->last) open.push_back(c.origin->last);
  while (!open.empty()) {
    const OpRef op = open.back();
    open.pop_back();
    if (reached[op.get()]) continue;
    reached[op.get()] = true;
    for (const OpRef& a : op->after) open.push_back(a);
  }
  for (const OpRef& n : c.nodes)
    if (!reached[n.get()] && n->kind != OpKind::kEvent) return n->name;
  return "";
}

OpRef copy_of(const Op& node) {
  auto op = std::make_shared<Op>();
  op->kind = node.kind, op->name = node.name, op->device = node.device, op->run = node.run;
  op->call = node.call, op->host_buffers = node.host_buffers, op->lane = node.lane;
  op->launched = node.launched;
  return op;
}

void set_call(const OpRef& op, std::shared_ptr<KernelCall> call) {
  op->call = call, op->name = call->function->name;
  op->run = [call] { run_call(*call); };
}

// A graph launches on the devices of its nodes: each captured lane gets one of the graph's own.
uint32_t lane_of(GraphExecObject& e, const Op& node) {
  for (const auto& [captured, lane] : e.lanes)
    if (captured == node.lane) return lane;
  e.lanes.emplace_back(node.lane, gpu().new_lane(node.device));
  return e.lanes.back().second;
}

template <class T>
Result check(const char* call, const T* object) {
  if (is_handle(object)) return Result::kSuccess;
  return refuse(Result::kInvalidHandle, call, "no such object, or one that was destroyed");
}

}  // namespace

extern "C" {

Result cuStreamBeginCapture_v2(StreamHandle stream, int mode) {
  return on_stream(__func__, stream, [&](StreamObject& s) {
    if (s.capture) return refuse(Result::kIllegalState, "cuStreamBeginCapture", "it is captured");
    if (mode < kCaptureGlobal || mode > kCaptureRelaxed) return Result::kInvalidValue;
    s.capture = std::make_shared<Capture>();
    *s.capture = {&s, {&s}, {}, mode, std::this_thread::get_id()};
    s.last = nullptr, s.waits.clear();
    capture_begins(s.capture);
    return Result::kSuccess;
  });
}
Result cuStreamEndCapture(StreamHandle stream, GraphHandle* graph) {
  return in_context(__func__, [&](int device) {
    *graph = nullptr;
    if (!is_handle(stream))
      return refuse(Result::kInvalidHandle, "cuStreamEndCapture", "no stream");
    const std::shared_ptr<Capture> c = stream->capture;
    if (!c)
      return refuse(Result::kIllegalState, "cuStreamEndCapture", "the stream is not captured");
    if (c->origin != stream) {
      c->invalid = true;
      return refuse(Result::kStreamCaptureUnmatched, "cuStreamEndCapture",
                    "the capture began in another stream");
    }
    if (c->mode != kCaptureRelaxed && c->thread != std::this_thread::get_id())
      return refuse(Result::kStreamCaptureWrongThread, "cuStreamEndCapture",
                    "the capture began in another thread");
    const std::string left = unjoined(*c);
    const std::vector<OpRef> nodes = std::move(c->nodes);
    std::vector<std::shared_ptr<void>> owned;  // events keep nodes
    for (const OpRef& op : nodes)
      if (op->owned) owned.push_back(std::move(op->owned));
    c->ended = true;
    for (StreamObject* s : c->streams)
      if (is_handle(s)) s->capture = nullptr, s->last = nullptr, s->waits.clear();
    capture_ends(c);
    if (c->invalid) return Result::kStreamCaptureInvalidated;
    if (!left.empty())
      return refuse(Result::kStreamCaptureUnjoined, "cuStreamEndCapture",
                    "nothing waits for '" + left + "' of another stream");
    auto g = std::make_unique<GraphObject>();
    g->device = device, g->ops = nodes, g->owned = std::move(owned);
    for (const OpRef& op : g->ops)
      if (is_shown(*op)) g->nodes.push_back(std::make_unique<NodeObject>(NodeObject{op}));
    for (const auto& n : g->nodes) handles<NodeObject>().insert(n.get());
    *graph = hand_out(std::move(g));
    return Result::kSuccess;
  });
}
Result cuStreamIsCapturing(StreamHandle stream, int* status) {
  return in_context(__func__, [&](int) {
    if (!is_handle(stream))
      return refuse(Result::kInvalidHandle, "cuStreamIsCapturing", "no stream");
    *status = !stream->capture           ? kCaptureNone
              : stream->capture->invalid ? kCaptureInvalidated
                                         : kCaptureActive;
    return Result::kSuccess;
  });
}

Result cuGraphDestroy(GraphHandle graph) {
  return in_driver(__func__, [&] {
    if (const Result r = check("cuGraphDestroy", graph); r != Result::kSuccess) return r;
    for (const auto& n : graph->nodes) handles<NodeObject>().erase(n.get());
    handles<GraphObject>().erase(graph);
    delete graph;
    return Result::kSuccess;
  });
}
Result cuGraphGetNodes(GraphHandle graph, NodeHandle* nodes, size_t* count) {
  return in_driver(__func__, [&] {
    if (const Result r = check("cuGraphGetNodes", graph); r != Result::kSuccess) return r;
    if (!nodes) return *count = graph->nodes.size(), Result::kSuccess;
    for (size_t i = 0; i < *count; ++i)
      nodes[i] = i < graph->nodes.size() ? graph->nodes[i].get() : nullptr;
    *count = std::min(*count, graph->nodes.size());
    return Result::kSuccess;
  });
}
Result cuGraphNodeGetType(NodeHandle node, NodeType* type) {
  return in_driver(__func__, [&] {
    if (const Result r = check("cuGraphNodeGetType", node); r != Result::kSuccess) return r;
    *type = type_of(*node->op);
    return Result::kSuccess;
  });
}
Result cuGraphKernelNodeGetParams_v2(NodeHandle node, KernelNodeParams* params) {
  return in_driver(__func__, [&] {
    if (const Result r = check("cuGraphKernelNodeGetParams", node); r != Result::kSuccess) return r;
    KernelCall* c = node->op->call.get();
    if (!c) return refuse(Result::kInvalidValue, "cuGraphKernelNodeGetParams", "no kernel's node");
    *params = {c->function,          c->blocks.x,  c->blocks.y,  c->blocks.z,
               c->threads.x,         c->threads.y, c->threads.z, c->dynamic_bytes,
               c->parameters.data(), nullptr,      nullptr,      c->context};
    return Result::kSuccess;
  });
}

Result cuGraphInstantiateWithFlags(GraphExecHandle* exec, GraphHandle graph,
                                   unsigned long long flags) {
  return in_context(__func__, [&](int device) {
    if (const Result r = check("cuGraphInstantiate", graph); r != Result::kSuccess) return r;
    if (flags) return refuse(Result::kInvalidValue, "cuGraphInstantiate", "flags are not emulated");
    auto e = std::make_unique<GraphExecObject>();
    e->device = device, e->sources = graph->ops, e->owned = graph->owned;
    std::unordered_map<const Op*, OpRef> made;
    for (const OpRef& node : graph->ops) {
      const OpRef op = made[node.get()] = copy_of(*node);
      op->lane = lane_of(*e, *node);
      for (const OpRef& a : node->after) op->after.push_back(made.at(a.get()));
      e->ops.push_back(op);
    }
    *exec = hand_out(std::move(e));
    return Result::kSuccess;
  });
}
Result cuGraphExecDestroy(GraphExecHandle exec) {
  return in_driver(__func__, [&] {
    if (const Result r = check("cuGraphExecDestroy", exec); r != Result::kSuccess) return r;
    for (const auto& [captured, lane] : exec->lanes) gpu().give_back_lane(lane);
    handles<GraphExecObject>().erase(exec);
    delete exec;
    return Result::kSuccess;
  });
}
// The same nodes in the same places, with other parameters.
Result cuGraphExecUpdate_v2(GraphExecHandle exec, GraphHandle graph, GraphUpdateInfo* info) {
  return in_context(__func__, [&](int) {
    Result r = check("cuGraphExecUpdate", exec);
    if (r == Result::kSuccess) r = check("cuGraphExecUpdate", graph);
    if (r != Result::kSuccess) return r;
    constexpr int kTopologyChanged = 2, kTypeChanged = 3;
    *info = {};
    const auto place = [](const std::vector<OpRef>& ops, const OpRef& op) {
      return std::ranges::find(ops, op) - ops.begin();
    };
    if (graph->ops.size() != exec->ops.size()) info->result = kTopologyChanged;
    for (size_t i = 0; i < graph->ops.size() && !info->result; ++i) {
      const Op &now = *graph->ops[i], &before = *exec->ops[i];
      if (now.kind != before.kind)
        info->result = kTypeChanged;
      else if (now.after.size() != before.after.size())
        info->result = kTopologyChanged;
      for (size_t k = 0; k < now.after.size() && !info->result; ++k)
        if (place(graph->ops, now.after[k]) != place(exec->ops, before.after[k]))
          info->result = kTopologyChanged;
    }
    if (info->result) return Result::kGraphExecUpdateFailure;
    for (size_t i = 0; i < graph->ops.size(); ++i) {
      const Op& now = *graph->ops[i];
      Op& op = *exec->ops[i];
      op.run = now.run, op.call = now.call, op.name = now.name, op.host_buffers = now.host_buffers;
      op.launched = now.launched;
    }
    exec->owned = graph->owned;
    return Result::kSuccess;
  });
}
Result cuGraphExecKernelNodeSetParams_v2(GraphExecHandle exec, NodeHandle node,
                                         const KernelNodeParams* p) {
  return in_context(__func__, [&](int) {
    Result r = check("cuGraphExecKernelNodeSetParams", exec);
    if (r == Result::kSuccess) r = check("cuGraphExecKernelNodeSetParams", node);
    if (r != Result::kSuccess) return r;
    const auto source = std::ranges::find(exec->sources, node->op);
    if (source == exec->sources.end() || !node->op->call)
      return refuse(Result::kInvalidValue, "cuGraphExecKernelNodeSetParams",
                    "no kernel's node of the graph that was instantiated");
    auto call = make_call("cuGraphExecKernelNodeSetParams", &r, p->function,
                          {p->grid_x, p->grid_y, p->grid_z}, {p->block_x, p->block_y, p->block_z},
                          p->shared_bytes, p->parameters, p->extra);
    if (call) set_call(exec->ops[static_cast<size_t>(source - exec->sources.begin())], call);
    return r;
  });
}
Result cuGraphUpload(GraphExecHandle exec, StreamHandle stream) {
  return on_stream(__func__, stream, [&](StreamObject&) { return check("cuGraphUpload", exec); });
}
Result cuGraphLaunch(GraphExecHandle exec, StreamHandle stream) {
  return on_stream(__func__, stream, [&](StreamObject& s) {
    if (const Result r = check("cuGraphLaunch", exec); r != Result::kSuccess) return r;
    if (s.capture)
      return refuse(Result::kNotSupported, "cuGraphLaunch",
                    "a graph within a graph is not emulated");
    Gpu& g = gpu();
    if (exec->last) s.waits.push_back(exec->last);
    const OpRef begin = g.submit(s, OpKind::kMarker, "graph", nullptr);
    std::unordered_map<const Op*, OpRef> made;
    for (const OpRef& node : exec->ops) {
      const OpRef op = made[node.get()] = copy_of(*node);
      op->after = {begin};
      for (const OpRef& a : node->after) op->after.push_back(made.at(a.get()));
      if (const auto launched = std::exchange(op->launched, nullptr)) launched(op);
      g.add(op);
      s.waits.push_back(op);
    }
    exec->last = g.submit(s, OpKind::kMarker, "end of a graph", nullptr);
    g.run_some();
    return Result::kSuccess;
  });
}
}

}  // namespace tessera::cuda
