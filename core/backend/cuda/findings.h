// What a user should know of this machine's cards: the driver, each card, the run-time compiler,
// and the vendor's libraries, with their versions and where they are, or why one is missing.
#pragma once
#include <vector>

#include "core/base/finding.h"

namespace tessera::cuda {

std::vector<Finding> findings();

}  // namespace tessera::cuda
