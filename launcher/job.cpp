#include "launcher/job.h"

#include <fmt/core.h>

#include <cstdlib>

#include "collectives/store/environment.h"
#include "collectives/store/tcp_server.h"
#include "core/base/error.h"
#include "core/base/version.h"
#include "launcher/agent.h"
#include "launcher/console.h"
#include "launcher/process_threads.h"
#include "launcher/supervisor.h"

namespace tessera::launcher {
namespace {

using Changes = std::vector<std::pair<std::string, std::string>>;

/// Where this host's ranks stand in a world, and how they reach its store.
struct World {
  int first_rank = 0, size = 1;
  int node = 0;  // GROUP_RANK
  std::string master_addr;
  int master_port = 0;
  std::string run_id, key;
  int attempt = 0;
  std::string mark = {};
};

World world_alone(const Options& o, int port, const std::string& key, int attempt) {
  return {.size = o.nproc,
          .master_addr = o.host,
          .master_port = port,
          .run_id = o.run_id,
          .key = key,
          .attempt = attempt};
}

/// The variables that the environment of the host's rank `local` has besides those of tlaunch.
Changes rank_environment(const Options& o, const Placement& placement, const World& world,
                         int local) {
  Changes changes;
  int cores = placement.ranks[size_t(local)].cores;
  if (!std::getenv("OMP_NUM_THREADS"))
    changes.emplace_back("OMP_NUM_THREADS", std::to_string(cores));
  bool user_places = std::getenv("OMP_PROC_BIND") || std::getenv("OMP_PLACES") ||
                     std::getenv("OMP_NUM_THREADS") || std::getenv("GOMP_CPU_AFFINITY");
  if (o.bind != Bind::kNone && cores > 1 && !placement.shared && !user_places) {
    changes.emplace_back("OMP_PROC_BIND", "close");
    changes.emplace_back("OMP_PLACES", "cores");
  }
  if (!std::getenv("OMP_WAIT_POLICY") && !std::getenv("GOMP_SPINCOUNT"))
    changes.emplace_back("GOMP_SPINCOUNT", kSpins);
  if (o.timeout_s > 0) changes.emplace_back("TESSERA_TIMEOUT", std::to_string(o.timeout_s));
  if (o.join_timeout_s > 0)
    changes.emplace_back("TESSERA_JOIN_TIMEOUT", std::to_string(o.join_timeout_s));
  changes.insert(changes.end(), o.env.begin(), o.env.end());
  changes.insert(changes.end(), {{"RANK", std::to_string(world.first_rank + local)},
                                 {"LOCAL_RANK", std::to_string(local)},
                                 {"WORLD_SIZE", std::to_string(world.size)},
                                 {"LOCAL_WORLD_SIZE", std::to_string(o.nproc)},
                                 {"GROUP_RANK", std::to_string(world.node)},
                                 {"MASTER_ADDR", world.master_addr},
                                 {"MASTER_PORT", std::to_string(world.master_port)},
                                 {"TESSERA_RUN_ID", world.run_id},
                                 {"TESSERA_RESTART_COUNT", std::to_string(world.attempt)},
                                 {"TESSERA_STORE_KEY", world.key},
                                 {"TESSERA_LAUNCHER", world.mark}});
  return changes;
}

/// `run_id`: as people know the run.
Outcome run_attempt(const Run& run, Console& console, const std::string& run_id, const World& world,
                    Store* store, OtherHosts* others) {
  auto environment = [&](int rank, int) {
    return merged_environment(
        rank_environment(run.options, run.placement, world, rank - world.first_rank));
  };
  Job job{.options = run.options,
          .placement = run.placement,
          .console = console,
          .guard = run.guard,
          .store = store,
          .signal_fd = run.signal_fd,
          .open_files = run.open_files,
          .signal_mask = run.signal_mask,
          .environment = environment,
          .run_id = run_id,
          .first_rank = world.first_rank,
          .on_host = others ? " on " + host_name() : "",
          .elsewhere = others};
  return Supervisor(job, world.attempt).run();
}

std::string command_of(const Options& o) {
  std::string text;
  for (const std::string& word : o.command) text += (text.empty() ? "" : " ") + word;
  if (text.size() > 2000) text = text.substr(0, 2000) + "...";
  return text;
}

}  // namespace

int run_alone(const Run& run) {
  const Options& o = run.options;
  const std::string key = make_store_key();
  Console console(o.nproc > 1);
  if (!run.placement.note.empty()) console.note("tlaunch: " + run.placement.note);
  if (o.idle_nodes > 0)
    console.note(fmt::format(
        "tlaunch: this Slurm job has {} nodes, of which only this one is used: put srun "
        "in front of tlaunch to use all (--standalone silences this line)",
        o.idle_nodes + 1));
  console.flush(0, -1);
  TcpStoreServer server(o.host, o.port, key);
  for (int attempt = 0;; ++attempt) {
    PrefixStore store(attempt_prefix(attempt), server.store());
    World world = world_alone(o, server.port(), key, attempt);
    world.mark = run.mark;
    const Outcome outcome = run_attempt(run, console, o.run_id, world, &store, nullptr);
    if (!outcome.report.empty()) console.note(outcome.report);
    bool again = outcome.exit_code != 0 && outcome.stop_signal == 0 && attempt < o.max_restarts;
    if (again)
      console.note(fmt::format("tlaunch: restarting all ranks, restart {} of {}", attempt + 1,
                               o.max_restarts));
    console.flush(again ? 0 : outcome.stop_signal ? 1000 : 60000, run.signal_fd);
    if (!again) {
      if (outcome.exit_code == 0) run.guard.dismiss();
      return outcome.exit_code == 0 && console.lost() ? 1 : outcome.exit_code;
    }
    server.forget(attempt_prefix(attempt));
  }
}

int run_with_others(const Run& run, const Secret& secret) {
  const Options& o = run.options;
  Console console(true, host_name());
  if (!run.placement.note.empty()) console.note("tlaunch: " + run.placement.note);
  AgentOptions options;
  options.nnodes = o.nnodes, options.node_rank = o.node_rank, options.nproc = o.nproc;
  options.rendezvous = {o.host, o.port};
  options.max_restarts = o.max_restarts;
  options.run = o.run_id;
  options.job =
      fmt::format("tlaunch {} --nnodes {} --rdzv-endpoint {}:{} --nproc {} --max-restarts {}: {}",
                  version(), o.nnodes, o.host, o.port, o.nproc, o.max_restarts, command_of(o));
  if (o.join_timeout_s > 0) options.join_timeout = std::chrono::seconds(o.join_timeout_s);
  if (o.node_timeout_s > 0)
    options.node_timeout = Membership::Time(int64_t(o.node_timeout_s * 1000));
  Agent agent(options, secret);
  for (;;) {
    const Agent::Turn turn = agent.await_turn(run.signal_fd, console);
    if (!turn.generation) {
      if (!turn.text.empty()) console.note(turn.text);
      console.flush(60000, run.signal_fd);
      if (turn.exit_code == 0) run.guard.dismiss();
      return turn.exit_code == 0 && console.lost() ? 1 : turn.exit_code;
    }
    const Generation& g = *turn.generation;
    const World world{.first_rank = g.first_rank(turn.place),
                      .size = g.world_size(),
                      .node = turn.place,
                      .master_addr = g.leader().addresses.front().host,
                      .master_port = g.leader().store_port,
                      .run_id = fmt::format("{}-{:08x}", g.run, uint32_t(g.ballot.by)),
                      .key = turn.key,
                      .attempt = g.restarts,
                      .mark = run.mark};
    try {
      const Outcome outcome = run_attempt(run, console, g.run, world, turn.store.get(), &agent);
      if (!outcome.report.empty()) console.note(outcome.report);
      // Nobody is told where the others have ended the attempt already.
      if (outcome.cut_short && outcome.stop_signal) return 128 + outcome.stop_signal;
      agent.tell_done(outcome);
    } catch (const UserError& e) {  // ranks could not be started here
      Outcome outcome;
      outcome.exit_code = 1;
      outcome.report = fmt::format("tlaunch: {}: {}\n", host_name(), e.what());
      console.note(outcome.report);
      agent.tell_failure({world.first_rank, "it could not be started", outcome.exit_code});
      agent.tell_done(outcome, true);
    }
  }
}

int print_plan(const Options& o, const Placement& placement) {
  const std::string port = o.port ? std::to_string(o.port) : "any free port";
  if (o.nnodes > 1)
    fmt::print("node: {} of {}, which meet at {}:{}\n", o.node_rank, o.nnodes, o.host, port);
  else
    fmt::print("store: {}:{}\n", o.host, port);
  fmt::print("run: {}, up to {} restarts\n", o.run_id, o.max_restarts);
  if (!placement.note.empty()) fmt::print("note: {}\n", placement.note);
  if (!o.log_dir.empty()) fmt::print("logs: {}/{}/attempt_0\n", o.log_dir, o.run_id);
  std::string command = o.program;
  for (size_t i = 1; i < o.command.size(); ++i) command += " " + o.command[i];
  // The store of several hosts takes any free port.
  World world = world_alone(o, o.nnodes > 1 ? 0 : o.port, "(secret)", 0);
  world.mark = "(random)";
  world.size = o.nproc * o.nnodes;
  world.first_rank = o.nproc * o.node_rank;
  world.node = o.node_rank;
  for (int local = 0; local < o.nproc; ++local) {
    const Place& place = placement.ranks[size_t(local)];
    fmt::print("rank {}: {}:", world.first_rank + local,
               place.cpus.empty() ? "not bound" : "cpus " + cpu_list(place.cpus));
    for (const auto& [name, value] : rank_environment(o, placement, world, local))
      fmt::print(" {}={}", name, value);
    fmt::print(" {}\n", command);
  }
  return 0;
}

}  // namespace tessera::launcher
