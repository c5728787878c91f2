// What the calls of the virtual libcuda share: the objects behind the vendor's handles, and the
// checks that every call begins with. Invariant: each function of driver_functions.def is declared
// here as the table has it, so a definition that differs does not compile, and one that is missing
// does not link (exports.cpp).
#pragma once
#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "core/backend/cuda/driver_api.h"
#include "tests/vgpu/fake/block.h"
#include "tests/vgpu/fake/gpu.h"

namespace tessera::cuda {

#define FUNCTION(member, symbol, parameters) extern "C" Result symbol parameters;
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION

struct ContextObject {
  int device = 0, retained = 0;
};
struct StreamObject : vgpu::StreamState {};
struct EventObject {
  int device = 0;
  bool has_time = false;
  vgpu::OpRef op;  // the latest that was recorded; null: none yet
};
struct ModuleObject {
  int device = 0;
  void* library = nullptr;
  VgpuModule module{};
  std::vector<std::unique_ptr<FunctionObject>> functions;
};
struct FunctionObject {
  ModuleObject* module = nullptr;
  const VgpuKernel* kernel = nullptr;
  std::string name;
  int dynamic_bytes = 48 << 10;  // the most that a launch may ask for
};
struct NodeObject {
  vgpu::OpRef op;
};
struct GraphObject {
  int device = 0;
  std::vector<vgpu::OpRef> ops;                    // in an order that respects `after`
  std::vector<std::unique_ptr<NodeObject>> nodes;  // of those that the driver shows
  std::vector<std::shared_ptr<void>> owned;
};
struct GraphExecObject {
  int device = 0;
  std::vector<vgpu::OpRef> ops, sources;             // `sources`: the graph's, of the same places
  std::vector<std::pair<uint32_t, uint32_t>> lanes;  // of captured lanes: lanes of its own
  std::vector<std::shared_ptr<void>> owned;
  vgpu::OpRef last;  // the end of its latest launch
};

}  // namespace tessera::cuda

namespace vgpu {

using namespace tessera::cuda;  // NOLINT: the fake is the vendor's side of these names

/// A launch that was submitted: parameters are read at the call, as the driver does.
struct KernelCall {
  FunctionObject* function;
  dim3 blocks, threads;
  unsigned dynamic_bytes;
  std::vector<char> bytes;  // of the parameters
  std::vector<void*> parameters;
  ContextObject* context;
};
struct Capture {
  StreamObject* origin;
  std::vector<StreamObject*> streams;
  std::vector<OpRef> nodes;
  int mode;
  std::thread::id thread;
  bool invalid = false, ended = false;
};

/// Says what is wrong with a call, and returns `result`.
Result refuse(Result result, const char* call, const std::string& why);
std::string text(uint64_t n);

/// The objects that were handed out and not destroyed.
template <class T>
std::unordered_set<const T*>& handles() {
  static auto* all = new std::unordered_set<const T*>;
  return *all;
}
template <class T>
T* hand_out(std::unique_ptr<T> object) {
  handles<T>().insert(object.get());
  return object.release();
}
template <class T>
bool is_handle(const T* object) {
  return handles<T>().contains(object);
}

/// The context of this thread, or null.
ContextObject* current_context();
/// kSuccess where the program may make `call` now. Otherwise the error that it returns:
/// kNotInitialized before cuInit, kNotPermitted in a host function that a stream runs.
Result may_call(const char* call);
/// Where a capture forbids the call (it would wait, or tie the graph to what is not in it).
Result forbidden_in_capture(const char* call);
Result device_error(int device);

template <class F>
Result in_driver(const char* call, F&& body) {
  if (const Result r = may_call(call); r != Result::kSuccess) return r;
  std::lock_guard lock(gpu().mutex);
  ++gpu().calls[call];
  return body();
}
template <class F>
Result in_context(const char* call, F&& body) {
  return in_driver(call, [&]() -> Result {
    const ContextObject* context = current_context();
    if (!context)
      return refuse(Result::kInvalidContext, call, "this thread has no current context");
    if (const Result r = device_error(context->device); r != Result::kSuccess) return r;
    return body(context->device);
  });
}
/// `stream` is one of the current context's, and no capture of it has failed.
Result check_stream(const char* call, StreamHandle stream, bool of_current);
/// A call that adds work to a stream.
template <class F>
Result on_stream(const char* call, StreamHandle stream, F&& body) {
  return in_context(call, [&](int) -> Result {
    if (const Result r = check_stream(call, stream, true); r != Result::kSuccess) return r;
    return body(*stream);
  });
}
/// Submits, records where the stream is captured, and lets the scheduler run what it likes.
OpRef enqueue(StreamObject& stream, OpKind kind, std::string name, std::function<void()> run,
              std::vector<Op::HostBuffer> host_buffers = {});
/// Bytes of device memory that the op which runs reads or writes; throws OpError where it may not.
void use_range(DevicePtr at, size_t bytes, VgpuAccess kind, int device);

// A launch in two halves: graphs keep what the first checked and run the second later.
std::shared_ptr<KernelCall> make_call(const char* call, Result* result, FunctionHandle function,
                                      dim3 blocks, dim3 threads, unsigned dynamic_bytes,
                                      void** parameters, void** extra);
void run_call(const KernelCall& call);

}  // namespace vgpu
