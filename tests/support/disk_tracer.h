// Runs a function in a child process and stops at the entry of each of its system calls that could
// change a disk (creates, writes, syncs, truncates, links, renames, removes), in whichever of its
// threads. Killing the child at the entry of call number n, for every n, visits every state that a
// crash between two calls can leave behind.
#pragma once
#include <functional>
#include <optional>
#include <string>

namespace tessera {

struct DiskCall {
  std::string name;     // "openat", "write", "fsync", ...
  std::string path;     // of the file, or the new name of a rename
  bool reached = true;  // false: killed before it
};

struct TracedRun {
  bool killed = false;
  int exit_status = -1;         // of a child that lived
  std::vector<DiskCall> calls;  // in the order of their entries; the last one may not be reached
};

/// `kill_at`: the number of the call (from 0) at whose entry all threads are killed; without it the
/// child runs to its end. `body` returns the exit status. `at_entry`, in this process, is told of
/// each call while the thread that makes it stands before it.
TracedRun run_traced(const std::function<int()>& body, std::optional<size_t> kill_at,
                     const std::function<void(const DiskCall&)>& at_entry = {});

}  // namespace tessera
