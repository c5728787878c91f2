#include "core/backend/cuda/cudnn/plans.h"

#include <fmt/format.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/refusals.h"
#include "core/backend/cuda/stream.h"
#include "core/base/log.h"
#include "core/io/hash.h"
#include "core/io/object_cache.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {
namespace {

using dnn::Status;

constexpr size_t kMostPlans = 4096;  // that a thread has for a card; further graphs are refused

thread_local bool own_graphs = false;

/// The library, or why it is no longer used.
class InUse {
 public:
  const CudnnFunctions* get() {
    if (failed_.load(std::memory_order_relaxed)) return nullptr;
    const CudnnFunctions* f = cudnn();
    // A user who has switched the library off is not warned.
    if (!f && !cudnn_is_wanted()) failed_ = true;
    if (!f) fail(why_no_cudnn());
    return f;
  }
  void fail(const std::string& why) {
    if (!failed_.exchange(true))
      logging::warn(
          "cuda: Tessera's own kernels compute convolutions and attention, which may take longer: "
          "{}",
          why);
  }

 private:
  std::atomic<bool> failed_ = false;
};
InUse& in_use() {
  static InUse& one = *new InUse;
  return one;
}

/// What a thread has on a card: a handle, and plans, which stay, since what they enqueued may still
/// run, or be captured. A null plan is a graph that is refused.
struct OnCard {
  dnn::Handle handle = nullptr;
  void* stream = nullptr;  // the handle's
  std::unordered_map<std::string, dnn::ExecutionPlan*> plans;
};

/// Keeps the handles and plans of threads that have ended, for threads that begin. It destroys
/// none: that would wait for the card, or come after the driver's end.
class Pool {
 public:
  OnCard& take(int device) {
    std::lock_guard lock(mutex_);
    auto& free = free_[device];
    if (free.empty()) return *new OnCard;
    OnCard& one = *free.back();
    free.pop_back();
    return one;
  }
  void give_back(const std::map<int, OnCard*>& all) {
    std::lock_guard lock(mutex_);
    for (const auto& [device, one] : all) free_[device].push_back(one);
  }
  static Pool& one() {
    static Pool& pool = *new Pool;
    return pool;
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<OnCard*>> free_;
};
struct OfThread {
  std::map<int, OnCard*> all;
  ~OfThread() { Pool::one().give_back(all); }
};

OnCard& on_card(int device) {
  thread_local OfThread mine;
  OnCard*& one = mine.all[device];
  if (!one) one = &Pool::one().take(device);
  return *one;
}

// The handle, on `stream`; null where the library does not start.
dnn::Handle handle_for(const CudnnFunctions& f, OnCard& mine, const Stream& stream) {
  const auto failed = [&](const char* symbol, Status s) {
    in_use().fail(fmt::format("{} failed with {}", symbol, dnn::name_of(s)));
    return nullptr;
  };
  if (!mine.handle)
    if (const Status s = f.create.result(&mine.handle); s != Status::kSuccess) {
      mine.handle = nullptr;
      return failed(f.create.symbol(), s);
    }
  if (mine.stream != stream.handle) {
    if (const Status s = f.set_stream.result(mine.handle, handle_of(stream)); s != Status::kSuccess)
      return failed(f.set_stream.symbol(), s);
    mine.stream = stream.handle;
  }
  return mine.handle;
}

void refuse(const WantedGraph& wanted, const std::string& why) {
  static std::atomic<bool> said = false;
  const std::string line =
      fmt::format("cuda: Tessera's own kernels compute {}: {}", wanted.describe(), why);
  if (!said.exchange(true))
    logging::warn("{}; TESSERA_LOG=info names further ones", line);
  else
    logging::info("{}", line);
}

io::ObjectCache disk() { return {"", ".graph", "cuda"}; }

std::optional<dnn::Engine> kept(const std::string& key) {
  try {
    const auto entry = disk().find(key);
    return entry ? dnn::engine_of(entry->object()) : std::nullopt;
  } catch (const io::CacheError& e) {
    logging::info("{}; cuDNN's engines are chosen again", e.what());
    return {};
  }
}
void keep(const std::string& key, const dnn::Engine& engine) {
  try {
    bool made = false;
    disk().find_or_make(
        key, [&](const std::string&) { return dnn::text_of(engine); }, &made);
  } catch (const io::CacheError& e) {
    logging::info("{}; cuDNN's engines are chosen again", e.what());
  }
}

std::string key_of(const CudnnFunctions& f, const WantedGraph& wanted, const std::string& text,
                   int device) {
  const Properties& card = properties(device);
  const std::string all =
      fmt::format("{}, {}, {} multiprocessors, driver {}, cuDNN {}{}{}: {}", card.name,
                  card.architecture(), card.multiprocessors, driver().version, f.version,
                  wanted.demands.deterministic ? ", deterministic" : "",
                  wanted.demands.full_precision ? ", full precision" : "", text);
  return to_string(io::xxh128(all.data(), all.size()));
}

std::unique_ptr<dnn::ExecutionPlan> compile(const CudnnFunctions& f, const WantedGraph& wanted,
                                            dnn::Handle handle, int device) {
  dnn::Graph graph = wanted.make(f);
  const std::string key = key_of(f, wanted, graph.text(), device);
  const std::optional<dnn::Engine> known = kept(key);
  std::string why;
  auto plan = graph.compile({handle, nullptr}, wanted.demands, known ? &*known : nullptr, why);
  if (!plan)
    refuse(wanted, why);
  else if (!known)
    keep(key, plan->engine());
  return plan;
}

// What a status says of the graph, or of the library.
bool is_of_graph(Status s) { return int(s) >= int(Status::kBadParam) && int(s) < 4000; }

}  // namespace

OwnGraphs::OwnGraphs() : before_(std::exchange(own_graphs, true)) {}
OwnGraphs::~OwnGraphs() { own_graphs = before_; }

const CudnnFunctions* graphs_in_use() { return own_graphs ? nullptr : in_use().get(); }

bool run_graph(const WantedGraph& wanted, FunctionRef<std::vector<dnn::Binding>()> bind,
               const Stream& stream) {
  const CudnnFunctions* f = graphs_in_use();
  if (!f) return false;
  const int device = stream.device.index;
  CurrentDevice current(device);
  OnCard& mine = on_card(device);
  const dnn::Handle handle = handle_for(*f, mine, stream);
  if (!handle) return false;
  std::string key(wanted.problem);
  key += wanted.demands.deterministic ? 'd' : ' ';
  key += wanted.demands.full_precision ? 'f' : ' ';
  auto at = mine.plans.find(key);
  if (at == mine.plans.end()) {
    dnn::ExecutionPlan* made = nullptr;
    if (mine.plans.size() < kMostPlans)
      made = compile(*f, wanted, handle, device).release();
    else
      refuse(wanted, fmt::format("{} graphs have been compiled, which is the most", kMostPlans));
    at = mine.plans.emplace(std::move(key), made).first;
  }
  const dnn::ExecutionPlan* plan = at->second;
  if (!plan) return false;
  // Aligned as the caching allocator does; freed in the order of the stream.
  const size_t bytes = plan->workspace_bytes();
  const Tensor workspace = bytes ? empty({int64_t(bytes)}, kU8, stream.device) : Tensor();
  std::string why;
  const Status s = plan->execute(handle, bind(), bytes ? workspace.device_data() : nullptr, why);
  if (s != Status::kSuccess) {
    why = fmt::format("{} failed with {}", f->execute.symbol(), why);
    if (is_of_graph(s))
      refuse(wanted, why), at->second = nullptr;
    else
      in_use().fail(why);
    return false;
  }
  if (synchronous()) [[unlikely]]
    synchronize(stream);
  return true;
}

}  // namespace tessera::cuda
