// The subcommands of bench. Each adds itself to the command line; when it is chosen, it stores in
// `run` a function that prints its results as text and returns the same numbers for --json.
// Invariant: the result has only values that were measured in this run.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "examples/bench/measure.h"
#include "examples/bench/workload.h"

namespace CLI {
class App;
}

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

/// A subcommand on the command line `app`. It stands between the commands and the parser, which is
/// slow to compile.
class Subcommand {
 public:
  Subcommand(CLI::App& app, const std::string& name, const std::string& what);

  /// An option that sets `value`, whose present value --help shows. T is int, int64_t, double,
  /// std::string or, for an option that may be repeated, std::vector<std::string>.
  template <class T>
  void option(const std::string& flag, T& value, const std::string& help = "");
  /// An option that sets `values`, separated by commas. T is int or std::string.
  template <class T>
  void list(const std::string& flag, std::vector<T>& values, const std::string& help);
  /// An option whose text goes to `set`, which returns what is wrong with it, or nothing.
  void option(const std::string& flag, std::function<std::string(const std::string&)> set,
              const std::string& usual, const std::string& help);
  /// A flag that sets `value` to true; to false where `flag` begins with an exclamation mark.
  void flag(const std::string& flag, bool& value, const std::string& help);
  /// Adds --cpu-time, for commands that measure one thread.
  void clock_option();
  /// Leaves the command out of --help.
  void hide();
  /// Stores `f` in `run` when the command is chosen; `run` has to outlive the parsing.
  void runs(Run& run, std::function<Json()> f);

 private:
  CLI::App& app_;
};

/// Adds --model, --batch-size, --seq-len and --set, which choose the step that a command runs.
void add_workload_options(Subcommand& sub, WorkloadOptions& options);

inline Json to_json(const Stats& s, double unit_per_second = 1) {
  return {{"median", s.median * unit_per_second}, {"q1", s.q1 * unit_per_second},
          {"q3", s.q3 * unit_per_second},         {"min", s.min * unit_per_second},
          {"max", s.max * unit_per_second},       {"samples", s.samples}};
}

}  // namespace tessera::bench
