// What bench scaling makes of a job's numbers: ratios of phases that took turns, as a row of a
// table, as JSON and as bars. Invariant: a ratio is taken within a round, and its median and
// interval over rounds.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/bench/measure.h"
#include "examples/bench/plot.h"

namespace tessera::bench {

/// Ratios of milliseconds a step; 1 is as fast as what stands above.
struct Efficiency {
  std::string name;
  Interval weak;           // one rank over ddp
  Interval bound;          // of it: one rank over unconnected ranks, set by memory and caches
  Interval communication;  // unconnected ranks over ddp
  // Unconnected ranks over the same with a barrier after each step: what waiting for the slowest
  // and using memory at the same moments leaves of `communication` before anything is communicated.
  Interval lockstep;
  Interval processor;  // unconnected ranks over ddp in processor time of all threads of a rank
  Interval sharded;    // ddp over fsdp
};

/// From what measure_scaling returns. Throws UserError naming a list of rounds that is not there or
/// whose length is not that of the others.
Efficiency efficiency_of(const std::string& name, const nlohmann::ordered_json& job);
/// {"weak_scaling": {"median", "low", "high"}, ..}.
nlohmann::ordered_json to_json(const Efficiency& e);

/// The table: its head, a line of it (all columns but the load average), what they mean.
std::string efficiency_head();
std::string line_of(const Efficiency& e, const nlohmann::ordered_json& job);
std::string efficiency_legend();

/// A group of bars for each row, and a line where communication efficiency should end.
BarChart chart_of(const std::vector<Efficiency>& rows, const std::string& note);

}  // namespace tessera::bench
