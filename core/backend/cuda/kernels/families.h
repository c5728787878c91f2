// Every kernel that the backend can ask for, as texts: what the build compiles into packs of cubins
// and what tests compile. A family that is not listed in families.cpp does not exist.
#pragma once
#include "core/backend/cuda/kernels/text.h"

namespace tessera::cuda {

/// All instances of all families, by texts of a size that compiles in a second or two.
std::vector<KernelText> all_kernel_texts();

}  // namespace tessera::cuda
