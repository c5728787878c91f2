// One worker and its two output streams, as the supervisor sees them. Invariant: until finish() has
// killed its group and reaped it, `pid` stays a zombie of this process and cannot be reused.
#pragma once
#include <sys/types.h>

#include <array>
#include <string>

#include "launcher/console.h"

namespace tessera::launcher {

/// A worker's stdout or stderr: a pipe or, for rank 0 of an interactive run, a pseudo-terminal.
struct Stream {
  int fd = -1;        // our end; -1 once it has ended
  int child_fd = -1;  // the worker's end, until it is spawned
  int log_fd = -1;
  bool interactive = false;
  bool on_console = true;
  long shown_at = -1;  // the console's line count when it last printed; -1: it has printed nothing
};

class Worker {
 public:
  explicit Worker(int rank) : rank(rank) {}
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker();

  /// Opens stream `s`; `terminal`: as a pseudo-terminal with the size of the terminal on tlaunch's
  /// descriptor s + 1.
  void open_stream(int s, bool terminal);
  /// Opens the log file of stream `s`, in a folder that exists. Throws UserError.
  void open_log(int s, const std::string& path);
  /// Closes the ends of the streams that the worker uses.
  void close_child_ends();

  /// Reads at most `max_bytes` and passes them to console, log and tail. False at end of stream.
  bool read_stream(int s, Console& console, size_t max_bytes);
  void close_stream(int s, Console& console);
  bool has_open_stream() const { return streams[0].fd >= 0 || streams[1].fd >= 0; }

  /// Sends a signal to the worker's process group, which exists until the worker is finished.
  void signal_group(int signal) const;
  /// Checks whether the process has ended, without reaping it; if so, sets `status` and returns
  /// true.
  bool poll_exit();
  /// Kills what is left of the group and reaps the worker.
  void finish();

  bool ended() const { return ended_s >= 0; }
  bool failed() const { return ended() && status != 0; }
  /// Whether what it printed last is still visible on the console, a few lines above the next line
  /// on stderr.
  bool in_view(const Console& console) const;
  /// "exit status 3" or "signal 9 (Killed)".
  std::string how() const;
  /// What a shell would report: the exit status, or 128 + signal.
  int exit_code() const;

  const int rank;
  pid_t pid = -1;
  int pid_fd = -1;
  std::array<Stream, 2> streams;
  int status = 0;        // wait status
  double ended_s = -1;   // when, in seconds of the supervisor's clock; -1: running
  double stopped_s = 0;  // for how long a signal has stopped it, where that is checked
  int sent_signal = 0;   // last signal from tlaunch
  // Whether the others gave it up while it ran, and whether it was stopped then.
  enum class Absent { kNo, kRunning, kStopped } absent = Absent::kNo;
  bool finished = false;
  std::string tail;  // last bytes of both streams
};

}  // namespace tessera::launcher
