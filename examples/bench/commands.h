// The subcommands of bench. Each adds itself to the command line; when it is chosen, it stores in
// `run` a function that prints its results as text and returns the same numbers for --json.
// Invariant: the result has only values that were measured in this run.
#pragma once
#include <CLI/CLI.hpp>
#include <functional>
#include <nlohmann/json.hpp>

#include "examples/bench/measure.h"
#include "examples/bench/workload.h"

namespace tessera::bench {

using Json = nlohmann::ordered_json;
using Run = std::function<Json()>;

void add_roofline(CLI::App& app, Run& run);
void add_ops(CLI::App& app, Run& run);
void add_collectives(CLI::App& app, Run& run);
void add_products(CLI::App& app, Run& run);
void add_train(CLI::App& app, Run& run);
void add_int8(CLI::App& app, Run& run);
void add_passes(CLI::App& app, Run& run);
void add_kernels(CLI::App& app, Run& run);
void add_scaling(CLI::App& app, Run& run);
void add_checkpoint(CLI::App& app, Run& run);
void add_serve(CLI::App& app, Run& run);  // hidden: see serve.cpp

/// Throws UserError where the file that `flag` names cannot be written, so that hours of measuring
/// are not lost.
void check_can_write(const char* flag, const std::string& path);

/// Adds --cpu-time, for commands that measure one thread.
inline void add_clock_option(CLI::App& sub) {
  sub.add_flag_callback(
      "--cpu-time", [] { set_clock(Clock::kThread); },
      "count this thread's CPU time, where other programs use the machine; default: wall time");
}

/// Adds --model, --batch-size, --seq-len and --set, which choose the step that a command runs.
void add_workload_options(CLI::App& sub, WorkloadOptions& options);

inline Json to_json(const Stats& s, double unit_per_second = 1) {
  return {{"median", s.median * unit_per_second}, {"q1", s.q1 * unit_per_second},
          {"q3", s.q3 * unit_per_second},         {"min", s.min * unit_per_second},
          {"max", s.max * unit_per_second},       {"samples", s.samples}};
}

}  // namespace tessera::bench
