#include "compile/run/stream_choice.h"

#include <algorithm>

#include "core/base/env.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/io/tuned_choices.h"
#include "core/tensor/device_runtime.h"

namespace tessera::compiler {
namespace {

const io::TunedChoices& on_disk() {
  static const auto& all = *new io::TunedChoices(".streams", "compile", "streams");
  return all;
}

// All that the times of the range depend on.
std::string key_of(const Program& p, const StepRange& range) {
  std::string text = runtime_of(range.device).identity(range.device.index);
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
    : device_(range.device), streams_(spread(p, range)) {
  const std::string wanted = streams_wanted();
  const bool times =
      wanted == "timed" || runtime_of(device_).why_times_mean_nothing(device_.index).empty();
  const bool asked = wanted == "several";
  if (streams_.count == 1 || wanted == "one" || (!asked && (range.collectives || !times)))
    chosen_ = Way::kOne;
  if (asked) trying_ = Way::kSeveralOneByOne;
  if (asked || chosen_) return;
  key_ = key_of(p, range);
  const auto kept = on_disk().find(key_);
  if (!kept) return;
  if (*kept == "several")
    trying_ = Way::kSeveralOneByOne;
  else
    chosen_ = Way::kOne;
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
  if (!end_ || !end_->done()) return;
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
  chosen_ = times_[1].least < times_[0].least ? Way::kSeveral : Way::kOne;
  logging::info("compile: a step takes {:.3f} ms on one stream and {:.3f} ms on {}",
                times_[0].least, times_[1].least, streams_.count);
  on_disk().keep(key_, *chosen_ == Way::kSeveral ? "several" : "one");
}

}  // namespace tessera::compiler
