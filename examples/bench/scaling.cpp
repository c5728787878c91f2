// bench scaling: what training on N ranks costs. For each model and precision it runs one job, in
// which several ways to train take turns on the same cores: one rank alone, N ranks without
// communication ("unconnected"), N ranks under ddp and under fsdp. So a machine that slows down
// slows all of them, and what other work takes from it cancels out of the ratios. Weak scaling is
// one rank over ddp; its bound, set by memory and caches, is one rank over unconnected ones;
// communication efficiency is unconnected over ddp; and fsdp is compared with ddp. With --strong
// the ranks share the batch that the one has.
#include <fcntl.h>
#include <fmt/core.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "collectives/store/environment.h"
#include "core/base/error.h"
#include "examples/bench/commands.h"
#include "examples/bench/device.h"
#include "examples/bench/efficiency.h"
#include "examples/bench/scaling_ranks.h"

extern char** environ;

namespace tessera::bench {
namespace {

namespace fs = std::filesystem;

constexpr int kFewestRounds = 6;

struct ScalingOptions {
  std::vector<int> nproc = {};  // none: 2, or every power of two up to the number of cards
  DeviceOptions device;
  std::vector<std::string> models = {"gpt-nano"}, precisions = {"fp32"};
  int64_t batch_size = 0;  // of one rank
  int steps = 0, rounds = 9;
  bool compile = false, strong = false;
  std::string plot;
};

// The file to which a job writes its numbers; it is removed at the end.
class Scratch {
 public:
  Scratch() {
    std::string name = (fs::temp_directory_path() / "bench-scaling-XXXXXX").string();
    int fd = mkstemp(name.data());
    TESSERA_CHECK(fd >= 0, "bench scaling: cannot make a file {}", name);
    close(fd);
    path = name;
  }
  ~Scratch() {
    std::error_code ignored;
    fs::remove(path, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  fs::path path;
};

// Waits for a child; a signal that would end this program ends the child first.
int wait_or_stop(pid_t pid, const sigset_t& watched) {
  int status = 0, stopped_by = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    int signal = 0;
    if (sigwait(&watched, &signal) != 0 || signal == SIGCHLD) continue;
    kill(pid, signal);
    stopped_by = signal;
  }
  if (stopped_by) throw Error(fmt::format("bench scaling: stopped by {}", strsignal(stopped_by)));
  return status;
}

// Blocks the signals that end a program, and SIGCHLD, while this object lives.
class Watched {
 public:
  Watched() {
    sigemptyset(&set);
    for (int s : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&set, s);
    pthread_sigmask(SIG_BLOCK, &set, &before);
  }
  ~Watched() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  sigset_t set, before;
};

void run(std::vector<std::string> command, const std::string& what) {
  std::vector<char*> argv;
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  Watched watched;
  posix_spawnattr_setsigmask(&attributes, &watched.before);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  pid_t pid = -1;
  int error = posix_spawn(&pid, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  TESSERA_CHECK(error == 0, "bench scaling: cannot start {}: {}", command[0], std::strerror(error));
  const int status = wait_or_stop(pid, watched.set);
  TESSERA_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0,
                "bench scaling: {} failed, see above", what);
}

/// Runs one job and returns its rounds, as measure_scaling reports them.
Json run_job(const ScalingOptions& o, int nproc, const std::string& model,
             const std::string& precision) {
  fs::path bin = fs::read_symlink("/proc/self/exe").parent_path();
  TESSERA_CHECK(fs::exists(bin / "tlaunch"),
                "bench scaling: there is no {}; build the programs first",
                (bin / "tlaunch").string());
  Scratch scratch;
  std::vector<std::string> command = {(bin / "tlaunch").string(),
                                      "--nproc",
                                      std::to_string(nproc),
                                      "--bind",
                                      "core",
                                      "--timeout",
                                      "600",
                                      (bin / "bench").string(),
                                      "scaling",
                                      "--model",
                                      model,
                                      "--precision",
                                      precision,
                                      "--batch-size",
                                      std::to_string(o.batch_size),
                                      "--steps",
                                      std::to_string(o.steps),
                                      "--rounds",
                                      std::to_string(o.rounds),
                                      "--device",
                                      o.device.device,
                                      "--json",
                                      scratch.path.string()};
  if (o.compile) command.push_back("--compile");
  if (o.strong) command.push_back("--strong");
  run(command, fmt::format("{} in {} on {} ranks", model, precision, nproc));
  std::ifstream file(scratch.path);
  return Json::parse(file).at("result");
}

/// Samples per second of all ranks together.
Json samples_per_second(const Json& job) {
  const auto rate = [&](const char* phase, const char* batch) {
    return job[batch].get<double>() / stats_of(job[phase].get<std::vector<double>>()).median * 1e3;
  };
  const bool strong = job.at("scaling") == "strong";
  return {{"solo", rate("solo_ms", strong ? "global_batch" : "batch_size")},
          {"ddp", rate("ddp_ms", "global_batch")},
          {"fsdp", rate("fsdp_ms", "global_batch")}};
}

void write_plot(const std::string& path, const std::vector<Efficiency>& rows,
                const std::string& note) {
  std::ofstream file(path);
  file << to_svg(chart_of(rows, note));
  file.close();
  TESSERA_CHECK(bool(file), "bench scaling: --plot {}: cannot write it", path);
}

/// On a device each rank has a card of its own.
std::vector<int> numbers_of_ranks(const ScalingOptions& o) {
  const Device device = device_for("scaling", o.device);
  if (device.is_cpu()) return o.nproc.empty() ? std::vector{2} : o.nproc;
  const int cards = runtime_of(device).count();
  TESSERA_CHECK(cards > 1, "bench scaling: --device {}: there is one card, and scaling takes two",
                o.device.device);
  std::vector<int> all = o.nproc;
  if (all.empty())
    for (int n = 2; n <= cards; n *= 2) all.push_back(n);
  for (int n : all)
    TESSERA_CHECK(n <= cards,
                  "bench scaling: --nproc {}: there are {} cards, and each rank takes one", n,
                  cards);
  return all;
}

Json measure_jobs(const ScalingOptions& o) {
  if (!o.plot.empty()) check_can_write("--plot", o.plot);
  const std::vector<int> numbers = numbers_of_ranks(o);
  if (const Device device = device_for("scaling", o.device); !device.is_cpu())
    fmt::print("{}", device_text(device));
  fmt::print("{} rounds of solo, unconnected, ddp and fsdp in turn, one thread a rank{}, {}\n",
             o.rounds, o.compile ? ", compiled steps" : "", load_text());
  fmt::print("{}\n", efficiency_head(o.strong));
  std::fflush(stdout);
  Json jobs;
  std::vector<Efficiency> rows;
  for (const std::string& model : o.models)
    for (const std::string& precision : o.precisions)
      for (int n : numbers) {
        if (n == 1) continue;  // every job has its own solo phase
        Json job = run_job(o, n, model, precision);
        rows.push_back(efficiency_of(fmt::format("{} {} x{}", model, precision, n), job));
        fmt::print("{} {:>6.1f}\n", line_of(rows.back(), job), load_average());
        std::fflush(stdout);
        Json entry{
            {"model", model}, {"precision", precision}, {"nproc", n}, {"compile", o.compile}};
        entry.update(job);
        entry["samples_per_s"] = samples_per_second(job);
        entry.update(to_json(rows.back()));
        jobs.push_back(std::move(entry));
      }
  fmt::print("{}\n", efficiency_legend(o.strong));
  if (!o.plot.empty())
    write_plot(o.plot, rows,
               fmt::format("{}, {} rounds in turn, {}", cpu_name(), o.rounds, load_text()));
  return jobs;
}

Json bench_scaling(const ScalingOptions& o) {
  TESSERA_CHECK(o.device.device.find(':') == std::string::npos,
                "bench scaling: --device {}: each rank takes the card of its own number; write {}",
                o.device.device, o.device.device.substr(0, o.device.device.find(':')));
  for (int n : o.nproc) TESSERA_CHECK(n >= 1, "bench scaling: --nproc {}: expected at least 1", n);
  TESSERA_CHECK(o.rounds >= kFewestRounds && o.steps >= 0 && o.batch_size >= 0,
                "bench scaling: --rounds {} --steps {} --batch-size {}: expected at least {} (the "
                "interval of a median takes as many), 0 and 0",
                o.rounds, o.steps, o.batch_size, kFewestRounds);
  for (const std::string& p : o.precisions)
    TESSERA_CHECK(p == "fp32" || p == "bf16",
                  "bench scaling: --precision {}: expected fp32 or bf16", p);
  if (job_environment().world_size == 1) return measure_jobs(o);
  TESSERA_CHECK(o.models.size() == 1 && o.precisions.size() == 1,
                "bench scaling: under tlaunch a job is one model in one precision; leave tlaunch "
                "out to compare several");
  RankOptions ranks{.workload = {.model = o.models[0],
                                 .batch_size = o.batch_size,
                                 .compile = o.compile,
                                 .precision = o.precisions[0] == "bf16" ? kBF16 : kF32},
                    .device = device_for("scaling", o.device),
                    .steps = o.steps,
                    .rounds = o.rounds,
                    .strong = o.strong};
  return measure_scaling(ranks);
}

}  // namespace

void add_scaling(CLI::App& app, Run& run) {
  auto o = std::make_shared<ScalingOptions>();
  Subcommand sub(app, "scaling",
                 "training on several ranks: weak scaling, its bound, and what "
                 "communication costs");
  sub.list(
      "--nproc", o->nproc,
      "numbers of ranks, as in 2,4; default 2, on a device every power of two up to the number "
      "of its cards; one is always measured");
  add_device_options(sub, o->device, false);
  sub.list("--model", o->models, "models of bench train, as in resnet50,bert-base,gpt-nano");
  sub.list("--precision", o->precisions, "fp32, bf16 or both");
  sub.option("--batch-size", o->batch_size, "batch of one rank; 0: the model's usual one");
  sub.flag("--strong", o->strong, "the batch is that of all ranks together: strong scaling");
  sub.option("--steps", o->steps, "in each phase; 0: what fills half a second");
  sub.option("--rounds", o->rounds, "of the phases, in turn");
  sub.flag("--compile", o->compile, "steps as compiled graphs");
  sub.option("--plot", o->plot, "SVG file that gets the efficiencies as bars");
  sub.runs(run, [o] { return bench_scaling(*o); });
}

}  // namespace tessera::bench
