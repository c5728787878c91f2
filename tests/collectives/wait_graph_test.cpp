// Which rank is to blame for a wait: records in, culprits out. This needs no clock and no thread.
#include "collectives/wait_graph.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace tessera::detail {
namespace {

using Ranks = std::vector<int>;
constexpr Millis kTimeout{4000};

WaitFacts wait_in(const std::string& group, Ranks members, uint64_t number,
                  std::optional<Ranks> absent) {
  WaitFacts w;
  w.group = group;
  w.members = std::move(members);
  w.number = number;
  w.call = fmt::format("all_reduce #{}", number), w.site = "here.cpp:1";
  w.absent = std::move(absent);
  return w;
}

/// A world in which ranks tell what they wait for.
class World {
 public:
  void waits(int rank, const WaitFacts& w) {
    Account& a = accounts_[rank];
    if (!a.record) a.record.emplace();
    a.record->waits.push_back(w);
    a.alive = true;
  }
  void works(int rank, const std::string& group, int64_t idle_ms) {
    Account& a = accounts_[rank];
    if (!a.record) a.record.emplace();
    a.record->work.push_back({group, "writing step 20", idle_ms});
    a.alive = true;
  }
  Account& operator[](int rank) { return accounts_[rank]; }
  Verdict judge(int me) {
    const WaitFacts mine = accounts_.at(me).record->waits.at(0);
    return find_culprits(me, mine, kTimeout, [&](int rank) {
      auto at = accounts_.find(rank);
      return at == accounts_.end() ? Account{std::nullopt, true, {}} : at->second;
    });
  }

