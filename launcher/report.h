// The text that explains a failed attempt: the rank that failed first with its last lines, then the
// others in groups. Invariant: "first" is the order in which the kernel reported the ends.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "launcher/worker.h"

namespace tessera::launcher {

/// `failed`: ranks in the order they failed on their own; `out_of_memory`: the kernel has killed a
/// process for memory during the attempt.
std::string failure_report(const std::vector<std::unique_ptr<Worker>>& workers,
                           const std::vector<int>& failed, bool out_of_memory);

/// "0-3,5" for ranks in ascending order.
std::string rank_list(const std::vector<int>& ranks);

/// How often the kernel has killed a process for memory since the machine started; -1: unknown.
long count_memory_kills();

}  // namespace tessera::launcher
