// Calls the registration of every family of ops by name. An op that is not registered is not
// tested; the sweep fails for it.
#include "core/ops/register.h"

namespace tessera {

const OpRegistry& op_registry() {
  static const OpRegistry* registry = [] {
    auto* r = new OpRegistry;
    register_pointwise_ops(*r);
    register_select_ops(*r);
    register_view_ops(*r);
    register_join_ops(*r);
    register_reduce_ops(*r);
    register_create_ops(*r);
    register_indexing_ops(*r);
    register_bits_hash_ops(*r);
    register_sort_ops(*r);
    register_scan_ops(*r);
    register_contract_ops(*r);
    register_contract_epilogue_ops(*r);
    register_scaled_matmul_ops(*r);
    register_linalg_ops(*r);
    register_segment_ops(*r);
    register_sparse_ops(*r);
    register_softmax_ops(*r);
    register_norm_ops(*r);
    register_conv_ops(*r);
    register_conv_stats_ops(*r);
    register_conv_norm_ops(*r);
    register_conv_grad_norm_ops(*r);
    register_pool_ops(*r);
    register_quantized_ops(*r);
    register_batch_norm_ops(*r);
    register_batch_norm_part_ops(*r);
    register_embedding_ops(*r);
    register_attention_ops(*r);
    register_random_ops(*r);
    register_update_ops(*r);
    return r;
  }();
  return *registry;
}

}  // namespace tessera
