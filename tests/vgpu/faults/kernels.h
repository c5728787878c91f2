// Kernels with faults, and a few without.
#pragma once

namespace vgpu_test {

inline constexpr const char* kKernels = R"(
extern "C" __global__ void scale(const float* x, float* y, float by, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = by * x[i];
}
extern "C" __global__ void write_one_too_many(float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) y[i] = 1.0f;
}
extern "C" __global__ void read_one_too_many(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i + 1];
}
extern "C" __global__ void reverse(const float* x, float* y, int barrier) {
  __shared__ float row[256];
  row[threadIdx.x] = x[threadIdx.x];
  if (barrier) __syncthreads();
  y[threadIdx.x] = row[255 - threadIdx.x];
}
extern "C" __global__ void second_round(float* y) {  // the barrier between the rounds is missing
  __shared__ float one;
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x == round * 40) one = round;
    __syncthreads();
    y[threadIdx.x] = one;
  }
}
extern "C" __global__ void unwritten_shared(float* y) {
  __shared__ float row[64];
  if (threadIdx.x < 32) row[threadIdx.x] = 1;
  __syncthreads();
  y[threadIdx.x] = row[threadIdx.x];
}
extern "C" __global__ void dynamic_shared(float* y, int n) {
  extern __shared__ float row[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = i;
  __syncthreads();
  y[threadIdx.x] = row[threadIdx.x];
}
extern "C" __global__ void index_too_large(float* y, int i) {
  __shared__ float row[32];
  row[i + threadIdx.x] = 1;
  y[threadIdx.x] = 2;
}
extern "C" __global__ void two_barriers(float* y) {
  if (threadIdx.x < 100)
    __syncthreads();
  else
    __syncthreads();
  y[threadIdx.x] = 0;
}
extern "C" __global__ void barrier_of_some(float* y) {
  if (threadIdx.x < 70)
    __syncthreads();
  else
    y[threadIdx.x] = __shfl_sync(0xffffffffu, 1.0f, 0);
}
extern "C" __global__ void shuffle_of_some(float* y) {
  float x = threadIdx.x;
  if (threadIdx.x < 16) x = __shfl_sync(0xffffffffu, x, 0);
  __syncthreads();
  y[threadIdx.x] = x;
}
extern "C" __global__ void mask_of_others(float* y) {
  y[threadIdx.x] = __shfl_sync(0xffff0000u, float(threadIdx.x), 16);
}
extern "C" __global__ void lane_of_others(float* y) {
  y[threadIdx.x] = threadIdx.x < 16 ? __shfl_sync(0xffffu, float(threadIdx.x), 20) : 0;
}
extern "C" __global__ void misaligned(const float* x, float* y) {
  *reinterpret_cast<float4*>(y) = *reinterpret_cast<const float4*>(x + 1);
}
extern "C" __global__ void blocks_race(float* y) { y[threadIdx.x] = blockIdx.x; }
extern "C" __global__ void threads_race(float* y) {
  y[127 - threadIdx.x] = threadIdx.x;
  if (threadIdx.x % 64 == 0) y[64] = 1;
}
extern "C" __global__ void last_block(float* parts, int* count, float* out, int fence) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = blockIdx.x;
    if (fence) __threadfence();
    last = atomicAdd(count, 1) == int(gridDim.x) - 1;
  }
  __syncthreads();
  if (!last || threadIdx.x) return;
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += parts[i];
  *out = sum;
}
extern "C" __global__ void __launch_bounds__(64) at_most_64(float* y) { y[threadIdx.x] = 1; }
extern "C" __global__ void asserts(float* y) { assert(y == nullptr); }
)";

}  // namespace vgpu_test
