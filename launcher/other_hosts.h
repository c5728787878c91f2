// The other hosts of a job, as the supervisor of one host sees them. Invariant: news come in the
// order in which they were sent, and no call blocks.
#pragma once
#include <string>
#include <vector>

namespace tessera::launcher {

/// A rank's end that was not what tlaunch asked for.
struct RankFailure {
  int rank = 0;
  std::string how;    // "exit status 3"
  int exit_code = 1;  // what a shell would report
};

class OtherHosts {
 public:
  struct News {
    enum class Kind {
      kNone,
      kNote,     // text: a line for people
      kFailure,  // a rank on another host failed: survivors have their time for errors of their own
      kLeft,     // a rank, on whatever host, has ended well
      kSignal,   // tlaunch on another host was told to stop
      kEnd       // a host is lost, or joins: this attempt ends at once
    };
    Kind kind = Kind::kNone;
    int signal = 0;
    std::vector<int> absent = {};  // ranks that the others gave up, with kFailure
    std::string text = {};         // for people, with kNote and kEnd
    int attempt = 0;               // that it is about, but for kNote
  };

  virtual ~OtherHosts() = default;
  /// Can be read while there are news.
  virtual int news_fd() const = 0;
  /// Returns the oldest news, or kNone.
  virtual News take_news() = 0;
  /// A rank of this host has ended; `failed`: with another status than 0.
  virtual void tell_end(int rank, const std::string& how, bool failed) = 0;
  /// The first rank of this host that failed on its own.
  virtual void tell_failure(const RankFailure& failure) = 0;
  /// The user's signal has reached this host.
  virtual void tell_signal(int signal) = 0;
};

}  // namespace tessera::launcher
