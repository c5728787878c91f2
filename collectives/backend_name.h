// The backends of CPU tensors that a program can name: the one table that choices are checked
// against and that error texts list.
#pragma once
#include <fmt/format.h>

#include <string>
#include <string_view>

#include "core/base/error.h"

namespace tessera::detail {

inline constexpr std::string_view kShm = "shm", kLoopback = "loopback", kGloo = "gloo",
                                  kMpi = "mpi";
/// The backend for ranks on several hosts: shm within blocks of ranks, gloo between blocks. The
/// library chooses it; a program cannot ask for it.
inline constexpr std::string_view kBlocks = "gloo+shm";

/// Whether ranks are processes or threads. Gloo serves both.
enum class RanksAre : uint8_t { kProcesses, kThreads };
struct BackendRow {
  std::string_view name;
  bool processes, threads;
  bool serves(RanksAre r) const { return r == RanksAre::kProcesses ? processes : threads; }
};
inline constexpr BackendRow kBackends[] = {
    {kShm, true, false}, {kLoopback, false, true}, {kGloo, true, true}, {kMpi, true, false}};

/// Throws UserError in the name of `op` unless `name` is empty (the library then chooses) or a
/// backend for such ranks.
inline void check_backend_name(std::string_view op, std::string_view name, RanksAre ranks) {
  std::string known;
  for (const BackendRow& b : kBackends) {
    if (!b.serves(ranks)) continue;
    if (name == b.name) return;
    known += fmt::format("{}{}", known.empty() ? "" : " or ", b.name);
  }
  TESSERA_CHECK(name.empty(),
                "{}: no backend \"{}\" for ranks that are {}; use {}, or leave it out", op, name,
                ranks == RanksAre::kProcesses ? "processes" : "threads", known);
}

}  // namespace tessera::detail
