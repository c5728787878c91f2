#include "examples/models/warn.h"

#include "collectives/store/environment.h"
#include "core/base/log.h"

namespace tessera::models {

void warn(const std::string& text) {
  if (job_environment().rank == 0) log::warn("{}", text);
}

}  // namespace tessera::models
