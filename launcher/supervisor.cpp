#include "launcher/supervisor.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <utility>

#include "collectives/store/liveness.h"
#include "core/base/env.h"
#include "core/base/error.h"
#include "core/base/process.h"
#include "core/base/silence.h"
#include "launcher/report.h"

namespace tessera::launcher {
namespace {

constexpr double kSurvivorsGrace_s = 2;  // time for survivors' own errors after another rank failed
constexpr double kLook_s = 0.5;          // between checks of running ranks when others have ended
constexpr double kLingerGrace_s = 0.5;   // time for children of a dead worker that still print
constexpr size_t kMaxPendingBytes = 1 << 20;
constexpr size_t kReadBytes = 256 << 10;  // read from one stream before the others get their turn

// An epoll event's tag has the kind in its upper half, in its lower half the number, or the stream,
// of a worker on this host.
constexpr uint64_t kSignalTag = 1ull << 32, kExitTag = 2ull << 32, kStreamTag = 3ull << 32,
                   kNewsTag = 4ull << 32;

uint64_t stream_tag(size_t index, int s) { return kStreamTag | uint64_t(2 * index + size_t(s)); }

double monotonic_s() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

}  // namespace

Supervisor::Supervisor(Job job, int attempt)
    : job_(std::move(job)),
      attempt_(attempt),
      start_s_(monotonic_s()),
      timeout_s_(job_.options.timeout_s > 0 ? job_.options.timeout_s
                                            : env::get_seconds("TESSERA_TIMEOUT", 60)),
      memory_kills_(count_memory_kills()) {
  epoll_fd_ = ::epoll_create1(EPOLL_CLOEXEC);
  null_fd_ = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  TESSERA_CHECK(epoll_fd_ >= 0 && null_fd_ >= 0, "cannot open /dev/null or epoll: {}",
                std::strerror(errno));
}

Supervisor::~Supervisor() {
  for (auto& worker : workers_)
    if (worker->pid > 0 && !worker->finished) {
      worker->finish();
      job_.guard.forget(worker->pid);
    }
  ::close(epoll_fd_);
  ::close(null_fd_);
}

double Supervisor::now_s() const { return monotonic_s() - start_s_; }

void Supervisor::watch(int fd, uint64_t tag, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  TESSERA_CHECK(::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) == 0, "epoll: {}",
                std::strerror(errno));
}

Outcome Supervisor::run() {
  start_all();
  loop();
  put_cause_first();
  return outcome();
}

void Supervisor::prepare(Worker& worker) {
  const Options& o = job_.options;
  int redirect = o.redirects.of(worker.rank), tee = o.tee.of(worker.rank);
  bool shown = !o.console_ranks || o.console_ranks->count(worker.rank - job_.first_rank);
  for (int s : {0, 1}) {
    Stream& stream = worker.streams[s];
    stream.on_console = shown && !(redirect >> s & 1);
    worker.open_stream(s, worker.rank == 0 && stream.on_console && ::isatty(s + 1));
    if (!((redirect | tee) >> s & 1)) continue;
    std::string folder =
        fmt::format("{}/{}/attempt_{}/rank_{}", o.log_dir, job_.run_id, attempt_, worker.rank);
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    TESSERA_CHECK(!error, "--log-dir: cannot create {} ({})", folder, error.message());
    worker.open_log(s, folder + (s == 0 ? "/stdout.log" : "/stderr.log"));
  }
}

void Supervisor::start_all() {
  int status[2];
  TESSERA_CHECK(::pipe2(status, O_CLOEXEC) == 0, "no pipe: {}", std::strerror(errno));
  watch(job_.signal_fd, kSignalTag, EPOLLIN);
  if (job_.elsewhere) watch(job_.elsewhere->news_fd(), kNewsTag, EPOLLIN);
  for (int i = 0; i < job_.options.nproc; ++i) {
    const int rank = job_.first_rank + i;
    workers_.push_back(std::make_unique<Worker>(rank));
    Worker& worker = *workers_.back();
    prepare(worker);
    SpawnRequest request;
    request.rank = rank;
    request.program = &job_.options.program;
    request.command = &job_.options.command;
    request.env = job_.environment(rank, attempt_);
    request.cpus = job_.placement.ranks[size_t(i)].cpus;
    request.in = rank == 0 && !::isatty(0) ? 0 : null_fd_;
    request.out = worker.streams[0].child_fd;
    request.err = worker.streams[1].child_fd;
    request.open_files = job_.open_files;
    request.signal_mask = job_.signal_mask;
    worker.pid = spawn(request, status[1]);
    job_.guard.watch(worker.pid);
    worker.close_child_ends();
    worker.pid_fd = int(::syscall(SYS_pidfd_open, worker.pid, 0));
    TESSERA_CHECK(worker.pid_fd >= 0, "pidfd_open: {}; Linux 5.3 or later is needed",
                  std::strerror(errno));
    watch(worker.pid_fd, kExitTag | uint64_t(i), EPOLLIN);
    for (int s : {0, 1}) watch(worker.streams[s].fd, stream_tag(size_t(i), s), EPOLLIN);
    ++unfinished_;
  }
  ::close(status[1]);
  check_started(status[0]);
}

