#include "launcher/options.h"

#include <algorithm>
#include <charconv>
#include <chrono>

#include "collectives/store/sha256.h"
#include "core/base/env.h"
#include "core/base/error.h"
#include "core/base/version.h"
#include "launcher/agents/slurm.h"
#include "launcher/cards.h"
#include "launcher/command_line.h"
#include "launcher/program.h"

namespace tessera::launcher {
namespace {

constexpr int kMaxRanks = 4096;

constexpr const char* kFooter = R"(
Workers see RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT
TESSERA_RUN_ID TESSERA_RESTART_COUNT TESSERA_STORE_KEY, and unless you set them OMP_NUM_THREADS and,
where OMP_WAIT_POLICY is unset too, GOMP_SPINCOUNT (--dry-run prints them).
PROGRAM is a path, a name on PATH, or a program beside tlaunch. Rank 0 reads tlaunch's standard
input unless that is a terminal; the other ranks read nothing.
Exit status: that of the worker that failed first, 128+n if signal n ended it or tlaunch.

Examples:
  tlaunch --nproc 2 train --model gpt-nano --data text:corpus.txt
  tlaunch --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29500 --nproc 8 train ...   (on node0)
  tlaunch --nnodes 2 --node-rank 1 --rdzv-endpoint node0:29500 --nproc 8 train ...   (on node1)
  tlaunch --nproc auto --log-dir logs --max-restarts 3 ./my_program --my-flag
  tlaunch --doctor)";

/// The footer of --help, with the variables that Tessera reads from the environment.
std::string footer() {
  std::string text = std::string(kFooter) + "\n\nVariables that programs of Tessera read:";
  for (const env::Variable& v : env::table()) {
    text += fmt::format("\n  {:<28} {}", v.name, v.meaning);
    if (*v.fallback) text += fmt::format("; default {}", v.fallback);
  }
  return text;
}

class HelpText : public CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: tlaunch [options] PROGRAM [args]\n";
  }
};

/// The options as they were typed; `checked` turns them into Options.
struct Typed {
  std::string nproc = "1", nnodes = "1", node_rank, endpoint, run_id, max_restarts = "0";
  std::string log_dir, tee, redirects, ranks, bind = "auto", timeout, join_timeout, grace = "10";
  std::string node_timeout, key_file;
  std::vector<std::string> env;
  bool standalone = false, dry_run = false, doctor = false;
};

std::optional<int64_t> to_int(std::string_view text) {
  int64_t v = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return v;
}

int int_flag(const char* flag, const std::string& text, int low, int high, const char* what) {
  auto v = to_int(text);
  TESSERA_CHECK(v && *v >= low && *v <= high, "{} {}: expected {} from {} to {}", flag, text, what,
                low, high);
  return int(*v);
}

double seconds_flag(const char* flag, const std::string& text, double low) {
  char* end = nullptr;
  const double s = std::strtod(text.c_str(), &end);
  TESSERA_CHECK(!text.empty() && *end == '\0' && s >= low && s <= 86400,
                "{} {}: expected seconds from {:g} to 86400", flag, text, low);
  return s;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == at)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

int number_of_ranks(const std::string& text, int cores) {
  if (text == "cpu") return cores;
  auto n = to_int(text);
  TESSERA_CHECK(n && *n >= 1 && *n <= kMaxRanks,
                "--nproc {}: expected a number of workers from 1 to {}, or auto, gpu or cpu", text,
                kMaxRanks);
  return int(*n);
}

/// Reads --nproc and --bind, which ask for the machine's cards.
void read_ranks(const Typed& typed, int cores, Options& o) {
  const std::map<std::string, Bind> binds = {{"auto", Bind::kAuto},
                                             {"core", Bind::kCore},
                                             {"numa", Bind::kNuma},
                                             {"gpu", Bind::kGpu},
                                             {"none", Bind::kNone}};
  auto bind = binds.find(typed.bind);
  TESSERA_CHECK(bind != binds.end(), "--bind {}: expected auto, core, numa, gpu or none",
                typed.bind);
  o.bind = bind->second;
  std::string why;
  const bool by_cards = typed.nproc == "gpu" || typed.nproc == "auto";
  if (by_cards || o.bind == Bind::kGpu) o.nodes_of_cards = nodes_of_cards(why);
  const int cards = int(o.nodes_of_cards.size());
  TESSERA_CHECK(cards > 0 || typed.nproc != "gpu", "--nproc gpu: {}; or use --nproc cpu", why);
  TESSERA_CHECK(cards > 0 || o.bind != Bind::kGpu, "--bind gpu: {}; or use --bind core", why);
  o.nproc = !by_cards ? number_of_ranks(typed.nproc, cores) : cards > 0 ? cards : cores;
  TESSERA_CHECK(o.bind != Bind::kGpu || o.nproc <= cards,
                "--bind gpu: there are {} ranks and {} cards; use --nproc gpu or --bind core",
                o.nproc, cards);
  if (o.bind == Bind::kAuto) o.bind = by_cards && cards > 0 ? Bind::kGpu : Bind::kCore;
}

