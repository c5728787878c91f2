// The calls of the virtual NCCL that move data, groups of them, and memory. Invariant: what is
// wrong with a call is said before any part of its group runs.
#include <algorithm>

#include "tests/vgpu/nccl/comm.h"

namespace vgpu::nccl {

namespace {

/// What a thread has called since its outermost ncclGroupStart.
struct Group {
  struct Part {
    CommRef comm;
    StreamObject* stream;
    Tasks tasks;
  };
  int depth = 0;
  std::vector<Part> parts;  // by communicator
  Result failed = Result::kSuccess;
};
thread_local Group group;

Result launch_group(std::unique_lock<std::mutex>&) {
  Result result = std::exchange(group.failed, Result::kSuccess);
  std::vector<Group::Part> parts = std::exchange(group.parts, {});
  if (result != Result::kSuccess) return result;
  for (Group::Part& part : parts) {
    if (part.comm->blocking) {
      launch(part.comm, *part.stream, std::move(part.tasks));
      continue;
    }
    auto tasks = std::make_shared<Tasks>(std::move(part.tasks));
    part.comm->unlaunched = [comm = part.comm, stream = part.stream, tasks,
                             capture = part.stream->capture] {
      if (stream->capture != capture)
        return void(comm->state = refuse(Result::kUnhandledCudaError, "ncclGroupEnd",
                                         "the capture ended while the call was in progress"));
      launch(comm, *stream, std::move(*tasks));
    };
    part.comm->asked = 0;
    part.comm->state = result = Result::kInProgress;
  }
  return result;
}

// Adds a task to the group of this thread, or to one of its own.
template <class MakeTask>
Result add(const char* call, Comm handle, StreamHandle stream, size_t count, DataType type,
           MakeTask make) {
  return in_nccl(call, [&](auto& lock) {
    const auto outcome = [&]() -> Result {
      CommRef comm;
      if (const Result r = find_ready(call, handle, &comm); r != Result::kSuccess) return r;
      if (check_stream(call, stream, false) != tessera::cuda::Result::kSuccess)
        return Result::kInvalidArgument;
      if (stream->device != comm->device)
        return refuse(Result::kInvalidArgument, call,
                      "a stream of device " + std::to_string(stream->device) +
                          ", but the communicator is on device " + std::to_string(comm->device));
      if (static_cast<int>(type) < 0 || static_cast<int>(type) > 9)
        return refuse(Result::kInvalidArgument, call, "a type that is not emulated");
      std::string why;
      auto task = make(comm, why);
      if (!task && !why.empty()) return refuse(Result::kInvalidArgument, call, why);
      if (!task || count == 0) return Result::kSuccess;
      task->name = call;
      auto part = std::ranges::find(group.parts, comm, &Group::Part::comm);
      if (part == group.parts.end()) part = group.parts.insert(part, Group::Part{comm, stream, {}});
      if (part->stream != stream)
        return refuse(Result::kInvalidUsage, call,
                      "a group uses a communicator on two streams, which is not emulated");
      part->tasks.push_back(std::move(task));
      return Result::kSuccess;
    }();
    if (outcome != Result::kSuccess && group.depth) group.failed = outcome;
    if (outcome != Result::kSuccess || group.depth) return outcome;
    return launch_group(lock);
  });
}

Result collective(const char* name, const CollectiveCall& call, Comm comm, StreamHandle stream) {
  return add(name, comm, stream, call.count, call.type,
             [&](const CommRef& c, std::string& why) -> std::unique_ptr<Task> {
               if (call.root < 0 || call.root >= c->size) why = "the root is no rank";
               const int op = static_cast<int>(call.op);
               if (op < 0 || (op > 4 && !c->operators.contains(op))) why = "no such operator";
               if (!why.empty() || call.count == 0) return nullptr;
               return make_collective(c, call);
             });
}
Result message(const char* name, bool sends, void* at, size_t count, DataType type, int peer,
               Comm comm, StreamHandle stream) {
  return add(name, comm, stream, std::max<size_t>(count, 1), type,
             [&](const CommRef& c, std::string& why) -> std::unique_ptr<Task> {
               if (peer < 0 || peer >= c->size) return why = "the peer is no rank", nullptr;
               return make_message(c, sends, at, count * size_of(type), peer);
             });
}

bool is_device_memory(const void* at, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(at);
  for (uintptr_t p = begin; p < begin + bytes;) {
    const Life* block = gpu().memory.blocks().alive_around(p);
    if (!block) return false;
    p = block->begin + block->bytes;
  }
  return true;
}

int next_operator = 5;

constexpr size_t kPage = 4096;
/// What ncclMemAlloc gave out, and what the driver had given.
std::map<DevicePtr, DevicePtr>& allocations() {
  static auto* all = new std::map<DevicePtr, DevicePtr>;
  return *all;
}

}  // namespace

}  // namespace vgpu::nccl

