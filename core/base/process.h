// What the system says of processes of this host.
#pragma once
#include <sys/types.h>

namespace tessera {

/// Whether a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped process `pid`; false where there is
/// none.
bool is_stopped(pid_t pid);

}  // namespace tessera
