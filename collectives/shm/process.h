// Tells whether another process of this machine still runs. The pid alone is not enough: pids are
// reused, and a killed process keeps its pid until its parent has waited for it.
#pragma once
#include <cstdint>
#include <string>

namespace tessera::detail {

/// When process `pid` started, in clock ticks since boot; 0 when there is no such process, it has
/// ended, or this process can open no file to look.
uint64_t process_start(int pid);
/// Whether the process `pid` that started at `started` has ended. False where that cannot be told
/// now.
bool process_ended(int pid, uint64_t started);

/// Returns a text that is equal for two processes if and only if they can share memory and see each
/// other's pids: host name, boot and pid namespace.
std::string host_identity();

}  // namespace tessera::detail
