#include "compile/run/stream_choice.h"

#include <algorithm>

#include "core/base/env.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/io/tuned_choices.h"
#include "core/ops/create.h"
#include "core/tensor/device_runtime.h"

namespace tessera::compiler {
namespace {

const io::TunedChoices& on_disk() {
  static const auto& all = *new io::TunedChoices(".streams", "compile", "streams");
  return all;
}

// All that the times of the range depend on.
std::string key_of(const Program& p, const StepRange& range, const RangeRanks& ranks) {
  std::string text = runtime_of(range.device).identity(range.device.index) + ranks.text();
  for (int i = range.begin; i < range.end; ++i) {
    const Step& s = p.steps[size_t(i)];
    text += to_string(*s.prim);
    for (auto list : {s.in, s.out})
      for (const Tensor& t : list) text += " " + describe(t);
    text += "\n";
  }
  return io::TunedChoices::key_of(text);
}

}  // namespace

std::string streams_wanted() {
  const std::string wanted = env::get("TESSERA_COMPILE_STREAMS");
  TESSERA_CHECK(wanted.empty() || wanted == "one" || wanted == "several" || wanted == "timed",
                "TESSERA_COMPILE_STREAMS={}: expected one, several or timed", wanted);
  return wanted;
}

StreamChoice::StreamChoice(const Program& p, const StepRange& range)
    : device_(range.device),
      streams_(spread(p, range)),
      ranks_(p, range),
      key_(key_of(p, range, ranks_)) {
  const Plan plan = agreed(plan_here());
  if (plan == Plan::kOne || plan == Plan::kKeptOne) chosen_ = Way::kOne;
  if (plan == Plan::kKeptSeveral || plan == Plan::kAskedSeveral) trying_ = Way::kSeveralOneByOne;
}

StreamChoice::Plan StreamChoice::plan_here() const {
  const std::string wanted = streams_wanted();
  if (streams_.count == 1 || wanted == "one") return Plan::kOne;
  if (wanted == "several") return Plan::kAskedSeveral;
  if (wanted.empty() && !runtime_of(device_).why_times_mean_nothing(device_.index).empty())
    return Plan::kOne;
  const auto kept = on_disk().find(key_);
  return !kept ? Plan::kTimes : *kept == "several" ? Plan::kKeptSeveral : Plan::kKeptOne;
}

// Ranks with different plans take one stream where one of them has to, and time both ways where
// none has.
StreamChoice::Plan StreamChoice::agreed(Plan here) const {
  if (ranks_.alone()) return here;
  const Tensor ends = from_values<int32_t>({int32_t(here), -int32_t(here)}, {2});
  ranks_.least(ends);
  const Plan first = Plan(ends.data<int32_t>()[0]), last = Plan(-ends.data<int32_t>()[1]);
  return first == last || first == Plan::kOne ? first : Plan::kTimes;
}

StreamChoice::Way StreamChoice::next() {
  if (chosen_) return *chosen_;
  look();
  const Way now = chosen_.value_or(trying_);
  if (now == Way::kSeveralOneByOne) {
    trying_ = Way::kSeveral;
    if (times_[0].count == 0) chosen_ = Way::kSeveral;  // it was asked for, or kept on disk
  }
  return now;
}

void StreamChoice::begins() {
  if (!chosen_ && !end_) begin_ = runtime_of(device_).record_timed(stream_of(device_));
}
void StreamChoice::ended() {
  if (!chosen_ && !end_) end_ = runtime_of(device_).record_timed(stream_of(device_));
}

void StreamChoice::look() {
  if (!end_ || (ranks_.alone() && !end_->done())) return;
  Times& t = times_[trying_ == Way::kSeveral];
  const double ms = runtime_of(device_).elapsed_ms(*begin_, *end_);
  begin_ = end_ = nullptr;
  t.least = t.count++ ? std::min(t.least, ms) : ms;
  if (t.count < kTimedLaunches) return;
  if (trying_ == Way::kOne)
    trying_ = Way::kSeveralOneByOne;
  else
    choose();
}

void StreamChoice::choose() {
  const Tensor ms = from_values<double>({times_[0].least, times_[1].least}, {2});
  ranks_.most(ms);
  const double one = ms.data<double>()[0], several = ms.data<double>()[1];
  chosen_ = several < one ? Way::kSeveral : Way::kOne;
  logging::info("compile: a step takes {:.3f} ms on one stream and {:.3f} ms on {}", one, several,
                streams_.count);
  // If an entry exists, ranks had different ones.
  on_disk().replace(key_, *chosen_ == Way::kSeveral ? "several" : "one");
}

}  // namespace tessera::compiler
