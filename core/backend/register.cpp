// Every backend of this build, by name: a device or a kernel family that is not called here does
// not exist.
#include "core/backend/cpu/register.h"
#if TESSERA_HAVE_CUDA
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/runtime.h"
#endif
#include "core/tensor/device_runtime.h"

namespace tessera {

void register_devices() {
#if TESSERA_HAVE_CUDA
  cuda::register_cuda();
#endif
}

void register_kernels(KernelTable& table) {
  cpu::register_pointwise(table);
  cpu::register_reduce(table);
  cpu::register_create(table);
  cpu::register_indexing(table);
  cpu::register_sort(table);
  cpu::register_scan(table);
  cpu::register_contract(table);
  cpu::register_linalg(table);
  cpu::register_sparse(table);
  cpu::register_conv(table);
  cpu::register_pool(table);
  cpu::register_quantized(table);
  cpu::register_batch_norm(table);
  cpu::register_fused(table);
  cpu::register_attention(table);
  cpu::register_random(table);
  cpu::register_update(table);
#if TESSERA_HAVE_CUDA
  cuda::register_pointwise(table);
  cuda::register_create(table);
  cuda::register_join(table);
  cuda::register_reduce(table);
  cuda::register_rows(table);
  cuda::register_indexing(table);
  cuda::register_order(table);
  cuda::register_contract(table);
  cuda::register_random(table);
  cuda::register_update(table);
  cuda::register_attention(table);
  cuda::register_conv(table);
  cuda::register_pool(table);
  cuda::register_batch_norm(table);
  cuda::register_sparse(table);
  cuda::register_linalg(table);
#endif
}

}  // namespace tessera