// End of file on the status pipe means that every worker executes the program.
void Supervisor::check_started(int status_fd) {
  SpawnFailure failure{};
  ssize_t n = 0;
  do n = ::read(status_fd, &failure, sizeof failure);
  while (n < 0 && errno == EINTR);
  ::close(status_fd);
  if (n != ssize_t(sizeof failure)) return;
  const char* advice = failure.error == ENOEXEC  ? "; a script needs a first line like #!/bin/sh"
                       : failure.error == ENOENT ? "; does its interpreter exist?"
                       : failure.error == E2BIG  ? "; arguments or environment are too long"
                                                 : "";
  detail::raise<UserError>(fmt::format("{}: cannot be executed ({}){}", job_.options.program,
                                       std::strerror(failure.error), advice));
}

void Supervisor::loop() {
  epoll_event events[64];
  while (unfinished_ > 0) {
    int n = ::epoll_wait(epoll_fd_, events, 64, wait_ms());
    TESSERA_CHECK(n >= 0 || errno == EINTR, "epoll: {}", std::strerror(errno));
    for (int i = 0; i < n; ++i) on_event(events[i].data.u64);
    on_time();
    write_console();
  }
}

void Supervisor::on_event(uint64_t tag) {
  uint64_t kind = tag >> 32 << 32, index = tag - kind;
  if (kind == kSignalTag) return on_signal();
  if (kind == kNewsTag) return on_news();
  Worker& worker = *workers_[kind == kExitTag ? index : index / 2];
  if (kind == kExitTag)
    on_exit(worker);
  else
    on_output(worker, int(index % 2));
}

void Supervisor::on_signal() {
  signalfd_siginfo info{};
  if (::read(job_.signal_fd, &info, sizeof info) != ssize_t(sizeof info)) return;
  int signal = int(info.ssi_signo);
  bool stops = signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT;
  if (stops) return on_stop_signal(signal);
  if (signal == SIGWINCH) {
    winsize size{};
    for (int s : {0, 1})
      if (workers_[0]->streams[s].interactive && ::ioctl(s + 1, TIOCGWINSZ, &size) == 0)
        ::ioctl(workers_[0]->streams[s].fd, TIOCSWINSZ, &size);
  }
  signal_all(signal);
}

void Supervisor::on_stop_signal(int signal, bool elsewhere) {
  const char* name = ::strsignal(signal);
  // `timeout` and some shells signal a program and its group at once, which counts as one signal.
  constexpr double kOneSignal_s = 0.25;
  if (signal == stop_signal_ && now_s() < stop_s_ + kOneSignal_s) return;
  // Whoever stops a job of several hosts may signal one after another.
  if (stop_signal_ != 0 && std::exchange(stopped_elsewhere_, false)) return;
  if (stop_signal_ != 0) {
    job_.console.note(
        fmt::format("tlaunch: signal {} ({}) again: killing all ranks", signal, name));
    signal_all(SIGKILL);
    phase_ = Phase::kKilled;
    return;
  }
  stop_signal_ = signal;
  stop_s_ = now_s();
  stopped_elsewhere_ = elsewhere;
  if (job_.elsewhere && !elsewhere) job_.elsewhere->tell_signal(signal);
  job_.console.note(fmt::format(
      "tlaunch: signal {} ({}){}: passed on to all ranks, which have {:g} s; send it again to kill "
      "them now",
      signal, name, elsewhere ? " on another host" : "", job_.options.grace_s));
  signal_all(signal);
  phase_ = Phase::kStopping;
  phase_end_s_ = now_s() + job_.options.grace_s;
}

