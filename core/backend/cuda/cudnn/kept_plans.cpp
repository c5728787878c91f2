#include "core/backend/cuda/cudnn/kept_plans.h"

#include <fmt/format.h>

#include <atomic>
#include <filesystem>
#include <optional>

#include "core/base/log.h"
#include "core/io/tuned_choices.h"

namespace tessera::cuda {
namespace {

io::ObjectCache plans_on_disk() { return {"", ".plan", "cuda"}; }

void say_that_none_are_kept(const io::CacheError& e) {
  static std::atomic<bool> said = false;
  if (!said.exchange(true))
    logging::warn("{}; until then every start has cuDNN compile its graphs again", e.what());
}

}  // namespace

// What a file begins with. The text that follows does not say all of this in a form that we read.
std::string KeptPlans::head_of(const dnn::Engine& engine) const {
  return fmt::format("{}: {}", text_of(engine), graph_) + '\0';
}

std::unique_ptr<dnn::ExecutionPlan> KeptPlans::find(const dnn::Graph& graph, dnn::Handle handle,
                                                    const dnn::Engine& engine) const {
  const std::string head = head_of(engine);
  std::string why;
  try {
    const auto entry = plans_on_disk().find(io::TunedChoices::key_of(head));
    if (!entry) return nullptr;
    if (entry->object().starts_with(head)) {
      auto plan = graph.reload({handle, nullptr}, engine, entry->object().substr(head.size()), why);
      if (plan) return plan;
    } else {
      why = "it is of another graph";
    }
    logging::info("cuda: cuDNN compiles a graph again, whose plan {} it does not take: {}",
                  entry->path, why);
  } catch (const io::CacheError& e) {
    say_that_none_are_kept(e);
  }
  return nullptr;
}

void KeptPlans::keep(const dnn::ExecutionPlan& plan) const {
  const std::string text = plan.text();
  if (text.empty()) return;
  const std::string head = head_of(plan.engine()), object = head + text,
                    key = io::TunedChoices::key_of(head);
  try {
    if (const auto entry = plans_on_disk().find(key); entry && entry->object() != object) {
      std::error_code gone_already;
      std::filesystem::remove(entry->path, gone_already);
    }
    bool made = false;
    const auto make = [&](const std::string&) { return object; };
    plans_on_disk().find_or_make(key, make, &made);
  } catch (const io::CacheError& e) {
    say_that_none_are_kept(e);
  }
}

}  // namespace tessera::cuda
