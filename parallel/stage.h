// Cuts a list of modules into the stages of a pipeline.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/base/error.h"
#include "core/nn/containers.h"

namespace tessera::parallel {

struct StageRange {
  int64_t begin = 0, end = 0;
};
/// Returns the range of `modules` that belongs to `stage`: all stages get equally many, the first
/// ones one more if they do not divide evenly. Throws UserError for more stages than modules.
inline StageRange stage_range(int64_t modules, int stage, int stages) {
  TESSERA_CHECK(0 <= stage && stage < stages && stages <= modules,
                "stage_range: stage {} of {} for {} modules; a stage has at least one, and they "
                "count from 0",
                stage, stages, modules);
  int64_t each = modules / stages, more = modules % stages;
  auto begin = [&](int64_t s) { return s * each + std::min(s, more); };
  return {begin(stage), begin(stage + 1)};
}

/// Returns the modules of that range. They are shared with `model` and have the same names.
inline nn::SequentialPtr pipeline_stage(const nn::Sequential& model, int stage, int stages) {
  StageRange r = stage_range(int64_t(model.size()), stage, stages);
  return model.part(size_t(r.begin), size_t(r.end));
}

}  // namespace tessera::parallel
