#include "examples/train/stages.h"

#include "examples/models/bert.h"
#include "examples/models/gpt.h"
#include "examples/models/mlp.h"
#include "examples/models/resnet.h"

namespace tessera::train {

Stage stage_of(const Task& task, const Options& o, int stage, int stages) {
  auto check = [&](int64_t has, const char* parts, const std::string& remedy) {
    TESSERA_CHECK(has >= stages,
                  "train: --strategy pp: {} {} cannot be cut into pp={} stages; give {} or "
                  "fewer ranks in --mesh",
                  has, parts, stages, remedy);
  };
  const std::string as_many = fmt::format("--set layers={}", stages);
  nn::OnDevice meta(kMeta);
  if (auto* gpt = dynamic_cast<models::Gpt*>(task.model.get())) {
    check(gpt->options.layers, "layers", as_many);
    Stage s{models::gpt_stage(gpt->options, stage, stages), {}};
    if (gpt->options.tied) s.tied = {"wte.weight"};
    return s;
  }
  if (auto* bert = dynamic_cast<models::BertForMaskedLM*>(task.model.get())) {
    check(bert->options.layers, "layers", as_many);
    return {models::bert_stage(bert->options, stage, stages), {models::kBertWords}};
  }
  if (auto* resnet = dynamic_cast<models::ResNet*>(task.model.get())) {
    check(models::num_blocks(resnet->options), "residual blocks", "a deeper --model");
    return {models::resnet_stage(resnet->options, stage, stages), {}};
  }
  auto* mlp = dynamic_cast<models::Mlp*>(task.model.get());
  TESSERA_ASSERT(mlp, "--model {} has no stages", o.model);
  check(mlp->options.layers + 1, "linear layers", fmt::format("--set layers={}", stages - 1));
  return {models::mlp_stage(mlp->options, stage, stages), {}};
}

}  // namespace tessera::train
