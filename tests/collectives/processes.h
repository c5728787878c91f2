// Ranks as processes: starts this test binary again, once for each rank, as a launcher would. The
// program that a rank runs is one of those in rank_programs.cpp, by name.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collectives/store/store.h"
#include "collectives/store/tcp_server.h"

namespace tessera::test {

struct RankResult {
  int status = 0;      // as waitpid gives it
  std::string output;  // stdout and stderr
};

/// Seconds after which a rank that has not ended counts as hanging. Under ThreadSanitizer the
/// program of all verbs takes ten times as long, of eight ranks on two cores more than a minute.
#if defined(__SANITIZE_THREAD__)
inline constexpr double kHangs = 300;
#else
inline constexpr double kHangs = 60;
#endif

class RankProcesses {
 public:
  /// `hosts`: the number of hosts that the ranks pretend to be on, each with as many consecutive
  /// ranks.
  RankProcesses(int n, const std::string& program, std::map<std::string, std::string> environment,
                int hosts = 1);
  ~RankProcesses();

  /// Waits for rank r to end, at most `seconds`, after which it is killed.
  RankResult wait(int r, double seconds);
  std::vector<RankResult> wait_all(double seconds);
  int pid(int r) const { return pids_[size_t(r)]; }
  /// The store as the ranks see it.
  std::shared_ptr<Store> store();
  /// Ends the store's server.
  void lose_store() { server_.reset(); }

 private:
  std::unique_ptr<TcpStoreServer> server_;
  std::vector<int> pids_, outputs_;
};

}  // namespace tessera::test
