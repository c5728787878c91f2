// Collectives over messages between pairs of ranks: our plans and our reduction order on top of a
// Transport. Transports' own collectives are not used: they lack verbs and uneven forms, or add up
// in an order that depends on sizes. Invariant: no message of a collective is sent before all
// ranks' call records have been compared.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/messages/transport.h"
#include "core/base/boundaries.h"

namespace tessera::detail {

/// Memory for the time of a call, from the allocator that keeps it for the next one: memory that is
/// new to the process costs more than what is done with it here.
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
  /// What is no larger is reduced by every rank, of everybody's whole tensor.
  static constexpr int64_t kReduceAloneBytes = limit("messages.alone") * kLineBytes;

  /// `store` and `prefix` are where ranks tell each other what the group died of.
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
  /// out = the reduction of `in` over the ranks `ours`, of which this rank is the one at `place`;
  /// an average divides by the group's size. Takes the steps kPieces and kGather. `in` and `out`
  /// are one place or do not overlap.
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
