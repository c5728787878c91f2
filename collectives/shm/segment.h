// The memory that the ranks of a shared-memory group have in common. Each rank has a state with its
// counters and latest calls, and a staging area; each ordered pair has a mailbox for send and recv.
// The memory is a mapping without a name (memfd), so nothing is left behind however ranks end;
// ranks that are threads share one mapping. Invariant: only rank r writes state(r), except for its
// bell, which peers ring.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "collectives/plan.h"
#include "collectives/store/memory_store.h"
#include "core/base/boundaries.h"

namespace tessera::detail {

static_assert(std::atomic<uint64_t>::is_always_lock_free);

/// A short text that can be read while it is being changed.
class SharedText {
 public:
  void write(std::string_view text);
  std::string read() const;

 private:
  static constexpr size_t kWords = 24;
  std::atomic<uint64_t> version_{0};  // odd while the text is being changed
  std::atomic<uint64_t> words_[kWords] = {};
};

/// What a rank publishes with a call, besides its pieces.
struct Entry {
  uint64_t fingerprint = 0;
  int64_t place = 0;      // if `direct`: the place of the first piece that it gives, see places()
  uint32_t verdict = 0;   // its PlaceTuner's verdict
  bool direct = false;    // peers can reach its pieces where they lie
  bool staged = false;    // its pieces are in its staging area
  bool has_pool = false;  // RankState::pool is filled in
  bool in_place = false;  // its result goes to `place`, too
};
/// Where a rank's pool can be opened.
struct PoolAddress {
  int32_t descriptor = -1;
  uint64_t bytes = 0;
};

/// How a rank waits for its peers' posts.
enum class Sleep : uint32_t {
  kNone,
  kDeep,  // until a peer rings
  kDoze,  // until its own program needs it, or a peer whose program is blocked rings
};

struct alignas(2 * kLineBytes) RankState {
  // One cache line holds all that peers read of a call in the common case.
  std::atomic<uint64_t> posted{0};  // phases that this rank has published
  Entry entries[2];                 // of the latest calls, by parity of their number in turn
  static_assert(sizeof(std::atomic<uint64_t>) + 2 * sizeof(Entry) <= kLineBytes);
  // Peers read it after they have posted, to see whether this rank has to be woken.
  alignas(kLineBytes) std::atomic<Sleep> sleep{Sleep::kNone};
  std::atomic<uint32_t> bell{0};  // rung by peers
  std::atomic<uint32_t> left{0};  // 1: this rank's group was destroyed
  int32_t pid = 0;                // 0: ranks are threads
  uint64_t started = 0;  // start time of the process, which tells it from a later one with its pid
  cpu_set_t cpus;        // the CPUs that it may run on
  PoolAddress pool;      // set for processes that have allocated from it
  std::atomic<uint32_t> reaches{0};  // 1: this rank could map the pools of the last map_pools
  // The rest is read for reports.
  alignas(kLineBytes) std::atomic<uint64_t> entered{0};  // number of the last collective entered
  std::atomic<uint64_t> finished{0};                     // number of the last collective finished
  std::atomic<uint64_t> p2p{0};  // count << 32 | (1 send, 2 recv) << 24 | peer; 0 in low bits: none
  std::atomic<uint64_t> site_seq{0};  // number of the collective whose call site `site` holds
  SharedText site;
  CallRecord records[2];
  OrderDigest digests[2];  // digests of the lists that calls announce, if their record has an order
};

struct alignas(kLineBytes) Mailbox {
  std::atomic<uint64_t> sent{0};  // chunks written by the sender
  CallRecord record;              // of the message in progress
  char site[120] = {};
  alignas(kLineBytes) std::atomic<uint64_t> got{0};  // chunks read by the receiver
};

/// The error that killed the group; written once.
struct FailureRecord {
  std::atomic<uint32_t> state{0};  // 0 none, 1 being written, 2 readable
  uint64_t seq = 0;
  struct Ranks {
    int32_t count = 0, list[64] = {};
    void write(std::span<const int> ranks) {
      count = int32_t(std::min(ranks.size(), std::size(list)));
      std::copy_n(ranks.begin(), count, list);
    }
    std::vector<int> read() const { return {list, list + count}; }
  } ranks, culprits;
  char text[4000] = {};
};

class Segment {
 public:
  static constexpr size_t kSwapBytes = limit("shm.alone") * kLineBytes;
  // The most bytes of a giver's pieces that are sent with the fingerprint, in the first phase.
  static constexpr size_t kInlineBytes = limit("shm.first_phase") * kLineBytes;
  struct Options {
    // The size of each of a rank's two staging areas: at least kInlineBytes and a cache line per
    // rank.
    size_t stage_bytes = size_t{512} << 10;
    size_t mail_bytes = size_t{64} << 10;  // of each of a mailbox's two slots
  };

