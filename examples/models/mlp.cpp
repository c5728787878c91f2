#include "examples/models/mlp.h"

#include "core/ops/views.h"
#include "examples/models/options.h"

namespace tessera::models {

void set_option(MlpOptions& o, std::string_view key, std::string_view value) {
  set_field("mlp",
            {{"in", &o.in},
             {"hidden", &o.hidden},
             {"out", &o.out},
             {"layers", &o.layers},
             {"dropout", &o.dropout}},
            key, value);
}

Mlp::Mlp(const MlpOptions& o) : options(o) {
  TESSERA_CHECK(o.in > 0 && o.hidden > 0 && o.out > 0 && o.layers >= 0,
                "mlp: in={}, hidden={}, out={} must be positive, layers={} at least 0", o.in,
                o.hidden, o.out, o.layers);
  layers_ = nn::sequential();
  int64_t width = o.in;
  for (int64_t i = 0; i < o.layers; ++i) {
    layers_->push_back(nn::linear(width, o.hidden));
    layers_->push_back(nn::relu());
    if (o.dropout > 0) layers_->push_back(nn::dropout(o.dropout));
    width = o.hidden;
  }
  layers_->push_back(nn::linear(width, o.out));
  register_module("layers", layers_);
}

Tensor Mlp::compute(Tensor x) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() >= 1 && x.size(0) * options.in == x.numel(),
                   "mlp: x is {}; give [B, ..] with in={} elements per sample",
                   tessera::describe(x), options.in);
  if (x.ndim() != 2) x = reshape(x, {x.size(0), options.in});
  return (*layers_)(std::move(x));
}

Tensor Mlp::loss(const Tensor& x, const Tensor& targets) {
  Tensor y = forward(x);
  nn::Scope scope("loss");
  return is_floating(targets.dtype()) ? nn::mse_loss(y, targets) : cross_entropy(y, targets);
}

std::shared_ptr<Mlp> mlp(const MlpOptions& options) { return std::make_shared<Mlp>(options); }

}  // namespace tessera::models
