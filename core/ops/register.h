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

}  // namespace tessera
