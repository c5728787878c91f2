#include "core/backend/cuda/cudnn/plans.h"

#include <fmt/format.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/cudnn/engine_choice.h"
#include "core/backend/cuda/library_in_use.h"
#include "core/backend/cuda/refusals.h"
#include "core/backend/cuda/stream.h"
#include "core/base/log.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {
namespace {

using dnn::Status;

constexpr size_t kMostPlans = 4096;  // that a thread has for a card; further graphs are refused

thread_local bool own_graphs = false;

LibraryInUse<CudnnFunctions>& in_use() {
  static auto& one = *new LibraryInUse<CudnnFunctions>(
      {cudnn, cudnn_is_wanted, why_no_cudnn, "convolutions and attention"});
  return one;
}

/// What a thread has on a card: a handle, and plans, which stay, since what they enqueued may still
/// run, or be captured.
struct Known {
  dnn::ExecutionPlan* plan = nullptr;  // null: our own kernels compute the graph
  bool for_good = true;                // false: an engine is chosen by time outside of captures
  bool kept = false;                   // the plan is from disk, and has not been executed yet
};
struct OnCard {
  dnn::Handle handle = nullptr;
  void* stream = nullptr;  // the handle's
  std::unordered_map<std::string, Known> plans;
  std::vector<dnn::ExecutionPlan*> replaced;  // plans, by others that were chosen later
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

// What a status says of the graph, or of the library.
bool is_of_graph(Status s) { return int(s) >= int(Status::kBadParam) && int(s) < 4000; }

using Execute = FunctionRef<Status(const dnn::ExecutionPlan&, std::string& why)>;

Known choose(const CudnnFunctions& f, const WantedGraph& wanted, PlanFrom from, dnn::Handle handle,
             const OnCard& mine, const Stream& stream, Execute execute) {
  if (mine.plans.size() > kMostPlans) {
    refuse(wanted, fmt::format("{} graphs have been compiled, which is the most", kMostPlans));
    return {};
  }
  std::string why, of_run;
  const auto run = [&](const dnn::ExecutionPlan& plan) {
    return execute(plan, of_run) == Status::kSuccess;
  };
  ChosenPlan chosen = choose_plan(f, wanted, from, handle, stream, run, why);
  if (!chosen.plan && !chosen.own) refuse(wanted, why);
  return {chosen.plan.release(), chosen.for_good, chosen.kept};
}

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
  std::vector<dnn::Binding> bindings;
  const auto execute = [&](const dnn::ExecutionPlan& plan, std::string& why) {
    if (bindings.empty()) bindings = bind();
    // Aligned as the caching allocator does; freed in the order of the stream.
    const size_t bytes = plan.workspace_bytes();
    const Tensor workspace = bytes ? empty({int64_t(bytes)}, kU8, stream.device) : Tensor();
    return plan.execute(handle, bindings, bytes ? workspace.device_data() : nullptr, why);
  };
  Known& known = mine.plans.emplace(std::move(key), Known{.for_good = false}).first->second;
  if (!known.for_good && !(known.plan && captures(stream))) {
    if (known.plan) mine.replaced.push_back(known.plan);
    known = choose(*f, wanted, PlanFrom::kDisk, handle, mine, stream, execute);
  }
  if (!known.plan) return false;
  std::string why;
  Status s = execute(*known.plan, why);
  // What is wrong with a plan from disk may show as late as here.
  if (std::exchange(known.kept, false) && s != Status::kSuccess) {
    logging::info("cuda: cuDNN compiles {} again, whose kept plan failed with {}",
                  wanted.describe(), why);
    mine.replaced.push_back(known.plan);
    known = choose(*f, wanted, PlanFrom::kGraph, handle, mine, stream, execute);
    if (!known.plan) return false;
    s = execute(*known.plan, why);
  }
  if (s != Status::kSuccess) {
    why = fmt::format("{} failed with {}", f->execute.symbol(), why);
    if (is_of_graph(s))
      refuse(wanted, why), known.plan = nullptr;
    else
      in_use().fail(why);
    return false;
  }
  if (synchronous()) [[unlikely]]
    synchronize(stream);
  return true;
}

}  // namespace tessera::cuda
