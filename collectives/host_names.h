// How errors know on which host a rank is.
#pragma once
#include <memory>
#include <string>
#include <vector>

namespace tessera::detail {

/// The names of the hosts of a group's members, by their rank in it; null where all are on one.
using HostNames = std::shared_ptr<const std::vector<std::string>>;

}  // namespace tessera::detail
