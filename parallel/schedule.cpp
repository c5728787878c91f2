#include "parallel/schedule.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>

#include "core/base/error.h"

namespace tessera::parallel {
namespace {

using enum ActionKind;

bool sends(ActionKind k) { return k == kSendActivation || k == kSendGradient; }
bool goes_forward(ActionKind k) { return k <= kSendActivation; }
/// The kind of action at the other end of a message.
ActionKind counterpart(ActionKind k) {
  switch (k) {
    case kRecvActivation: return kSendActivation;
    case kSendActivation: return kRecvActivation;
    case kRecvGradient: return kSendGradient;
    case kSendGradient: return kRecvGradient;
    default: return k;
  }
}

/// "send the activation of micro-batch 1 to stage 2".
std::string tell(const Action& a, int stage) {
  return fmt::format("{} the {} of micro-batch {} {} stage {}", sends(a.kind) ? "send" : "receive",
                     goes_forward(a.kind) ? "activation" : "gradient", a.micro_batch,
                     sends(a.kind) ? "to" : "from", peer_of(a.kind, stage));
}

std::string token(const Action& a, int stage) {
  std::string text = fmt::format("{}{}", goes_forward(a.kind) ? 'F' : 'B', a.micro_batch);
  int peer = peer_of(a.kind, stage);
  return peer < 0 ? text : fmt::format("{}{}{}", text, sends(a.kind) ? '>' : '<', peer);
}

/// Adds messages to the forwards and backwards of a stage. A stage receives its next activation
/// before it sends a gradient back: the stage before has sent that activation first, and waits for
/// both.
std::vector<Action> with_messages(const std::vector<Action>& compute, int stage, int stages) {
  std::vector<Action> out;
  auto message = [&](ActionKind kind, int micro_batch) {
    int peer = peer_of(kind, stage);
    if (peer >= 0 && peer < stages) out.push_back({kind, micro_batch});
  };
  for (size_t i = 0; i < compute.size(); ++i) {
    const Action& a = compute[i];
    if (a.kind == kForward) {
      if (i == 0 || compute[i - 1].kind == kForward) message(kRecvActivation, a.micro_batch);
      out.push_back(a);
      message(kSendActivation, a.micro_batch);
    } else {
      message(kRecvGradient, a.micro_batch);
      out.push_back(a);
      if (i + 1 < compute.size() && compute[i + 1].kind == kForward)
        message(kRecvActivation, compute[i + 1].micro_batch);
      message(kSendGradient, a.micro_batch);
    }
  }
  return out;
}

Schedule make(const char* name, int stages, int micro_batches,
              const std::function<std::vector<Action>(int stage)>& compute) {
  TESSERA_CHECK(stages > 0 && micro_batches > 0,
                "{}: {} stages and {} micro-batches; at least one of each", name, stages,
                micro_batches);
  Schedule s{name, micro_batches, {}};
  for (int stage = 0; stage < stages; ++stage)
    s.stages.push_back(with_messages(compute(stage), stage, stages));
  return s;
}

// ---- checks

std::vector<int> order_of(const Schedule& s, int stage, ActionKind kind) {
  std::vector<int> order;
  for (const Action& a : s.stages[size_t(stage)])
    if (a.kind == kind) order.push_back(a.micro_batch);
  return order;
}

std::string_view verb_of(ActionKind k) {
  constexpr std::array<std::string_view, kNumActionKinds> verbs = {
      "receives activations", "runs forward",  "sends activations",
      "receives gradients",   "runs backward", "sends gradients"};
  return verbs[size_t(k)];
}

/// The order in which micro-batches leave the stage where a direction begins.
std::vector<int> departures(const Schedule& s, int stage, ActionKind kind) {
  std::vector<int> order = order_of(s, stage, kind), sorted = order;
  std::ranges::sort(sorted);
  bool complete = int(sorted.size()) == s.micro_batches;
  for (int k = 0; complete && k < s.micro_batches; ++k) complete = sorted[size_t(k)] == k;
  TESSERA_CHECK(
      complete,
      "schedule {}: stage {} {} of micro-batches [{}]; each of the {} takes its turn once", s.name,
      stage, verb_of(kind), fmt::join(order, ", "), s.micro_batches);
  return order;
}

/// Checks that every stage does each action to each micro-batch once, in that order.
void check_orders(const Schedule& s) {
  int last = int(s.stages.size()) - 1;
  std::vector<int> forward = departures(s, 0, kForward), backward = departures(s, last, kBackward);
  for (int stage = 0; stage <= last; ++stage)
    for (int k = 0; k < kNumActionKinds; ++k) {
      ActionKind kind = ActionKind(k);
      bool compute = kind == kForward || kind == kBackward;
      int peer = peer_of(kind, stage);
      bool inside = compute || (peer >= 0 && peer <= last);
      std::vector<int> want = !inside              ? std::vector<int>()
                              : goes_forward(kind) ? forward
                                                   : backward,
                       got = order_of(s, stage, kind);
      TESSERA_CHECK(got == want,
                    "schedule {}: stage {} {} of micro-batches [{}] where the order is [{}]; each "
                    "takes its turn once, in one order on all stages",
                    s.name, stage, verb_of(kind), fmt::join(got, ", "), fmt::join(want, ", "));
    }
}

/// Checks that the actions of a stage on one micro-batch come in the order of ActionKind.
void check_needs(const Schedule& s) {
  for (size_t stage = 0; stage < s.stages.size(); ++stage) {
    std::vector<int> reached(size_t(s.micro_batches), -1);
    for (const Action& a : s.stages[stage]) {
      int& before = reached[size_t(a.micro_batch)];
      TESSERA_CHECK(before < int(a.kind),
                    "schedule {}: stage {} does {} after {}; a micro-batch is received, run "
                    "forward, sent, and then the same backward",
                    s.name, stage, token(a, int(stage)),
                    token({ActionKind(std::max(before, 0)), a.micro_batch}, int(stage)));
      before = int(a.kind);
    }
  }
}

/// Simulates the schedule with sends that wait for their receivers. Where it stops, each stage
/// waits for another one, and following these waits leads round a cycle.
void check_progress(const Schedule& s) {
  size_t n = s.stages.size();
  std::vector<size_t> at(n, 0);
  auto next = [&](size_t stage) -> const Action* {
    return at[stage] < s.stages[stage].size() ? &s.stages[stage][at[stage]] : nullptr;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t stage = 0; stage < n; ++stage)
      while (const Action* a = next(stage)) {
        int peer = peer_of(a->kind, int(stage));
        if (peer >= 0) {
          const Action* b = next(size_t(peer));
          if (!b || *b != Action{counterpart(a->kind), a->micro_batch}) break;
          ++at[size_t(peer)];
        }
        ++at[stage];
        moved = true;
      }
  }
  size_t stage = 0;
  while (stage < n && !next(stage)) ++stage;
  if (stage == n) return;
  // The orders match, so no stage waits for one that has finished.
  std::vector<size_t> path;
  while (std::ranges::find(path, stage) == path.end()) {
    path.push_back(stage);
    const Action* a = next(stage);
    TESSERA_ASSERT(a, "stage {} is waited for and has finished", stage);
    stage = size_t(peer_of(a->kind, int(stage)));
  }
  path.erase(path.begin(), std::ranges::find(path, stage));
  std::string cycle;
  for (size_t i = 0; i < path.size(); ++i)
    cycle += fmt::format("{} waits to {}", i == 0 ? fmt::format("stage {}", path[i]) : ", which",
                         tell(*next(path[i]), int(path[i])));
  throw UserError(
      fmt::format("schedule {}: a deadlock: {}; let one of them come to the other's message first",
                  s.name, cycle));
}

}  // namespace

