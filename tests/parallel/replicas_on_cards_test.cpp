// Replicas on cards are hashed where they are: bytes that come to the host are those of hashes, and
// a flipped bit is found as on the host.
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "core/core.h"
#include "core/dispatch/copy.h"
#include "parallel/checkpoint/replicas.h"
#include "tests/support/joined_on_card.h"
#include "tests/support/ranks_on_cards.h"

namespace tessera {
namespace {

using checkpoint::Piece;
using checkpoint::whole;

class ReplicasOnCards : public test::RanksWithCards {
 protected:
  using PiecesOf = std::function<std::vector<Piece>(int rank)>;
  // What two ranks find, which must be the same text.
  static std::string found(const PiecesOf& pieces_of) {
    std::mutex mutex;
    std::set<std::string> all;
    run_ranks(2, [&](ProcessGroup& group) {
      const auto pieces = pieces_of(group.rank());
      const std::string text = compare_replicas(pieces, group).difference.value_or("none");
      const std::lock_guard lock(mutex);
      all.insert(text);
    });
    EXPECT_EQ(all.size(), 1u);
    return *all.begin();
  }
};

// Numbers of `dtype`, of which the last byte has one flipped bit where `odd`.
Tensor numbers(DType dtype, int64_t count, bool odd, Device device) {
  Tensor t = arange(0, count, 1, {.dtype = kI64}).to(dtype);
  if (odd) static_cast<uint8_t*>(t.raw())[t.nbytes() - 1] ^= 4;
  return transferred(t, device);
}

TEST_F(ReplicasOnCards, OneFlippedBitIsFoundInEveryDtype) {
  for (DType dtype : {kF64, kF32, kBF16, kF16, kI64, kI32, kU8})
    for (const int odd : {-1, 0, 1}) {
      const std::string text = found([&](int rank) {
        return std::vector{whole("a", numbers(kF32, 100, false, card(rank))),
                           whole("b", numbers(dtype, 1003, rank == odd, card(rank)))};
      });
      if (odd < 0) {
        EXPECT_EQ(text, "none");
        continue;
      }
      EXPECT_TRUE(text.starts_with("b: rank 0 has bits_hash ")) << text;
      EXPECT_NE(text.find(", rank 1 has bits_hash "), text.npos) << text;
    }
}

TEST_F(ReplicasOnCards, ARankThatHoldsAPieceOnTheHostHasTheSameHash) {
  for (const bool odd : {false, true}) {
    const std::string text = found([&](int rank) {
      return std::vector{
          whole("host", full({50}, 1.5, {kF32, kCPU})),
          whole("both", numbers(kBF16, 1003, odd && rank == 0, rank == 0 ? kCPU : card(rank)))};
    });
    EXPECT_EQ(text.substr(0, text.find(' ')), odd ? "both:" : "none") << text;
  }
}

// Views, transposed or at an odd place, are compared by their elements.
TEST_F(ReplicasOnCards, WhereElementsLieDoesNotMatter) {
  for (const bool odd : {false, true})
    EXPECT_EQ(found([&](int rank) {
                const Tensor t = numbers(kBF16, 7 * 11, odd && rank == 1, card(rank));
                const Tensor f = -numbers(kF32, 77, false, card(rank));
                const Tensor square = reshape(t, {7, 11});
                return std::vector{
                    whole("t", rank == 0 ? square
                                         : transpose(transpose(square, 0, 1).contiguous(), 0, 1)),
                    whole("u", rank == 0 ? narrow(t, 0, 3, 50) : narrow(t, 0, 3, 50).clone()),
                    whole("v", rank == 0 ? narrow(f, 0, 3, 50) : narrow(f, 0, 3, 50).clone())};
              }) == "none",
              !odd);
}

TEST_F(ReplicasOnCards, OnlyHashesComeToTheHost) {
  constexpr int kPieces = 12;
  const char* kCopy = "copy to the host";
  if (test::counts_on_card(kCopy, card_).runs < 0) GTEST_SKIP() << "a real card counts nothing";
  test::CardCounts before, after;
  run_ranks(2, [&](ProcessGroup& group) {
    std::vector<Piece> pieces;
    for (int i = 0; i < kPieces; ++i)
      pieces.push_back(whole(std::to_string(i), numbers(kF32, 5000, false, card(group.rank()))));
    runtime_of(card_).synchronize(stream_of(card(group.rank())));
    group.barrier();
    if (group.rank() == 0) before = test::counts_on_card(kCopy, card_);
    group.barrier();
    EXPECT_EQ(compare_replicas(pieces, group).difference, std::nullopt);
    group.barrier();
    if (group.rank() == 0) after = test::counts_on_card(kCopy, card_);
    group.barrier();
  });
  EXPECT_EQ(after.runs - before.runs, 2);  // one of each rank
  // Bytes are counted in checked runs.
  if (after.bytes > 0) {
    EXPECT_EQ(after.bytes - before.bytes, 2 * 16 * kPieces);
  }
}

}  // namespace
}  // namespace tessera