  // These throw UserError when the staging areas of `options` are too small for `size` ranks.
  /// Makes the memory for ranks that are threads of this process.
  static std::shared_ptr<Segment> make_private(int size, const Options& options);
  /// Makes the memory for processes; peers join with attach(address()).
  static std::shared_ptr<Segment> make_shared(int size, const Options& options);
  /// Joins the memory of a peer. Throws UserError when it cannot be reached (another user or
  /// container).
  static std::shared_ptr<Segment> attach(const std::string& address, int size,
                                         const Options& options);
  ~Segment();

  int size() const { return size_; }
  const Options& options() const { return options_; }
  std::string address() const;
  /// The number of peers that have attached; the creator may close its descriptor once all have.
  std::atomic<uint32_t>& attached() { return header().attached; }
  void close_descriptor();

  FailureRecord& failure() { return header().failure; }
  RankState& state(int r) { return states_[r]; }
  std::byte* stage(int r, int parity) {
    return stages_ + size_t(2 * r + parity) * options_.stage_bytes;
  }
  /// Where rank r stages at most kSwapBytes that only one phase needs. These areas rotate: a rank
  /// writes where it has read before, so its stores hit lines that are in its cache, and each line
  /// crosses between caches once.
  std::byte* swap(int r, uint64_t phase) {
    size_t area = (size_t(r) + phase / 2) % size_t(size_);
    return swaps_ + (2 * area + phase % 2) * kSwapBytes;
  }
  Mailbox& mailbox(int from, int to) { return mailboxes_[from * size_ + to]; }
  std::byte* mail(int from, int to, int parity) {
    return mail_ + (size_t(from * size_ + to) * 2 + size_t(parity)) * options_.mail_bytes;
  }
  /// The places of rank r's pieces in the call of `turn`, if it is direct: of each piece that it
  /// gives except the first, whose place is in its entry, and at index size() of the first that it
  /// takes. A place is an address between threads, else an offset into the rank's pool.
  int64_t* places(int r, uint64_t turn) { return places_ + (2 * r + int(turn & 1)) * (size_ + 1); }
  /// The bytes that rank r sends to every rank, then those that it expects from every rank, in the
  /// call of `turn`.
  int64_t* splits(int r, uint64_t turn) { return splits_ + (2 * r + int(turn & 1)) * 2 * size_; }

 private:
  struct Header {
    std::atomic<uint32_t> attached{0};
    FailureRecord failure;
  };
  Segment(int size, const Options& options);
  Header& header() { return *static_cast<Header*>(base_); }
  void map(int fd, bool fresh);

  int size_;
  Options options_;
  size_t bytes_ = 0;
  int fd_ = -1;
  void* base_ = nullptr;
  RankState* states_ = nullptr;
  Mailbox* mailboxes_ = nullptr;
  int64_t* splits_ = nullptr;
  int64_t* places_ = nullptr;
  std::byte* swaps_ = nullptr;
  std::byte* stages_ = nullptr;
  std::byte* mail_ = nullptr;
};

/// Where ranks that are threads find the segment of a group, by the group's name.
class Hub {
 public:
  std::shared_ptr<Segment> join(const std::string& group, int size,
                                const Segment::Options& options);
  /// The store through which the ranks' watchdogs communicate.
  const std::shared_ptr<Store>& store() const { return store_; }

 private:
  struct Meeting {
    std::shared_ptr<Segment> segment;
    int joined = 0;
  };
  std::mutex mutex_;
  std::map<std::string, Meeting> meetings_;
  const std::shared_ptr<Store> store_ = std::make_shared<MemoryStore>();
};

}  // namespace tessera::detail
