// Describes a run in lines of text.
#pragma once
#include <string>

#include "compile/run/executor.h"

namespace tessera::compiler {

/// Lists kernels and the bytes they move, communication and memory. How long each kernel took, and
/// how much of the communication was hidden, is in the profile of the thread that ran it
/// (core/base/profile.h).
std::string report(const Executor& executor);

}  // namespace tessera::compiler
