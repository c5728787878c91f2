// Whether a range of steps runs on one stream of its device or on several (side_streams.h). Both
// are timed in steps of training, which they compute alike; what was faster is kept on disk.
// Nothing waits for a time: a launch is timed once its end has been seen. Internal: not part of the
// public interface.
#pragma once
#include <array>
#include <optional>
#include <string>

#include "compile/run/side_streams.h"
#include "core/tensor/event.h"

namespace tessera::compiler {

class StreamChoice {
 public:
  enum class Way : uint8_t {
    kOne,             // by the graph on one stream
    kSeveral,         // by that on several
    kSeveralOneByOne  // steps on several streams without a graph, as libraries prepare themselves
  };
  StreamChoice(const Program& p, const StepRange& range);

  /// How the next run of the range goes.
  Way next();
  /// To be called around each launch of a graph.
  void begins();
  void ended();
  const StepStreams& streams() const { return streams_; }

 private:
  static constexpr int kTimedLaunches = 3;  // each way; the shortest counts
  struct Times {
    int count = 0;
    double least = 0;  // ms
  };
  void look();
  void choose();

  const Device device_;
  const StepStreams streams_;
  std::string key_;  // on disk
  std::optional<Way> chosen_;
  Way trying_ = Way::kOne;
  std::array<Times, 2> times_;  // of kOne and kSeveral
  Ref<Event> begin_, end_;      // of the launch that is timed
};

}  // namespace tessera::compiler
