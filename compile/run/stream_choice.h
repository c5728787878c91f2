// Whether a range of steps runs on one stream of its device or on several (side_streams.h). Both
// are timed in steps of training, where both compute the same; what was faster is kept on disk.
// Nothing waits for a time: a launch is timed once its end has been seen. Where the range has
// collectives, its ranks go the same way in each run: they wait for their times, and choose by
// those of the slowest rank.
// Internal: not part of the public interface.
#pragma once
#include <array>
#include <optional>
#include <string>

#include "compile/run/range_ranks.h"
#include "compile/run/side_streams.h"
#include "core/tensor/event.h"

namespace tessera::compiler {

/// TESSERA_COMPILE_STREAMS, or "" where it is not set; throws UserError for what it cannot be.
std::string streams_wanted();

class StreamChoice {
 public:
  enum class Way : uint8_t {
    kOne,             // by the graph on one stream
    kSeveral,         // by that on several
    kSeveralOneByOne  // steps on several streams without a graph, as libraries prepare themselves
  };
  /// All ranks of the range make theirs in the same run.
  StreamChoice(const Program& p, const StepRange& range);

  /// How the next run of the range goes.
  Way next();
  /// To be called around each launch of a graph.
  void begins();
  void ended();
  bool is_made() const { return chosen_.has_value(); }
  const StepStreams& streams() const { return streams_; }

 private:
  static constexpr int kTimedLaunches = 3;  // each way; the shortest counts
  struct Times {
    int count = 0;
    double least = 0;  // ms
  };
  // What a rank would do by itself, and what ranks agree on.
  enum class Plan : int32_t {
    kOne,          // has to be
    kTimes,        // both ways are timed
    kKeptOne,      // on disk
    kKeptSeveral,  // on disk
    kAskedSeveral
  };
  Plan plan_here() const;
  Plan agreed(Plan here) const;
  void look();
  void choose();

  const Device device_;
  const StepStreams streams_;
  const RangeRanks ranks_;
  std::string key_;  // on disk
  std::optional<Way> chosen_;
  Way trying_ = Way::kOne;
  std::array<Times, 2> times_;  // of kOne and kSeveral
  Ref<Event> begin_, end_;      // of the launch that is timed
};

}  // namespace tessera::compiler
