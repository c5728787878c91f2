#include "core/backend/cuda/cudnn/engine_choice.h"

#include <fmt/format.h>

#include <limits>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/cudnn/kept_plans.h"
#include "core/backend/cuda/stream.h"
#include "core/base/env.h"
#include "core/io/tuned_choices.h"

namespace tessera::cuda {
namespace {

constexpr size_t kMostTimed = 4;            // suggestions, each of which is compiled first
constexpr int kTimedRuns = 3;               // of each, after one that is not timed
constexpr const char* kOwn = "own kernel";  // what is kept where that is the fastest

// Times of a virtual GPU mean nothing.
bool times_graphs() {
  static const bool on =
      env::get_int("TESSERA_CUDA_TIME_GRAPHS", driver().emulated ? 0 : 1, 0, 1) == 1;
  return on;
}

const io::TunedChoices& on_disk() {
  static const auto& all = *new io::TunedChoices(".graph", "cuda", "cuDNN's engines");
  return all;
}

// What a choice depends on.
std::string subject_of(const CudnnFunctions& f, const WantedGraph& wanted, const std::string& text,
                       int device, bool timed) {
  return fmt::format("{}, cuDNN {}{}{}{}: {}", identity(device), f.version,
                     wanted.demands.deterministic ? ", deterministic" : "",
                     wanted.demands.full_precision ? ", full precision" : "",
                     timed ? ", timed" : "", text);
}

double ms_of(FunctionRef<bool()> run, const Stream& stream) {
  if (!run()) return std::numeric_limits<double>::infinity();
  StreamEvent begin(stream, StreamEvent::Timing::kOn);
  for (int i = 0; i < kTimedRuns; ++i) run();
  StreamEvent end(stream, StreamEvent::Timing::kOn);
  return elapsed_ms(begin, end);
}

// The name of the fastest; "" where none runs.
std::string fastest(const dnn::Plans& plans, const WantedGraph& wanted, const Stream& stream,
                    FunctionRef<bool(const dnn::ExecutionPlan&)> run) {
  if (plans.size() == 1 && !wanted.own) return text_of(plans[0]->engine());
  std::string best;
  double least = std::numeric_limits<double>::infinity();
  for (const auto& plan : plans)
    if (const double ms = ms_of([&] { return run(*plan); }, stream); ms < least)
      least = ms, best = text_of(plan->engine());
  if (!wanted.own) return best;
  const auto own = [&] {
    (*wanted.own)();
    return true;
  };
  return ms_of(own, stream) < least ? kOwn : best;
}

}  // namespace

ChosenPlan choose_plan(const CudnnFunctions& f, const WantedGraph& wanted, PlanFrom from,
                       dnn::Handle handle, const Stream& stream,
                       FunctionRef<bool(const dnn::ExecutionPlan&)> run, std::string& why) {
  dnn::Graph graph = wanted.make(f);
  const bool timed = times_graphs() && !wanted.demands.deterministic;
  const bool times = timed && !captures(stream);
  const std::string subject = subject_of(f, wanted, graph.text(), stream.device.index, timed),
                    key = io::TunedChoices::key_of(subject);
  const std::string known = on_disk().find(key).value_or("");
  if (wanted.own && known == kOwn) return {nullptr, true};
  const std::optional<dnn::Engine> engine = dnn::engine_of(known);
  const KeptPlans kept(subject);
  if (engine && from == PlanFrom::kDisk)
    if (auto plan = kept.find(graph, handle, *engine))
      return {.plan = std::move(plan), .kept = true};
  dnn::Plans plans = graph.compile({handle, nullptr}, wanted.demands, engine ? &*engine : nullptr,
                                   times ? kMostTimed : 1, why);
  if (plans.empty()) return {};
  const auto keep = [&](std::unique_ptr<dnn::ExecutionPlan>& plan) {
    kept.keep(*plan);
    return ChosenPlan{std::move(plan)};
  };
  if (text_of(plans[0]->engine()) == known) return keep(plans[0]);
  if (timed && !times) return {std::move(plans[0]), false, false};
  const std::string mine =
      times ? fastest(plans, wanted, stream, run) : text_of(plans[0]->engine());
  if (mine.empty()) return {std::move(plans[0])};
  const std::string chosen = on_disk().keep(key, mine);
  for (const std::string& name : {chosen, mine}) {
    if (wanted.own && name == kOwn) return {nullptr, true};
    for (auto& plan : plans)
      if (text_of(plan->engine()) == name) return keep(plan);
  }
  return {std::move(plans[0])};
}

}  // namespace tessera::cuda
