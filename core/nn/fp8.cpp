#include "core/nn/fp8.h"

#include <algorithm>

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/dispatch/precision.h"
#include "core/nn/layers.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/scaled_matmul.h"
#include "core/ops/update.h"
#include "core/ops/views.h"

namespace tessera::nn {
namespace {

constexpr int64_t kWidthMultiple = 16;
constexpr double kLeastScale = 0x1p-126;  // a scale of zeros; smaller ones lose digits
constexpr const char* kAmax = "fp8_amax";
constexpr const char* kHistory = "fp8_amax_history";

// The tensors of a layer that are scaled, in the order of its buffers.
enum Scaled : int { kX, kW, kGrad, kScaled };

double largest(DType t) { return t == kF8E4M3 ? 448 : 57344; }

struct Quantized {
  Tensor values, scale;
};

// How the tensors of one layer are scaled; the buffers are of delayed scaling.
struct Scaling {
  Tensor amax = {}, history = {};
  bool records = false;

  Quantized quantized(const Tensor& t, DType to, Scaled which) const {
    Scoped<Communication> of_one_number(context().communication, Communication::kAlways);
    const Tensor own = t.numel() ? cast(tessera::amax(abs(t)), kF32)
                                 : full({}, 0.0, {.dtype = kF32, .device = t.device()});
    const auto scale_of = [&](const Tensor& most) {
      return clamp_min(most / largest(to), kLeastScale);
    };
    if (!history.defined()) {
      const Tensor scale = scale_of(own);
      return {rounded(t, scale, to), scale};
    }
    const Tensor seen = tessera::amax(select(history, 0, which));
    const Tensor scale = scale_of(where(gt(seen, 0.0), seen, own));
    if (records) {
      const Tensor place = select(amax, 0, which);
      assign_(place, maximum(place, own));
    }
    // Infinities, which are clamped too, and NaNs show in the scale.
    return {rounded(t, scale, to), scale + own * 0.0};
  }
  Tensor rounded(const Tensor& t, const Tensor& scale, DType to) const {
    const Tensor x = cast(t, kF32) / scale;
    return cast(history.defined() ? clamp(x, -largest(to), largest(to)) : x, to);
  }
};

// x [M, K] and w [N, K] -> y [M, N].
class Fp8Function final : public CustomFunction {
 public:
  Fp8Function(Scaling scaling, DType out) : scaling_(std::move(scaling)), out_(out) {}
  std::string_view name() const override { return "fp8_linear"; }

  Tensors forward(std::span<const Tensor> in) override {
    x_ = in[0].dtype(), w_ = in[1].dtype();
    const Quantized x = scaling_.quantized(in[0], kF8E4M3, kX),
                    w = scaling_.quantized(in[1], kF8E4M3, kW);
    // The weight is quantised again in backward, so that a gathered one need not be kept.
    for (const Tensor& t : {x.values, x.scale, in[1], w.scale}) save(t);
    return {scaled_matmul(x.values, w.values, x.scale, w.scale, out_)};
  }

  Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) override {
    TESSERA_CHECK_AS(NotDifferentiable, !grad_enabled(),
                     "fp8_linear has no second derivative; leave layers that need one as they are "
                     "(Fp8Options::skip)");
    const Tensor &x = saved[0], &x_scale = saved[1], &w_scale = saved[3];
    const Tensor w = scaling_.rounded(saved[2], w_scale, kF8E4M3);
    const Quantized dy = scaling_.quantized(cot[0], kF8E5M2, kGrad);
    const auto transposed = [](const Tensor& t) { return permute(t, {1, 0}); };
    return {scaled_matmul(dy.values, transposed(w), dy.scale, w_scale, x_),
            scaled_matmul(transposed(dy.values), transposed(x), dy.scale, x_scale, w_)};
  }