 private:
  std::map<int, Account> accounts_;
};

TEST(WaitGraph, ARankThatWaitsForNobodyIsToBlame) {
  World w;
  w.waits(0, wait_in("world", {0, 1, 2}, 7, Ranks{2}));
  w.waits(1, wait_in("world", {0, 1, 2}, 7, Ranks{2}));
  const Verdict v = w.judge(0);
  EXPECT_FALSE(v.undecided);
  EXPECT_EQ(v.absent, Ranks{2});
  EXPECT_EQ(v.culprits, Ranks{2});
  EXPECT_EQ(v.chain + v.why, "");
}

TEST(WaitGraph, AChainThroughOtherGroupsEndsAtTheCulprit) {
  World w;
  w.waits(2, wait_in("world/1.0", {0, 2}, 3, Ranks{0}));
  w.waits(0, wait_in("world/2.0", {0, 1}, 5, Ranks{1}));
  const Verdict v = w.judge(2);
  EXPECT_EQ(v.absent, Ranks{0});
  EXPECT_EQ(v.culprits, Ranks{1});
  EXPECT_EQ(v.chain,
            "world rank 0 waits in all_reduce #5 on world/2.0 (here.cpp:1) for world rank 1");
}

TEST(WaitGraph, WhatIsWaitedForInTheSameGroupComesBeforeOtherWaits) {
  World w;
  w.waits(0, wait_in("world", {0, 1, 2, 3}, 9, Ranks{1}));
  w.waits(1, wait_in("other", {1, 3}, 2, Ranks{3}));  // its writer, say
  w.waits(1, wait_in("world", {0, 1, 2, 3}, 8, Ranks{2}));
  EXPECT_EQ(w.judge(0).culprits, Ranks{2});
}

TEST(WaitGraph, AWaitThatHoldsUpNobodyLeadsNowhere) {
  World w;
  w.waits(0, wait_in("world", {0, 1, 2}, 9, Ranks{1}));
  WaitFacts beside = wait_in("other", {1, 2}, 2, Ranks{2});
  beside.holds_up = false;
  w.waits(1, beside);
  EXPECT_EQ(w.judge(0).culprits, Ranks{1});
}

TEST(WaitGraph, ARankThatStoppedWhileItWaitedIsToBlame) {
  World w;
  w.waits(0, wait_in("world", {0, 1}, 4, Ranks{1}));
  w.waits(1, wait_in("world", {0, 1}, 4, Ranks{0}));  // it had waited for rank 0, which came
  w[1].alive = std::nullopt;
  EXPECT_TRUE(w.judge(0).undecided);
  w[1].alive = false;
  const Verdict v = w.judge(0);
  EXPECT_FALSE(v.undecided);
  EXPECT_EQ(v.culprits, Ranks{1});
  EXPECT_NE(v.why.find("world rank 1 has stopped: it tells nothing any more"), std::string::npos);
}

// The rank has reached its deadline before the others, and takes its time to end.
TEST(WaitGraph, ARankThatHasFailedLeadsToWhatItFailedOn) {
  World w;
  w.waits(0, wait_in("world", {0, 1, 2}, 4, Ranks{1}));
  w[1].alive = true;
  w[1].failed_on = {2};
  Verdict v = w.judge(0);
  EXPECT_FALSE(v.undecided);
  EXPECT_EQ(v.absent, Ranks{1});
  EXPECT_EQ(v.culprits, Ranks{2});
  EXPECT_EQ(v.chain, "world rank 1 has failed because of world rank 2");
  w[1].failed_on = {1};
  v = w.judge(0);
  EXPECT_EQ(v.culprits, Ranks{1});
  EXPECT_EQ(v.why, "world rank 1 has failed");
}

TEST(WaitGraph, RanksThatWaitForEachOtherAreSaidTo) {
  World w;
  w.waits(0, wait_in("a", {0, 1}, 1, Ranks{1}));
  w.waits(1, wait_in("b", {0, 1}, 1, Ranks{0}));
  const Verdict v = w.judge(0);
  EXPECT_FALSE(v.undecided);
  EXPECT_EQ(v.culprits, Ranks{1});
  EXPECT_EQ(v.why, "they wait for each other, world rank 1 in all_reduce #1 on b (here.cpp:1)");
}

// Two groups have the same ranks: one for tensors of the CPU, one for those on cards.
TEST(WaitGraph, OfRanksThatWaitForEachOtherTheFewerAreToBlame) {
  World w;
  w.waits(1, wait_in("world", {0, 1, 2, 3}, 1, Ranks{0, 2, 3}));
  for (int r : {0, 2, 3}) w.waits(r, wait_in("world (cuda)", {0, 1, 2, 3}, 5, std::nullopt));
  for (int r = 0; r < 4; ++r) EXPECT_EQ(w.judge(r).culprits, Ranks{1}) << r;
}

TEST(WaitGraph, WorkThatGetsOnIsWaitedForAndWorkThatStandsStillIsNot) {
  World w;
  w.waits(0, wait_in("world/3.0", {0, 1}, 4, Ranks{1}));
  w.works(1, "world/3.0", 3999);
  EXPECT_TRUE(w.judge(0).undecided);
  w[1].record->work[0].idle_ms = 4000;
  const Verdict v = w.judge(0);
  EXPECT_FALSE(v.undecided);
  EXPECT_EQ(v.culprits, Ranks{1});
  EXPECT_EQ(v.why, "world rank 1 is writing step 20 and has not got on for 4 s");
}

// If its program waits for its own writer, or for a third rank, that one is to blame.
TEST(WaitGraph, WorkInAnotherGroupCountsWhereTheProgramIsInNoCall) {
  World w;
  w.waits(0, wait_in("world", {0, 1, 2}, 4, Ranks{1}));
  w.works(1, "world/3.0", 10);
  EXPECT_TRUE(w.judge(0).undecided);
  w.waits(1, wait_in("world/5.0", {1, 2}, 1, Ranks{2}));
  EXPECT_FALSE(w.judge(0).undecided);
  EXPECT_EQ(w.judge(0).culprits, Ranks{2});
}

// This is the case for transports of messages, which do not see which ranks have made a call.
TEST(WaitGraph, RecordsTellWhoIsInACall) {
  World w;
  w.waits(0, wait_in("world", {0, 1, 2, 3}, 9, std::nullopt));
  w.waits(1, wait_in("world", {0, 1, 2, 3}, 9, std::nullopt));
  w.waits(3, wait_in("world", {0, 1, 2, 3}, 8, std::nullopt));  // in the call before, for rank 2
  const Verdict v = w.judge(0);
  EXPECT_EQ(v.absent, (Ranks{2, 3}));
  EXPECT_EQ(v.culprits, Ranks{2});
  EXPECT_EQ(v.reached, 8u);
  // All are in the call, and the data of one does not come.
  World all;
  for (int r = 0; r < 2; ++r) all.waits(r, wait_in("world", {0, 1}, 9, std::nullopt));
  EXPECT_TRUE(all.judge(0).absent.empty());
  all[0].record->waits[0].awaited = 1;
  EXPECT_EQ(all.judge(0).culprits, Ranks{1});
}

// In random jobs one rank has stopped: each of the others waits for it, or for one that does.
TEST(WaitGraph, EveryRankOfARandomJobFindsTheOneThatStopped) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    const int n = int(2 + random() % 15), culprit = int(random() % unsigned(n));
    World w;
    std::vector<int> chained{culprit};
    std::vector<int> others;
    for (int r = 0; r < n; ++r)
      if (r != culprit) others.push_back(r);
    std::shuffle(others.begin(), others.end(), random);
    for (int r : others) {
      const int next = chained[random() % chained.size()];
      WaitFacts f =
          wait_in(fmt::format("group {}", random() % 3), {r, next}, random() % 3 + 1, Ranks{next});
      f.group += fmt::format(".{}-{}", r, next);  // no two waits are in one group by accident
      w.waits(r, f);
      chained.push_back(r);
    }
    if (random() % 2) {  // it had told something before it stopped
      w.waits(culprit, wait_in("before", {culprit, others[0]}, 1, Ranks{others[0]}));
      w[culprit].alive = false;
    }
    for (int r : others) {
      const Verdict v = w.judge(r);
      EXPECT_FALSE(v.undecided);
      ASSERT_EQ(v.culprits, Ranks{culprit}) << "round " << round << ", rank " << r << " of " << n;
    }
  }
}

