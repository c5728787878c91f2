#include "compile/codegen/streams.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "core/base/env.h"

namespace tessera::compiler {
namespace {

// Reads "32768K", the size of the last-level cache of this core. sysconf adds up the caches of all
// sockets.
int64_t last_level_bytes() {
  int64_t most = 0;
  for (int i = 0; i < 8; ++i) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/size");
    int64_t size = 0;
    char unit = 0;
    if (file >> size >> unit) most = std::max(most, size * (unit == 'M' ? 1 << 20 : 1 << 10));
  }
  return most > 0 ? most : int64_t(32) << 20;
}

}  // namespace

int64_t streamed_from() {
  static const int64_t last_level = last_level_bytes();
  return env::get_int("TESSERA_COMPILE_STREAM", last_level, 0, std::numeric_limits<int64_t>::max());
}

}  // namespace tessera::compiler
