#include "collectives/store/environment.h"

#include "collectives/store/memory_store.h"
#include "collectives/store/tcp_store.h"
#include "core/base/env.h"
#include "core/base/open_files.h"

namespace tessera {
namespace {

constexpr int kMaxWorldSize = 1 << 20;

int get_rank(const char* name, const char* size_name, int fallback, int size) {
  int value = int(env::get_int(name, fallback, 0, kMaxWorldSize - 1));
  TESSERA_CHECK(value < size, "{}={}: must be below {}={}; correct one of them", name, value,
                size_name, size);
  return value;
}

/// The names of the variables that a launcher sets.
struct Names {
  const char *rank, *size, *local_rank, *local_size;
};
constexpr Names kOurs{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpi{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                         "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};

/// Throws if two launchers started this process: every process would be in two jobs.
void check_one_launcher() {
  for (auto [ours, theirs] : {std::pair{kOurs.size, kOpenMpi.size}, {kOurs.rank, kOpenMpi.rank}}) {
    std::string a = env::get(ours), b = env::get(theirs);
    TESSERA_CHECK(
        a.empty() || b.empty() || a == b,
        "{}={}, but {}={}: two launchers, tlaunch or torchrun and mpirun; use one of them", ours,
        a.substr(0, 64), theirs, b.substr(0, 64));
  }
}

/// Throws under srun, or an mpirun whose variables are not read: each process would be a job of its
/// own.
void check_alone() {
  for (const char* size : {"SLURM_STEP_NUM_TASKS", "PMI_SIZE"})
    TESSERA_CHECK(
        env::get_int(size, 1, 0, kMaxWorldSize) <= 1,
        "{}={}, but no WORLD_SIZE: these processes would run as separate jobs of one rank. "
        "Start one task with tlaunch, use Open MPI's mpirun, or set WORLD_SIZE=1 if "
        "separate jobs are meant",
        size, env::get(size).substr(0, 64));
}

}  // namespace

JobEnvironment job_environment() {
  JobEnvironment job;
  check_one_launcher();
  job.mpirun = env::get(kOurs.size).empty() && env::get(kOurs.rank).empty() &&
               !env::get(kOpenMpi.size).empty();
  const Names& names = job.mpirun ? kOpenMpi : kOurs;
  bool has_size = job.mpirun || !env::get("WORLD_SIZE").empty();
  TESSERA_CHECK(has_size || env::get("RANK").empty(),
                "RANK={}: set without WORLD_SIZE; set both (tlaunch does) or neither",
                env::get("RANK").substr(0, 64));
  if (!has_size) check_alone();
  job.world_size = int(env::get_int(names.size, 1, 1, kMaxWorldSize));
  TESSERA_CHECK(job.world_size == 1 || !env::get(names.rank).empty(),
                "{}={}: set without {}; set both (the launcher does) or neither", names.size,
                job.world_size, names.rank);
  job.rank = get_rank(names.rank, names.size, 0, job.world_size);
  job.local_world_size = int(env::get_int(names.local_size, job.world_size, 1, kMaxWorldSize));
  TESSERA_CHECK(job.local_world_size <= job.world_size, "{}={}: exceeds {}={}; correct one of them",
                names.local_size, job.local_world_size, names.size, job.world_size);
  int guess = job.rank % job.local_world_size;
  job.local_rank = get_rank(names.local_rank, names.local_size, guess, job.local_world_size);
  job.group_rank = get_rank("GROUP_RANK", "WORLD_SIZE", 0, job.world_size);
  job.master_addr = env::get("MASTER_ADDR", job.master_addr);
  job.master_port = int(env::get_int("MASTER_PORT", 0, 1, 65535));
  job.run_id = env::get("TESSERA_RUN_ID");
  job.key = env::get("TESSERA_STORE_KEY");
  job.restart_count = int(env::get_int("TESSERA_RESTART_COUNT", 0, 0, 1 << 30));
  return job;
}

std::string attempt_prefix(int restart_count) { return fmt::format("a{}/", restart_count); }

std::shared_ptr<Store> connect_store(const JobEnvironment& job, Millis timeout) {
  bool served = job.master_port != 0 && !job.key.empty();
  if (job.world_size == 1 && !served) return std::make_shared<MemoryStore>();
  TESSERA_CHECK(job.master_port != 0,
                "MASTER_PORT: unset, but WORLD_SIZE={}; start the program with tlaunch",
                job.world_size);
  TESSERA_CHECK(!job.key.empty(),
                "TESSERA_STORE_KEY: unset, but WORLD_SIZE={}; start the program with tlaunch",
                job.world_size);
  check_open_files("init_process_group", 13 + 2 * job.world_size);
  auto tcp = std::make_shared<TcpStore>(job.master_addr, job.master_port, job.key, timeout);
  return std::make_shared<PrefixStore>(attempt_prefix(job.restart_count), std::move(tcp));
}

}  // namespace tessera
