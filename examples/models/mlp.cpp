#include "examples/models/mlp.h"

#include "core/ops/views.h"
#include "examples/models/options.h"
#include "examples/models/registry.h"
#include "parallel/stage.h"

namespace tessera::models {

Fields fields_of(MlpOptions& o) {
  return {"mlp",
          {{"in", &o.in},
           {"hidden", &o.hidden},
           {"out", &o.out},
           {"layers", &o.layers},
           {"dropout", &o.dropout}}};
}

void set_option(MlpOptions& o, std::string_view key, std::string_view value) {
  set_field(fields_of(o), key, value);
}

Mlp::Mlp(const MlpOptions& o, MlpPart p) : options(o), part(p) {
  TESSERA_CHECK(o.in > 0 && o.hidden > 0 && o.out > 0 && o.layers >= 0,
                "mlp: in={}, hidden={}, out={} must be positive, layers={} at least 0", o.in,
                o.hidden, o.out, o.layers);
  TESSERA_CHECK(0 <= p.begin && p.begin < p.end && p.end <= o.layers + 1,
                "mlp: linear layers [{}, {}) are no part of {}", p.begin, p.end, o.layers + 1);
  const int64_t modules_each = o.dropout > 0 ? 3 : 2;
  layers_ = std::make_shared<nn::Sequential>(size_t(p.begin * modules_each));
  for (int64_t i = p.begin; i < p.end; ++i) {
    const bool last = i == o.layers;
    layers_->push_back(nn::linear(i == 0 ? o.in : o.hidden, last ? o.out : o.hidden));
    if (last) break;
    layers_->push_back(nn::relu());
    if (o.dropout > 0) layers_->push_back(nn::dropout(o.dropout));
  }
  register_module("layers", layers_);
}

Tensor Mlp::forward(Tensor x) {
  const int64_t width = part.begin == 0 ? options.in : options.hidden;
  TESSERA_CHECK_AS(ShapeError, x.ndim() >= 1 && x.size(0) * width == x.numel(),
                   "mlp: x is {}; give [B, ..] with {}={} elements per sample",
                   tessera::describe(x), part.begin == 0 ? "in" : "hidden", width);
  if (x.ndim() != 2) x = reshape(x, {x.size(0), width});
  return (*layers_)(std::move(x));
}

Tensor Mlp::loss(const Tensor& x, const Tensor& targets) {
  Tensor y = (*this)(x);
  nn::Scope scope("loss");
  return is_floating(targets.dtype()) ? nn::mse_loss(y, targets) : cross_entropy(y, targets);
}

std::shared_ptr<Mlp> mlp(const MlpOptions& options) { return std::make_shared<Mlp>(options); }

std::shared_ptr<Mlp> mlp_stage(const MlpOptions& options, int stage, int stages) {
  const parallel::StageRange r = parallel::stage_range(options.layers + 1, stage, stages);
  return std::make_shared<Mlp>(options, MlpPart{r.begin, r.end});
}

// ---- how `train` and `bench` see it

parallel::ParallelPlan tensor_parallel_plan(const MlpOptions& o) {
  parallel::ParallelPlan plan;
  int64_t modules_each = o.dropout > 0 ? 3 : 2;  // Linear, ReLU and perhaps Dropout
  for (int64_t i = 0; i + 1 <= o.layers; i += 2) {
    plan.emplace_back(fmt::format("layers.{}", i * modules_each), parallel::colwise());
    plan.emplace_back(fmt::format("layers.{}", (i + 1) * modules_each), parallel::rowwise());
  }
  return plan;
}

std::vector<ModelSpec> mlp_models() {
  ModelSpec spec{
      .name = "mlp", .options = MlpOptions(), .data = Data::kValues, .make = on<MlpOptions>(mlp)};
  spec.tensor_parallel = {
      .plan = on<MlpOptions>([](const MlpOptions& o) { return tensor_parallel_plan(o); })};
  spec.pipeline = {.stage = on<MlpOptions>(mlp_stage),
                   .places = on<MlpOptions>([](const MlpOptions& o) { return o.layers + 1; }),
                   .parts = "linear layers",
                   .remedy = [](int stages) { return fmt::format("--set layers={}", stages - 1); }};
  spec.bench_batch_size = 128;
  return {spec};
}

}  // namespace tessera::models
