#include "core/base/process.h"

#include <fmt/format.h>

#include <fstream>
#include <iterator>
#include <string>

namespace tessera {

bool is_stopped(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = text.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return false;
  return text[name_end + 2] == 'T';
}

}  // namespace tessera
