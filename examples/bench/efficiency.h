// The report of bench scaling: ratios of the times of phases that took turns, as a row of a table,
// as JSON and as bars. Invariant: a ratio is computed within a round, and its median and interval
// over rounds.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/bench/measure.h"
#include "examples/bench/plot.h"

namespace tessera::bench {

/// Ratios of milliseconds per step; 1 means as fast as the numerator.
struct Efficiency {
  std::string name;
  // Whether the ranks share the batch of the one. A step of that one then counts over the number of
  // ranks, as the part of it that each of them has.
  bool strong = false;
  Interval scaling;  // one rank over ddp
  Interval bound;  // bound of `scaling`, set by memory and caches: one rank over unconnected ranks
  Interval communication;  // unconnected ranks over ddp
  // Unconnected ranks over the same with a barrier after each step: what waiting for the slowest
  // rank and using memory at the same time leave of `communication` before anything is
  // communicated.
  Interval lockstep;
  Interval processor;  // processor time of all threads of a rank: unconnected ranks over ddp
  Interval sharded;    // ddp over fsdp
};

/// Computes the ratios from what measure_scaling returns. Throws UserError that names a list of
/// rounds which is missing or has another length than the others.
Efficiency efficiency_of(const std::string& name, const nlohmann::ordered_json& job);
/// {"weak_scaling": {"median", "low", "high"}, ..}, or "strong_scaling".
nlohmann::ordered_json to_json(const Efficiency& e);

/// The parts of the table: its head, a row (all columns but the load average), the explanation of
/// the columns.
std::string efficiency_head(bool strong);
std::string line_of(const Efficiency& e, const nlohmann::ordered_json& job);
std::string efficiency_legend(bool strong);

/// Makes a group of bars for each row, and a line at the communication efficiency that is the
/// target.
BarChart chart_of(const std::vector<Efficiency>& rows, const std::string& note);

}  // namespace tessera::bench
