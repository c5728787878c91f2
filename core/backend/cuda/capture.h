// CUDA graphs: what a thread enqueues on a card is captured, and enqueued again by one call. Memory
// that is freed while it is captured stays allocated as long as the graph lives, because each
// launch uses it again.
#pragma once
#include <span>

#include "core/tensor/device_runtime.h"

namespace tessera::cuda {

/// What a captured graph uses beside the driver and is told of its launches: a communicator, say.
/// It lives until the graph has been destroyed.
class GraphPart : public RefCounted {
 public:
  /// The graph is about to be launched on `stream`. Throws what forbids that.
  virtual void before_launch(const Stream& stream) = 0;
  virtual void launched(const Stream& stream) = 0;
};

/// As DeviceRuntime::capture.
Ref<DeviceGraph> capture(int device, FunctionRef<void()> enqueue);

/// The stream whose work a block that the calling thread allocates on card `device` comes after:
/// its compute stream, or while it captures, the one that the graph will be launched on.
Stream allocation_stream(int device);
/// Whether the calling thread captures what it enqueues on `stream`.
bool is_captured(const Stream& stream);
/// `stream` is captured too until the capture of the calling thread ends: it waits for a stream
/// that is.
void note_captured(const Stream& stream);
/// The part of `owner` in what the calling thread captures; `make` makes it at the first call.
GraphPart& captured_part(const void* owner, FunctionRef<Ref<GraphPart>()> make);
/// A tensor whose values are written once, on allocation_stream(), and read at each launch of a
/// graph that is captured meanwhile: no other work of the graph uses its memory.
Tensor constant_memory(const Meta& meta);
/// Tells that the calling thread has a new block.
void note_allocated(const void* p);
/// While the calling thread captures: a block of `allocator` that was freed since the capture
/// began, on the stream that is its compute stream now, at least `bytes` large, for work that comes
/// later in the same graph; else null.
void* kept_block(Allocator& allocator, size_t bytes);
/// Whether the calling thread captures; `allocator` is then asked to free the block when the graph
/// dies, and must not free it now.
bool kept_for_graph(Allocator& allocator, void* p, size_t bytes,
                    std::span<const Ref<Event>> pending);

}  // namespace tessera::cuda
