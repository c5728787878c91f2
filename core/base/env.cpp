#include "core/base/env.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "core/base/error.h"

namespace tessera::env {
namespace {

constexpr Variable kTable[] = {
    {"RANK", "0", "number of this process, 0 to WORLD_SIZE - 1 (set by tlaunch)"},
    {"WORLD_SIZE", "1", "number of processes of the job (set by tlaunch)"},
    {"LOCAL_RANK", "0", "number of this process on its node (set by tlaunch)"},
    {"LOCAL_WORLD_SIZE", "1", "number of processes on this node (set by tlaunch)"},
    {"GROUP_RANK", "0", "number of this node (set by tlaunch)"},
    {"MASTER_ADDR", "127.0.0.1", "address of the store (set by tlaunch)"},
    {"MASTER_PORT", "", "port of the store (set by tlaunch)"},
    {"OMPI_COMM_WORLD_RANK", "", "number of this process (set by mpirun)"},
    {"OMPI_COMM_WORLD_SIZE", "", "number of processes of the job (set by mpirun)"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "", "number of this process on its node (set by mpirun)"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "", "number of processes on this node (set by mpirun)"},
    {"SLURM_STEP_NUM_TASKS", "", "tasks that srun started; several without a launcher are refused"},
    {"SLURM_STEP_ID", "", "with those below, what tlaunch reads of a step of srun: its number"},
    {"SLURM_JOB_ID", "", "number of the job"},
    {"SLURM_PROCID", "", "number of the task"},
    {"SLURM_STEP_NUM_NODES", "", "nodes of the step"},
    {"SLURM_STEP_NODELIST", "", "their names"},
    {"SLURM_NODEID", "", "number of this node among them"},
    {"SLURMD_NODENAME", "", "name of this node"},
    {"PMI_SIZE", "", "processes that another mpirun started; refused likewise"},
    {"TESSERA_RUN_ID", "", "name of the job, part of every shared name (set by tlaunch)"},
    {"TESSERA_RESTART_COUNT", "0", "how often tlaunch has restarted the workers"},
    {"TESSERA_STORE_KEY", "", "per-job secret that the store asks of its clients (set by tlaunch)"},
    {"TESSERA_LAUNCHER", "", "marks what one tlaunch has started (set by tlaunch)"},
    {"TESSERA_JOB_KEY", "",
     "secret that the tlaunch of each host shares with the others; default is in ~/.tessera/key"},
    {"TESSERA_TIMEOUT", "60", "deadline of each collective in seconds"},
    {"TESSERA_JOIN_TIMEOUT", "600", "how long ranks may be apart when they start, in seconds"},
    {"TESSERA_LOG", "warn", "log level: debug, info, warn, error or off"},
    {"TESSERA_COMPILE_SKIP", "", "passes of the compiler to leave out: cse,fuse"},
    {"TESSERA_ISA", "", "kernel instruction set: base, v3 or v4; default is the best the CPU has"},
    {"TESSERA_FAULT", "", "fault injection for tests, e.g. rank=1,op=all_reduce,n=20,kill"},
    {"TESSERA_BACKEND", "",
     "collective backend for CPU tensors: shm, gloo or mpi; default is chosen by host"},
    {"TESSERA_HOST_ID", "",
     "tells hosts apart that are one by name: ranks share memory only where it is equal too"},
    {"TESSERA_COMPILE_MEMORY", "",
     "megabytes that a compiled step may take beside its state; it computes more again to keep to "
     "it"},
    {"TESSERA_COMPILE_CXX", "",
     "C++ compiler of generated kernels; default is c++, g++ or clang++"},
    {"TESSERA_COMPILE_CACHE", "", "folder of compiled kernels; default is ~/.cache/tessera"},
    {"TESSERA_COMPILE_CAPTURE", "1",
     "0: compiled steps on a card launch each kernel, instead of one graph of all"},
    {"TESSERA_COMPILE_STREAMS", "",
     "of compile mode max-autotune on a card: steps run on one stream, on several, or (timed) as "
     "was "
     "faster; default is timed, and one where times mean nothing"},
    {"TESSERA_COMPILE_DUMP", "",
     "folder to which graphs and sources of generated kernels are written"},
    {"TESSERA_COMPILE_STREAM", "",
     "bytes from which on generated code stores a result past the caches; default is the size of "
     "the last one"},
    {"TESSERA_CUDA_LIBRARIES", "",
     "folders of libcuda, libnvrtc and others, separated by colons, looked into after the "
     "loader's"},
    {"TESSERA_CUDA_MEMORY", "", "megabytes that tensors may take of a GPU; default is all it has"},
    {"TESSERA_CUDA_ALLOCATOR", "cached",
     "cached, or exact: each tensor asks the driver, so that tools see its bounds (slow)"},
    {"TESSERA_CUDA_SYNCHRONOUS", "0",
     "1: the host waits for every kernel, so that errors of a GPU are thrown by the op that made "
     "them (slow)"},
    {"TESSERA_CUDA_LIBRARY_PRODUCTS", "1",
     "0: Tessera's own kernels compute matrix products on GPUs, also where cuBLASLt is found"},
    {"TESSERA_CUDA_TIME_GRAPHS", "",
     "0: the first of cuDNN's engines computes a graph, without a comparison of times; default is "
     "1 "
     "on a card"},
    {"TESSERA_CUDA_TIME_PRODUCTS", "",
     "1: the algorithms that cuBLASLt suggests for a product are timed at its first use, which is "
     "the default on cards; 0: the first is taken"},
    {"TESSERA_CUDA_LIBRARY_GRAPHS", "1",
     "0: Tessera's own kernels compute convolutions and attention on GPUs, also where cuDNN is "
     "found"},
    {"NVTX_INJECTION64_PATH", "",
     "library of a profiler that is told of modules, ops and spans (set by nsys and ncu)"},
    {"TESSERA_TEST_DATA", "", "folder of the data sets that some tests read"},
    {"OMP_NUM_THREADS", "", "threads of CPU kernels per process (tlaunch sets it when unset)"},
};

}  // namespace

std::span<const Variable> table() { return kTable; }

std::string get(const char* name, const std::string& fallback) {
  bool known = false;
  for (const Variable& v : kTable) known |= std::strcmp(v.name, name) == 0;
  TESSERA_ASSERT(known, "environment variable {} is not in the table", name);
  const char* value = std::getenv(name);
  return value && *value ? value : fallback;
}

int64_t get_int(const char* name, int64_t fallback, int64_t low, int64_t high) {
  std::string text = get(name);
  if (text.empty()) return fallback;
  int64_t v = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  bool whole = error == std::errc() && end == text.data() + text.size();
  TESSERA_CHECK(whole && v >= low && v <= high,
                "{}=\"{}\": expected an integer from {} to {}; unset it or correct it", name,
                text.substr(0, 64), low, high);
  return v;
}

double get_seconds(const char* name, double fallback) {
  std::string text = get(name);
  if (text.empty()) return fallback;
  double s = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), s);
  bool whole = error == std::errc() && end == text.data() + text.size();
  TESSERA_CHECK(whole && s > 0 && s <= 1e7,
                "{}=\"{}\": expected a number of seconds above 0; unset it or correct it", name,
                text.substr(0, 64));
  return s;
}

}  // namespace tessera::env
