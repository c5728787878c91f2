#include "collectives/store/environment.h"

#include "collectives/store/memory_store.h"
#include "collectives/store/tcp_store.h"
#include "core/base/env.h"

namespace tessera {
namespace {

constexpr int kMaxWorldSize = 1 << 20;

int get_rank(const char* name, const char* size_name, int fallback, int size) {
  int value = int(env::get_int(name, fallback, 0, kMaxWorldSize - 1));
  TESSERA_CHECK(value < size, "{}={}: must be below {}={}; correct one of them", name, value,
                size_name, size);
  return value;
}

}  // namespace

JobEnvironment job_environment() {
  JobEnvironment job;
  bool has_size = !env::get("WORLD_SIZE").empty();
  TESSERA_CHECK(has_size || env::get("RANK").empty(),
                "RANK={}: set without WORLD_SIZE; set both (tlaunch does) or neither",
                env::get("RANK").substr(0, 64));
  job.world_size = int(env::get_int("WORLD_SIZE", 1, 1, kMaxWorldSize));
  TESSERA_CHECK(job.world_size == 1 || !env::get("RANK").empty(),
                "WORLD_SIZE={}: set without RANK; set both (tlaunch does) or neither",
                job.world_size);
  job.rank = get_rank("RANK", "WORLD_SIZE", 0, job.world_size);
  job.local_world_size = int(env::get_int("LOCAL_WORLD_SIZE", job.world_size, 1, kMaxWorldSize));
  TESSERA_CHECK(job.local_world_size <= job.world_size,
                "LOCAL_WORLD_SIZE={}: exceeds WORLD_SIZE={}; correct one of them",
                job.local_world_size, job.world_size);
  int guess = job.rank % job.local_world_size;
  job.local_rank = get_rank("LOCAL_RANK", "LOCAL_WORLD_SIZE", guess, job.local_world_size);
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
  auto tcp = std::make_shared<TcpStore>(job.master_addr, job.master_port, job.key, timeout);
  return std::make_shared<PrefixStore>(attempt_prefix(job.restart_count), std::move(tcp));
}

}  // namespace tessera
