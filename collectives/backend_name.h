// The backends of CPU tensors that a program can ask for by name: one table, from which choices are
// checked and errors are worded.
#pragma once
#include <fmt/format.h>

#include <string>
#include <string_view>

#include "core/base/error.h"

namespace tessera::detail {

inline constexpr std::string_view kShm = "shm", kLoopback = "loopback", kGloo = "gloo",
                                  kMpi = "mpi";
/// Of ranks on several hosts: gloo between blocks of ranks, shm in them. Chosen, never asked for.
inline constexpr std::string_view kBlocks = "gloo+shm";

/// What ranks are. Gloo serves both.
enum class RanksAre : uint8_t { kProcesses, kThreads };
struct BackendRow {
  std::string_view name;
  bool processes, threads;
  bool serves(RanksAre r) const { return r == RanksAre::kProcesses ? processes : threads; }
};
inline constexpr BackendRow kBackends[] = {
    {kShm, true, false}, {kLoopback, false, true}, {kGloo, true, true}, {kMpi, true, false}};

/// Throws UserError in the name of `op` unless `name` is empty (the library chooses) or a backend
/// for such ranks.
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
