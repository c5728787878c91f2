// The log for files that include the ops, of which one is log().
#pragma once
#include <string>

namespace tessera::models {

/// A warning about what all ranks of a job do alike, from rank 0.
void warn(const std::string& text);

}  // namespace tessera::models
