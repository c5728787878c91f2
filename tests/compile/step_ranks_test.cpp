// What ranks agree on before a run, in all combinations of groups: threads vote in groups that say
// that NCCL moves their tensors.
#include "compile/run/step_ranks.h"

#include <gtest/gtest.h>

#include "collectives/decorators/decorator.h"
#include "collectives/loopback/run_ranks.h"

namespace tessera::compiler {
namespace {

class SaysNccl final : public Decorator {
 public:
  using Decorator::Decorator;
  std::string_view backend(Device) const override { return "nccl"; }

 private:
  Ref<ProcessGroup> decorate(Ref<ProcessGroup> group) override {
    return make_ref<SaysNccl>(std::move(group));
  }
};

struct Outcome {
  bool can, moved, together;
  bool operator==(const Outcome&) const = default;
};

using GroupsOf = std::function<std::vector<Ref<ProcessGroup>>(int rank, ProcessGroup& world)>;
using Vote = std::function<void(std::vector<GroupCalls>& calls, RunState& mine)>;

// What each rank hears where all vote the same, but for what `odd_vote` changes on rank `odd`.
std::vector<Outcome> outcomes(int ranks, const GroupsOf& groups_of, int odd, const Vote& odd_vote) {
  std::vector<Outcome> heard(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](ProcessGroup& g) {
    const auto world = make_ref<SaysNccl>(Ref<ProcessGroup>(&g));
    std::vector<GroupCalls> calls;
    for (const Ref<ProcessGroup>& group : groups_of(g.rank(), *world))
      if (group) calls.push_back({group, kCPU, 7, 0});
    StepRanks step("a test");
    RunState run{.stage = RunState::kByGraphs + 3};
    const RunState same = step.agree(calls, run);
    EXPECT_TRUE(same.can && !same.moved && step.together());
    if (g.rank() == odd) odd_vote(calls, run);
    const RunState all = step.agree(calls, run);
    heard[size_t(g.rank())] = {all.can, all.moved, step.together()};
  });
  return heard;
}

// Rows and columns of two by two ranks.
std::vector<Ref<ProcessGroup>> grid(int rank, ProcessGroup& world) {
  return {world.split(rank / 2), world.split(rank % 2)};
}
// Rank 0 is in the world alone, the others have a group of their own before it, too.
std::vector<Ref<ProcessGroup>> pair_in_world(int rank, ProcessGroup& world) {
  return {world.split(rank == 0 ? -1 : 0), Ref<ProcessGroup>(&world)};
}
std::vector<Ref<ProcessGroup>> world_and_pair(int rank, ProcessGroup& world) {
  return {Ref<ProcessGroup>(&world), world.split(rank == 0 ? -1 : 0)};
}

struct Case {
  int ranks;
  GroupsOf groups;
};
const Case kCases[] = {{4, grid}, {3, pair_in_world}, {3, world_and_pair}};

TEST(StepRanks, WhatOneRankCannotDoAllHear) {
  for (const Case& c : kCases)
    for (int odd = 0; odd < c.ranks; ++odd) {
      const std::vector<Outcome> all(size_t(c.ranks), {false, false, true});
      EXPECT_EQ(outcomes(c.ranks, c.groups, odd, [](auto&, RunState& r) { r.can = false; }), all);
    }
}

TEST(StepRanks, MovedMemoryOfOneRankAllHear) {
  for (const Case& c : kCases)
    for (int odd = 0; odd < c.ranks; ++odd) {
      const std::vector<Outcome> all(size_t(c.ranks), {true, true, true});
      EXPECT_EQ(outcomes(c.ranks, c.groups, odd, [](auto&, RunState& r) { r.moved = true; }), all);
    }
}

// Whichever group finds it out, all ranks go apart.
TEST(StepRanks, ADifferenceOfOneRankAllHear) {
  for (const Case& c : kCases)
    for (int odd = 0; odd < c.ranks; ++odd)
      for (const bool last : {false, true})
        for (const Vote& vote :
             {Vote([](auto&, RunState&r) { --r.stage; }),
              Vote([&](auto&calls, RunState&) { (last ? calls.back() : calls.front()).hash = 8; }),
              Vote([&](auto&calls, RunState&) { (last ? calls.back() : calls.front()).cut = 8; })})
          for (const Outcome& heard : outcomes(c.ranks, c.groups, odd, vote))
            EXPECT_FALSE(heard.together) << odd << last;
}

// Without graphs it does not matter where they would be cut.
TEST(StepRanks, CutsCountWhereGraphsAreLaunched) {
  run_ranks(2, [](ProcessGroup& g) {
    const auto world = make_ref<SaysNccl>(Ref<ProcessGroup>(&g));
    StepRanks step("a test");
    const std::vector<GroupCalls> calls{{world, kCPU, 7, uint64_t(g.rank())}};
    for (const RunState::Stage stage :
         {RunState::kInterpreted, RunState::kSized, RunState::kFirst, RunState::kStepByStep}) {
      step.agree(calls, {.stage = stage});
      EXPECT_TRUE(step.together()) << stage;
    }
    step.agree(calls, {.stage = RunState::kByGraphs + 1});
    EXPECT_FALSE(step.together());
  });
}

// A rank that runs the calls of its two groups in two graphs votes before the first one in both.
TEST(StepRanks, GroupsOfACallThatIsTwoGraphs) {
  for (int odd = 0; odd < 4; ++odd)
    run_ranks(4, [&](ProcessGroup& g) {
      const auto world = make_ref<SaysNccl>(Ref<ProcessGroup>(&g));
      std::vector<GroupCalls> calls;
      for (const Ref<ProcessGroup>& group : grid(g.rank(), *world))
        calls.push_back({group, kCPU, 7, 0});
      StepRanks step("a test");
      step.expect(calls);
      if (g.rank() == odd) calls.pop_back();
      step.agree(calls, {.stage = RunState::kFirst});
      EXPECT_FALSE(step.together()) << odd;
    });
}

// Graphs without collectives of NCCL need no vote, whatever else the call has.
TEST(StepRanks, NoVoteWithoutCalls) {
  run_ranks(2, [&](ProcessGroup& g) {
    StepRanks step("a test");
    step.expect({{make_ref<SaysNccl>(Ref<ProcessGroup>(&g)), kCPU, 7, 0}});
    if (g.rank() == 0) step.agree({}, {});
    if (g.rank() == 1) step.agree(std::vector<GroupCalls>{{Ref<ProcessGroup>(&g), kCPU, 7, 0}}, {});
    EXPECT_TRUE(step.together());
  });
}

}  // namespace
}  // namespace tessera::compiler
