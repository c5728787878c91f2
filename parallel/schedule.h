// The order in which each stage of a pipeline acts. A schedule is a value: programs can print it,
// make their own, and check it before anything runs. Invariants of a schedule that passed check():
// micro-batches pass through all stages in one order forward and in one order backward; and it
// finishes even if every send waits until the receiver takes the message (a rendezvous). With
// asynchronous sends it waits less and never forever.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::parallel {

enum class ActionKind : uint8_t {
  kRecvActivation,  // from the stage before
  kForward,
  kSendActivation,  // to the stage after
  kRecvGradient,    // from the stage after
  kBackward,
  kSendGradient  // to the stage before
};
inline constexpr int kNumActionKinds = 6;

struct Action {
  ActionKind kind = ActionKind::kForward;
  int micro_batch = 0;
  bool operator==(const Action&) const = default;
};

/// The stage at the other end of a message of `stage`, which may lie outside of the pipeline; -1
/// for forward and backward.
int peer_of(ActionKind kind, int stage);

struct Schedule {
  std::string name;  // "gpipe"
  int micro_batches = 0;
  std::vector<std::vector<Action>> stages;  // stage s is rank s of the pipeline

  /// Prints a line for each stage. F and B are forward and backward of a micro-batch; F0>1 sends
  /// its activation to stage 1, F0<0 receives it from stage 0; B0>0 and B0<1 do so with its
  /// gradient:
  ///   stage 0: F0 F0>1 B0<1 B0
  ///   stage 1: F0<0 F0 B0 B0>0
  std::string to_string() const;
};

/// Runs all micro-batches forward, then all backward (Huang et al., "GPipe", NeurIPS 2019). A stage
/// keeps what backward needs of every micro-batch.
Schedule gpipe(int stages, int micro_batches);
/// Runs the backward of a micro-batch as early as possible, alternating with forwards (Harlap et
/// al., "PipeDream", 2018; Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
/// ICML 2021). Stage s keeps what backward needs of at most stages - s micro-batches; the time is
/// that of GPipe.
Schedule one_forward_one_backward(int stages, int micro_batches);

/// The most micro-batches whose state for backward `stage` keeps at one time.
int max_live(const Schedule& schedule, int stage);

/// Throws UserError that names the first fault: a micro-batch that a stage misses, repeats or takes
/// in another order than its neighbour, an action before what it needs, or a deadlock, with the
/// cycle of stages that wait for each other.
void check(const Schedule& schedule);

}  // namespace tessera::parallel
