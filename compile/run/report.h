// What a run does, in lines for people.
#pragma once
#include <string>

#include "compile/run/executor.h"

namespace tessera::compiler {

/// Kernels and the bytes they move, communication, memory. What a run took, kernel by kernel and
/// how much of the communication was hidden, is in the profile of the thread that ran it
/// (core/base/profile.h).
std::string report(const Executor& executor);

}  // namespace tessera::compiler
