#include "examples/train/stop.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <iterator>
#include <span>
#include <string_view>

#include "core/ops/create.h"

namespace tessera::train {
namespace {

constexpr int kSignals[kStopSignals] = {SIGINT, SIGTERM};
std::atomic<int> sent = 0;  // to any thread

std::atomic<int64_t> sent_at_ms = 0;
constexpr int64_t kSameMs = 1000;  // `timeout` signals the process, then its group

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

void write_error(std::string_view text) {
  [[maybe_unused]] const ssize_t written = ::write(2, text.data(), text.size());
}

// The interrupted code may hold any lock, so stdio must not be used here.
void on_interrupt(int signal) {
  constexpr std::string_view kText =
      "train: stopped by signal 2 (Interrupt): no step is saved; with --checkpoint FOLDER a run "
      "saves the step at which it is stopped, and --resume goes on from there\n";
  if (isatty(1) == 1) write_error("\n");  // after the progress bar
  write_error(kText);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

StopSignals::StopSignals(bool saves, bool tells) : saves_(saves) {
  sent = 0;
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    ::sigaction(kSignals[i], nullptr, &before_[i]);
    const bool ends_as_ever = !saves && !(tells && kSignals[i] == SIGINT);
    // A shell ignores the signal for a background job, which must stay so.
    if (ends_as_ever || before_[i].sa_handler == SIG_IGN) continue;
    struct sigaction action {};
    action.sa_handler = saves ? on_signal : on_interrupt;
    action.sa_flags = SA_RESTART;  // waits for a peer or a disk are continued
    ::sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (size_t i = 0; i < std::size(kSignals); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

int StopSignals::agreed(ProcessGroup& group) const {
  if (!saves_) return 0;
  if (group.size() == 1) return sent.load();
  Tensor all = empty({group.size()}, kI64);
  group.all_gather(all, from_values<int64_t>({int64_t(sent.load())}, {1}));
  return int(std::ranges::max(std::span(all.data<int64_t>(), size_t(group.size()))));
}

}  // namespace tessera::train
