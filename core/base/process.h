// What the operating system knows of processes of this host.
#pragma once
#include <sys/types.h>

namespace tessera {

/// Whether a signal (SIGSTOP, Ctrl-Z) has stopped process `pid`. False where there is no such
/// process, and where a debugger has stopped it, which is no fault.
bool is_stopped(pid_t pid);

}  // namespace tessera