/// "3" for all ranks, or "0:1,2:3" by rank; 0 none, 1 stdout, 2 stderr, 3 both.
StreamModes stream_modes(const char* flag, const std::string& text, int nproc) {
  StreamModes modes;
  if (text.empty()) return modes;
  for (const std::string& part : split(text, ',')) {
    size_t colon = part.find(':');
    auto mode = to_int(colon == std::string::npos ? part : part.substr(colon + 1));
    auto rank =
        colon == std::string::npos ? std::optional<int64_t>(-1) : to_int(part.substr(0, colon));
    TESSERA_CHECK(mode && rank && *mode >= 0 && *mode <= 3 && *rank < nproc &&
                      (colon == std::string::npos || *rank >= 0),
                  "{} {}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or RANK:MODE,... "
                  "with ranks below {}",
                  flag, text, nproc);
    if (colon == std::string::npos)
      modes.fallback = int(*mode);
    else
      modes.by_rank[int(*rank)] = int(*mode);
  }
  return modes;
}

// How many hosts there are, and which of them this is.
void read_nodes(const Typed& typed, Options& o) {
  const auto nodes = split(typed.nnodes, ':');
  const bool numbers = nodes.size() <= 2 && std::ranges::all_of(nodes, [](const auto& n) {
                         const auto v = to_int(n);
                         return v && *v >= 1 && *v <= kMaxRanks;
                       });
  TESSERA_CHECK(numbers, "--nnodes {}: expected N or MIN:MAX, from 1 to {}", typed.nnodes,
                kMaxRanks);
  TESSERA_CHECK(nodes.front() == nodes.back(),
                "--nnodes {}: a number of hosts that changes is not available yet; use --nnodes {}",
                typed.nnodes, nodes.back());
  o.nnodes = int(*to_int(nodes.front()));
  TESSERA_CHECK(o.nnodes > 1 || typed.node_rank.empty() || to_int(typed.node_rank) == 0,
                "--node-rank {}: give --nnodes too, the number of hosts", typed.node_rank);
  o.node_rank = typed.node_rank.empty()
                    ? 0
                    : int_flag("--node-rank", typed.node_rank, 0, o.nnodes - 1, "a number");
  if (o.nnodes > 1) {
    TESSERA_CHECK(!typed.standalone, "--standalone: is a job of one host; drop it or --nnodes {}",
                  typed.nnodes);
    TESSERA_CHECK(!typed.node_rank.empty(),
                  "--nnodes {}: give each host its --node-rank, from 0 to {}", o.nnodes,
                  o.nnodes - 1);
    TESSERA_CHECK(!typed.endpoint.empty() && o.port > 0,
                  "--nnodes {}: give all hosts the same --rdzv-endpoint HOST:PORT, the host of "
                  "--node-rank 0 and a port that is free there",
                  o.nnodes);
  }
}

// One task of srun on each host makes a job of them, without a flag.
void read_slurm(Typed& typed) {
  const auto step = slurm_step();
  if (!step || step->tasks == 1 || typed.standalone) return;
  TESSERA_CHECK(step->tasks == step->nodes,
                "SLURM_STEP_NUM_TASKS={} on {} nodes: start one tlaunch on each node (srun "
                "--ntasks-per-node=1), which starts --nproc ranks there, or give --standalone to "
                "run a separate job in each",
                step->tasks, step->nodes);
  TESSERA_CHECK(
      typed.node_rank.empty() && (typed.nnodes == "1" || to_int(typed.nnodes) == step->nodes),
      "SLURM_STEP_NUM_NODES={}: srun says how many nodes there are and which is which; "
      "drop --nnodes {} and --node-rank",
      step->nodes, typed.nnodes);
  typed.nnodes = std::to_string(step->nodes);
  typed.node_rank = std::to_string(step->node);
  if (typed.endpoint.empty())
    typed.endpoint = fmt::format("{}:{}", step->hosts.front(), slurm_port(*step));
  if (typed.run_id.empty()) typed.run_id = "slurm-" + step->id;
}

