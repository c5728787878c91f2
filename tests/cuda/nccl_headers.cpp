// Tessera declares by itself what it uses of NCCL. This unit is compiled where <nccl.h> is, and
// each of its assertions compares one of those declarations with the vendor's. Invariant: it
// compiles only if every symbol, parameter, constant and struct agrees.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "collectives/nccl/api.h"
#include "tests/cuda/same_function.h"

namespace tessera::nccl {
namespace {

using cuda::kSameFunction;

#define FUNCTION(member, symbol, parameters) \
  static_assert(kSameFunction<Result parameters, std::remove_pointer_t<decltype(&::symbol)>>);
#include "collectives/nccl/functions.def"
#include "collectives/nccl/optional_functions.def"
#include "collectives/nccl/window_functions.def"
#undef FUNCTION

#define SAME(ours, vendor) static_assert(int(ours) == int(::vendor))
SAME(Result::kSuccess, ncclSuccess);
SAME(Result::kUnhandledCudaError, ncclUnhandledCudaError);
SAME(Result::kSystemError, ncclSystemError);
SAME(Result::kInternalError, ncclInternalError);
SAME(Result::kInvalidArgument, ncclInvalidArgument);
SAME(Result::kInvalidUsage, ncclInvalidUsage);
SAME(Result::kRemoteError, ncclRemoteError);
SAME(Result::kInProgress, ncclInProgress);
SAME(DataType::kInt8, ncclInt8);
SAME(DataType::kUint8, ncclUint8);
SAME(DataType::kInt32, ncclInt32);
SAME(DataType::kUint32, ncclUint32);
SAME(DataType::kInt64, ncclInt64);
SAME(DataType::kUint64, ncclUint64);
SAME(DataType::kFloat16, ncclFloat16);
SAME(DataType::kFloat32, ncclFloat32);
SAME(DataType::kFloat64, ncclFloat64);
SAME(DataType::kBfloat16, ncclBfloat16);
SAME(RedOp::kSum, ncclSum);
SAME(RedOp::kProd, ncclProd);
SAME(RedOp::kMax, ncclMax);
SAME(RedOp::kMin, ncclMin);
SAME(RedOp::kAvg, ncclAvg);
SAME(ScalarResidence::kDevice, ncclScalarDevice);
SAME(ScalarResidence::kHostImmediate, ncclScalarHostImmediate);
static_assert(kUndefined == NCCL_CONFIG_UNDEF_INT && kNoColor == NCCL_SPLIT_NOCOLOR);
static_assert(kWindowSymmetric == NCCL_WIN_COLL_SYMMETRIC);
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));

// Newer headers add members at the end, and NCCL goes by `size`.
#define MEMBER(ours, vendor)                                               \
  static_assert(offsetof(Config, ours) == offsetof(ncclConfig_t, vendor)); \
  static_assert(sizeof(Config::ours) == sizeof(ncclConfig_t::vendor))
MEMBER(size, size);
MEMBER(magic, magic);
MEMBER(version, version);
MEMBER(blocking, blocking);
MEMBER(cga_cluster_size, cgaClusterSize);
MEMBER(min_ctas, minCTAs);
MEMBER(max_ctas, maxCTAs);
MEMBER(net_name, netName);
MEMBER(split_share, splitShare);
MEMBER(traffic_class, trafficClass);
MEMBER(comm_name, commName);
MEMBER(collnet_enable, collnetEnable);
MEMBER(cta_policy, CTAPolicy);
MEMBER(shrink_share, shrinkShare);
MEMBER(nvls_ctas, nvlsCTAs);
MEMBER(channels_per_net_peer, nChannelsPerNetPeer);
MEMBER(nvlink_centric_sched, nvlinkCentricSched);
static_assert(sizeof(Config) <= sizeof(ncclConfig_t));

}  // namespace
}  // namespace tessera::nccl