void Supervisor::on_news() {
  using Kind = OtherHosts::News::Kind;
  for (;;) {
    const OtherHosts::News news = job_.elsewhere->take_news();
    switch (news.kind) {
      case Kind::kNone: return;
      case Kind::kNote: job_.console.note(news.text); break;
      case Kind::kFailure:
        cause_ = news.absent;
        note_absent(news.absent);
        if (phase_ != Phase::kRunning) break;
        phase_ = Phase::kGrace;
        phase_end_s_ = now_s() + kSurvivorsGrace_s;
        break;
      case Kind::kSignal:
        if (stop_signal_ == 0) on_stop_signal(news.signal, true);
        break;
      case Kind::kLeft:
        if (left_elsewhere_s_ < 0) left_elsewhere_s_ = now_s();
        break;
      case Kind::kEnd:
        cut_short_ = true;
        if (phase_ == Phase::kStopping || phase_ == Phase::kKilled) break;
        signal_all(SIGTERM);
        phase_ = Phase::kStopping;
        phase_end_s_ = now_s() + job_.options.grace_s;
    }
  }
}

void Supervisor::signal_all(int signal) {
  for (auto& worker : workers_) {
    if (worker->finished) continue;
    if (!worker->ended()) worker->sent_signal = signal;
    worker->signal_group(signal);
    if (signal == SIGTERM || signal == SIGHUP || signal == SIGINT || signal == SIGQUIT)
      worker->signal_group(SIGCONT);  // a stopped process would not see the signal
  }
}

void Supervisor::on_exit(Worker& worker) {
  if (worker.ended() || !worker.poll_exit()) return;
  worker.ended_s = now_s();
  ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, worker.pid_fd, nullptr);
  announce(worker);
  bool own = phase_ == Phase::kRunning || phase_ == Phase::kGrace;  // tlaunch has sent no signal
  if (worker.failed() && own) failed_.push_back(&worker);
  if (worker.failed() && own && failed_.size() == 1 && job_.elsewhere)
    job_.elsewhere->tell_failure({worker.rank, worker.how(), worker.exit_code()});
  if (worker.failed() && phase_ == Phase::kRunning) {
    phase_ = Phase::kGrace;
    phase_end_s_ = now_s() + kSurvivorsGrace_s;
    if (job_.store) note_absent(cause_of_failure(*job_.store));
  }
  finish_if_done(worker);
}

void Supervisor::announce(const Worker& worker) {
  if (job_.elsewhere) return job_.elsewhere->tell_end(worker.rank, worker.how(), worker.failed());
  try {
    if (worker.failed())
      announce_death(*job_.store, worker.rank, worker.how());
    else
      announce_departure(*job_.store, worker.rank);
  } catch (const UserError& e) {  // a store that workers have filled must not end supervision
    job_.console.note(fmt::format("tlaunch: rank {} ended, which could not be announced: {}",
                                  worker.rank, e.what()));
  }
}

// Notes that the others waited for these ranks in vain; they have not ended, and soon get signals.
void Supervisor::note_absent(const std::vector<int>& ranks) {
  for (int rank : ranks) {
    Worker* worker = worker_of(rank);
    if (!worker || worker->ended()) continue;
    worker->absent = is_stopped(worker->pid) ? Worker::Absent::kStopped : Worker::Absent::kRunning;
  }
}

// Puts the ranks that caused the failure first: ranks that fail because of another may end before
// it.
void Supervisor::put_cause_first() {
  if (job_.store) cause_ = cause_of_failure(*job_.store);
  std::ranges::stable_partition(failed_, [&](const Worker* worker) {
    return std::ranges::find(cause_, worker->rank) != cause_.end();
  });
}

Worker* Supervisor::worker_of(int rank) const {
  const int index = rank - job_.first_rank;
  return index >= 0 && index < int(workers_.size()) ? workers_[size_t(index)].get() : nullptr;
}

void Supervisor::on_output(Worker& worker, int s) {
  if (worker.streams[s].fd < 0 || paused_) return;
  if (worker.read_stream(s, job_.console, kReadBytes)) return;
  worker.close_stream(s, job_.console);
  finish_if_done(worker);
}

// Finishes a worker that has ended, once its streams are closed, or held open only by its children,
// whose time is limited.
void Supervisor::finish_if_done(Worker& worker) {
  if (!worker.ended() || worker.finished) return;
  bool linger = now_s() < worker.ended_s + kLingerGrace_s && phase_ != Phase::kKilled;
  if (worker.has_open_stream() && linger) return;
  worker.signal_group(SIGKILL);
  for (int s : {0, 1}) {
    if (worker.streams[s].fd < 0) continue;
    worker.read_stream(s, job_.console, SIZE_MAX);
    worker.close_stream(s, job_.console);
  }
  worker.finish();
  job_.guard.forget(worker.pid);
  --unfinished_;
}

