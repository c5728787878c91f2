#include "core/base/error.h"

#include <cstring>

namespace tessera::detail {

void raise_bug(const char* file, int line, const char* condition, const std::string& text) {
  const char* name = std::strrchr(file, '/');
  throw BugError(fmt::format("internal error at {}:{}: {} ({}); please report it",
                             name ? name + 1 : file, line, text, condition));
}

}  // namespace tessera::detail