// A batch script of Slurm runs on the first node of its job, with no step of its own.
int nodes_left_idle(const Typed& typed) {
  const char* nodes = std::getenv("SLURM_JOB_NUM_NODES");
  if (!nodes || typed.standalone || std::getenv("SLURM_STEP_ID")) return 0;
  return int(std::max<int64_t>(to_int(nodes).value_or(1) - 1, 0));
}

void read_endpoint(const Typed& typed, Options& options) {
  if (typed.endpoint.empty()) return;
  TESSERA_CHECK(!typed.standalone,
                "--standalone: chooses its own endpoint; drop it or --rdzv-endpoint {}",
                typed.endpoint);
  size_t colon = typed.endpoint.rfind(':');
  auto port = colon == std::string::npos ? std::nullopt : to_int(typed.endpoint.substr(colon + 1));
  TESSERA_CHECK(port && *port >= 0 && *port <= 65535 && colon > 0,
                "--rdzv-endpoint {}: expected HOST:PORT with a port from 0 (any free one) to 65535",
                typed.endpoint);
  options.host = typed.endpoint.substr(0, colon);
  options.port = int(*port);
}

void read_env(const Typed& typed, Options& options) {
  static const std::set<std::string> ours = {"RANK",
                                             "LOCAL_RANK",
                                             "WORLD_SIZE",
                                             "LOCAL_WORLD_SIZE",
                                             "GROUP_RANK",
                                             "MASTER_ADDR",
                                             "MASTER_PORT",
                                             "TESSERA_RESTART_COUNT",
                                             "TESSERA_STORE_KEY",
                                             "TESSERA_LAUNCHER",
                                             "TESSERA_RUN_ID"};
  for (const std::string& pair : typed.env) {
    size_t equal = pair.find('=');
    TESSERA_CHECK(equal != std::string::npos && equal > 0, "--env {}: expected NAME=VALUE", pair);
    std::string name = pair.substr(0, equal);
    TESSERA_CHECK(!ours.count(name), "--env {}: tlaunch sets {} itself; drop it", pair, name);
    options.env.emplace_back(name, pair.substr(equal + 1));
  }
}

std::string new_run_id() {
  std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char date[32];
  std::strftime(date, sizeof date, "%Y%m%d-%H%M%S", &local);
  return std::string(date) + "-" + detail::to_hex(detail::random_bytes(4));
}

Options checked(Typed typed, int cores) {
  read_slurm(typed);
  Options o;
  read_ranks(typed, cores, o);
  o.idle_nodes = nodes_left_idle(typed);
  read_endpoint(typed, o);
  read_nodes(typed, o);
  o.run_id = typed.run_id.empty() ? new_run_id() : typed.run_id;
  TESSERA_CHECK(o.run_id.find('/') == std::string::npos && o.run_id != ".." && o.run_id != "." &&
                    o.run_id.size() <= 128,
                "--rdzv-id {}: names a folder of --log-dir; use up to 128 characters without /",
                o.run_id.substr(0, 160));
  o.max_restarts = int_flag("--max-restarts", typed.max_restarts, 0, 1 << 20, "a number");
  o.tee = stream_modes("--tee", typed.tee, o.nproc * o.nnodes);
  o.redirects = stream_modes("--redirects", typed.redirects, o.nproc * o.nnodes);
  o.log_dir = typed.log_dir;
  bool to_files = !typed.tee.empty() || !typed.redirects.empty();
  if (to_files && o.log_dir.empty()) o.log_dir = "logs";
  if (!to_files && !o.log_dir.empty()) o.tee.fallback = 3;
  if (!typed.ranks.empty()) {
    o.console_ranks.emplace();
    for (const std::string& rank : split(typed.ranks, ',')) {
      auto r = to_int(rank);
      TESSERA_CHECK(r && *r >= 0 && *r < o.nproc,
                    "--local-ranks-filter {}: expected ranks from 0 to {}, with commas",
                    typed.ranks, o.nproc - 1);
      o.console_ranks->insert(int(*r));
    }
  }
  if (!typed.timeout.empty())
    o.timeout_s = int_flag("--timeout", typed.timeout, 1, 30 * 86400, "whole seconds");
  if (!typed.join_timeout.empty())
    o.join_timeout_s =
        int_flag("--join-timeout", typed.join_timeout, 1, 30 * 86400, "whole seconds");
  o.grace_s = seconds_flag("--grace", typed.grace, 0);
  if (!typed.node_timeout.empty())
    o.node_timeout_s = seconds_flag("--node-timeout", typed.node_timeout, 0.2);
  o.key_file = typed.key_file;
  read_env(typed, o);
  o.dry_run = typed.dry_run;
  o.doctor = typed.doctor;
  return o;
}

