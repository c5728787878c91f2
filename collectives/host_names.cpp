#include "collectives/host_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace tessera::detail {

HostNames host_names(std::span<const std::string> identities) {
  std::vector<std::string> names;
  std::map<std::string, std::vector<std::string>> boots;  // by name
  for (const std::string& identity : identities) {
    const size_t space = identity.find(' ');
    const std::string name = identity.substr(0, space);
    const std::string boot = identity.substr(0, identity.find(' ', space + 1));
    std::vector<std::string>& same = boots[name];
    const auto at = std::ranges::find(same, boot);
    const auto number = at - same.begin() + 1;
    if (at == same.end()) same.push_back(boot);
    names.push_back(number == 1 ? name : fmt::format("{} ({})", name, number));
  }
  if (std::ranges::all_of(names, [&](const std::string& n) { return n == names[0]; }))
    return nullptr;
  return std::make_shared<const std::vector<std::string>>(std::move(names));
}

}  // namespace tessera::detail
