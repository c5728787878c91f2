// Replicas that differ in one bit are found under every cutting, in every piece, on every rank.
#include "parallel/checkpoint/replicas.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>

#include "collectives/loopback/run_ranks.h"
#include "core/base/boundary.h"
#include "core/ops/create.h"
#include "core/ops/views.h"
#include "tests/support/boundaries.h"
#include "tests/support/temp_folder.h"

namespace tessera::checkpoint {
namespace {

// Four ranks, 2 x 2: "cut" is cut over the columns of the mesh and held twice, "whole" is held by
// all, "own" is another tensor on each rank. Rank `odd` has one flipped bit in piece `at`.
std::vector<Piece> pieces_of(int rank, int odd, size_t at) {
  std::vector<Piece> out;
  Tensor cut = full({300, 1000}, 1.5 + double(rank % 2));
  out.push_back({"cut", {600, 1000}, {300 * (rank % 2), 0}, cut});
  out.push_back(whole("own." + std::to_string(rank), full({3}, double(rank))));
  out.push_back(whole("whole", arange(0, 7, 1, {.dtype = kF32})));
  out.push_back(whole("scalar", zeros({})));
  out.push_back(whole("empty", zeros({0, 4})));
  out.push_back(whole("numbers", from_values<int64_t>({1, 2, 3}, {3})));
  if (rank == odd) {
    auto* bytes = static_cast<std::byte*>(out[at].values.raw());
    bytes[out[at].values.nbytes() - 1] ^= std::byte(1);
  }
  return out;
}

// Returns what all ranks find, which must be the same text.
std::optional<std::string> found(int odd, size_t at) {
  std::mutex mutex;
  std::set<std::optional<std::string>> all;
  run_ranks(4, [&](ProcessGroup& group) {
    std::optional<std::string> text =
        compare_replicas(pieces_of(group.rank(), odd, at), group).difference;
    std::lock_guard lock(mutex);
    all.insert(text);
  });
  EXPECT_EQ(all.size(), 1u);
  return *all.begin();
}

TEST(Replicas, EqualOnesAreFine) { EXPECT_EQ(found(-1, 0), std::nullopt); }

TEST(Replicas, OneBitIsFoundInEveryPieceOfEveryRank) {
  for (int odd = 0; odd < 4; ++odd) {
    const std::string text = found(odd, 0).value_or("none");
    expect_contains(text, odd % 2 ? "cut [300:600, 0:1000]: rank 1 has xxh128 "
                                  : "cut [0:300, 0:1000]: rank 0 has xxh128 ");
    expect_contains(text, odd % 2 ? ", rank 3 has xxh128 " : ", rank 2 has xxh128 ");
    for (const auto& [at, name] :
         {std::pair<size_t, std::string>{2, "whole"}, {3, "scalar"}, {5, "numbers"}}) {
      const std::string where = found(odd, at).value_or("none");
      EXPECT_TRUE(where.starts_with(name + ": ")) << where;
      expect_contains(where, odd == 0   ? "rank 0 has xxh128 "
                             : odd == 1 ? "ranks 0, 2, 3 have xxh128 "
                             : odd == 2 ? "ranks 0, 1, 3 have xxh128 "
                                        : "ranks 0, 1, 2 have xxh128 ");
    }
    EXPECT_EQ(found(odd, 1), std::nullopt);  // no other rank has it
  }
}

TEST(Replicas, ThreadsShareBlocks) {
  CountBoundaries counting;
  for (int64_t mebibytes : {7, 8, 9}) {
    std::atomic<int> differ = 0;
    run_ranks(2, [&](ProcessGroup& group) {
      set_num_threads(3);
      const Tensor values = full({mebibytes << 18}, 1.5);
      EXPECT_EQ(compare_replicas(std::vector{whole("w", values)}, group).difference, std::nullopt);
      for (int64_t block : {int64_t(0), int64_t(3), int64_t(4), mebibytes - 1}) {
        Tensor odd = clone(values);
        odd.data<float>()[(block << 18) + 5] += float(group.rank());
        differ += compare_replicas(std::vector{whole("w", odd)}, group).difference.has_value();
      }
    });
    EXPECT_EQ(differ, 2 * 4);
  }
  EXPECT_EQ(test::not_met({"replicas"}), "");
}

TEST(Replicas, TheFirstOfSeveralIsNamed) {
  std::mutex mutex;
  std::set<std::string> all;
  run_ranks(2, [&](ProcessGroup& group) {
    std::vector<Piece> pieces;
    for (const char* name : {"b", "a", "c"})
      pieces.push_back(whole(name, full({4}, *name == 'b' ? 0.0 : double(group.rank()))));
    const std::string text = compare_replicas(pieces, group).difference.value_or("none");
    std::lock_guard lock(mutex);
    all.insert(text);
  });
  ASSERT_EQ(all.size(), 1u);
  EXPECT_TRUE(all.begin()->starts_with("a: rank 0 has xxh128 ")) << *all.begin();
  EXPECT_TRUE(all.begin()->ends_with("; 1 more differ")) << *all.begin();
}

TEST(Replicas, OnlyWhatSeveralRanksHoldIsHashed) {
  run_ranks(3, [&](ProcessGroup& group) {
    std::vector<Piece> pieces = {whole("all", zeros({100})),
                                 whole("own." + std::to_string(group.rank()), zeros({70}))};
    if (group.rank() > 0) pieces.push_back(whole("two", zeros({50})));
    const ReplicasCompared compared = compare_replicas(pieces, group);
    EXPECT_FALSE(compared.difference);
    EXPECT_EQ(compared.bytes, group.rank() > 0 ? 600u : 400u);
  });
}

// The two zeros are equal numbers with different bits; strides are not compared.
TEST(Replicas, BitsCountAndStridesDoNot) {
  run_ranks(2, [&](ProcessGroup& group) {
    const double zero = group.rank() == 0 ? 0.0 : -0.0;
    EXPECT_TRUE(compare_replicas(std::vector{whole("z", full({2}, zero))}, group).difference);
    Tensor t = reshape(arange(0, 6, 1, {.dtype = kF32}), {2, 3});
    if (group.rank() == 1) t = transpose(transpose(t, 0, 1).contiguous(), 0, 1);
    EXPECT_FALSE(compare_replicas(std::vector{whole("t", t)}, group).difference);
  });
}

}  // namespace
}  // namespace tessera::checkpoint