// All have made the call, and the data of one comes slowly.
TEST(WaitGraph, ARankWhoseDataStillMovesIsNotBlamed) {
  for (const int64_t ago : {int64_t(-1), int64_t(0), kTimeout.count() - 1, kTimeout.count()}) {
    World w;
    WaitFacts mine = wait_in("world", {0, 1, 2}, 7, std::nullopt);
    mine.awaited = 1;
    w.waits(0, mine);
    mine.awaited = 2, mine.moved_ms_ago = ago;
    w.waits(1, mine);
    mine.awaited = 1;
    w.waits(2, mine);
    EXPECT_EQ(w.judge(0).undecided, ago >= 0 && ago < kTimeout.count()) << ago;
  }
}

TEST(WaitGraph, HostsAreNamedWhereThereAreSeveral) {
  WaitFacts w = wait_in("world", {4, 6, 7}, 7, std::nullopt);
  EXPECT_EQ(w.name_of_rank(6), "rank 1 (world rank 6)");
  EXPECT_EQ(w.neighbours_of(6), "");
  w.hosts = std::make_shared<const std::vector<std::string>>(
      std::vector<std::string>{"node0", "node1", "node1"});
  EXPECT_EQ(w.name_of_rank(6), "rank 1 (world rank 6) on node1");
  EXPECT_EQ(w.name_of_rank(5), "world rank 5");
  EXPECT_EQ(w.neighbours_of(6), "; rank 2 is on node1 too");
  EXPECT_EQ(w.neighbours_of(4), "");
  w.hosts = std::make_shared<const std::vector<std::string>>(3, "node0");
  EXPECT_EQ(w.neighbours_of(6), "; ranks 0, 2 are on node0 too");
}

// Two machines that were cloned have one name, but other boots. Containers of one have their boot.
TEST(WaitGraph, HostsOfOneNameAreToldApart) {
  const std::vector<std::string> machines{"node a1 pid:1 0", "node b2 pid:1 0", "node a1 pid:2 0",
                                          "other a1 pid:3 0", "node b2 pid:1 7"};
  WaitFacts w = wait_in("world", {0, 1, 2, 3, 4}, 7, std::nullopt);
  w.hosts = host_names(machines);
  ASSERT_TRUE(w.hosts);
  EXPECT_EQ(w.name_of_rank(0), "rank 0 on node");
  EXPECT_EQ(w.name_of_rank(1), "rank 1 on node (2)");
  EXPECT_EQ(w.neighbours_of(0), "; rank 2 is on node too");
  EXPECT_EQ(w.neighbours_of(1), "; rank 4 is on node (2) too");
  EXPECT_EQ(w.neighbours_of(3), "");
  EXPECT_EQ(host_names(std::vector<std::string>{"node a1 pid:1 0", "node a1 pid:2 0"}), nullptr);
}

TEST(WaitGraph, RecordsComeBackAsTheyWereTold) {
  WaitRecord record{.beat = 12345678901234567u, .waits = {}, .work = {}};
  record.waits.push_back(wait_in("world/1.0", {0, 5, 7}, 3, Ranks{5}));
  record.waits.push_back(wait_in("a group", {}, 0, std::nullopt));
  record.waits.push_back(wait_in("b", {1, 2}, 8, Ranks{}));
  record.waits[1].kind = WaitFacts::Kind::kJoin;
  record.waits[1].holds_up = false;
  record.waits[2].peer = 2, record.waits[2].awaited = 1, record.waits[2].moved_ms_ago = 1234;
  record.work.push_back({"world/3.0", "saving into 'a b'", 77});
  EXPECT_EQ(decode_record(encode(record)), record);
  record.work[0].what = "two\nlines\tand a tab";
  EXPECT_EQ(decode_record(encode(record)).work[0].what, "two lines and a tab");
  for (const char* text : {"", "x", "1\nwait\t0", "1\nwork\ta\tb\tc", "1\nwalk\ta\tb\t1"})
    EXPECT_THROW(decode_record(text), UserError) << text;
}

}  // namespace
}  // namespace tessera::detail
