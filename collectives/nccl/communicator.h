// One NCCL communicator and its stream. Calls never block: after each the owner asks until NCCL has
// submitted it, so that an absent rank holds nobody up beyond a deadline. Invariant: a thread that
// uses it holds the owner's lock; abort() ends all work of it, here, and nothing may follow.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <thread>

#include "collectives/nccl/library.h"
#include "collectives/plan.h"
#include "core/backend/cuda/stream.h"

namespace tessera::nccl {

/// What NCCL answered, with the call that it answered so.
class Error : public std::runtime_error {
 public:
  Error(const char* symbol, Result result, Comm comm);
};

/// Memory as a communicator knows it: a window of all ranks, a buffer of this one, or neither.
struct Registration {
  Window window = nullptr;
  void* buffer = nullptr;
  explicit operator bool() const { return window || buffer; }
  bool operator==(const Registration&) const = default;
};

class Communicator {
 public:
  /// Called while NCCL is busy; throws to end the wait.
  using Pause = std::function<void()>;

  /// Meets the other ranks. Throws Error, and what `pause` throws.
  Communicator(int device, int size, const UniqueId& id, int rank, const Pause& pause);
  ~Communicator();
  Communicator(const Communicator&) = delete;

  /// Divides it among ranks of equal color, in the order of `key`; null for a negative color. All
  /// its ranks call it.
  std::unique_ptr<Communicator> split(int color, int key, const Pause& pause);

  /// Submits the plans together to stream `on`. NCCL has their operators. Equal pieces of an
  /// all_gather or a reduce_scatter follow each other in memory.
  void submit(std::span<const ::tessera::detail::Plan* const> plans, const Stream& on,
              const Pause& pause);
  /// Registers memory of NCCL's, whole pages of it: as a symmetric window, for which all ranks call
  /// it with as many bytes, in one order; where NCCL has none, as a buffer; as neither, where it
  /// refuses at once.
  Registration register_memory(void* at, size_t bytes, const Pause& pause);
  /// Its work on the memory is done. Nothing, where it was closed or aborted.
  void deregister(const Registration& registration);
  /// What has gone wrong meanwhile; kSuccess: nothing.
  Result error() const;
  void abort();
  /// The same beside the calling thread, where graphs have calls of it: NCCL waits until they are
  /// destroyed. The work ends at once.
  void abort_beside();
  /// Ends it together with its peers, once its work is done; aborts it where that takes too long.
  /// No memory is registered then.
  void close();

  int device() const { return device_; }
  const Stream& stream() const { return stream_.stream(); }

 private:
  Communicator(int device, Comm comm);
  void check(Result result, const char* symbol) const;
  void settle(const char* symbol, const Pause& pause) const;
  void enqueue(const ::tessera::detail::Plan& plan);
  void all_gather(const ::tessera::detail::Plan& plan);
  void reduce_scatter(const ::tessera::detail::Plan& plan);
  void exchange(const ::tessera::detail::Plan& plan);
  void copy_own(const ::tessera::detail::Plan& plan) const;

  const Functions& nccl_;
  const int device_;
  Comm comm_ = nullptr;
  cuda::SideStream stream_;
  Stream on_;  // of the submission that is made
  std::thread aborting_;
  std::vector<Registration> registered_;
};

/// Whether NCCL has the operator for the dtype.
bool has_operator(ReduceOp op, DType dtype);

}  // namespace tessera::nccl
