// --profile: records the ten steps after the third (when memory is allocated and steps are
// compiled) as one trace file of all ranks and a table.
#pragma once
#include <optional>
#include <string>

#include "collectives/process_group.h"
#include "core/base/profile.h"

namespace tessera::train {

class Profiling {
 public:
  /// Records some of the steps `first` .. `end` - 1 that the run takes; does nothing where `path`
  /// is empty. Throws UserError when the file cannot be written.
  Profiling(std::string path, ProcessGroup& group, int64_t first, int64_t end);

  void before_step(int64_t step);
  /// Writes the file after the last recorded step; all ranks call it. Returns what the user should
  /// then be told, also that the disk refused it; else nothing.
  std::string after_step(int64_t step);

 private:
  std::string write(const std::vector<ProfileEvent>& events) const;

  const std::string path_;
  ProcessGroup& group_;
  int64_t first_, last_;  // steps that are recorded
  std::optional<Profiler> profiler_;
};

}  // namespace tessera::train
