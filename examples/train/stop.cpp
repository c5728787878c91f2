#include "examples/train/stop.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <iterator>
#include <span>

#include "core/ops/create.h"

namespace tessera::train {
namespace {

constexpr int kSignals[kStopSignals] = {SIGINT, SIGTERM};
std::atomic<int> sent = 0;  // to whichever thread

std::atomic<int64_t> sent_at_ms = 0;
constexpr int64_t kSameMs = 1000;  // `timeout` sends to the process, then to its group

int64_t now_ms() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000 + t.tv_nsec / 1'000'000;
}

void on_signal(int signal) {
  const int saved = errno;
  if (sent == 0) {
    sent_at_ms = now_ms();
    sent = signal;
  } else if (now_ms() - sent_at_ms > kSameMs) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  errno = saved;
}

}  // namespace

StopSignals::StopSignals(bool active) : active_(active) {
  if (!active_) return;
  sent = 0;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // what waits for a peer or a disk goes on
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    ::sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler == SIG_IGN) continue;  // as a shell starts what runs behind it
    ::sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (size_t i = 0; active_ && i < std::size(kSignals); ++i)
    ::sigaction(kSignals[i], &before_[i], nullptr);
}

int StopSignals::agreed(ProcessGroup& group) const {
  if (!active_) return 0;
  if (group.size() == 1) return sent.load();
  Tensor all = empty({group.size()}, kI64);
  group.all_gather(all, from_values<int64_t>({int64_t(sent.load())}, {1}));
  return int(std::ranges::max(std::span(all.data<int64_t>(), size_t(group.size()))));
}

}  // namespace tessera::train
