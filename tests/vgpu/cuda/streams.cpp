// Streams and events, host functions, and where captures say no.
#include <algorithm>

#include "tests/vgpu/cuda/api.h"

namespace vgpu {

namespace {

std::vector<std::shared_ptr<Capture>>& captures() {  // that go on
  static auto* all = new std::vector<std::shared_ptr<Capture>>;
  return *all;
}

}  // namespace

void capture_begins(const std::shared_ptr<Capture>& capture) { captures().push_back(capture); }
void capture_ends(const std::shared_ptr<Capture>& capture) { std::erase(captures(), capture); }

// In the mode `global` any capture of the process forbids, in `thread-local` this thread's.
Result forbidden_in_capture(const char* call) {
  for (const auto& c : captures()) {
    const bool mine = c->thread == std::this_thread::get_id();
    if (c->mode == kCaptureGlobal || (c->mode == kCaptureThreadLocal && mine)) {
      c->invalid = true;
      return refuse(Result::kStreamCaptureUnsupported, call, "while a stream is captured");
    }
  }
  return Result::kSuccess;
}

Result check_stream(const char* call, StreamHandle stream, bool of_current) {
  if (!stream)
    return refuse(Result::kInvalidHandle, call,
                  "the legacy stream orders itself with all others; name a stream");
  if (!is_handle(stream)) return refuse(Result::kInvalidHandle, call, "the stream was destroyed");
  const ContextObject* context = current_context();
  if (of_current && context && context->device != stream->device)
    return refuse(Result::kInvalidHandle, call,
                  "wrong device: a stream of device " + std::to_string(stream->device) +
                      " while device " + std::to_string(context->device) + " is current");
  if (stream->capture && stream->capture->invalid) return Result::kStreamCaptureInvalidated;
  return Result::kSuccess;
}

OpRef enqueue(StreamObject& s, OpKind kind, std::string name, std::function<void()> run,
              std::vector<Op::HostBuffer> host_buffers) {
  OpRef op = gpu().submit(s, kind, std::move(name), std::move(run), std::move(host_buffers));
  if (s.capture)
    s.capture->nodes.push_back(op);
  else
    gpu().run_some();
  return op;
}

}  // namespace vgpu

