// The list of collectives that a rank will call on a group, where it is known in advance: a step
// that is replayed without its program knows all of them. Ranks that announce their list with a
// call compare the lists before any data moves. A rank that runs its program does not know its
// list, announces nothing and is not compared. Invariant: equal lists have equal digests, and
// digests tell where two lists begin to differ, to within a fifth of that position.
// Internal: not part of the public interface.
#pragma once
#include <array>
#include <span>
#include <string>
#include <vector>

#include "core/base/ref.h"

namespace tessera {

struct CallOrder final : RefCounted {
  std::vector<uint64_t> calls;     // hash of kind, operator, dtype and counts of each, in order
  std::vector<std::string> names;  // of each, for errors: "all_reduce(%7) in h.0.mlp backward"
};

namespace detail {

/// A digest of a list: hashes of its prefixes of 1, 2, .., 16 calls, then of four prefixes for each
/// doubling of the length.
struct OrderDigest {
  static constexpr int kPrefixes = 32;
  uint64_t whole = 0;  // 0: there is no list
  std::array<uint32_t, kPrefixes> prefixes{};
};
OrderDigest digest_of(std::span<const uint64_t> calls);

/// Returns the error text where ranks announce different lists ("" otherwise): which ranks differ,
/// from which call on, and what the list `mine` of this rank has there. `blame` gets the ranks
/// outside the majority.
std::string compare_orders(std::span<const OrderDigest> digests, const CallOrder& mine, int rank,
                           const std::string& title, std::vector<int>& blame);

}  // namespace detail
}  // namespace tessera
