// Whether another process of this machine still runs. A pid alone would not do: it is reused, and a
// killed process keeps it until its parent has looked.
#pragma once
#include <cstdint>
#include <string>

namespace tessera::detail {

/// When process `pid` started, in clock ticks since boot; 0 when there is none or it has ended, or
/// this process can open no file to look.
uint64_t process_start(int pid);
/// Whether the process that started then has ended. False where that cannot be told for now.
bool process_ended(int pid, uint64_t started);

/// A text that is equal for two processes if and only if they can share memory and see each other's
/// pids: host name, boot and pid namespace.
std::string host_identity();

}  // namespace tessera::detail
