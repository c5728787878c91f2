// bench scaling: weak scaling of `tlaunch --nproc N train` against one process on one core with the
// batch of one rank. Beside it the bound that memory sets: N unconnected processes at once. The
// three run in turn, several rounds.
#include <fcntl.h>
#include <fmt/core.h>
#include <sched.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "core/base/error.h"
#include "examples/bench/commands.h"

extern char** environ;

namespace tessera::bench {
namespace {

namespace fs = std::filesystem;

struct ScalingOptions {
  std::vector<int> nproc = {1, 2};
  std::string model = "gpt-nano";
  int64_t batch_size = 12, steps = 60;  // batch of one rank
  int rounds = 3;
};

// A folder for the metrics of the runs, removed at the end.
class Scratch {
 public:
  Scratch() {
    std::string name = (fs::temp_directory_path() / "bench-scaling-XXXXXX").string();
    TESSERA_CHECK(mkdtemp(name.data()), "bench scaling: cannot make a folder {}", name);
    path = name;
  }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  fs::path path;
};

// Starts a program, bound to `core` unless -1, with one thread and no output of its own.
pid_t start(std::vector<std::string> command, int core) {
  std::vector<char*> argv;
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  core < 0 ? unbind() : void(bind_to_core(core));  // a child starts with its parent's cores
  pid_t pid = -1;
  int error = posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  unbind();
  TESSERA_CHECK(error == 0, "bench scaling: cannot start {}: {}", command[0], std::strerror(error));
  return pid;
}

void wait_for(pid_t pid, const std::string& what) {
  int status = 0;
  waitpid(pid, &status, 0);
  TESSERA_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0,
                "bench scaling: {} failed; run it by itself to see why", what);
}

// Median over the steps after the warm-up, tokens/s (or samples/s) of the whole run.
double rate_in(const fs::path& metrics, int64_t warmup) {
  std::ifstream file(metrics);
  std::vector<double> rates;
  for (std::string line; std::getline(file, line);) {
    Json j = Json::parse(line);
    if (!j.contains("step_ms") || j["step"].get<int64_t>() <= warmup) continue;
    double tokens = j["tokens_per_s"].get<double>();
    rates.push_back(tokens > 0 ? tokens : j["samples_per_s"].get<double>());
  }
  TESSERA_CHECK(!rates.empty(), "bench scaling: no steps in {}", metrics.string());
  return stats_of(rates).median;
}

class Runs {
 public:
  explicit Runs(const ScalingOptions& o)
      : o_(o), bin_(fs::read_symlink("/proc/self/exe").parent_path()) {
    for (const char* program : {"tlaunch", "train"})
      TESSERA_CHECK(fs::exists(bin_ / program),
                    "bench scaling: there is no {}; build the programs first",
                    (bin_ / program).string());
  }
  /// n ranks that train together.
  double together(int n) {
    std::vector<std::string> command = {(bin_ / "tlaunch").string(), "--nproc", std::to_string(n),
                                        "--bind", "core"};
    for (auto& word : train(n, 0)) command.push_back(word);
    wait_for(start(command, -1), fmt::format("tlaunch --nproc {}", n));
    return rate_in(metrics(0), kWarmup);
  }
  /// n processes that do not know of each other, each bound to a core: the sum of their rates.
  double unconnected(int n) {
    std::vector<int> cores = allowed_cores();
    std::vector<pid_t> pids;
    for (int i = 0; i < n; ++i) pids.push_back(start(train(1, i), cores[size_t(i) % cores.size()]));
    for (pid_t pid : pids) wait_for(pid, "train");
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += rate_in(metrics(i), kWarmup);
    return sum;
  }

 private:
  static constexpr int64_t kWarmup = 10;
  fs::path metrics(int i) const { return scratch_.path / fmt::format("{}.jsonl", i); }
  std::vector<std::string> train(int ranks, int i) const {
    return {(bin_ / "train").string(),
            "--model",
            o_.model,
            "--data",
            "synthetic:",
            "--batch-size",
            std::to_string(o_.batch_size * ranks),
            "--steps",
            std::to_string(o_.steps + kWarmup),
            "--metrics",
            metrics(i).string()};
  }
  const ScalingOptions& o_;
  fs::path bin_;
  Scratch scratch_;
};

Json bench_scaling(const ScalingOptions& o) {
  for (int n : o.nproc) TESSERA_CHECK(n >= 1, "bench scaling: --nproc {}: expected at least 1", n);
  TESSERA_CHECK(o.rounds >= 1 && o.steps >= 1 && o.batch_size >= 1,
                "bench scaling: --rounds, --steps and --batch-size are at least 1");
  Runs runs(o);
  fmt::print("{}, batch {} a rank, {} steps x {} rounds in turn, {}\n", o.model, o.batch_size,
             o.steps, o.rounds, load_text());
  std::vector<double> one;
  std::map<int, std::vector<double>> together, unconnected;
  for (int r = 0; r < o.rounds; ++r) {
    one.push_back(runs.unconnected(1));
    for (int n : o.nproc) {
      if (n == 1) continue;
      together[n].push_back(runs.together(n));
      unconnected[n].push_back(runs.unconnected(n));
    }
  }
  double base = stats_of(one).median;
  fmt::print("{:<34} {:>12} {:>8} {:>10}\n", "", "per s", "x one", "efficiency");
  fmt::print("{:<34} {:>12.0f} {:>8.2f}\n", "1 process on 1 core", base, 1.0);
  Json rows = {{{"nproc", 1}, {"rate", base}}};
  for (auto& [n, rates] : together) {
    double rate = stats_of(rates).median, bound = stats_of(unconnected[n]).median;
    fmt::print("{:<34} {:>12.0f} {:>8.2f} {:>9.1f}%\n",
               fmt::format("{} unconnected processes (bound)", n), bound, bound / base,
               bound / base / n * 100);
    fmt::print("{:<34} {:>12.0f} {:>8.2f} {:>9.1f}%   of the bound {:.1f}%\n",
               fmt::format("{} ranks", n), rate, rate / base, rate / base / n * 100,
               rate / bound * 100);
    rows.push_back({{"nproc", n},
                    {"rate", rate},
                    {"speedup", rate / base},
                    {"unconnected_rate", bound},
                    {"share_of_bound", rate / bound}});
  }
  return rows;
}

}  // namespace

void add_scaling(CLI::App& app, Run& run) {
  auto o = std::make_shared<ScalingOptions>();
  CLI::App* sub = app.add_subcommand(
      "scaling", "weak scaling of training, beside the bound set by unconnected processes");
  sub->add_option("--nproc", o->nproc, "numbers of ranks, as in 1,2,4")
      ->delimiter(',')
      ->capture_default_str();
  sub->add_option("--model", o->model, "gpt-nano, gpt2 or mlp")->capture_default_str();
  sub->add_option("--batch-size", o->batch_size, "of one rank")->capture_default_str();
  sub->add_option("--steps", o->steps, "timed in each run")->capture_default_str();
  sub->add_option("--rounds", o->rounds, "of all runs in turn")->capture_default_str();
  sub->callback([o, &run] { run = [o] { return bench_scaling(*o); }; });
}

}  // namespace tessera::bench
