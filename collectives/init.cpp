// Joins the job and sets the calling thread's world.
#include "collectives/backend_name.h"
#include "collectives/decorators/fault.h"
#include "collectives/decorators/logging.h"
#include "collectives/mpi/store.h"
#include "collectives/rendezvous.h"
#include "collectives/store/environment.h"
#include "core/base/env.h"
#include "core/base/log.h"

namespace tessera {
namespace {

// The world belongs to the thread's context: ranks may be threads, each with its own world.
thread_local Ref<ProcessGroup> this_thread_world;

Ref<ProcessGroup> decorate(Ref<ProcessGroup> group) {
  if (logging::enabled(logging::Level::kDebug)) group = make_ref<LoggingGroup>(std::move(group));
  std::string fault = env::get("TESSERA_FAULT");
  if (!fault.empty()) group = make_ref<FaultGroup>(std::move(group), parse_fault(fault));
  return group;
}

}  // namespace

Ref<ProcessGroup> init_process_group(const GroupOptions& options) {
  detail::forks();  // from now on a fork is noticed
  JobEnvironment job = job_environment();
  if (options.rank >= 0) job.rank = options.rank;
  if (options.world_size > 0) job.world_size = options.world_size;
  TESSERA_CHECK(job.rank < job.world_size,
                "init_process_group: rank {} of {} ranks; ranks are 0 "
                "to world_size - 1",
                job.rank, job.world_size);
  detail::JoinOptions join;
  join.backend = options.backend.empty() ? env::get("TESSERA_BACKEND") : options.backend;
  detail::check_backend_name("init_process_group", join.backend, detail::RanksAre::kProcesses);
  join.timeout = options.timeout.count() > 0 ? options.timeout : detail::default_timeout();
  join.join_timeout = options.timeout.count() > 0 ? options.timeout : detail::join_timeout();
  if (job.world_size > 1) {
    join.store = options.store ? options.store
                 : job.mpirun  ? detail::connect_mpi_store(job, join.join_timeout)
                               : connect_store(job, join.join_timeout);
    if (job.mpirun && !options.store) join.store_keeper = 0;
    // All ranks count how often they joined, so a second world does not read the records of the
    // first.
    int64_t turn = join.store->add(fmt::format("pg/{}/turn/{}", options.name, job.rank), 1);
    join.prefix = fmt::format("pg/{}/{}/", options.name, turn);
  }
  auto members = detail::make_world(options.name, job.rank, job.world_size);
  Ref<ProcessGroup> group = decorate(detail::join_by_store(std::move(members), join));
  logging::info("{}: rank {} of {}, backend {}", group->name(), group->rank(), group->size(),
                group->backend());
  set_world(group);
  return group;
}

Ref<ProcessGroup> world_group() {
  if (!this_thread_world) {
    JobEnvironment job = job_environment();
    TESSERA_CHECK(job.world_size == 1,
                  "world: this thread has no process group, but WORLD_SIZE={}; call "
                  "init_process_group() first, or, where another thread of this rank did, "
                  "set_world(group) in this one",
                  job.world_size);
    init_process_group();
  }
  return this_thread_world;
}

ProcessGroup& world() {
  if (!this_thread_world) world_group();
  return *this_thread_world;
}

int get_rank() { return world().rank(); }
int get_world_size() { return world().size(); }

Ref<ProcessGroup> solo_group() {
  detail::JoinOptions join;
  join.timeout = detail::default_timeout();
  return detail::join_by_store(detail::make_world("solo", 0, 1), join);
}

void set_world(Ref<ProcessGroup> group) { this_thread_world = std::move(group); }

void destroy_process_group() {
  Ref<ProcessGroup> group = std::move(this_thread_world);
  this_thread_world = nullptr;
  if (!group) return;
  try {
    group->flush();
  } catch (const CommError& e) {  // calls have thrown the error, or their results were not read
    logging::error("destroy_process_group: {}", e.what());
  }
}

}  // namespace tessera
