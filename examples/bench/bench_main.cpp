// bench: measures this machine, and Tessera on it. Every command prints its numbers with their
// units and writes the same as JSON with --json (under tlaunch, rank 0 does). Invariant: a wrong
// flag gives one line on stderr and a non-zero exit status.
#include "examples/bench/bench_main.h"

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "collectives/store/environment.h"
#include "core/base/error.h"
#include "core/base/isa.h"
#include "core/base/output.h"
#include "core/base/version.h"
#include "core/io/file.h"
#include "examples/bench/commands.h"
#include "launcher/command_line.h"
#include "parallel/checkpoint/overwrite.h"

namespace tessera::bench {
namespace {

void write_json(const std::string& path, const std::string& command, double load_before,
                Json result) {
  Json all{{"command", command},
           {"version", version()},
           {"cpu", cpu_name()},
           {"cores", allowed_cores().size()},
           {"isa", cpu::isa_name(cpu::current_isa())},
           {"clock", clock_in_use() == Clock::kWall ? "wall" : "thread CPU"},
           {"load_average", {{"before", load_before}, {"after", load_average()}}},
           {"result", std::move(result)}};
  std::ofstream file(path);
  file << all.dump(2) << '\n';
  file.close();
  TESSERA_CHECK(bool(file), "bench: --json {}: cannot write it", path);
}

int run(int argc, char** argv) {
  CLI::App app{"Measures this machine and Tessera on it.", "bench"};
  app.set_version_flag("--version", [] { return version_text("bench"); });
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  Run chosen;
  add_roofline(app, chosen), add_ops(app, chosen), add_collectives(app, chosen);
  add_products(app, chosen), add_train(app, chosen), add_passes(app, chosen);
  add_int8(app, chosen);
  add_kernels(app, chosen), add_scaling(app, chosen), add_checkpoint(app, chosen);
  add_serve(app, chosen);
  std::string json_path;
  for (CLI::App* sub : app.get_subcommands([](CLI::App*) { return true; }))
    sub->add_option("--json", json_path, "file that gets the numbers too");
  if (auto status = parse_command_line(app, argc, argv, 1)) return *status;
  const bool writes = !json_path.empty() && job_environment().rank == 0;
  if (writes) check_can_write("--json", json_path);
  double load = load_average();
  Json result = chosen();
  if (writes)
    write_json(json_path, app.get_subcommands().at(0)->get_name(), load, std::move(result));
  return 0;
}

}  // namespace

void check_can_write(const char* flag, const std::string& path) {
  checkpoint::check_may_write(path, fmt::format("bench: {}", flag));
  io::detach(path, fmt::format("bench: {}", flag));
  errno = 0;
  TESSERA_CHECK(std::ofstream(path, std::ios::app).good(), "bench: {} {}: cannot write it: {}",
                flag, path, std::strerror(errno));
}

}  // namespace tessera::bench

namespace tessera {

int bench_main(int argc, char** argv) {
  reserve_standard_streams();
  try {
    const int status = bench::run(argc, argv);
    check_output();
    return status;
  } catch (const std::exception& e) {
    std::fflush(stdout);
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

}  // namespace tessera
