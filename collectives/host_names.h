// How errors know on which host a rank is.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tessera::detail {

/// The names of the hosts of a group's members, by their rank in it; null where all are on one.
using HostNames = std::shared_ptr<const std::vector<std::string>>;
/// Those of members with these host_identity(), which begins with a name and what tells the
/// machine's boot; null where all are on one machine. Machines of one name, as clones have it, are
/// told apart: "node", "node (2)", "node (3)".
HostNames host_names(std::span<const std::string> identities);

}  // namespace tessera::detail
