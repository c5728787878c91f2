// What the system says of processes of this host.
#pragma once
#include <sys/types.h>

namespace tessera {

/// Whether a signal (SIGSTOP, Ctrl-Z) has stopped process `pid`; false where a debugger has, for
/// then somebody looks after it, and where there is no such process.
bool is_stopped(pid_t pid);

}  // namespace tessera
