// --profile: records the ten steps after the third (when memory is allocated and steps are
// compiled) as one trace file of all ranks, a table, and what each device held.
#pragma once
#include <optional>
#include <string>

#include "collectives/process_group.h"
#include "core/base/profile.h"
#include "core/tensor/device_runtime.h"

namespace tessera::train {

class Profiling {
 public:
  /// Records some of the steps `first` .. `end` - 1 that the run takes; does nothing where `path`
  /// is empty. `device` is that of the model. Throws UserError when the file cannot be written.
  Profiling(std::string path, ProcessGroup& group, Device device, int64_t first, int64_t end);

  void before_step(int64_t step);
  /// Writes the file after the last recorded step; all ranks call it. Returns what the user should
  /// then be told, also that the disk refused it; else nothing.
  std::string after_step(int64_t step);

 private:
  std::string write(const std::vector<ProfileEvent>& events) const;
  struct Held {
    MemoryStats stats;
    int64_t allocations = -1;
  };
  static Held held_on(Device device);
  std::string memory_of(Device device, const Held& before) const;

  const std::string path_;
  ProcessGroup& group_;
  const Device device_;
  int64_t first_, last_;  // steps that are recorded
  std::optional<Profiler> profiler_;
  Held before_host_, before_;  // of the steps; of the CPU and of `device_`
};

}  // namespace tessera::train
