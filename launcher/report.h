// The text that explains a failed attempt: the rank that failed first with its last lines, then the
// others in groups. Invariant: which rank failed "first" follows from what the ranks said their
// groups failed on or, where they said nothing, from the order in which the kernel reported their
// ends.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "launcher/worker.h"

namespace tessera::launcher {

/// `failed`: those of `workers` that failed on their own, the first to fail first. `on_host`: " on
/// node1", or "" where there are no other hosts. `out_of_memory`: the kernel
/// killed a process for lack of memory during the attempt. The last lines of the first rank are
/// left out where `console` has just shown them.
std::string failure_report(const std::vector<std::unique_ptr<Worker>>& workers,
                           const std::vector<Worker*>& failed, bool out_of_memory,
                           const std::string& on_host, const Console& console);

/// "0-3,5" for ranks in ascending order.
std::string rank_list(const std::vector<int>& ranks);

/// How often the kernel has killed a process for lack of memory since the machine started; -1:
/// unknown.
long count_memory_kills();

}  // namespace tessera::launcher
