// Who holds a TCP port on this machine, for the error of a port in use.
#pragma once
#include <string>

namespace tessera::detail {

/// "pid 123 (name)" of a process that listens on `port`, or "" when none is visible to this user.
std::string port_owner(int port);

}  // namespace tessera::detail
