#include "core/base/output.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/base/error.h"

namespace tessera {

void check_output() {
  const bool flushed = std::fflush(stdout) == 0;
  TESSERA_CHECK(flushed, "standard output: cannot write it: {}", std::strerror(errno));
  // A flush after one that failed has nothing left to write.
  TESSERA_CHECK(!std::ferror(stdout),
                "standard output: cannot write it; a part of what was printed is lost");
}

}  // namespace tessera
