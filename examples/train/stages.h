// How the models that are trained are cut into the stages of a pipeline.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "examples/train/options.h"
#include "examples/train/task.h"

namespace tessera::train {

struct Stage {
  std::shared_ptr<nn::Module> model;  // without values
  std::vector<std::string> tied;      // PipelineOptions::tied
};
/// Stage number `stage` of task.model. Throws UserError for more stages than the model has places
/// for.
Stage stage_of(const Task& task, const Options& options, int stage, int stages);

}  // namespace tessera::train