namespace tessera::cuda {

using namespace vgpu;

namespace {

Result check_event(const char* call, EventHandle event) {
  if (is_handle(event)) return Result::kSuccess;
  return refuse(Result::kInvalidHandle, call, "no event, or one that was destroyed");
}
// The host asks for what a captured event will be.
Result captured(const char* call, const EventObject& event) {
  if (!event.op || !event.op->capture) return Result::kSuccess;
  if (!event.op->capture->ended) event.op->capture->invalid = true;
  return refuse(Result::kCapturedEvent, call, "the event was recorded in a capture");
}
Result unsupported_in_capture(const char* call, StreamObject& s) {
  if (!s.capture) return Result::kSuccess;
  s.capture->invalid = true;
  return refuse(Result::kStreamCaptureUnsupported, call, "the stream is captured");
}

}  // namespace

extern "C" {

Result cuStreamCreateWithPriority(StreamHandle* stream, unsigned flags, int) {
  return in_context(__func__, [&](int device) {
    if (flags != static_cast<unsigned>(kStreamNonBlocking))
      return refuse(Result::kInvalidValue, "cuStreamCreateWithPriority",
                    "ask for CU_STREAM_NON_BLOCKING: others wait for the legacy stream");
    auto s = std::make_unique<StreamObject>();
    s->device = device, s->lane = gpu().new_lane(device);
    *stream = hand_out(std::move(s));
    return Result::kSuccess;
  });
}
Result cuStreamDestroy_v2(StreamHandle stream) {
  return in_driver(__func__, [&] {
    if (const Result r = check_stream("cuStreamDestroy", stream, false); r != Result::kSuccess)
      return r;
    if (stream->capture)
      return refuse(Result::kInvalidValue, "cuStreamDestroy", "the stream is captured");
    gpu().give_back_lane(stream->lane);
    handles<StreamObject>().erase(stream);
    delete stream;
    return Result::kSuccess;
  });
}
Result cuStreamQuery(StreamHandle stream) {
  return in_context(__func__, [&](int) {
    Result r = check_stream("cuStreamQuery", stream, false);
    if (r == Result::kSuccess) r = unsupported_in_capture("cuStreamQuery", *stream);
    if (r == Result::kSuccess) r = forbidden_in_capture("cuStreamQuery");
    if (r != Result::kSuccess) return r;
    bool done = !stream->last || gpu().query(stream->last);
    for (const OpRef& w : stream->waits) done = done && gpu().query(w);
    return done ? device_error(stream->device) : Result::kNotReady;
  });
}
Result cuStreamSynchronize(StreamHandle stream) {
  return in_context(__func__, [&](int) {
    Result r = check_stream("cuStreamSynchronize", stream, false);
    if (r == Result::kSuccess) r = unsupported_in_capture("cuStreamSynchronize", *stream);
    if (r == Result::kSuccess) r = forbidden_in_capture("cuStreamSynchronize");
    if (r != Result::kSuccess) return r;
    for (const OpRef& w : std::vector<OpRef>(stream->waits)) gpu().wait_for(w);
    if (const OpRef last = stream->last) gpu().wait_for(last);
    return device_error(stream->device);
  });
}

// A stream that waits for an event of a capture joins the capture.
Result cuStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned flags) {
  return in_context(__func__, [&](int) {
    Result r = check_stream("cuStreamWaitEvent", stream, false);
    if (r == Result::kSuccess) r = check_event("cuStreamWaitEvent", event);
    if (r != Result::kSuccess) return r;
    if (flags) return refuse(Result::kInvalidValue, "cuStreamWaitEvent", "flags are 0");
    const OpRef& op = event->op;
    if (!op) return Result::kSuccess;
    if (op->capture && op->capture->ended)
      return refuse(Result::kCapturedEvent, "cuStreamWaitEvent", "the event's capture has ended");
    if (stream->capture != op->capture) {
      if (stream->capture) {
        stream->capture->invalid = true;
        return refuse(Result::kStreamCaptureIsolation, "cuStreamWaitEvent",
                      "a captured stream waits for what is not in its capture");
      }
      stream->capture = op->capture, stream->last = nullptr, stream->waits.clear();
      op->capture->streams.push_back(stream);
    }
    stream->waits.push_back(op);
    return Result::kSuccess;
  });
}

Result cuEventCreate(EventHandle* event, unsigned flags) {
  return in_context(__func__, [&](int device) {
    constexpr unsigned kBlockingSync = 1;
    if (flags & ~(static_cast<unsigned>(kEventDisableTiming) | kBlockingSync))
      return refuse(Result::kInvalidValue, "cuEventCreate",
                    "flags " + text(flags) + " are not emulated");
    auto e = std::make_unique<EventObject>();
    e->device = device, e->has_time = !(flags & static_cast<unsigned>(kEventDisableTiming));
    *event = hand_out(std::move(e));
    return Result::kSuccess;
  });
}
Result cuEventDestroy_v2(EventHandle event) {
  return in_driver(__func__, [&] {
    if (const Result r = check_event("cuEventDestroy", event); r != Result::kSuccess) return r;
    handles<EventObject>().erase(event);
    delete event;
    return Result::kSuccess;
  });
}
Result cuEventRecord(EventHandle event, StreamHandle stream) {
  return in_context(__func__, [&](int) {
    Result r = check_event("cuEventRecord", event);
    if (r == Result::kSuccess) r = check_stream("cuEventRecord", stream, false);
    if (r != Result::kSuccess) return r;
    if (event->device != stream->device)
      return refuse(Result::kInvalidHandle, "cuEventRecord",
                    "wrong device: an event of device " + std::to_string(event->device) +
                        " in a stream of device " + std::to_string(stream->device));
    event->op = enqueue(*stream, OpKind::kEvent, "event", nullptr);
    return Result::kSuccess;
  });
}
Result cuEventQuery(EventHandle event) {
  return in_context(__func__, [&](int) {
    Result r = check_event("cuEventQuery", event);
    if (r == Result::kSuccess) r = captured("cuEventQuery", *event);
    if (r != Result::kSuccess) return r;
    if (event->op && !gpu().query(event->op)) return Result::kNotReady;
    return device_error(event->device);
  });
}
Result cuEventSynchronize(EventHandle event) {
  return in_context(__func__, [&](int) {
    Result r = check_event("cuEventSynchronize", event);
    if (r == Result::kSuccess) r = captured("cuEventSynchronize", *event);
    if (r != Result::kSuccess) return r;
    if (const OpRef op = event->op) gpu().wait_for(op);
    return device_error(event->device);
  });
}
Result cuEventElapsedTime(float* milliseconds, EventHandle from, EventHandle to) {
  return in_context(__func__, [&](int) {
    for (EventHandle e : {from, to}) {
      if (const Result r = check_event("cuEventElapsedTime", e); r != Result::kSuccess) return r;
      if (!e->has_time || !e->op || e->op->capture)
        return refuse(Result::kInvalidHandle, "cuEventElapsedTime",
                      "an event without timing, or one that was not recorded");
    }
    if (!from->op->done() || !to->op->done()) return Result::kNotReady;
    *milliseconds =
        std::chrono::duration<float, std::milli>(to->op->finished - from->op->finished).count();
    return Result::kSuccess;
  });
}

Result cuLaunchHostFunc(StreamHandle stream, HostFunction function, void* data) {
  return on_stream(__func__, stream, [&](StreamObject& s) {
    enqueue(s, OpKind::kHost, "host function", [function, data] { function(data); });
    return Result::kSuccess;
  });
}
}

}  // namespace tessera::cuda
