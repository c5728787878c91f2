// Collectives over messages between pairs of ranks: our plans and our order of reductions on top of
// a Transport. The collectives of the transports themselves are not used: they lack verbs and
// uneven forms, or sum in an order that depends on sizes. Invariant: no message of a collective is
// sent before the call records of all ranks have been compared.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/messages/transport.h"
#include "core/base/boundaries.h"

namespace tessera::detail {

/// Memory for the duration of a call. It comes from the allocator, which keeps it for the next
/// call: touching new memory costs more than the work done on it here.
class Scratch {
 public:
  explicit Scratch(int64_t bytes)
      : storage_(make_ref<Storage>(size_t(bytes), kCPU, cpu_allocator())) {}
  std::byte* data() const { return static_cast<std::byte*>(storage_->data()); }

 private:
  const Ref<Storage> storage_;
};

class MessageEngine : public Engine {
 public:
  /// Tensors up to this size are reduced by every rank, from the whole tensors of all ranks.
  static constexpr int64_t kReduceAloneBytes = limit("messages.alone") * kLineBytes;

  /// `store` and `prefix` say where ranks write why the group failed.
  MessageEngine(const Membership& members, std::unique_ptr<Transport> transport,
                std::shared_ptr<Watchdog> dog, std::shared_ptr<Store> store, std::string prefix);

  std::string_view name() const override { return transport_->name(); }
  void run(Call& call) final;
  void run_p2p(const Ref<Call>& first, FunctionRef<Ref<Call>()> next) override;
  void interrupt() override;
  void abort(const CommError& error) override;

 protected:
  /// Moves the pieces of a call that all ranks have agreed on.
  virtual void move(Call& call);
  /// Moves all `transfers` at once; no other messages of the call have this `step`.
  void exchange(const Call& call, std::span<const Transfer> transfers, Step step) {
    transport_->exchange(call, transfers, {call.seq(), step, false}, watch_);
  }
  /// Sets out to the reduction of `in` over the ranks `ours`, among which this rank is at index
  /// `place`; an average divides by the size of the group. Uses the steps kPieces and kGather. `in`
  /// and `out` are the same memory or do not overlap.
  void all_reduce(const Call& call, const Part& in, const Part& out, std::span<const int> ours,
                  int place);

  const Membership members_;
  const int rank_, size_;
  Watch watch_;

 private:
  void check_calls(const Call& call);
  void check_orders(const Call& call, std::span<const OrderDigest> digests);
  void check_splits(const Call& call);
  void move_pieces(const Call& call);
  void message(const Call& call, uint64_t number);
  std::vector<Transfer> with_all(void* mine, void* all, int64_t bytes) const;

  const std::unique_ptr<Transport> transport_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  std::vector<uint64_t> sent_, received_;  // messages to and from each rank
};

}  // namespace tessera::detail
