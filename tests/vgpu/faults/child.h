// Runs a program with a fault in a process of its own, since some end by a signal and each needs a
// fresh device. Invariant: the parent never starts the driver.
#pragma once
#include <functional>
#include <map>
#include <string>

#include "tests/vgpu/support/client.h"

namespace vgpu_test {

/// Kernels by name, compiled for checked or for plain runs.
using Kernels = Module;

struct Outcome {
  int status = 0;    // what the program returned, or minus the signal that ended it
  std::string said;  // on standard error
};
/// Runs `program` with these variables beside VGPU_CHECK.
Outcome in_child(bool checked, const std::map<std::string, std::string>& environment,
                 const std::function<int(const Kernels&)>& program);

/// `program` is found out with `words`, late, eager and by a seed.
void expect_found(bool checked, const std::string& words,
                  const std::function<int(const Kernels&)>& program,
                  std::map<std::string, std::string> environment = {});
/// `program` returns 0 and nothing is said of it, plain and checked, on several seeds.
void expect_right(const std::function<int(const Kernels&)>& program);

}  // namespace vgpu_test