void Supervisor::on_time() {
  bool all_ended = true;
  for (auto& worker : workers_) {
    finish_if_done(*worker);
    all_ended = all_ended && worker->ended();
  }
  if (phase_ == Phase::kRunning) look_after_ends();
  if (all_ended || now_s() < phase_end_s_) return;
  if (phase_ == Phase::kGrace) {
    signal_all(SIGTERM);
    phase_ = Phase::kStopping;
    phase_end_s_ = now_s() + job_.options.grace_s;
  } else if (phase_ == Phase::kStopping) {
    job_.console.note("tlaunch: ranks still run after the time they had: killing them");
    signal_all(SIGKILL);
    phase_ = Phase::kKilled;
  }
}

double Supervisor::last_end_s() const {
  double last = left_elsewhere_s_;
  for (const auto& worker : workers_) last = std::max(last, worker->ended_s);
  return last;
}

// Once a rank has ended well, the other ranks have no collective with it whose deadline would
// notice that a rank was stopped by a signal; tlaunch would wait for such a rank forever. This
// looks for it.
void Supervisor::look_after_ends() {
  const double last = last_end_s(), since = now_s() - last;
  if (last < 0) return;
  std::vector<int> running;
  for (const auto& worker : workers_)
    if (!worker->ended()) running.push_back(worker->rank);
  if (running.empty()) return;
  const double silence_s = std::chrono::duration<double>(Silence::kFirst).count();
  if (since >= silence_s && !std::exchange(said_who_runs_, true))
    job_.console.note(fmt::format(
        "tlaunch: rank{} {} still run{}, {:.0f} s after others have ended",
        running.size() == 1 ? "" : "s", rank_list(running), running.size() == 1 ? "s" : "", since));
  // Only time in which this process looks is counted: it may be suspended together with its ranks.
  const double passed = std::min(now_s() - looked_s_, 2 * kLook_s);
  looked_s_ = now_s();
  for (int rank : running) {
    Worker& worker = *worker_of(rank);
    worker.stopped_s = is_stopped(worker.pid) ? worker.stopped_s + passed : 0;
    if (worker.sent_signal == SIGKILL || worker.stopped_s < timeout_s_) continue;
    job_.console.note(fmt::format(
        "tlaunch: rank {} was stopped by a signal, and has not gone on {:.3g} s after others have "
        "ended (--timeout): killing it (pid {})",
        rank, since, worker.pid));
    worker.sent_signal = SIGKILL;
    worker.signal_group(SIGKILL);
  }
}

int Supervisor::wait_ms() const {
  double wait_s = 3600;
  if (phase_ == Phase::kRunning && last_end_s() >= 0) wait_s = kLook_s;
  if (phase_ == Phase::kGrace || phase_ == Phase::kStopping)
    wait_s = std::min(wait_s, phase_end_s_ - now_s());
  for (const auto& worker : workers_)
    if (worker->ended() && !worker->finished)
      wait_s = std::min(wait_s, worker->ended_s + kLingerGrace_s - now_s());
  // A console that is not ready is asked again soon; it may be a file, which epoll does not
  // support.
  if (job_.console.pending(0) + job_.console.pending(1) > 0) wait_s = std::min(wait_s, 0.002);
  return std::max(0, int(wait_s * 1000) + 1);
}

// Prints what the reader takes. If too much is waiting for the reader, nothing is read from the
// workers, which then have to wait too; ends of processes, signals and deadlines are still handled.
void Supervisor::write_console() {
  for (int s : {0, 1}) job_.console.pump(s);
  size_t pending = job_.console.pending(0) + job_.console.pending(1);
  bool pause = pending > (paused_ ? kMaxPendingBytes / 2 : kMaxPendingBytes);
  if (pause == paused_) return;
  paused_ = pause;
  for (size_t i = 0; i < workers_.size(); ++i)
    for (int s : {0, 1}) {
      int fd = workers_[i]->streams[s].fd;
      if (fd < 0) continue;
      if (pause)
        ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
      else
        watch(fd, stream_tag(i, s), EPOLLIN);
    }
}

Outcome Supervisor::outcome() const {
  Outcome result;
  result.stop_signal = stop_signal_;
  result.cut_short = cut_short_;
  if (!failed_.empty()) {
    result.exit_code = failed_.front()->exit_code();
    result.report = failure_report(workers_, failed_, count_memory_kills() > memory_kills_,
                                   job_.on_host, job_.console);
    if (!job_.options.log_dir.empty())
      result.report += fmt::format("tlaunch: logs in {}/{}/attempt_{}\n", job_.options.log_dir,
                                   job_.run_id, attempt_);
  }
  if (stop_signal_ != 0 && failed_.empty()) result.exit_code = 128 + stop_signal_;
  return result;
}

}  // namespace tessera::launcher
