#include "examples/models/plans.h"

#include "core/ops/contract.h"

namespace tessera::models {

parallel::ParallelPlan tensor_parallel_plan(const GptOptions& o, bool sequence_parallel) {
  namespace p = parallel;
  int64_t head_width = o.dim / o.heads;
  Placement between = sequence_parallel ? Shard(1) : Replicate();
  // What exact contraction could not share to the bit stays whole.
  bool cut_vocabulary = !context().exact_contraction || o.vocab % kExactLeaves == 0;
  p::ParallelPlan plan{
      {"h.*.attn.c_attn", p::colwise({.unit = 3 * head_width})},  // rows are [heads, 3, width]
      {"h.*.attn.c_proj", p::rowwise({.unit = head_width, .output = between})},
      {"h.*.mlp.c_fc", p::colwise()},
      {"h.*.mlp.c_proj", p::rowwise({.output = between})},
  };
  if (sequence_parallel) {
    plan.emplace_back("h.*.ln_1", p::sequence_parallel());
    plan.emplace_back("h.*.ln_2", p::sequence_parallel());
    plan.emplace_back("ln_f", p::sequence_parallel(Replicate()));
  } else if (cut_vocabulary) {
    plan.emplace_back("ln_f", p::prepare_output());
  }
  if (cut_vocabulary) plan.emplace_back("wte", p::rowwise({.output = between}));
  if (cut_vocabulary && !o.tied) plan.emplace_back("lm_head", p::colwise());
  return plan;
}

parallel::ParallelPlan tensor_parallel_plan(const BertOptions& o) {
  namespace p = parallel;
  int64_t head_width = o.dim / o.heads;
  p::ParallelPlan plan;
  for (const char* name : {"query", "key", "value"})
    plan.emplace_back(fmt::format("bert.encoder.layer.*.attention.self.{}", name),
                      p::colwise({.unit = head_width}));
  plan.emplace_back("bert.encoder.layer.*.attention.output.dense",
                    p::rowwise({.unit = head_width}));
  plan.emplace_back("bert.encoder.layer.*.intermediate.dense", p::colwise());
  plan.emplace_back("bert.encoder.layer.*.output.dense", p::rowwise());
  return plan;
}

parallel::ParallelPlan tensor_parallel_plan(const MlpOptions& o) {
  parallel::ParallelPlan plan;
  int64_t modules_each = o.dropout > 0 ? 3 : 2;  // Linear, ReLU and perhaps Dropout
  for (int64_t i = 0; i + 1 <= o.layers; i += 2) {
    plan.emplace_back(fmt::format("layers.{}", i * modules_each), parallel::colwise());
    plan.emplace_back(fmt::format("layers.{}", (i + 1) * modules_each), parallel::rowwise());
  }
  return plan;
}

parallel::ParallelPlan tensor_parallel_plan(const ResNetOptions& o) {
  namespace p = parallel;
  p::ParallelPlan plan;
  for (int layer = 1; layer <= kResNetLayers; ++layer) {
    auto add = [&](const char* name, p::StylePtr style) {
      plan.emplace_back(fmt::format("layer{}.*.{}", layer, name), std::move(style));
    };
    add("conv1", p::colwise());
    add("bn1", p::channel_parallel());
    if (o.bottleneck()) {
      add("conv2", p::rowwise({.output = Shard(1)}));
      add("bn2", p::channel_parallel());
    }
    add(o.bottleneck() ? "conv3" : "conv2", p::rowwise());
    // Only the first block of a layer changes shapes, that of the first layer where it widens.
    if (layer == 1 && !o.bottleneck()) continue;
    add("downsample.0", p::colwise());
    add("downsample.1", p::channel_parallel(Replicate()));
  }
  plan.emplace_back("fc", p::rowwise());
  return plan;
}

}  // namespace tessera::models
