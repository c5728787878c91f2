#include "core/backend/cuda/capture.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/library.h"
#include "core/backend/cuda/refusals.h"
#include "core/backend/cuda/stream.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {
namespace {

// A block that was freed while work was captured.
struct Kept {
  Allocator* allocator;
  void* at;
  size_t bytes;
  Stream freed_on = {};
  std::vector<Ref<Event>> pending = {};
  bool in_use = false;    // allocated again, by work that comes later in the graph
  bool constant = false;  // nothing else of the graph may use it
};

/// What a thread that captures knows of it.
struct Capturing {
  Stream launched_on, recorded;
  std::vector<Stream> sides = {};  // that follow it
  std::vector<Kept> kept = {};
  std::set<const void*> allocated = {};  // blocks that only work of the graph has used
  bool fresh = false;                    // allocations do not use a block that was kept
  std::unique_ptr<GraphRefusals> refusals = std::make_unique<GraphRefusals>();
  std::vector<std::pair<const void*, Ref<GraphPart>>> parts = {};  // by owner
};

thread_local Capturing* capturing = nullptr;

void free_all(std::vector<Kept>& kept, const Ref<Event>& last) {
  for (Kept& k : kept) {
    if (last) k.pending.push_back(last);
    k.allocator->deallocate_after(k.at, k.bytes, k.pending);
  }
  kept.clear();
}

class CapturedGraph final : public DeviceGraph {
 public:
  CapturedGraph(GraphExecHandle exec, int device, Capturing& what)
      : exec_(exec),
        device_(device),
        kept_(std::move(what.kept)),
        refusals_(std::move(what.refusals)) {
    for (auto& [owner, part] : what.parts) parts_.push_back(std::move(part));
  }
  ~CapturedGraph() override {
    try {
      CurrentDevice current(device_);
      const Ref<Event> last = launched_on_.handle ? make_ref<StreamEvent>(launched_on_) : nullptr;
      driver().graph_exec_destroy(exec_);  // once it has run, where it runs
      free_all(kept_, last);
    } catch (const Error& e) {
      logging::warn("cuda: a graph is not given back: {}", e.what());
    }
  }
  void launch(const Stream& stream) override {
    refusals_->launches();
    CurrentDevice current(device_);
    for (const Ref<GraphPart>& part : parts_) part->before_launch(stream);
    launched_on_ = stream;
    driver().graph_launch(exec_, handle_of(stream));
    for (const Ref<GraphPart>& part : parts_) part->launched(stream);
  }

 private:
  const GraphExecHandle exec_;
  const int device_;
  std::vector<Kept> kept_;
  std::unique_ptr<GraphRefusals> refusals_;
  std::vector<Ref<GraphPart>> parts_;
  Stream launched_on_;
};

// While it lives, the calling thread's compute stream is one that records what it is given.
class CaptureScope {
 public:
  explicit CaptureScope(Capturing& what) : before_(exchange_compute_stream(what.recorded)) {
    capturing = &what;
  }
  ~CaptureScope() {
    capturing = nullptr;
    exchange_compute_stream(before_);
  }
  CaptureScope(const CaptureScope&) = delete;
  CaptureScope& operator=(const CaptureScope&) = delete;

 private:
  const Stream before_;
};

}  // namespace

Ref<DeviceGraph> capture(int device, FunctionRef<void()> enqueue) {
  TESSERA_ASSERT(!capturing, "cuda: a capture within a capture");
  Capturing now{compute_stream(device), capture_stream(device)};
  const StreamHandle stream = handle_of(now.recorded);
  CurrentDevice current(device);
  GraphHandle graph = nullptr;
  GraphExecHandle exec = nullptr;
  try {
    driver().begin_capture(stream, kCaptureRelaxed);
    try {
      CaptureScope scope(now);
      GraphRefusals::Scope words(*now.refusals);
      enqueue();
    } catch (...) {
      driver().end_capture.result(stream, &graph);  // the first error is the one to report
      throw;
    }
    driver().end_capture(stream, &graph);
    driver().graph_instantiate(&exec, graph, 0);
  } catch (...) {
    if (graph) driver().graph_destroy.result(graph);
    free_all(now.kept, nullptr);
    throw;
  }
  driver().graph_destroy(graph);
  return make_ref<CapturedGraph>(exec, device, now);
}

GraphPart& captured_part(const void* owner, FunctionRef<Ref<GraphPart>()> make) {
  TESSERA_ASSERT(capturing, "cuda: a part of a graph, but none is captured");
  for (const auto& [of, part] : capturing->parts)
    if (of == owner) return *part;
  return *capturing->parts.emplace_back(owner, make()).second;
}

Stream allocation_stream(int device) {
  const bool here = capturing && capturing->launched_on.device.index == device;
  return here ? capturing->launched_on : compute_stream(device);
}

Tensor constant_memory(const Meta& meta) {
  if (!capturing) return empty(meta);
  capturing->fresh = true;
  Tensor t;
  try {
    t = empty(meta);
  } catch (...) {
    capturing->fresh = false;
    throw;
  }
  capturing->fresh = false;
  capturing->kept.push_back({.allocator = &allocator_of(meta.device),
                             .at = t.storage()->data(),
                             .bytes = t.storage()->bytes(),
                             .in_use = true,
                             .constant = true});
  return t;
}

void note_allocated(const void* p) {
  if (capturing) capturing->allocated.insert(p);
}

bool is_captured(const Stream& stream) {
  return capturing && (stream == capturing->recorded ||
                       std::ranges::find(capturing->sides, stream) != capturing->sides.end());
}

void note_captured(const Stream& stream) {
  if (!is_captured(stream)) capturing->sides.push_back(stream);
}

void* kept_block(Allocator& allocator, size_t bytes) {
  constexpr size_t kMostTimes = 4;  // as large as what is asked for
  if (!capturing || capturing->fresh) return nullptr;
  const Stream now = compute_stream(capturing->recorded.device.index);
  Kept* best = nullptr;
  for (Kept& k : capturing->kept)
    if (k.allocator == &allocator && !k.in_use && k.freed_on == now && k.bytes >= bytes &&
        k.bytes <= kMostTimes * bytes && (!best || k.bytes < best->bytes))
      best = &k;
  if (!best) return nullptr;
  best->in_use = true;
  return best->at;
}

bool kept_for_graph(Allocator& allocator, void* p, size_t bytes,
                    std::span<const Ref<Event>> pending) {
  if (!capturing) return false;
  const Stream now = compute_stream(capturing->recorded.device.index);
  for (Kept& k : capturing->kept)
    if (k.allocator == &allocator && k.at == p) {
      k.in_use = k.constant;
      k.freed_on = now;
      k.pending.insert(k.pending.end(), pending.begin(), pending.end());
      return true;
    }
  const bool was_there = !capturing->allocated.contains(p);
  capturing->kept.push_back({.allocator = &allocator,
                             .at = p,
                             .bytes = bytes,
                             .freed_on = now,
                             .pending = {pending.begin(), pending.end()},
                             .in_use = was_there,
                             .constant = was_there});
  return true;
}

}  // namespace tessera::cuda
