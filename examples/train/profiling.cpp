#include "examples/train/profiling.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "core/base/error.h"
#include "core/base/spelling.h"
#include "core/dispatch/device_span.h"
#include "core/io/file.h"
#include "core/ops/create.h"
#include "parallel/checkpoint/exchange.h"

namespace tessera::train {
namespace {

constexpr int64_t kWarmup = 3, kSteps = 10;

// Returns on every rank why rank 0 could not write; empty where it could.
std::string trouble_of(ProcessGroup& group, const std::string& path, bool written) {
  Tensor error = from_values<int64_t>({written ? 0 : errno}, {1});
  group.broadcast(error, 0);
  const int code = int(error.data<int64_t>()[0]);
  return code ? fmt::format("--profile {}: rank 0 cannot write it: {}", path, std::strerror(code))
              : "";
}

}  // namespace

Profiling::Profiling(std::string path, ProcessGroup& group, Device device, int64_t first,
                     int64_t end)
    : path_(std::move(path)),
      group_(group),
      device_(device),
      first_(std::clamp(first + kWarmup, first, std::max(first, end - 1))),
      last_(std::min(first_ + kSteps, end) - 1) {
  if (path_.empty()) return;
  if (group_.rank() == 0) io::detach(path_, "train: --profile");
  const bool opens = group_.rank() != 0 || std::ofstream(path_, std::ios::app).is_open();
  const std::string trouble = trouble_of(group_, path_, opens);
  TESSERA_CHECK(trouble.empty(), "train: {}", trouble);
}

void Profiling::before_step(int64_t step) {
  if (path_.empty() || step != first_) return;
  before_host_ = held_on(kCPU), before_ = held_on(device_);
  profiler_.emplace();
  profile_memory(kCPU);
}

std::string Profiling::after_step(int64_t step) {
  if (!profiler_ || step < first_ || step > last_) return "";
  profile_memory(kCPU);
  if (step != last_) return "";
  std::vector<ProfileEvent> events = profiler_->profile()->events();
  size_t dropped = profiler_->profile()->dropped();
  profiler_.reset();
  std::string text = write(events);
  CommunicationTime c = communication_of(events);
  text +=
      fmt::format("steps {} to {} of rank 0:\n{}", first_ + 1, last_ + 1, profile_table(events));
  if (c.total_us > 0)
    text += fmt::format("communication {:.3f} ms a step, {:.0f} % of it hidden\n",
                        c.total_us / 1e3 / double(last_ - first_ + 1), 100 * c.hidden());
  text += memory_of(kCPU, before_host_);
  if (!device_.is_cpu()) text += memory_of(device_, before_);
  if (dropped) text += fmt::format("{} events more were dropped\n", dropped);
  return text;
}

// Without a reset of the peak, which is the run's.
std::string Profiling::memory_of(Device device, const Held& before) const {
  const Held now = held_on(device);
  std::string text =
      fmt::format("memory of {}: {:.1f} MB held now, at most {:.1f} MB; {:.1f} MB",
                  to_string(device), double(now.stats.live_bytes) * 1e-6,
                  double(now.stats.peak_bytes) * 1e-6, double(now.stats.system_bytes) * 1e-6);
  text += fmt::format(" are taken from the {} by {} calls, {} of them in these steps",
                      device.is_cpu() ? "system" : "driver", now.stats.system_calls,
                      now.stats.system_calls - before.stats.system_calls);
  if (now.allocations >= 0)
    text += fmt::format("; {} allocations a step",
                        (now.allocations - before.allocations) / (last_ - first_ + 1));
  return text + "\n";
}

Profiling::Held Profiling::held_on(Device device) {
  return {memory_stats(device), runtime_of(device).allocations(device.index)};
}

std::string Profiling::write(const std::vector<ProfileEvent>& events) const {
  std::vector<std::string> ranks =
      checkpoint::Exchange(&group_, {}).gather(trace_events(events, group_.rank()));
  bool written = true;
  if (group_.rank() == 0) {
    std::ofstream file(path_, std::ios::trunc);
    file << chrome_trace(ranks);
    written = bool(file.flush());
  }
  if (std::string trouble = trouble_of(group_, path_, written); !trouble.empty())
    return fmt::format("warning: {}; the run goes on\n", trouble);
  return fmt::format("profile of {} in {}; ", counted(int64_t(ranks.size()), "rank"), path_);
}

}  // namespace tessera::train