namespace tessera::nccl {

using namespace vgpu::nccl;  // NOLINT: as in the fake's own files
using Result = tessera::nccl::Result;

extern "C" {

Result ncclGroupStart() { return ++group.depth, Result::kSuccess; }
Result ncclGroupEnd() {
  return in_nccl(__func__, [&](auto& lock) {
    if (group.depth == 0)
      return refuse(Result::kInvalidUsage, "ncclGroupEnd", "without ncclGroupStart");
    return --group.depth ? Result::kSuccess : launch_group(lock);
  });
}

Result ncclAllReduce(const void* in, void* out, size_t count, DataType type, RedOp op, Comm comm,
                     StreamHandle stream) {
  return collective(__func__, {Verb::kAllReduce, in, out, count, type, op}, comm, stream);
}
Result ncclReduce(const void* in, void* out, size_t count, DataType type, RedOp op, int root,
                  Comm comm, StreamHandle stream) {
  return collective(__func__, {Verb::kReduce, in, out, count, type, op, root}, comm, stream);
}
Result ncclBroadcast(const void* in, void* out, size_t count, DataType type, int root, Comm comm,
                     StreamHandle stream) {
  return collective(__func__, {Verb::kBroadcast, in, out, count, type, RedOp::kSum, root}, comm,
                    stream);
}
Result ncclAllGather(const void* in, void* out, size_t count, DataType type, Comm comm,
                     StreamHandle stream) {
  return collective(__func__, {Verb::kAllGather, in, out, count, type}, comm, stream);
}
Result ncclReduceScatter(const void* in, void* out, size_t count, DataType type, RedOp op,
                         Comm comm, StreamHandle stream) {
  return collective(__func__, {Verb::kReduceScatter, in, out, count, type, op}, comm, stream);
}
Result ncclAlltoAll(const void* in, void* out, size_t count, DataType type, Comm comm,
                    StreamHandle stream) {
  return collective(__func__, {Verb::kAllToAll, in, out, count, type}, comm, stream);
}
Result ncclGather(const void* in, void* out, size_t count, DataType type, int root, Comm comm,
                  StreamHandle stream) {
  return collective(__func__, {Verb::kGather, in, out, count, type, RedOp::kSum, root}, comm,
                    stream);
}
Result ncclScatter(const void* in, void* out, size_t count, DataType type, int root, Comm comm,
                   StreamHandle stream) {
  return collective(__func__, {Verb::kScatter, in, out, count, type, RedOp::kSum, root}, comm,
                    stream);
}
Result ncclSend(const void* in, size_t count, DataType type, int peer, Comm comm,
                StreamHandle stream) {
  return message(__func__, true, const_cast<void*>(in), count, type, peer, comm, stream);
}
Result ncclRecv(void* out, size_t count, DataType type, int peer, Comm comm, StreamHandle stream) {
  return message(__func__, false, out, count, type, peer, comm, stream);
}

Result ncclRedOpCreatePreMulSum(RedOp* op, void* scalar, DataType type, ScalarResidence residence,
                                Comm handle) {
  return in_nccl(__func__, [&](auto&) {
    CommRef comm;
    if (const Result r = find_ready("ncclRedOpCreatePreMulSum", handle, &comm);
        r != Result::kSuccess)
      return r;
    if (residence != ScalarResidence::kHostImmediate ||
        (type != DataType::kFloat32 && type != DataType::kFloat64))
      return refuse(Result::kInvalidArgument, "ncclRedOpCreatePreMulSum",
                    "emulated are scalars of the host, of 32 or 64 bits");
    const double scale = type == DataType::kFloat32
                             ? static_cast<double>(*static_cast<float*>(scalar))
                             : *static_cast<double*>(scalar);
    comm->operators[next_operator] = {RedOp::kSum, true, scale};
    *op = RedOp{next_operator++};
    return Result::kSuccess;
  });
}
Result ncclRedOpDestroy(RedOp op, Comm handle) {
  return in_nccl(__func__, [&](auto&) {
    CommRef comm;
    if (const Result r = find_ready("ncclRedOpDestroy", handle, &comm); r != Result::kSuccess)
      return r;
    if (!comm->operators.erase(static_cast<int>(op)))
      return refuse(Result::kInvalidArgument, "ncclRedOpDestroy", "no operator that was made");
    return Result::kSuccess;
  });
}

// The memory consists of whole pages, which symmetric windows need.
Result ncclMemAlloc(void** at, size_t bytes) {
  const Result asked = in_nccl(__func__, [](auto&) { return Result::kSuccess; });
  if (asked != Result::kSuccess) return asked;
  cuda::DevicePtr p = 0;
  if (cuda::cuMemAlloc_v2(&p, bytes + kPage) != cuda::Result::kSuccess)
    return Result::kUnhandledCudaError;
  const cuda::DevicePtr aligned = (p + kPage - 1) / kPage * kPage;
  *at = reinterpret_cast<void*>(aligned);
  std::lock_guard lock(vgpu::gpu().mutex);
  allocations()[aligned] = p;
  return Result::kSuccess;
}
Result ncclMemFree(void* at) {
  cuda::DevicePtr p = 0;
  {
    std::lock_guard lock(vgpu::gpu().mutex);
    const auto found = allocations().find(reinterpret_cast<cuda::DevicePtr>(at));
    if (found == allocations().end())
      return refuse(Result::kInvalidArgument, "ncclMemFree", "no memory of ncclMemAlloc");
    if (is_registered(at))
      return refuse(Result::kInvalidUsage, "ncclMemFree", "a communicator has it registered");
    p = found->second;
    allocations().erase(found);
  }
  const cuda::Result r = cuda::cuMemFree_v2(p);
  return r == cuda::Result::kSuccess ? Result::kSuccess : Result::kUnhandledCudaError;
}

Result ncclCommRegister(Comm handle, void* at, size_t bytes, void** registration) {
  return in_nccl(__func__, [&](auto&) {
    CommRef comm;
    if (const Result r = find_ready("ncclCommRegister", handle, &comm); r != Result::kSuccess)
      return r;
    if (!bytes || !is_device_memory(at, bytes))
      return refuse(Result::kInvalidArgument, "ncclCommRegister", "not memory of a device");
    auto* window = new WindowObject{at, bytes, ++comm->windows};
    comm->registered.insert(window);
    return *registration = window, Result::kSuccess;
  });
}
Result ncclCommDeregister(Comm handle, void* registration) {
  return in_nccl(__func__, [&](auto&) {
    CommRef comm;
    if (const Result r = find_ready("ncclCommDeregister", handle, &comm); r != Result::kSuccess)
      return r;
    if (!comm->registered.erase(static_cast<WindowObject*>(registration)))
      return refuse(Result::kInvalidArgument, "ncclCommDeregister", "nothing that is registered");
    delete static_cast<WindowObject*>(registration);
    return Result::kSuccess;
  });
}

// All ranks register their windows in one order: the sizes tell when they do not.
Result ncclCommWindowRegister(Comm handle, void* at, size_t bytes, Window* window, int flags) {
  return in_nccl(__func__, [&](auto& lock) {
    CommRef comm;
    if (const Result r = find_ready("ncclCommWindowRegister", handle, &comm); r != Result::kSuccess)
      return r;
    if (!bytes || !is_device_memory(at, bytes) || reinterpret_cast<uintptr_t>(at) % 4096)
      return refuse(Result::kInvalidArgument, "ncclCommWindowRegister",
                    "not memory of a device, or it does not begin at a multiple of 4096");
    comm->state = Result::kInProgress;
    comm->job = [=, c = comm.get(), k = comm->take_note()]() -> std::optional<Result> {
      if (!c->exchange(k, {static_cast<int64_t>(bytes), flags, 0, 0})) return std::nullopt;
      for (int r = 0; r < c->size; ++r)
        if (c->note_of(r, k)[0] != static_cast<int64_t>(bytes) || c->note_of(r, k)[1] != flags)
          return refuse(Result::kInvalidUsage, "ncclCommWindowRegister",
                        "rank " + std::to_string(r) + " registers " +
                            std::to_string(c->note_of(r, k)[0]) + " bytes where rank " +
                            std::to_string(c->rank) + " registers " + std::to_string(bytes) +
                            "; all ranks register in one order");
      auto* made = new WindowObject{at, bytes, ++c->windows};
      c->registered.insert(made);
      return *window = made, Result::kSuccess;
    };
    return finish_job(comm, lock);
  });
}
Result ncclCommWindowDeregister(Comm comm, Window window) {
  return ncclCommDeregister(comm, window);
}
}

}  // namespace tessera::nccl
