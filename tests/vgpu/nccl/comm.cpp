// Communicators of the virtual NCCL: how ranks come to one, divide it, and leave it.
#include "tests/vgpu/nccl/comm.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace vgpu::nccl {

namespace {

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(at, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

Requests requests_of_environment() {
  Requests r;
  const char* text = std::getenv("VGPU_NCCL");
  for (const std::string& item : split(text ? text : "", ',')) {
    const std::vector<std::string> words = split(item, ':');
    const auto number = [&](size_t i, int otherwise) {
      return i < words.size() ? std::atoi(words[i].c_str()) : otherwise;
    };
    if (words[0] == "report" && words.size() == 1) {
      r.report = true;
    } else if (words[0] == "hang" && words.size() == 3) {
      r.hang_rank = number(1, 0), r.hang_nth = static_cast<uint64_t>(number(2, 1));
    } else if (words[0] == "error" && words.size() >= 3) {
      r.error_rank = number(1, 0), r.error_nth = static_cast<uint64_t>(number(2, 1));
      r.error_code = Result{number(3, 6)};
    } else if (words[0] == "refuse" && words.size() >= 2) {
      r.refusals.push_back({words[1], static_cast<uint64_t>(number(2, 1)), Result{number(3, 2)}});
    } else {
      std::fprintf(stderr, "vgpu: VGPU_NCCL has no \"%s\"\n", item.c_str());
      std::abort();
    }
  }
  return r;
}

std::set<const CommObject*>& comms() {
  static auto* all = new std::set<const CommObject*>;
  return *all;
}
Comm hand_out(CommRef comm) {
  auto* object = new CommObject{std::move(comm)};
  comms().insert(object);
  return object;
}

// Comes to the segment of `id`; the job is done when all ranks have.
bool join(const CommRef& comm, const UniqueId& id) {
  comm->segment = Segment::open(id, comm->size);
  if (!comm->segment) return false;
  RankArea& mine = comm->segment->rank(comm->rank);
  mine.device = comm->device;
  mine.joined.store(1, std::memory_order_release);
  comm->job = [c = comm.get()]() -> std::optional<Result> {
    const Segment& all = *c->segment;
    for (int r = 0; r < c->size; ++r)
      if (!all.rank(r).joined.load(std::memory_order_acquire)) return std::nullopt;
    all.close_descriptor();
    for (int r = 0; r < c->size; ++r)
      for (int q = 0; q < r; ++q)
        if (all.rank(r).device == all.rank(q).device)
          return refuse(Result::kInvalidUsage, "ncclCommInitRankConfig",
                        "ranks " + std::to_string(q) + " and " + std::to_string(r) +
                            " are both on device " + std::to_string(all.rank(r).device));
    return Result::kSuccess;
  };
  comm->state = Result::kInProgress;
  return true;
}

Result read(const char* call, const Config* config, bool* blocking) {
  if (!config) return Result::kSuccess;
  if (config->size != sizeof(Config) || config->magic != 0xcafebeef)
    return refuse(Result::kInvalidArgument, call, "the configuration was not initialised");
  if (config->blocking != kUndefined && config->blocking != 0 && config->blocking != 1)
    return refuse(Result::kInvalidArgument, call, "blocking is 0 or 1");
  if (config->blocking != kUndefined) *blocking = config->blocking;
  return Result::kSuccess;
}

// The steps of a split, of which each waits for all ranks.
struct Split {
  CommRef parent, made;
  int color, key;
  Comm* result;
  uint64_t colors, places;  // the exchanges
  UniqueId id{};
  int leader = -1;  // in the parent
  enum { kColors, kPlaces, kJoining } step = kColors;

  std::optional<Result> go_on() {
    if (step == kColors) {
      if (!parent->exchange(colors, {color, key, 0, 0})) return std::nullopt;
      choose();
    }
    if (step == kPlaces) {
      int64_t words[3];  // what Segment::make writes
      std::memcpy(words, id.bytes, sizeof words);
      if (!parent->exchange(places, {words[0], words[1], words[2], 0})) return std::nullopt;
      if (color == kNoColor) return *result = nullptr, Result::kSuccess;
      std::memcpy(id.bytes, parent->note_of(leader, places), sizeof words);
      if (!join(made, id)) return Result::kSystemError;
      step = kJoining;
    }
    const std::optional<Result> r = made->job();
    if (!r) return r;
    made->job = nullptr, made->state = *r;
    *result = hand_out(made);
    return r;
  }
  void choose() {
    step = kPlaces;
    if (color == kNoColor) return;
    std::vector<std::pair<int64_t, int>> members;
    for (int r = 0; r < parent->size; ++r)
      if (const int64_t* note = parent->note_of(r, colors); note[0] == color)
        members.emplace_back(note[1], r);
    std::sort(members.begin(), members.end());
    leader = members[0].second;
    made->size = static_cast<int>(members.size());
    for (int i = 0; i < made->size; ++i)
      if (members[static_cast<size_t>(i)].second == parent->rank) made->rank = i;
    if (leader == parent->rank) Segment::make(&id);
  }
};

}  // namespace

Requests& requests() {
  static auto* of_environment = new Requests(requests_of_environment());
  return *of_environment;
}

Result refuse(Result result, const char* call, const std::string& why) {
  std::fprintf(stderr, "vgpu: %s: %s\n", call, why.c_str());
  return result;
}

bool Communicator::exchange(uint64_t k, const int64_t (&mine)[4]) const {
  RankArea& area = segment->rank(rank);
  if (area.notes.load(std::memory_order_relaxed) == k) {
    std::memcpy(area.note[k % 2], mine, sizeof mine);
    area.notes.store(k + 1, std::memory_order_release);
  }
  for (int r = 0; r < size; ++r)
    if (segment->rank(r).notes.load(std::memory_order_acquire) <= k) return false;
  return true;
}

const WindowObject* Communicator::window_with(const void* at, size_t bytes, bool all) const {
  const auto begin = reinterpret_cast<uintptr_t>(at), end = begin + bytes;
  for (const WindowObject* w : registered) {
    const auto first = reinterpret_cast<uintptr_t>(w->at), last = first + w->bytes;
    if (all ? first <= begin && end <= last : first < end && begin < last) return w;
  }
  return nullptr;
}

bool is_registered(const void* at) {
  return std::ranges::any_of(comms(), [&](const CommObject* object) {
    return object->comm->window_with(at, 1, /*all=*/false);
  });
}

Result Communicator::ask() {
  if (job)
    if (const std::optional<Result> r = job()) job = nullptr, state = *r;
  if (unlaunched && ++asked > 1) {
    std::exchange(unlaunched, nullptr)();
    if (state == Result::kInProgress) state = Result::kSuccess;
  }
  return broken == Result::kSuccess ? state : broken;
}

Result find_ready(const char* call, Comm comm, CommRef* found) {
  if (!comm || !comms().contains(comm))
    return refuse(Result::kInvalidArgument, call, "no communicator, or one that is gone");
  *found = comm->comm;
  if ((*found)->broken != Result::kSuccess) return (*found)->broken;
  if ((*found)->state == Result::kInProgress)
    return refuse(Result::kInvalidArgument, call,
                  "the call before it is in progress; ask ncclCommGetAsyncError until it is not");
  if ((*found)->finalized)
    return refuse(Result::kInvalidArgument, call, "the communicator was finalized");
  return Result::kSuccess;
}

static void nap(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  lock.lock();
}

Result finish_job(const CommRef& comm, std::unique_lock<std::mutex>& lock) {
  while (comm->blocking && comm->ask() == Result::kInProgress) nap(lock);
  return comm->state;
}

// Where nobody destroys them it waits for ever, as NCCL does.
static void await_graphs(const char* call, const Communicator& comm,
                         std::unique_lock<std::mutex>& lock) {
  if (comm.graphs)
    std::fprintf(stderr, "vgpu: %s: waits until graphs that have %d calls of it are destroyed\n",
                 call, comm.graphs);
  while (comm.graphs) nap(lock);
}

}  // namespace vgpu::nccl

