// The command line of tlaunch. Invariant: the options that parse_options returns can be carried
// out. Anything that cannot (a bad value, a flag that is not available yet, a program that does not
// exist) is refused with one line, and nothing that was given is ignored.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tessera::launcher {

enum class Bind { kAuto, kCore, kNuma, kGpu, kNone };

/// Which of a rank's streams an option applies to: bit 0 is stdout, bit 1 is stderr.
struct StreamModes {
  int fallback = 0;
  std::map<int, int> by_rank;
  int of(int rank) const {
    auto found = by_rank.find(rank);
    return found == by_rank.end() ? fallback : found->second;
  }
};

struct Options {
  int nproc = 1;
  int nnodes = 1, node_rank = 0;   // hosts, and the number of this one
  std::string host = "127.0.0.1";  // where the store listens, or of several hosts the first agent
  int port = 0;                    // 0: any free port, with one host
  std::string run_id;
  int max_restarts = 0;
  std::string log_dir;                         // "": no log files
  StreamModes tee;                             // to file and console
  StreamModes redirects;                       // to file only
  std::optional<std::set<int>> console_ranks;  // nullopt: all
  Bind bind = Bind::kCore;                     // kAuto is decided
  std::vector<int> nodes_of_cards;             // where --nproc or --bind asks for cards (cards.h)
  int timeout_s = 0;                           // 0: leave TESSERA_TIMEOUT alone
  int join_timeout_s = 0;                      // 0: leave TESSERA_JOIN_TIMEOUT alone
  double node_timeout_s = 0;                   // 0: as AgentOptions has it
  std::string key_file;                        // "": job_secret() says
  double grace_s = 10;
  std::vector<std::pair<std::string, std::string>> env;
  int idle_nodes = 0;  // further nodes of this Slurm job, which nothing will run on
  bool dry_run = false;
  bool doctor = false;
  std::string program;               // path to execute
  std::vector<std::string> command;  // argv of the program
};

/// Returns the options, or nullopt with `exit_code` set when tlaunch should end (--help, --version,
/// and errors, which are printed). `cores` is the value of --nproc cpu.
std::optional<Options> parse_options(int argc, char** argv, int cores, int* exit_code);

}  // namespace tessera::launcher
