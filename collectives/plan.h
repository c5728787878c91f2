// A plan says what a verb is for a backend: which ranks give which pieces, and which ranks take
// them. Each giver publishes either one piece that every taker reads or one piece for each rank; a
// taker copies each giver's piece to a place of its own, or reduces them all into one place.
// Backends move bytes by this table and need no code for single verbs. Invariant: what all ranks
// must agree on is in CallRecord, which is compared before any piece moves.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "collectives/process_group.h"
#include "core/base/small_vector.h"

namespace tessera::detail {

struct Part {
  std::byte* data = nullptr;
  int64_t bytes = 0;
};
using Parts = SmallVector<Part, 8>;

/// The facts of one call, which must be equal on all ranks of a collective.
struct CallRecord {
  uint64_t fingerprint = 0;  // hash of everything below except `order`
  uint64_t seq = 0;
  uint64_t counts = 0;  // number of elements, or a hash of them where they differ between ranks
  uint64_t site = 0;    // hash of file, line and column
  int32_t peer = -1;    // root, or the other end of a send
  CollKind kind = CollKind::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = kF32;
  uint8_t form = 0;  // 1: counts differ between ranks
  // Hash of the list that this rank announces with the call, not in the fingerprint; 0: there is
  // none.
  uint64_t order = 0;
};

/// The part of a plan that consists of plain values.
struct PlanFacts {
  CollKind kind = CollKind::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = kU8;
  int rank = 0, size = 1;
  int giver = -1;             // the only rank that gives; -1: all
  bool one_for_each = false;  // givers publish size() pieces, not one
  bool takes = false;         // this rank reads something
  bool reduces = false;       // takers reduce all givers' pieces into take[0]
  bool p2p = false;           // send or recv
  int64_t longest = 0;  // bytes of the longest piece of all ranks; -1: known after an exchange
  CallRecord record;    // fingerprint and seq are set later, by seal()
};

struct Plan : PlanFacts {
  Parts give;  // what this rank publishes
  Parts take;  // where a piece of each giver goes; one place when `reduces`

  bool gives() const { return !give.empty(); }
  bool is_p2p() const { return p2p; }
  bool has_splits() const { return longest < 0; }
  /// The index of the piece that this rank reads of each giver.
  int piece() const { return one_for_each ? rank : 0; }
  /// True when reading peers' pieces in place would race with writing results.
  bool must_stage() const;
};

/// Checks the arguments of `c` on a group of `size` ranks and sets `plan` to its pieces. Throws
/// UserError and ShapeError. All tensors are on `device`.
void make_plan(const Collective& c, int rank, int size, Plan& plan, Device device = kCPU);

/// The size of a cache line. Tensors are divided among ranks at cache lines, and limits on sizes
/// are counted in lines.
inline constexpr int64_t kLineBytes = 64;
/// The number of lines that `bytes` bytes occupy.
inline constexpr int64_t lines_of(int64_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes; }

/// The part of `bytes` bytes that rank r of `n` gets when they share them: it is cut at cache
/// lines.
struct Slice {
  int64_t begin, end;
};
Slice slice_of(int64_t bytes, int r, int n);

/// Copies the pieces into `memory` and returns the copies.
Parts copied(const Parts& pieces, std::vector<std::byte>& memory);

/// Gives `record` its number and computes its fingerprint.
void seal(CallRecord& record, uint64_t seq);
uint64_t hash_site(const CallSite& site);
/// "train.cpp:88".
std::string describe(const CallSite& site);

/// Returns "" when the ranks' records agree, else the error text: every distinct call with its
/// ranks, its call site and what differs. `blame` gets the ranks outside the majority.
std::string compare_calls(std::span<const CallRecord> records, std::span<const std::string> sites,
                          const std::string& group, std::vector<int>& blame);
/// Returns "" when what each rank sends is what its receiver expects, else the error text. `splits`
/// holds for each rank its bytes for every rank, then its bytes from every rank.
std::string compare_splits(std::span<const int64_t> splits, int size, const std::string& head,
                           std::vector<int>& blame);
/// "0, 2, 3".
std::string join_ranks(std::span<const int> ranks);

}  // namespace tessera::detail
