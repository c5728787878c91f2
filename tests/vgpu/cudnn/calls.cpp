// libcudnn.so.9 for machines without a GPU: handles, descriptors' lives, and execution. A graph is
// an op of the virtual driver's scheduler, on the handle's stream, which is told of every byte that
// it reads and writes. The names of these ops, which counters and VGPU_FAIL know, are "cudnn " and
// what graph.h says: "cudnn convolution_filter".
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_set>

#include "tests/vgpu/cuda/virtual_driver.h"
#include "tests/vgpu/cudnn/interpret.h"
#include "tests/vgpu/cudnn/objects.h"

namespace vgpu::dnn {

namespace {

std::mutex mutex;
thread_local std::string last_error;

template <class T>
std::unordered_set<const T*>& living() {
  static auto* all = new std::unordered_set<const T*>;
  return *all;
}
template <class T>
bool lives(const T* object) {
  std::lock_guard lock(mutex);
  return living<T>().contains(object);
}

constexpr int kTypes[] = {
    kPointwise,   kConvolution,   kEngine,          kEngineConfig, kHeuristics,  kPlan,
    kKnobChoice,  kConvForwardOp, kConvFilterOp,    kConvDataOp,   kPointwiseOp, kOperationGraph,
    kVariantPack, kTensor,        kMatmul,          kMatmulOp,     kReduction,   kReductionOp,
    kReshapeOp,   kStatisticsOp,  kDeviceProperties};

DevicePtr address(const void* p) { return reinterpret_cast<DevicePtr>(p); }

/// The bytes of a tensor as runs: neighbours first, then one use for every place of what is left.
void add_uses(std::vector<Use>& uses, const TensorInfo& t, const void* at, VgpuAccess kind) {
  struct Dim {
    int64_t extent, stride;
  };
  std::vector<Dim> dims;
  for (size_t i = 0; i < t.dims.size(); ++i)
    if (t.dims[i] != 1) dims.push_back({t.dims[i], t.strides[i]});
  std::sort(dims.begin(), dims.end(), [](Dim a, Dim b) { return a.stride < b.stride; });
  int64_t run = 1;
  size_t d = 0;
  for (; d < dims.size() && dims[d].stride == run; ++d) run *= dims[d].extent;
  const Dim apart = d < dims.size() ? dims[d++] : Dim{1, run};
  const auto bytes = static_cast<size_t>(bytes_of(t.type));
  std::vector<int64_t> starts{0};
  for (; d < dims.size(); ++d) {
    std::vector<int64_t> more;
    for (int64_t s : starts)
      for (int64_t i = 0; i < dims[d].extent; ++i) more.push_back(s + i * dims[d].stride);
    starts = std::move(more);
  }
  for (int64_t s : starts)
    uses.push_back({address(at) + static_cast<size_t>(s) * bytes, static_cast<size_t>(run) * bytes,
                    static_cast<size_t>(apart.stride) * bytes, static_cast<size_t>(apart.extent),
                    kind});
}

struct Call {
  std::map<int64_t, void*> at;
  std::map<int64_t, float> numbers;
};

/// "" or what is wrong with the variant pack for this plan.
std::string bind(const DescriptorObject& plan, const DescriptorObject& pack, Call& call) {
  const auto uids = pack.list<int64_t>(kPackUids);
  const auto pointers = pack.list<void*>(kPackPointers);
  std::map<int64_t, void*> given;
  for (size_t i = 0; i < uids.size(); ++i) given[uids[i]] = pointers[i];
  const GraphInfo& g = *plan.graph;
  for (const auto* list : {&g.read, &g.written, &g.numbers})
    for (const TensorInfo& t : *list) {
      const auto it = given.find(t.uid);
      if (it == given.end() || !it->second)
        return "tensor " + std::to_string(t.uid) + " has no address";
      if (list == &g.numbers) {
        std::memcpy(&call.numbers[t.uid], it->second, sizeof(float));
      } else {
        if (address(it->second) % static_cast<size_t>(t.alignment))
          return "tensor " + std::to_string(t.uid) + " is not aligned to " +
                 std::to_string(t.alignment) + " bytes, as its descriptor says";
        call.at[t.uid] = it->second;
      }
      given.erase(it);
    }
  if (!given.empty())
    return "the graph has no tensor " + std::to_string(given.begin()->first) + " with memory";
  return "";
}

}  // namespace

Status refuse(Status status, const char* call, const std::string& why) {
  std::fprintf(stderr, "vgpu: %s: %s\n", call, why.c_str());
  last_error = why;
  return status;
}
Status unsupported(const std::string& why, Status status) {
  last_error = why;
  return status;
}

Status requested(const char* call) {
  const char* asked = std::getenv("VGPU_FAIL");
  if (!asked) return Status::kSuccess;
  const std::string text = asked;
  const size_t first = text.find(':'), second = text.find(':', first + 1);
  if (text.substr(0, first) != call) return Status::kSuccess;
  static std::atomic<int> calls = 0;
  const int nth = first == text.npos ? 1 : std::atoi(text.c_str() + first + 1);
  if (++calls != nth) return Status::kSuccess;
  const Status status{first == text.npos || second == text.npos
                          ? static_cast<int>(Status::kInternalError)
                          : std::atoi(text.c_str() + second + 1)};
  return refuse(status, call, "fails, as VGPU_FAIL asks");
}

bool is_handle(Handle handle) { return lives(handle); }
bool is_descriptor(const DescriptorObject* d) { return lives(d); }

}  // namespace vgpu::dnn

