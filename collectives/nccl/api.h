// The part of NCCL (libnccl.so.2) that Tessera uses, declared by Tessera itself, so that a build
// without NVIDIA's headers contains the backend. The functions are the rows of functions.def.
// Invariant: each declaration agrees with <nccl.h>; tests/cuda/nccl_headers.cpp proves it where
// that is.
#pragma once
#include <climits>
#include <cstddef>

#include "core/backend/cuda/driver_api.h"

namespace tessera::nccl {

using cuda::StreamHandle;

enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};
enum class DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9
};
/// Operators that redop_create_premulsum makes have larger values.
enum class RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };
enum class ScalarResidence : int { kDevice = 0, kHostImmediate = 1 };

inline constexpr int kUndefined = INT_MIN;
inline constexpr int kNoColor = -1;
inline constexpr int kWindowSymmetric = 1;

/// What ranks of a communicator meet by; one of them makes it.
struct UniqueId {
  char bytes[128];
};

struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 22809;  // of the header that this struct is of
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined, max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
  int channels_per_net_peer = kUndefined;
  int nvlink_centric_sched = kUndefined;
};

// What NCCL hands out. The objects belong to it.
using Comm = struct CommObject*;
using Window = struct WindowObject*;

}  // namespace tessera::nccl
