// The registration function of each family of ops.
#pragma once
#include "core/primitive/registry.h"

namespace tessera {

void register_pointwise_ops(OpRegistry& registry);
void register_select_ops(OpRegistry& registry);
void register_view_ops(OpRegistry& registry);
void register_join_ops(OpRegistry& registry);
void register_reduce_ops(OpRegistry& registry);
void register_create_ops(OpRegistry& registry);
void register_indexing_ops(OpRegistry& registry);
void register_bits_hash_ops(OpRegistry& registry);
void register_sort_ops(OpRegistry& registry);
void register_scan_ops(OpRegistry& registry);
void register_contract_ops(OpRegistry& registry);
void register_contract_epilogue_ops(OpRegistry& registry);
void register_scaled_matmul_ops(OpRegistry& registry);
void register_linalg_ops(OpRegistry& registry);
void register_segment_ops(OpRegistry& registry);
void register_sparse_ops(OpRegistry& registry);
void register_softmax_ops(OpRegistry& registry);
void register_norm_ops(OpRegistry& registry);
void register_conv_ops(OpRegistry& registry);
void register_conv_stats_ops(OpRegistry& registry);
void register_conv_norm_ops(OpRegistry& registry);
void register_conv_grad_norm_ops(OpRegistry& registry);
void register_pool_ops(OpRegistry& registry);
void register_quantized_ops(OpRegistry& registry);
void register_batch_norm_ops(OpRegistry& registry);
void register_batch_norm_part_ops(OpRegistry& registry);
void register_embedding_ops(OpRegistry& registry);
void register_attention_ops(OpRegistry& registry);
void register_random_ops(OpRegistry& registry);
void register_update_ops(OpRegistry& registry);

}  // namespace tessera
