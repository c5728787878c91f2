#include "core/io/mapping.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "core/io/file.h"

namespace tessera::io {

namespace detail {

// An entry of a list that only grows, so that a signal handler can walk it without a lock. A range
// that is free again is empty and is taken by the next mapping.
struct GuardedRange {
  std::atomic<uintptr_t> begin{0}, end{0};  // end: of the last page
  std::atomic<bool> failed{false};          // a page of it reads as zeros
  bool taken = false;                       // guarded by the mutex
  GuardedRange* next = nullptr;
};

}  // namespace detail

namespace {

using detail::GuardedRange;

std::atomic<GuardedRange*> ranges{nullptr};
std::mutex mutex;  // held while a thread adds to the list
struct sigaction previous;
uintptr_t page_bytes;

// Does what would have happened without this handler.
void pass_on(int number, siginfo_t* info, void* context) {
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(number, info, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN)
    return previous.sa_handler(number);
  const bool sent = info->si_code <= 0;  // by a process, not by the instruction
  if (sent && previous.sa_handler == SIG_IGN) return;
  signal(SIGBUS, SIG_DFL);  // the instruction fails again
  if (sent) raise(number);
}

// Async-signal-safe: atomics and one system call.
void on_bus_error(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  for (GuardedRange* r = ranges.load(std::memory_order_acquire); r; r = r->next) {
    const uintptr_t end = r->end.load(std::memory_order_acquire);
    if (info->si_code <= 0 || at < r->begin.load(std::memory_order_acquire) || at >= end) continue;
    r->failed.store(true);  // before any thread can read the zeros
    const uintptr_t page = at / page_bytes * page_bytes;
    // All pages to the end are replaced at once, since all pages behind the end of a file fail.
    // This is a bare system call, which thread sanitizers do not take for a write to what others
    // read.
    if (syscall(SYS_mmap, page, end - page, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == -1)
      break;
    errno = error;
    return;
  }
  pass_on(number, info, context);
  errno = error;
}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    page_bytes = uintptr_t(sysconf(_SC_PAGESIZE));
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&action.sa_mask);
    TESSERA_CHECK(sigaction(SIGBUS, &action, &previous) == 0,
                  "mapping: no handler for SIGBUS can be installed: {}", std::strerror(errno));
  });
}

GuardedRange* begin_guarding(const void* data, size_t bytes) {
  install();
  std::lock_guard lock(mutex);
  GuardedRange* r = ranges.load(std::memory_order_relaxed);
  while (r && r->taken) r = r->next;
  if (!r) {
    r = new GuardedRange;
    r->next = ranges.load(std::memory_order_relaxed);
    ranges.store(r, std::memory_order_release);
  }
  const auto begin = reinterpret_cast<uintptr_t>(data);
  r->taken = true;
  r->failed = false;
  r->begin = begin;
  r->end = begin + (bytes + page_bytes - 1) / page_bytes * page_bytes;
  return r;
}

void end_guarding(GuardedRange* r) {
  std::lock_guard lock(mutex);
  r->end = 0;
  r->begin = 0;
  r->taken = false;
}

// Modification times are printed as seconds with their fraction: `stat` shows the same.
std::string what_became_of_it(const FileState& was, const FileState& is, bool failed) {
  if (is.bytes < was.bytes)
    return fmt::format("was truncated from {} to {} bytes", was.bytes, is.bytes);
  if (is.bytes > was.bytes) return fmt::format("grew from {} to {} bytes", was.bytes, is.bytes);
  if (is.modified_ns != was.modified_ns)
    return fmt::format("was written to (it has {} bytes as before)", is.bytes);
  return failed ? "could not be read: the disk or the network failed" : "";
}

}  // namespace

FileState state_of(int fd, const std::string& who, const std::string& path) {
  struct stat info {};
  TESSERA_CHECK(fstat(fd, &info) == 0, "{}: cannot look at {}: {}; check the disk", who,
                quote(path), std::strerror(errno));
  return {uint64_t(info.st_size),
          int64_t(info.st_mtim.tv_sec) * 1'000'000'000 + info.st_mtim.tv_nsec};
}

void check_state(int fd, const FileState& opened, const std::string& who, const std::string& path,
                 bool failed) {
  const FileState now = state_of(fd, who, path);
  if (!failed && now == opened) return;
  throw FileChanged(
      fmt::format("{}: {} {} while it was in use; what was read from it cannot be trusted. Put the "
                  "file back as it was, leave it alone while programs read it, and run again",
                  who, quote(path), what_became_of_it(opened, now, failed)));
}

Mapping::Mapping(int fd, const FileState& opened, std::string path, std::string who)
    : opened_(opened), path_(std::move(path)), who_(std::move(who)) {
  if (opened_.bytes == 0) return;
  fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  TESSERA_CHECK(fd_ >= 0, "{}: cannot keep {} open: {}; raise the limit of open files (ulimit -n)",
                who_, quote(path_), std::strerror(errno));
  void* p = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd_, 0);
  const int error = errno;
  if (p == MAP_FAILED) ::close(fd_);
  TESSERA_CHECK(p != MAP_FAILED, "{}: cannot map {} ({} bytes): {}; load it by copying instead",
                who_, quote(path_), bytes(), std::strerror(error));
  data_ = static_cast<std::byte*>(p);
  range_ = begin_guarding(p, bytes());
}

Mapping::~Mapping() {
  if (!data_) return;
  end_guarding(range_);
  munmap(data_, bytes());
  ::close(fd_);
}

void Mapping::check() const {
  if (data_) check_state(fd_, opened_, who_, path_, range_->failed.load());
}

}  // namespace tessera::io
