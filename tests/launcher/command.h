// Runs a command for a test and keeps what it printed. Invariant: it is killed, and the test fails,
// when it takes longer than allowed, so no test hangs.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera::testing {

struct Result {
  int exit_code = -1;  // 128 + n when signal n ended it
  std::string out, err;
  double seconds = 0;
};

class Command {
 public:
  /// Starts `argv`; argv[0] is looked up on PATH. `terminal`: its stdout is a pseudo-terminal.
  explicit Command(const std::vector<std::string>& argv, const std::string& input = "",
                   bool terminal = false);
  ~Command();
  pid_t pid() const { return pid_; }
  /// Reads output until `text` is in stdout.
  void wait_for(const std::string& text, double timeout_s = 10);
  /// Closes the reader of its stdout: a closed pipe, a terminal that is gone.
  void hang_up();
  /// Reads output until its end and waits for the exit status.
  Result finish(double timeout_s = 30);

 private:
  bool read_some(double timeout_s);

  pid_t pid_ = -1;
  int out_ = -1, err_ = -1;
  double start_s_;
  Result result_;
};

/// tlaunch with `arguments`, to the end.
Result tlaunch(std::vector<std::string> arguments, const std::string& input = "");
/// argv of tlaunch, for Command.
std::vector<std::string> tlaunch_argv(std::vector<std::string> arguments);

/// Processes whose command line contains `text`, without zombies.
int count_processes(const std::string& text);

}  // namespace tessera::testing
