// The MPI library of this process, used for messages between pairs of ranks. The library (Open MPI
// 4 or 5) is loaded when it is asked for, so programs that do not need it neither link nor start
// it. Invariant: at most one thread is inside MPI, which is all that MPI_THREAD_SERIALIZED permits.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace tessera::detail {

class Mpi {
 public:
  /// Returns the library. The first call starts it, which waits for all processes that mpirun
  /// started. Throws UserError when there are none, when Open MPI is not installed, or when Tessera
  /// was built without it.
  static Mpi& get();

  // The rank in the world that mpirun made.
  int rank() const { return rank_; }
  int size() const { return size_; }

  using Request = void*;
  /// Begins to move `bytes` to or from a rank of the world and adds requests to ask done() about.
  void begin(bool sends, void* data, int64_t bytes, int rank, int tag,
             std::vector<Request>& requests);
  /// Whether all requests are complete; they are then freed.
  bool done(std::span<Request> requests);
  /// The tag of messages that ranks exchange before there is a group; transports use higher tags.
  static constexpr int kTag = 0;

  Mpi(const Mpi&) = delete;
  Mpi& operator=(const Mpi&) = delete;

 private:
  struct Functions;
  Mpi();
  void check(int error, const char* what) const;
  std::vector<pid_t> processes_of_ranks();

  const Functions* f_;
  std::mutex mutex_;
  int rank_ = 0, size_ = 1;
};

}  // namespace tessera::detail
