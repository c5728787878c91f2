// Agreement of agents on generations, simulated (simulated_hosts.h): single histories that are
// known, then thousands of random ones.
#include "launcher/agents/membership.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include "collectives/store/wire.h"
#include "tests/launcher/agents/simulated_hosts.h"
#include "tests/support/fuzz.h"

namespace tessera::launcher {
namespace {

using test::SimulatedHosts;
using test::Time;

std::vector<int> hosts_from(int first, int end) {
  std::vector<int> hosts;
  for (int h = first; h < end; ++h) hosts.push_back(h);
  return hosts;
}

void start_all(SimulatedHosts& s, int hosts) {
  for (int h = 0; h < hosts; ++h) s.start(h);
}

TEST(Membership, FixedHostsBeginAsSoonAsTheLastHasCome) {
  SimulatedHosts s({.hosts = 3, .min_nodes = 3, .max_nodes = 3});
  s.start(2), s.start(1);
  s.run_until(Time{2000});
  EXPECT_EQ(s.training(), nullptr);
  s.start(0);
  ASSERT_TRUE(s.run_until(Time{2300}, [&] { return s.together({0, 1, 2}); }));
  const Generation& g = *s.training();
  EXPECT_EQ(g.number, 1u);
  EXPECT_EQ(g.world_size(), 6);
  for (int h : {0, 1, 2}) EXPECT_EQ(g.nodes[size_t(h)].slot, h);
  EXPECT_EQ(g.first_rank(2), 4);
  EXPECT_TRUE(s.agent(0).leads());
}

TEST(Membership, AHostThatIsStartedAgainTakesItsPlace) {
  SimulatedHosts s({.hosts = 3, .min_nodes = 3, .max_nodes = 3});
  start_all(s, 3);
  ASSERT_TRUE(s.run_until(Time{1000}, [&] { return s.together({0, 1, 2}); }));
  for (int victim : {1, 0, 2, 0}) {  // the leader among them
    s.kill(victim);
    s.run_until(s.now() + Time{300});
    EXPECT_EQ(s.training(), nullptr);
    s.start(victim);
    EXPECT_TRUE(s.run_until(s.now() + Time{1500}, [&] { return s.together({0, 1, 2}); })) << victim;
  }
  EXPECT_EQ(s.generations_trained(), 5);
  EXPECT_EQ(s.training()->number, 5u);
}

TEST(Membership, AHostThatVanishesIsLostAtItsTimeout) {
  SimulatedHosts s({.hosts = 4, .min_nodes = 2, .max_nodes = 4, .keeps = true});
  start_all(s, 4);
  ASSERT_TRUE(s.run_until(Time{8000}, [&] { return s.together({0, 1, 2, 3}); }));
  for (int victim : {3, 0}) {
    const Time before = s.now();
    s.kill(victim, true);
    const std::vector<int> left = victim == 3 ? hosts_from(0, 3) : hosts_from(1, 3);
    ASSERT_TRUE(s.run_until(before + Time{4000}, [&] { return s.together(left); })) << victim;
    EXPECT_GE(s.now() - before, Time{700});
    EXPECT_LE(s.now() - before, Time{victim == 3 ? 1500 : 2600}) << victim;
  }
  EXPECT_TRUE(s.agent(1).leads());
}

TEST(Membership, OneSideOfAPartitionGoesOn) {
  SimulatedHosts s({.hosts = 4, .min_nodes = 2, .max_nodes = 4, .keeps = true});
  start_all(s, 4);
  ASSERT_TRUE(s.run_until(Time{8000}, [&] { return s.together({0, 1, 2, 3}); }));
  for (int a : {0, 1})
    for (int b : {2, 3}) s.cut(a, b), s.cut(b, a);
  ASSERT_TRUE(s.run_until(s.now() + Time{4000}, [&] { return s.together({0, 1}); }));
  s.run_until(s.now() + Time{5000});
  EXPECT_EQ(s.agent(2).current(), nullptr);
  EXPECT_EQ(s.agent(3).current(), nullptr);
  s.heal();
  s.run_until(s.now() + Time{5000});
  EXPECT_TRUE(s.together({0, 1}));  // others wait until the next generation
  s.agent(0).renew("to take them in", s.now());
  EXPECT_TRUE(s.run_until(s.now() + Time{2000}, [&] { return s.together({0, 1, 2, 3}); }));
}

TEST(Membership, PayloadsReachTheirGeneration) {
  SimulatedHosts s({.hosts = 2, .min_nodes = 2, .max_nodes = 2});
  start_all(s, 2);
  ASSERT_TRUE(s.run_until(Time{1000}, [&] { return s.together({0, 1}); }));
  s.agent(1).tell_leader("to the leader");
  s.agent(0).tell_all("to all");
  s.run_until(s.now() + Time{50});
  EXPECT_EQ(s.payloads(0), std::vector<std::string>{"to the leader"});
  EXPECT_EQ(s.payloads(1), std::vector<std::string>{"to all"});
  s.agent(1).tell_leader("too late");
  s.agent(0).renew("a test", s.now());
  s.run_until(s.now() + Time{1000});
  EXPECT_EQ(s.payloads(0).size(), 1u);
}

TEST(Membership, WhatDoesNotFitIsRefused) {
  SimulatedHosts s({.hosts = 3, .min_nodes = 3, .max_nodes = 3});
  s.start(0), s.start(1, "another program");
  s.run_until(Time{1000});
  EXPECT_EQ(s.gave_up(1),
            "node 1 (host1) was started with another program, node 0 (host0) with a job; start all "
            "hosts alike");
  ASSERT_EQ(s.notes(0).size(), 1u);
  EXPECT_EQ(s.notes(0)[0], "node 1 (host1) was refused: " + s.gave_up(1));
}

TEST(Membership, ThoseThatWaitSayForWhomAndGiveUp) {
  SimulatedHosts s({.hosts = 3, .min_nodes = 3, .max_nodes = 3});
  s.start(0), s.start(2);
  s.run_until(Time{71000});
  const std::string absent = "2 of 3 nodes are here; absent: --node-rank 1";
  EXPECT_EQ(s.notes(0), (std::vector<std::string>{"waiting: " + absent, "waiting: " + absent}));
  s.run_until(Time{610000});
  for (int h : {0, 2}) EXPECT_EQ(s.gave_up(h), "after 600 s (--join-timeout) " + absent);
}

TEST(Membership, MessagesThatWereChangedEndTheirConnectionAlone) {
  Generation g{.ballot = {3, 4}, .number = 2};
  g.nodes = {{.id = 4, .host = "a", .addresses = {{"a", 1}}, .job = "x"}, {.id = 5, .host = "b"}};
  const Message m{.kind = MessageKind::kPrepare,
                  .ballot = {1, 2},
                  .promised = {3, 4},
                  .node = g.nodes[0],
                  .known = {g, g},
                  .proposal = g,
                  .covers = {{5, 6}},
                  .text = "why"};
  const std::string bytes = encode(m);
  const Message back = decode(bytes);
  EXPECT_EQ(back.kind, m.kind);
  EXPECT_EQ(back.known, m.known);
  EXPECT_EQ(back.proposal, m.proposal);
  EXPECT_EQ(back.covers, m.covers);
  EXPECT_EQ(back.text, m.text);
  EXPECT_EQ(encode(back), bytes);
  std::mt19937_64 random(1);
  int refused = 0;
  for (int i = 0; i < 100000; ++i) {
    std::string changed = bytes;
    for (int k = 0; k <= i % 3; ++k) changed[random() % changed.size()] = char(random());
    if (i % 5 == 0) changed.resize(random() % changed.size());
    try {
      decode(changed);
    } catch (const wire::BadFrame&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 30000);
}

// Kills, starts, cuts and silence at random, then quiet, in which all must come together.
void random_history(const test::SimulatedSettings& settings) {
  SimulatedHosts s(settings);
  std::mt19937_64 random(settings.seed);
  const int n = settings.hosts;
  start_all(s, n);
  // In some histories things happen while agents agree, in others after they have.
  const int longest = std::vector{200, 1000, 3000}[random() % 3];
  const int events = 5 + int(random() % (longest == 3000 ? 30 : 100));
  for (int e = 0; e < events && s.violation().empty(); ++e) {
    s.run_until(s.now() + Time{int(random() % uint64_t(random() % 2 ? 50 : longest))});
    const int host = int(random() % uint64_t(n)), other = int(random() % uint64_t(n));
    switch (random() % 8) {
      case 0:
      case 1:
        if (s.alive(host)) s.kill(host);
        break;
      case 2:
        if (s.alive(host)) s.kill(host, true);
        break;
      case 3:
      case 4:
        for (int h = 0; h < n; ++h)
          if (!s.alive(h) && random() % 2) s.start(h);
        break;
      case 5:
        s.cut(host, other);
        if (random() % 2) s.cut(other, host);
        break;
      case 6: s.heal(); break;
      default:
        for (int h = 0; h < n; ++h)
          if (s.alive(h) && s.agent(h).leads()) s.agent(h).renew("chance", s.now());
    }
  }
  s.heal();
  for (int h = 0; h < n; ++h)
    if (!s.alive(h)) s.start(h);
  // Those that come while others train wait for the next generation.
  const auto whole = [&] { return s.together(hosts_from(0, n)); };
  for (int k = 0; k < 8 && !s.run_until(s.now() + Time{5000}, whole) && s.violation().empty(); ++k)
    for (int h = 0; h < n; ++h)
      if (s.agent(h).leads()) s.agent(h).renew("to take all in", s.now());
  EXPECT_TRUE(whole() || !s.violation().empty()) << "hosts that are all there do not come together";
  EXPECT_EQ(s.violation(), "");
}

class MembershipHistories : public ::testing::TestWithParam<int> {};

TEST_P(MembershipHistories, NeverTrainTwiceAndComeTogether) {
  const auto seeds = tessera::test::fuzz_seeds(500);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SCOPED_TRACE(tessera::test::run_again(seed));
    const int hosts = 2 + int(seed % 4);
    test::SimulatedSettings settings{.hosts = hosts, .min_nodes = hosts, .max_nodes = hosts};
    settings.seed = seed;
    settings.max_delay_ms = seed % 3 ? 5 : 200;
    if (GetParam() == 1) settings.min_nodes = 1, settings.keeps = true;
    random_history(settings);
    if (HasFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(All, MembershipHistories, ::testing::Values(0, 1),
                         [](const auto& info) { return info.param ? "elastic" : "fixed"; });

}  // namespace
}  // namespace tessera::launcher