namespace tessera::nccl {

using vgpu::nccl::CommRef;
using vgpu::nccl::Communicator;
using vgpu::nccl::find_ready;
using vgpu::nccl::in_nccl;
using vgpu::nccl::refuse;
using vgpu::nccl::Segment;

extern "C" {

Result ncclGetVersion(int* version) {
  if (!version) return Result::kInvalidArgument;
  return *version = 22809, Result::kSuccess;
}
Result ncclGetUniqueId(UniqueId* id) {
  if (!id) return Result::kInvalidArgument;
  return Segment::make(id) ? Result::kSuccess : Result::kSystemError;
}
const char* ncclGetErrorString(Result result) {
  switch (result) {
    case Result::kSuccess: return "no error";
    case Result::kUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case Result::kSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case Result::kInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case Result::kInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case Result::kInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case Result::kRemoteError: return "remote process exited or there was a network error";
    case Result::kInProgress: return "NCCL operation in progress";
  }
  return "unknown result code";
}
const char* ncclGetLastError(Comm) { return "see the lines of vgpu on standard error"; }

Result ncclCommInitRankConfig(Comm* made, int size, UniqueId id, int rank, Config* config) {
  return in_nccl(__func__, [&](auto& lock) {
    if (size < 1 || rank < 0 || rank >= size || size > vgpu::nccl::kMostRanks)
      return refuse(Result::kInvalidArgument, "ncclCommInitRankConfig",
                    "rank " + std::to_string(rank) + " of " + std::to_string(size));
    const cuda::ContextObject* context = vgpu::current_context();
    if (!context)
      return refuse(Result::kUnhandledCudaError, "ncclCommInitRankConfig",
                    "this thread has no current device");
    auto comm = std::make_shared<Communicator>();
    comm->rank = rank, comm->size = size, comm->device = context->device;
    if (const Result r = vgpu::nccl::read("ncclCommInitRankConfig", config, &comm->blocking);
        r != Result::kSuccess)
      return r;
    if (!vgpu::nccl::join(comm, id))
      return refuse(Result::kSystemError, "ncclCommInitRankConfig",
                    "the process that made the id is gone, or it is none");
    *made = vgpu::nccl::hand_out(comm);
    return vgpu::nccl::finish_job(comm, lock);
  });
}

Result ncclCommSplit(Comm parent, int color, int key, Comm* made, Config* config) {
  return in_nccl(__func__, [&](auto& lock) {
    CommRef comm;
    if (const Result r = find_ready("ncclCommSplit", parent, &comm); r != Result::kSuccess)
      return r;
    if (color < 0 && color != kNoColor)
      return refuse(Result::kInvalidArgument, "ncclCommSplit", "the color is negative");
    auto split = std::make_shared<vgpu::nccl::Split>();
    split->parent = comm, split->color = color, split->key = key, split->result = made;
    split->made = std::make_shared<Communicator>();
    split->made->device = comm->device, split->made->blocking = comm->blocking;
    if (const Result r = vgpu::nccl::read("ncclCommSplit", config, &split->made->blocking);
        r != Result::kSuccess)
      return r;
    split->colors = comm->take_note(), split->places = comm->take_note();
    *made = nullptr;
    comm->state = Result::kInProgress;
    comm->job = [split] { return split->go_on(); };
    return vgpu::nccl::finish_job(comm, lock);
  });
}

Result ncclCommGetAsyncError(Comm comm, Result* error) {
  return in_nccl(__func__, [&](auto&) {
    if (!comm || !vgpu::nccl::comms().contains(comm))
      return refuse(Result::kInvalidArgument, "ncclCommGetAsyncError", "no communicator");
    return *error = comm->comm->ask(), Result::kSuccess;
  });
}

Result ncclCommFinalize(Comm handle) {
  return in_nccl(__func__, [&](auto& lock) {
    CommRef comm;
    if (const Result r = find_ready("ncclCommFinalize", handle, &comm); r != Result::kSuccess)
      return r;
    comm->finalized = true;
    if (!comm->last || comm->last->done()) return Result::kSuccess;
    comm->state = Result::kInProgress;
    comm->job = [c = comm.get()]() -> std::optional<Result> {
      if (!vgpu::gpu().query(c->last)) return std::nullopt;
      return Result::kSuccess;
    };
    return vgpu::nccl::finish_job(comm, lock);
  });
}
Result ncclCommDestroy(Comm handle) {
  if (!handle) return Result::kSuccess;
  return in_nccl(__func__, [&](auto& lock) {
    if (!vgpu::nccl::comms().contains(handle))
      return refuse(Result::kInvalidArgument, "ncclCommDestroy", "no communicator");
    const CommRef comm = handle->comm;
    if (comm->job || comm->unlaunched)
      return refuse(Result::kInvalidUsage, "ncclCommDestroy", "a call is in progress");
    if (!comm->registered.empty())
      return refuse(Result::kInvalidUsage, "ncclCommDestroy",
                    std::to_string(comm->registered.size()) + " buffers are registered");
    while (comm->last && !comm->last->done() && !vgpu::gpu().query(comm->last))
      vgpu::nccl::nap(lock);
    vgpu::nccl::await_graphs("ncclCommDestroy", *comm, lock);
    vgpu::nccl::comms().erase(handle);
    delete handle;
    return Result::kSuccess;
  });
}
Result ncclCommAbort(Comm handle) {
  if (!handle) return Result::kSuccess;
  return in_nccl(__func__, [&](auto& lock) {
    if (!vgpu::nccl::comms().contains(handle))
      return refuse(Result::kInvalidArgument, "ncclCommAbort", "no communicator");
    const CommRef comm = handle->comm;
    comm->aborted = true;
    comm->job = nullptr;
    if (comm->unlaunched) std::exchange(comm->unlaunched, nullptr)();
    vgpu::nccl::await_graphs("ncclCommAbort", *comm, lock);
    comm->registered.clear();
    vgpu::nccl::comms().erase(handle);
    delete handle;
    return Result::kSuccess;
  });
}

Result ncclCommCount(Comm comm, int* count) {
  return in_nccl(__func__, [&](auto&) {
    CommRef c;
    const Result r = find_ready("ncclCommCount", comm, &c);
    return r == Result::kSuccess ? (*count = c->size, r) : r;
  });
}
Result ncclCommCuDevice(Comm comm, int* device) {
  return in_nccl(__func__, [&](auto&) {
    CommRef c;
    const Result r = find_ready("ncclCommCuDevice", comm, &c);
    return r == Result::kSuccess ? (*device = c->device, r) : r;
  });
}
Result ncclCommUserRank(Comm comm, int* rank) {
  return in_nccl(__func__, [&](auto&) {
    CommRef c;
    const Result r = find_ready("ncclCommUserRank", comm, &c);
    return r == Result::kSuccess ? (*rank = c->rank, r) : r;
  });
}
}

}  // namespace tessera::nccl