 private:
  const Scaling scaling_;
  const DType out_;
  DType x_ = kF32, w_ = kF32;
};

class Fp8Product final : public LinearProduct {
 public:
  Fp8Product(Linear& layer, const Fp8Options& options) : options_(options) {
    if (options.recipe == Fp8Recipe::kCurrent) return;
    const TensorOptions like{.dtype = kF32, .device = layer.weight.device()};
    layer.register_buffer(kAmax, buffers_.amax, zeros({kScaled}, like), /*persistent=*/false);
    layer.register_buffer(kHistory, buffers_.history, zeros({kScaled, options.history}, like));
  }
  Tensor operator()(const Tensor& x, const Tensor& weight, const Tensor& bias,
                    bool training) override {
    const int64_t width = weight.size(1);
    TESSERA_CHECK_AS(ShapeError, x.ndim() > 0 && x.size(-1) == width,
                     "linear: x {} does not fit weight {} (out, in)", to_string(x.shape()),
                     to_string(weight.shape()));
    for (const Tensor& t : {x, weight})
      TESSERA_CHECK(t.dtype() == kF32 || t.dtype() == kBF16 || t.dtype() == kF16,
                    "linear: a layer in fp8 takes f32, bf16 or f16, got x {} and weight {}",
                    tessera::describe(x), tessera::describe(weight));
    Scaling scaling = buffers_;
    scaling.records = training && grad_enabled();
    const DType out = autocast_on() ? context().autocast : x.dtype();
    Shape shape = x.shape();
    shape[shape.size() - 1] = weight.size(0);
    Tensor y = apply_function(Ref<CustomFunction>(new Fp8Function(scaling, out)),
                              {reshape(x, {x.numel() / width, width}), weight})[0];
    if (bias.defined()) {
      Tensor sum[] = {std::move(y), bias};
      autocast_operands(Precision::kLow, sum);
      y = add(std::move(sum[0]), std::move(sum[1]));
    }
    return reshape(y, shape);
  }
  void reset() override {
    if (!buffers_.history.defined()) return;
    NoGrad off;
    for (const Tensor& t : {buffers_.amax, buffers_.history}) zeros_(t);
  }
  void step(const Tensor& most) {
    const Tensor& h = buffers_.history;
    const Tensor before = narrow(h, 1, 0, options_.history - 1);
    assign_(h, cat({unsqueeze(most, 1), before}, 1));
    zeros_(buffers_.amax);
  }
  std::string describe() const override {
    return options_.recipe == Fp8Recipe::kCurrent ? "fp8=current" : "fp8=delayed";
  }
  const Tensor& amax() const { return buffers_.amax; }

 private:
  const Fp8Options options_;
  Scaling buffers_;
};

std::vector<std::pair<std::string, Linear*>> linears(Module& model) {
  std::vector<std::pair<std::string, Linear*>> all;
  for (auto& [path, m] : model.named_modules())
    if (auto* linear = dynamic_cast<Linear*>(m)) all.emplace_back(path, linear);
  return all;
}

bool names(const std::string& name, const std::string& path) {
  return path == name || path.ends_with("." + name);
}
bool fits(const Linear& l) {
  return l.options.in > 0 && l.options.in % kWidthMultiple == 0 &&
         l.options.out % kWidthMultiple == 0;
}

std::vector<std::shared_ptr<Fp8Product>> delayed_products(Module& model) {
  std::vector<std::shared_ptr<Fp8Product>> all;
  for (auto& [path, linear] : linears(model))
    if (auto p = std::dynamic_pointer_cast<Fp8Product>(linear->product()); p && p->amax().defined())
      all.push_back(p);
  return all;
}

}  // namespace

Fp8Layers convert_to_fp8(Module& model, const Fp8Options& options) {
  TESSERA_CHECK(options.history > 0, "convert_to_fp8: history={} must be positive",
                options.history);
  const auto all = linears(model);
  for (const std::string& name : options.skip)
    TESSERA_CHECK(std::ranges::any_of(all, [&](auto& l) { return names(name, l.first); }),
                  "convert_to_fp8: skip names \"{}\", which is no Linear of the model", name);
  Fp8Layers done;
  std::vector<Linear*> chosen;
  for (const auto& [path, linear] : all) {
    TESSERA_CHECK(!linear->product(), "convert_to_fp8: \"{}\" is converted already ({})", path,
                  linear->describe());
    const bool skipped =
        std::ranges::any_of(options.skip, [&](auto& name) { return names(name, path); });
    if (skipped || (options.skip_unfit && !fits(*linear))) {
      done.left.push_back(path);
      continue;
    }
    TESSERA_CHECK(fits(*linear),
                  "convert_to_fp8: \"{}\" has in={} and out={}; products in eight bits take "
                  "multiples of {}: name it in skip, or set skip_unfit",
                  path, linear->options.in, linear->options.out, kWidthMultiple);
    done.converted.push_back(path), chosen.push_back(linear);
  }
  for (Linear* linear : chosen) linear->multiply_by(std::make_shared<Fp8Product>(*linear, options));
  return done;
}

void update_fp8_scales(Module& model, const std::function<Tensor(const Tensor&)>& max_over_ranks) {
  const auto products = delayed_products(model);
  if (products.empty()) return;
  NoGrad off;
  std::vector<Tensor> each;
  for (const auto& p : products) each.push_back(p->amax());
  Tensor most = stack(each, 0);
  most = where(isfinite(most), most, 0.0);
  if (max_over_ranks) most = max_over_ranks(most);
  for (size_t i = 0; i < products.size(); ++i) products[i]->step(select(most, 0, int64_t(i)));
}

void reset_fp8_scales(Module& model) {
  for (const auto& p : delayed_products(model)) p->reset();
}

bool is_fp8_history(std::string_view name) { return names(kHistory, std::string(name)); }

}  // namespace tessera::nn
