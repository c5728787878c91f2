// Tessera declares by itself what it uses of the driver API, of NVRTC, of cuBLASLt and of cuDNN.
// This unit is compiled where the vendor's headers are, and each of its assertions compares one of
// those declarations with theirs. Invariant: it compiles only if every symbol, parameter, constant
// and struct agrees.
#include <cuda.h>
#include <nvrtc.h>
#if __has_include(<cublasLt.h>)  // a wheel of its own, which compilers of kernels need not have
#include <cublasLt.h>
#define TESSERA_HAVE_CUBLASLT 1
#endif
#if __has_include(<cudnn.h>)  // as well
#include <cudnn.h>
#define TESSERA_HAVE_CUDNN 1
#endif

#include <cstddef>
#include <string_view>
#include <type_traits>

#include "core/backend/cuda/cublaslt_api.h"
#include "core/backend/cuda/cudnn_api.h"
#include "core/backend/cuda/driver_api.h"
#include "tests/cuda/same_function.h"

namespace tessera::cuda {
namespace {

// Names after macro expansion: <cuda.h> maps documented names to those of newer versions.
#define TEXT(name) #name
#define EXPANDED(name) TEXT(name)
#define FUNCTION(member, symbol, parameters)                                                   \
  static_assert(kSameFunction<Result parameters, std::remove_pointer_t<decltype(&::symbol)>>); \
  static_assert(std::string_view(EXPANDED(symbol)) == #symbol ||                               \
                std::string_view(#symbol) == "cuEventElapsedTime");
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION
#define FUNCTION(member, symbol, parameters) \
  static_assert(kSameFunction<NvrtcResult parameters, std::remove_pointer_t<decltype(&::symbol)>>);
#include "core/backend/cuda/nvrtc_functions.def"
#undef FUNCTION

#define RESULT(name, vendor, value) static_assert(int(::vendor) == value);
#include "core/backend/cuda/driver_constants.def"
#define DEVICE_ATTRIBUTE(name, vendor, value) static_assert(int(::vendor) == value);
#include "core/backend/cuda/driver_constants.def"
#define FUNCTION_ATTRIBUTE(name, vendor, value) static_assert(int(::vendor) == value);
#include "core/backend/cuda/driver_constants.def"
#define NODE_TYPE(name, vendor, value) static_assert(int(::vendor) == value);
#include "core/backend/cuda/driver_constants.def"
#define CONSTANT(name, vendor, value) static_assert(int(vendor) == value);
#include "core/backend/cuda/driver_constants.def"

static_assert(int(NvrtcResult::kSuccess) == NVRTC_SUCCESS);
static_assert(int(NvrtcResult::kOutOfMemory) == NVRTC_ERROR_OUT_OF_MEMORY);
static_assert(int(NvrtcResult::kProgramCreationFailure) == NVRTC_ERROR_PROGRAM_CREATION_FAILURE);
static_assert(int(NvrtcResult::kInvalidInput) == NVRTC_ERROR_INVALID_INPUT);
static_assert(int(NvrtcResult::kInvalidProgram) == NVRTC_ERROR_INVALID_PROGRAM);
static_assert(int(NvrtcResult::kInvalidOption) == NVRTC_ERROR_INVALID_OPTION);
static_assert(int(NvrtcResult::kCompilation) == NVRTC_ERROR_COMPILATION);
static_assert(int(NvrtcResult::kInternalError) == NVRTC_ERROR_INTERNAL_ERROR);

// Sizes and alignments are compared where a function takes the struct; here are the members.
#define MEMBER(ours, member, theirs, vendor)                           \
  static_assert(offsetof(ours, member) == offsetof(::theirs, vendor)); \
  static_assert(sizeof(ours::member) == sizeof(::theirs::vendor));
MEMBER(MemoryLocation, type, CUmemLocation, type)
MEMBER(MemoryLocation, id, CUmemLocation, id)
MEMBER(AllocationProperties, type, CUmemAllocationProp, type)
MEMBER(AllocationProperties, handle_types, CUmemAllocationProp, requestedHandleTypes)
MEMBER(AllocationProperties, location, CUmemAllocationProp, location)
MEMBER(AllocationProperties, win32_metadata, CUmemAllocationProp, win32HandleMetaData)
MEMBER(AllocationProperties, flags.compression, CUmemAllocationProp, allocFlags.compressionType)
MEMBER(AllocationProperties, flags.gpu_direct_rdma, CUmemAllocationProp,
       allocFlags.gpuDirectRDMACapable)
MEMBER(AllocationProperties, flags.usage, CUmemAllocationProp, allocFlags.usage)
MEMBER(AllocationProperties, flags.reserved, CUmemAllocationProp, allocFlags.reserved)
MEMBER(AccessDescription, location, CUmemAccessDesc, location)
MEMBER(AccessDescription, flags, CUmemAccessDesc, flags)
MEMBER(Memcpy2D, source_x_bytes, CUDA_MEMCPY2D, srcXInBytes)
MEMBER(Memcpy2D, source_y, CUDA_MEMCPY2D, srcY)
MEMBER(Memcpy2D, source_type, CUDA_MEMCPY2D, srcMemoryType)
MEMBER(Memcpy2D, source_host, CUDA_MEMCPY2D, srcHost)
MEMBER(Memcpy2D, source_device, CUDA_MEMCPY2D, srcDevice)
MEMBER(Memcpy2D, source_array, CUDA_MEMCPY2D, srcArray)
MEMBER(Memcpy2D, source_pitch, CUDA_MEMCPY2D, srcPitch)
MEMBER(Memcpy2D, target_x_bytes, CUDA_MEMCPY2D, dstXInBytes)
MEMBER(Memcpy2D, target_y, CUDA_MEMCPY2D, dstY)
MEMBER(Memcpy2D, target_type, CUDA_MEMCPY2D, dstMemoryType)
MEMBER(Memcpy2D, target_host, CUDA_MEMCPY2D, dstHost)
MEMBER(Memcpy2D, target_device, CUDA_MEMCPY2D, dstDevice)
MEMBER(Memcpy2D, target_array, CUDA_MEMCPY2D, dstArray)
MEMBER(Memcpy2D, target_pitch, CUDA_MEMCPY2D, dstPitch)
MEMBER(Memcpy2D, width_bytes, CUDA_MEMCPY2D, WidthInBytes)
MEMBER(Memcpy2D, height, CUDA_MEMCPY2D, Height)
MEMBER(LaunchAttribute, id, CUlaunchAttribute, id)
MEMBER(LaunchAttribute, value, CUlaunchAttribute, value)
MEMBER(LaunchAttribute, value.number, CUlaunchAttribute, value.cooperative)
MEMBER(LaunchAttribute, value.cluster, CUlaunchAttribute, value.clusterDim)
MEMBER(LaunchConfig, grid_x, CUlaunchConfig, gridDimX)
MEMBER(LaunchConfig, grid_y, CUlaunchConfig, gridDimY)
MEMBER(LaunchConfig, grid_z, CUlaunchConfig, gridDimZ)
MEMBER(LaunchConfig, block_x, CUlaunchConfig, blockDimX)
MEMBER(LaunchConfig, block_y, CUlaunchConfig, blockDimY)
MEMBER(LaunchConfig, block_z, CUlaunchConfig, blockDimZ)
MEMBER(LaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes)
MEMBER(LaunchConfig, stream, CUlaunchConfig, hStream)
MEMBER(LaunchConfig, attributes, CUlaunchConfig, attrs)
MEMBER(LaunchConfig, num_attributes, CUlaunchConfig, numAttrs)
MEMBER(KernelNodeParams, function, CUDA_KERNEL_NODE_PARAMS, func)
MEMBER(KernelNodeParams, grid_x, CUDA_KERNEL_NODE_PARAMS, gridDimX)
MEMBER(KernelNodeParams, grid_y, CUDA_KERNEL_NODE_PARAMS, gridDimY)
MEMBER(KernelNodeParams, grid_z, CUDA_KERNEL_NODE_PARAMS, gridDimZ)
MEMBER(KernelNodeParams, block_x, CUDA_KERNEL_NODE_PARAMS, blockDimX)
MEMBER(KernelNodeParams, block_y, CUDA_KERNEL_NODE_PARAMS, blockDimY)
MEMBER(KernelNodeParams, block_z, CUDA_KERNEL_NODE_PARAMS, blockDimZ)
MEMBER(KernelNodeParams, shared_bytes, CUDA_KERNEL_NODE_PARAMS, sharedMemBytes)
MEMBER(KernelNodeParams, parameters, CUDA_KERNEL_NODE_PARAMS, kernelParams)
MEMBER(KernelNodeParams, extra, CUDA_KERNEL_NODE_PARAMS, extra)
MEMBER(KernelNodeParams, kernel, CUDA_KERNEL_NODE_PARAMS, kern)
MEMBER(KernelNodeParams, context, CUDA_KERNEL_NODE_PARAMS, ctx)
MEMBER(GraphUpdateInfo, result, CUgraphExecUpdateResultInfo, result)
MEMBER(GraphUpdateInfo, error_node, CUgraphExecUpdateResultInfo, errorNode)
MEMBER(GraphUpdateInfo, error_from_node, CUgraphExecUpdateResultInfo, errorFromNode)
static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute) &&
              alignof(LaunchAttribute) == alignof(CUlaunchAttribute));

#ifdef TESSERA_HAVE_CUBLASLT
#define FUNCTION(member, symbol, parameters) \
  static_assert(kSameFunction<blas::Status parameters, std::remove_pointer_t<decltype(&::symbol)>>);
#include "core/backend/cuda/cublaslt_functions.def"
#undef FUNCTION
static_assert(kSameFunction<blas::VersionFunction, decltype(::cublasLtGetVersion)>);
#define STATUS(name, vendor, value) static_assert(int(::vendor) == value);
#include "core/backend/cuda/cublaslt_constants.def"
#define CONSTANT(name, vendor, value) static_assert(int(::vendor) == value);
#include "core/backend/cuda/cublaslt_constants.def"
MEMBER(blas::Suggestion, algorithm, cublasLtMatmulHeuristicResult_t, algo)
MEMBER(blas::Suggestion, workspace_bytes, cublasLtMatmulHeuristicResult_t, workspaceSize)
MEMBER(blas::Suggestion, state, cublasLtMatmulHeuristicResult_t, state)
MEMBER(blas::Suggestion, waves, cublasLtMatmulHeuristicResult_t, wavesCount)
MEMBER(blas::Suggestion, reserved, cublasLtMatmulHeuristicResult_t, reserved)
#endif

#ifdef TESSERA_HAVE_CUDNN
#define FUNCTION(member, symbol, parameters) \
  static_assert(kSameFunction<dnn::Status parameters, std::remove_pointer_t<decltype(&::symbol)>>);
#include "core/backend/cuda/cudnn_functions.def"
#undef FUNCTION
static_assert(kSameFunction<dnn::VersionFunction, decltype(::cudnnGetVersion)>);
static_assert(kSameFunction<dnn::LastErrorFunction, decltype(::cudnnGetLastErrorString)>);
#define STATUS(name, vendor, value) static_assert(int(::vendor) == value);
#include "core/backend/cuda/cudnn_constants.def"
#define CONSTANT(name, vendor, value) static_assert(int(::vendor) == value);
#include "core/backend/cuda/cudnn_constants.def"
#endif

}  // namespace
}  // namespace tessera::cuda
