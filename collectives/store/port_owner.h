// Finds the process that has a TCP port of this machine, for the error about a port in use.
#pragma once
#include <string>

namespace tessera::detail {

/// "pid 123 (name)" of a process that listens on `port`, or "" when none is visible to this user.
std::string port_owner(int port);

}  // namespace tessera::detail
