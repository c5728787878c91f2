// Schedules of pipelines: what they keep alive, how they print, and what is refused.
#include "parallel/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/base/error.h"

namespace tessera::parallel {
namespace {

using enum ActionKind;

std::string refusal(const Schedule& s) {
  try {
    check(s);
  } catch (const UserError& e) {
    return e.what();
  }
  return "no error";
}

TEST(Schedule, EveryShapeComesToItsEnd) {
  for (int stages = 1; stages <= 8; ++stages)
    for (int micro_batches = 1; micro_batches <= 17; ++micro_batches) {
      Schedule all = gpipe(stages, micro_batches),
               turns = one_forward_one_backward(stages, micro_batches);
      EXPECT_NO_THROW(check(all)) << all.to_string();
      EXPECT_NO_THROW(check(turns)) << turns.to_string();
      for (int s = 0; s < stages; ++s) {
        EXPECT_EQ(max_live(all, s), micro_batches);
        EXPECT_EQ(max_live(turns, s), std::min(micro_batches, stages - s)) << turns.to_string();
      }
    }
}

TEST(Schedule, Prints) {
  EXPECT_EQ(gpipe(2, 2).to_string(),
            "gpipe: 2 stages, 2 micro-batches\n"
            "stage 0: F0 F0>1 F1 F1>1 B0<1 B0 B1<1 B1\n"
            "stage 1: F0<0 F0 F1<0 F1 B0 B0>0 B1 B1>0\n");
  EXPECT_EQ(one_forward_one_backward(2, 3).to_string(),
            "1f1b: 2 stages, 3 micro-batches\n"
            "stage 0: F0 F0>1 F1 F1>1 B0<1 B0 F2 F2>1 B1<1 B1 B2<1 B2\n"
            "stage 1: F0<0 F0 B0 F1<0 B0>0 F1 B1 F2<0 B1>0 F2 B2 B2>0\n");
}

// It sends each gradient before it receives the next activation, which the stage before is still
// sending.
TEST(Schedule, DeadlockIsRefusedWithItsCycle) {
  Schedule s = one_forward_one_backward(2, 3);
  s.name = "naive";
  auto& actions = s.stages[1];
  for (size_t i = 0; i + 1 < actions.size(); ++i)
    if (actions[i].kind == kRecvActivation && actions[i + 1].kind == kSendGradient)
      std::swap(actions[i], actions[i + 1]);
  EXPECT_EQ(refusal(s),
            "schedule naive: a deadlock: stage 0 waits to send the activation of micro-batch 1 to "
            "stage 1, which waits to send the gradient of micro-batch 0 to stage 0; let one of "
            "them come to the other's message first");
}

// Stage 2 waits as well, but not in the cycle.
TEST(Schedule, OnlyTheCycleIsPrinted) {
  Schedule s = gpipe(3, 1);
  auto& first = s.stages[0];  // F0 F0>1 B0<1 B0
  std::swap(first[1], first[2]);
  EXPECT_NE(refusal(s).find("stage 0 does F0>1 after B0<1"), std::string::npos) << refusal(s);

  s = gpipe(3, 2);
  auto& middle = s.stages[1];  // F0<0 F0 F0>2 F1<0 F1 F1>2 B0<2 B0 B0>0 B1<2 B1 B1>0
  std::rotate(middle.begin() + 3, middle.begin() + 6, middle.begin() + 9);
  EXPECT_EQ(refusal(s),
            "schedule gpipe: a deadlock: stage 1 waits to receive the gradient of micro-batch 0 "
            "from stage 2, which waits to receive the activation of micro-batch 1 from stage 1; "
            "let one of them come to the other's message first");
}

TEST(Schedule, FaultsAreNamed) {
  auto with = [](auto change) {
    Schedule s = gpipe(2, 2);
    change(s.stages);
    return refusal(s);
  };
  using Stages = std::vector<std::vector<Action>>;
  EXPECT_EQ(with([](Stages& s) { s[0][2].micro_batch = 0; }),
            "schedule gpipe: stage 0 runs forward of micro-batches [0, 0]; each of the 2 takes its "
            "turn once");
  EXPECT_EQ(with([](Stages& s) { s[1].pop_back(); }),
            "schedule gpipe: stage 1 sends gradients of micro-batches [0] where the order is [0, "
            "1]; each takes its turn once, in one order on all stages");
  EXPECT_EQ(with([](Stages& s) { std::swap(s[1][0], s[1][2]); }),
            "schedule gpipe: stage 1 receives activations of micro-batches [1, 0] where the order "
            "is [0, 1]; each takes its turn once, in one order on all stages");
  EXPECT_EQ(with([](Stages& s) {
              s[0].push_back({kSendGradient, 0});
            }),
            "schedule gpipe: stage 0 sends gradients of micro-batches [0] where the order is []; "
            "each takes its turn once, in one order on all stages");
  EXPECT_EQ(with([](Stages& s) { std::swap(s[0][4], s[0][5]); }),
            "schedule gpipe: stage 0 does B0<1 after B0; a micro-batch is received, run forward, "
            "sent, and then the same backward");
  EXPECT_EQ(refusal({"empty", 0, {}}),
            "schedule empty: 0 stages and 0 micro-batches; at least one of each");
  EXPECT_THROW(gpipe(2, 0), UserError);
}

}  // namespace
}  // namespace tessera::parallel
