#include "launcher/process_threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace tessera {
namespace {

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value && *value;
}

// The CPUs that process `pid` may use.
cpu_set_t cpus_of(pid_t pid) {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(pid, sizeof set, &set);
  return set;
}

// Whether `cpu` is the first of those in `set` that share its core.
bool leads_its_core(int cpu, const cpu_set_t& set) {
  std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                     "/topology/thread_siblings_list");
  int sibling = 0;  // of a list as "0,64" or "0-1", in rising order
  while (file >> sibling && sibling < cpu) {
    if (CPU_ISSET(sibling, &set)) return false;
    file.ignore();
  }
  return true;
}

int ranks_here() {
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"})
    if (is_set(name)) return std::max(std::atoi(std::getenv(name)), 1);
  return 1;
}

// The cores of this rank; 0: as many as it may use.
int share_of_cores() {
  const int ranks = ranks_here();
  const cpu_set_t mine = cpus_of(0), parents = cpus_of(::getppid());
  if (ranks == 1 || !CPU_EQUAL(&mine, &parents)) return 0;  // the launcher has bound this rank
  int cores = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    cores += CPU_ISSET(cpu, &mine) && leads_its_core(cpu, mine);
  return cores == 0 ? 0 : std::max(cores / ranks, 1);  // 0: more CPUs than a cpu_set_t holds
}

}  // namespace

void settle_threads(char** argv) {
  const bool waits = is_set("OMP_WAIT_POLICY") || is_set("GOMP_SPINCOUNT");
  const int cores = is_set("OMP_NUM_THREADS") ? 0 : share_of_cores();
  if (waits && cores == 0) return;
  if (!waits) ::setenv("GOMP_SPINCOUNT", kSpins, 1);
  if (cores > 0) ::setenv("OMP_NUM_THREADS", std::to_string(cores).c_str(), 1);
  std::error_code e;  // the path and not the link, whose name the process would get
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", e);
  if (!e) ::execv(self.c_str(), argv);
  // Where that is refused the program runs with libgomp's defaults.
}

}  // namespace tessera
