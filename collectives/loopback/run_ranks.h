// Runs ranks as threads of one process, so that tests can run many ranks under a debugger or a
// sanitizer. The algorithm is that of processes on one host, on memory of this process.
#pragma once
#include <memory>
#include <optional>

#include "collectives/process_group.h"
#include "core/base/function_ref.h"

namespace tessera {

namespace detail {
enum class Way : uint8_t;  // shm/tuner.h
}

struct RunOptions {
  std::string backend = "loopback";  // or "gloo": threads that talk over TCP
  Millis timeout{0};                 // deadline of each collective; 0: TESSERA_TIMEOUT
  // false: large tensors pass through staging areas, as between processes
  bool read_in_place = true;
  // How an all_reduce is done where there are several ways; if unset, the ways are timed.
  std::optional<detail::Way> way = {};
};

/// Calls body(group) on n threads, each with one OpenMP thread, with world() set to its group of n
/// ranks. When a rank throws, its group is aborted with that text; once all have ended, the error
/// of the rank that failed first is thrown.
void run_ranks(int n, FunctionRef<void(ProcessGroup&)> body, const RunOptions& options = {});

}  // namespace tessera
