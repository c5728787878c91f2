// all_reduce by MPI itself, as `bench collectives --only all_reduce` times ours: before each call
// every rank writes its buffer, then a barrier; the mean over ranks of the call alone, the median
// over calls. Prints the same JSON. Not part of the build:
//   mpicxx -O3 -o all_reduce_mpi scripts/reference/all_reduce_mpi.cpp
//   mpirun -n 1 taskset -c 2 ./all_reduce_mpi : -n 1 taskset -c 3 ./all_reduce_mpi
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <vector>

namespace {

constexpr double kSeconds = 0.2;  // for each size, about
constexpr int kFewest = 9, kMost = 50000;

double seconds_of_a_call(std::vector<float>& values) {
  std::fill(values.begin(), values.end(), 1.0f);
  asm volatile("" ::"r"(values.data()) : "memory");
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  MPI_Allreduce(MPI_IN_PLACE, values.data(), int(values.size()), MPI_FLOAT, MPI_SUM,
                MPI_COMM_WORLD);
  return MPI_Wtime() - start;
}

/// Microseconds.
double median_of_calls(long bytes, int ranks) {
  std::vector<float> values(size_t(bytes) / sizeof(float));
  for (int i = 0; i < 2; ++i) seconds_of_a_call(values);
  const double start = MPI_Wtime();
  seconds_of_a_call(values);
  int calls = std::clamp(int(kSeconds / (MPI_Wtime() - start)), kFewest, kMost);
  MPI_Bcast(&calls, 1, MPI_INT, 0, MPI_COMM_WORLD);
  std::vector<double> times;
  for (int i = 0; i < calls; ++i) times.push_back(seconds_of_a_call(values) / ranks);
  MPI_Allreduce(MPI_IN_PLACE, times.data(), calls, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e6;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (rank == 0)
    std::printf("{\"result\": {\"ranks\": %d, \"backend\": \"Open MPI\", \"rows\": [", ranks);
  for (long bytes : {4L << 10, 32L << 10, 256L << 10, 2L << 20, 16L << 20, 100L << 20}) {
    const double us = median_of_calls(bytes, ranks);
    if (rank == 0)
      std::printf("%s\n  {\"verb\": \"all_reduce\", \"bytes\": %ld, \"us\": {\"median\": %.3f}}",
                  bytes == 4096 ? "" : ",", bytes, us);
  }
  if (rank == 0) std::printf("\n]}}\n");
  MPI_Finalize();
}