namespace tessera::cuda {

using namespace vgpu;
using namespace vgpu::dnn;

extern "C" {

#define FUNCTION(member, symbol, parameters) Status symbol parameters;
#include "core/backend/cuda/cudnn_functions.def"
#undef FUNCTION

// The library has every function of the table, or this does not link.
__attribute__((used)) void* const vgpu_exported_cudnn[] = {
#define FUNCTION(member, symbol, parameters) reinterpret_cast<void*>(&symbol),
#include "core/backend/cuda/cudnn_functions.def"
#undef FUNCTION
};

size_t cudnnGetVersion() {
  const char* asked = std::getenv("VGPU_CUDNN_VERSION");
  return asked ? std::strtoul(asked, nullptr, 10) : 91900;
}
void cudnnGetLastErrorString(char* message, size_t bytes) {
  if (bytes) std::snprintf(message, bytes, "%s", last_error.c_str());
}
// By this Tessera tells the library from the vendor's, which does not run on the virtual driver.
const char* vgpu_emulation() { return "cudnn"; }

Status cudnnCreate(Handle* handle) {
  if (const Status s = requested(__func__); s != Status::kSuccess) return s;
  if (!handle) return refuse(Status::kBadParam, __func__, "no place for the handle");
  const int device = vgpu::virtual_driver() ? vgpu::virtual_driver()->current_device() : -1;
  if (device < 0)
    return refuse(Status::kNotInitialized, __func__, "no device is current on this thread");
  *handle = new HandleObject{device, nullptr};
  std::lock_guard lock(mutex);
  living<HandleObject>().insert(*handle);
  return Status::kSuccess;
}
Status cudnnDestroy(Handle handle) {
  std::lock_guard lock(mutex);
  if (!living<HandleObject>().erase(handle))
    return refuse(Status::kBadParam, __func__, "no handle, or one that was destroyed");
  delete handle;
  return Status::kSuccess;
}
Status cudnnSetStream(Handle handle, StreamHandle stream) {
  if (const Status s = requested(__func__); s != Status::kSuccess) return s;
  if (!is_handle(handle))
    return refuse(Status::kBadParam, __func__, "no handle, or one that was destroyed");
  handle->stream = stream;
  return Status::kSuccess;
}

Status cudnnBackendCreateDescriptor(int type, Descriptor* descriptor) {
  if (!descriptor) return refuse(Status::kBadParam, __func__, "no place for the descriptor");
  if (std::find(std::begin(kTypes), std::end(kTypes), type) == std::end(kTypes))
    return refuse(Status::kNotSupported, __func__,
                  "descriptors of type " + std::to_string(type) + " are not emulated");
  auto* made = new DescriptorObject;
  made->type = type;
  *descriptor = made;
  std::lock_guard lock(mutex);
  living<DescriptorObject>().insert(made);
  return Status::kSuccess;
}
Status cudnnBackendDestroyDescriptor(Descriptor descriptor) {
  auto* d = static_cast<DescriptorObject*>(descriptor);
  std::lock_guard lock(mutex);
  if (!living<DescriptorObject>().erase(d))
    return refuse(Status::kBadParam, __func__, "no descriptor, or one that was destroyed");
  delete d;
  return Status::kSuccess;
}
Status cudnnBackendFinalize(Descriptor descriptor) {
  auto* d = static_cast<DescriptorObject*>(descriptor);
  if (!is_descriptor(d)) return refuse(Status::kBadParam, __func__, "no descriptor");
  if (d->type == kPlan)
    if (const Status s = requested(d->has(kPlanText) ? "cudnn text" : "cudnn plan");
        s != Status::kSuccess)
      return s;
  return finish(*d);
}

Status cudnnBackendExecute(Handle handle, Descriptor plan_at, Descriptor pack_at) {
  if (const Status s = requested(__func__); s != Status::kSuccess) return s;
  const auto* plan = static_cast<DescriptorObject*>(plan_at);
  const auto* pack = static_cast<DescriptorObject*>(pack_at);
  if (!is_handle(handle)) return refuse(Status::kBadParam, __func__, "no handle");
  if (!is_descriptor(plan) || plan->type != kPlan || !plan->finished || !is_descriptor(pack) ||
      pack->type != kVariantPack || !pack->finished)
    return refuse(Status::kNotFinalized, __func__, "no plan or no variant pack that is finalized");
  const int current = vgpu::virtual_driver()->current_device();
  if (current != handle->device || plan->device != handle->device)
    return refuse(Status::kBadParam, __func__,
                  "wrong device: a handle of device " + std::to_string(handle->device) +
                      " and a plan of device " + std::to_string(plan->device) + " while device " +
                      std::to_string(current) + " is current");
  if (!handle->stream) return refuse(Status::kBadParam, __func__, "the handle has no stream");
  Call call;
  if (const std::string why = bind(*plan, *pack, call); !why.empty())
    return refuse(Status::kBadParam, __func__, why);
  const EngineKind& engine = *engine_kind(plan->engine.index);
  void* workspace = pack->value<void*>(kPackWorkspace);
  if (engine.workspace && !workspace)
    return refuse(Status::kBadParam, __func__,
                  "no workspace; the plan needs " + std::to_string(engine.workspace) + " bytes");
  Work work;
  work.name = "cudnn " + plan->graph->name;
  for (const TensorInfo& t : plan->graph->read) add_uses(work.uses, t, call.at[t.uid], kVgpuRead);
  for (const TensorInfo& t : plan->graph->written)
    add_uses(work.uses, t, call.at[t.uid], kVgpuWrite);
  if (engine.workspace)
    work.uses.push_back({address(workspace), engine.workspace, engine.workspace, 1, kVgpuWrite});
  static std::atomic<unsigned> turn = 0;
  const auto more = std::chrono::milliseconds(is_slow(engine.index) ? 100 : 0);
  work.run = [more, graph = plan->graph, index = engine.index, call, t = turn++] {
    std::this_thread::sleep_for(more);
    interpret(*graph, index, call.at, call.numbers, t);
  };
  const Result r = vgpu::virtual_driver()->submit(handle->stream, &work);
  return r == Result::kSuccess
             ? Status::kSuccess
             : refuse(Status::kExecutionFailed, __func__,
                      "the driver refuses it with error " + std::to_string(static_cast<int>(r)));
}
}

}  // namespace tessera::cuda
