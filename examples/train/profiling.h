// --profile: what the ten steps after the third did (memory is there by then, and compiled steps
// are), as one trace file of all ranks and a table.
#pragma once
#include <optional>
#include <string>

#include "collectives/process_group.h"
#include "core/base/profile.h"

namespace tessera::train {

class Profiling {
 public:
  /// Does nothing where `path` is empty. Of the steps `first` .. `end` - 1 that the run takes.
  /// Throws UserError when the file cannot be written.
  Profiling(std::string path, ProcessGroup& group, int64_t first, int64_t end);

  void before_step(int64_t step);
  /// Writes the file after the last recorded step, which all ranks do together. Returns what there
  /// is to tell then, a disk that refuses included; else nothing.
  std::string after_step(int64_t step);

 private:
  std::string write(const std::vector<ProfileEvent>& events) const;

  const std::string path_;
  ProcessGroup& group_;
  int64_t first_, last_;  // steps that are recorded
  std::optional<Profiler> profiler_;
};

}  // namespace tessera::train
