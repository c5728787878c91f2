// Every backend of this build, by name: a kernel family that is not called here does not exist.
#include "core/backend/cpu/register.h"

namespace tessera {

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
}

}  // namespace tessera
