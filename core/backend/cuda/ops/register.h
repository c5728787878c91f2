// Registration of CUDA's kernels, one function per family; register_kernels calls them all.
#pragma once
#include "core/dispatch/kernel.h"

namespace tessera::cuda {

void register_pointwise(KernelTable& table);
void register_create(KernelTable& table);
void register_join(KernelTable& table);
void register_reduce(KernelTable& table);
void register_rows(KernelTable& table);
void register_indexing(KernelTable& table);
void register_order(KernelTable& table);
void register_contract(KernelTable& table);
void register_random(KernelTable& table);
void register_update(KernelTable& table);
void register_attention(KernelTable& table);
void register_conv(KernelTable& table);
void register_pool(KernelTable& table);
void register_batch_norm(KernelTable& table);
void register_sparse(KernelTable& table);
void register_linalg(KernelTable& table);

}  // namespace tessera::cuda