int peer_of(ActionKind kind, int stage) {
  switch (kind) {
    case kRecvActivation:
    case kSendGradient: return stage - 1;
    case kSendActivation:
    case kRecvGradient: return stage + 1;
    default: return -1;
  }
}

std::string Schedule::to_string() const {
  std::string text =
      fmt::format("{}: {} stages, {} micro-batches\n", name, stages.size(), micro_batches);
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    text += fmt::format("stage {}:", stage);
    for (const Action& a : stages[stage]) text += " " + token(a, int(stage));
    text += "\n";
  }
  return text;
}

Schedule gpipe(int stages, int micro_batches) {
  return make("gpipe", stages, micro_batches, [&](int) {
    std::vector<Action> order;
    for (ActionKind kind : {kForward, kBackward})
      for (int k = 0; k < micro_batches; ++k) order.push_back({kind, k});
    return order;
  });
}

Schedule one_forward_one_backward(int stages, int micro_batches) {
  return make("1f1b", stages, micro_batches, [&](int stage) {
    // First come enough forwards to keep the later stages busy until the first gradient comes back.
    int ahead = std::min(micro_batches, stages - stage - 1);
    std::vector<Action> order;
    for (int k = 0; k < ahead; ++k) order.push_back({kForward, k});
    for (int k = 0; k < micro_batches; ++k) {
      if (k + ahead < micro_batches) order.push_back({kForward, k + ahead});
      order.push_back({kBackward, k});
    }
    return order;
  });
}

int max_live(const Schedule& schedule, int stage) {
  int live = 0, most = 0;
  for (const Action& a : schedule.stages.at(size_t(stage))) {
    live += (a.kind == kForward) - (a.kind == kBackward);
    most = std::max(most, live);
  }
  return most;
}

void check(const Schedule& schedule) {
  TESSERA_CHECK(!schedule.stages.empty() && schedule.micro_batches > 0,
                "schedule {}: {} stages and {} micro-batches; at least one of each", schedule.name,
                schedule.stages.size(), schedule.micro_batches);
  check_orders(schedule);
  check_needs(schedule);
  check_progress(schedule);
}

}  // namespace tessera::parallel
