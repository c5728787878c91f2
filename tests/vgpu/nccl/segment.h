// Memory that the ranks of a virtual communicator share, be they threads or processes. It has no
// name in the file system: a rank opens it through the descriptor of the process that made it, so
// nothing is left when processes are killed. Invariant: each value has one writer; what a rank
// wrote before it counted up is seen by whoever sees the count.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "collectives/nccl/api.h"

namespace vgpu::nccl {

constexpr int kMostRanks = 64;
constexpr size_t kStageBytes = 1 << 20;     // that a rank shows to all in one round
constexpr size_t kMessageBytes = 64 << 10;  // of a message that are under way

/// What one rank says it calls; all ranks have to say the same.
struct CallFacts {
  uint64_t number = 0;  // of the call in the communicator
  int32_t verb = 0, type = 0, op = 0, root = 0;
  /// The number of the node in the communicator, by first launches, where a graph makes the call.
  int32_t captured = 0;
  uint64_t count = 0;
  /// Where operand and result lie: of each the number of its window and the offset; 0: in none.
  uint64_t places[4] = {};
  bool operator==(const CallFacts&) const = default;
};

/// A rank's side: rounds of collectives, and what ranks tell each other to set things up. Both have
/// two places in turn: a rank comes to round k + 2 only after all have come to k + 1, and then all
/// have read k.
struct RankArea {
  std::atomic<uint64_t> joined, rounds, notes;
  int64_t device;
  CallFacts facts[2];
  int64_t note[2][4];
  alignas(64) char stage[2][kStageBytes];
};
/// Messages of one rank to another, a piece at a time.
struct Channel {
  std::atomic<uint64_t> written, taken;
  uint64_t message_bytes;  // of the message that the piece belongs to
  alignas(64) char piece[kMessageBytes];
};

class Segment {
 public:
  /// Makes one; `id` says where it is.
  static bool make(tessera::nccl::UniqueId* id);
  /// Opens that of `id` for `size` ranks; null where it is gone.
  static std::shared_ptr<Segment> open(const tessera::nccl::UniqueId& id, int size);
  ~Segment();
  Segment(const Segment&) = delete;

  RankArea& rank(int r) const { return ranks_[r]; }
  Channel& channel(int from, int to) const { return channels_[from * size_ + to]; }
  /// Closes this process's descriptor: all ranks are here.
  void close_descriptor() const;

 private:
  explicit Segment(int size) : size_(size) {}
  const int size_;
  int descriptor_ = -1;  // where this process made the segment
  uint64_t number_ = 0;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
  RankArea* ranks_ = nullptr;
  Channel* channels_ = nullptr;
};

}  // namespace vgpu::nccl
