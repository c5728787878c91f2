// What a rank knows of the calls that follow one: a step that is run again without its program
// knows all that it will make on a group. Ranks that announce a step with the same call compare
// what they announce before anything moves; a rank that announces nothing (it runs its program, and
// does not know) takes no part. Invariant: equal lists have equal digests, and a digest tells
// where two lists part to within a fifth of the way there.
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

/// Hashes of prefixes of a list: of 1, 2, .., 16 calls, then four for each doubling.
struct OrderDigest {
  static constexpr int kPrefixes = 32;
  uint64_t whole = 0;  // 0: there is no list
  std::array<uint32_t, kPrefixes> prefixes{};
};
OrderDigest digest_of(std::span<const uint64_t> calls);

/// Error text where ranks announce different lists ("" otherwise): which ranks, from which call on,
/// and what `mine`, that of this rank, has there. `blame` gets the ranks outside the majority.
std::string compare_orders(std::span<const OrderDigest> digests, const CallOrder& mine, int rank,
                           const std::string& title, std::vector<int>& blame);

}  // namespace detail
}  // namespace tessera