void declare(CLI::App& app, Typed& t) {
  app.add_option("--nproc,--nproc-per-node", t.nproc,
                 "workers: N, gpu, cpu (one per core), or auto (GPUs, else cores); default 1")
      ->type_name("N|auto|gpu|cpu");
  app.add_option("--nnodes", t.nnodes, "hosts; tlaunch is started on each of them; default 1")
      ->type_name("N");
  app.add_option("--node-rank", t.node_rank, "number of this host, from 0")->type_name("N");
  app.add_option("--rdzv-endpoint", t.endpoint,
                 "where the hosts meet: the host of --node-rank 0 and a port of it; with one host, "
                 "where its store listens (default 127.0.0.1 and any free port)")
      ->type_name("HOST:PORT");
  app.add_option("--rdzv-id", t.run_id, "name of the run; default is date, time, random")
      ->type_name("ID");
  app.add_flag("--standalone", t.standalone, "a job of its own, whatever surrounds it");
  app.add_option("--max-restarts", t.max_restarts, "restart all workers so often after a failure")
      ->type_name("N");
  app.add_option("--log-dir", t.log_dir,
                 "keep output in DIR/<run>/attempt_<k>/rank_<r>/{stdout,stderr}.log; default logs "
                 "when --tee or --redirects is given, else none")
      ->type_name("DIR");
  app.add_option("--tee", t.tee,
                 "to file and console: 0 none, 1 stdout, 2 stderr, 3 both (with --log-dir the "
                 "default), or by rank")
      ->type_name("MODE|RANK:MODE,...");
  app.add_option("--redirects", t.redirects, "to file only; same values")
      ->type_name("MODE|RANK:MODE,...");
  app.add_option("--local-ranks-filter", t.ranks, "show only these ranks on the console")
      ->type_name("0,1,...");
  app.add_option("--bind", t.bind,
                 "pin each rank to its share of the cores, to a NUMA node, or to its share of the "
                 "cores near its card (gpu); auto: gpu with --nproc gpu, else core")
      ->type_name("auto|core|numa|gpu|none");
  app.add_option("--timeout", t.timeout,
                 "deadline of each collective (TESSERA_TIMEOUT); default 60")
      ->type_name("SECONDS");
  app.add_option("--join-timeout", t.join_timeout,
                 "how long ranks may be apart when they start (TESSERA_JOIN_TIMEOUT); default 600")
      ->type_name("SECONDS");
  app.add_option("--node-timeout", t.node_timeout,
                 "after how long without a word a host is lost; default 5")
      ->type_name("SECONDS");
  app.add_option("--key-file", t.key_file,
                 "file with the secret that all hosts of the job share; default TESSERA_JOB_KEY, "
                 "else ~/.tessera/key, which is made where there is none")
      ->type_name("FILE");
  app.add_option("--grace", t.grace, "time from a stop signal to SIGKILL; default 10")
      ->type_name("SECONDS");
  app.add_option("--env", t.env, "variable for the workers; may be repeated")
      ->type_name("NAME=VALUE")
      ->take_all()
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_flag("--doctor", t.doctor, "check this machine and say what to fix");
  app.add_flag("--dry-run", t.dry_run, "print what would be run");
  app.set_version_flag("--version", [] { return version_text("tlaunch"); });
}

}  // namespace

std::optional<Options> parse_options(int argc, char** argv, int cores, int* exit_code) {
  CLI::App app("Starts a program on several ranks and looks after them.", "tlaunch");
  app.formatter(std::make_shared<HelpText>());
  app.footer(footer());
  Typed typed;
  declare(app, typed);
  try {
    std::vector<std::string> command;
    if (auto status = parse_command_line(app, argc, argv, 2, &command)) {
      *exit_code = *status;
      return std::nullopt;
    }
    Options options = checked(typed, cores);
    options.command = command;
    if (!options.doctor) {
      TESSERA_CHECK(!command.empty(),
                    "PROGRAM is missing; usage: tlaunch [options] PROGRAM [args]");
      options.program = find_program(command[0]);
    }
    return options;
  } catch (const ProgramError& e) {
    std::fprintf(stderr, "tlaunch: %s\n", e.what());
    *exit_code = e.exit_code();
  } catch (const UserError& e) {
    std::fprintf(stderr, "tlaunch: %s\n", e.what());
    *exit_code = 2;
  }
  return std::nullopt;
}

}  // namespace tessera::launcher
