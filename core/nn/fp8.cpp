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

// The least power of two that is not less than x, from 2^-126 on, and x where that is not finite.
// log2 may be off by a digit, so the power may be one too many or too few; powers are exact.
Tensor next_power_of_two(const Tensor& x) {
  const Tensor near = exp2(ceil(log2(x))), up = where(lt(near, x), near * 2.0, near),
               down = up * 0.5;
  return where(ge(down, x), down, up);
}

// How the tensors of one layer are scaled; the buffers are of delayed scaling.
struct Scaling {
  Tensor amax = {}, history = {};
  bool powers_of_two = false, records = false;

  Quantized quantized(const Tensor& t, DType to, Scaled which) const {
    Scoped<Communication> of_one_number(context().communication, Communication::kAlways);
    const Tensor own = t.numel() ? cast(tessera::amax(abs(t)), kF32)
                                 : full({}, 0.0, {.dtype = kF32, .device = t.device()});
    const Tensor scale = scale_of(own, to, which);
    return {rounded(t, scale, to), noted(scale, own, which)};
  }
  // The scale of a tensor whose largest magnitude is `own` now.
  Tensor scale_of(const Tensor& own, DType to, Scaled which) const {
    Tensor most = own;
    if (history.defined()) {
      const Tensor seen = tessera::amax(select(history, 0, which));
      most = where(gt(seen, 0.0), seen, own);
    }
    const Tensor scale = clamp_min(most / largest(to), kLeastScale);
    return powers_of_two ? next_power_of_two(scale) : scale;
  }
  // Notes `own` where there is a history, and returns what results are multiplied by: infinities,
  // which are clamped there, and NaNs show in it.
  Tensor noted(const Tensor& scale, const Tensor& own, Scaled which) const {
    if (!history.defined()) return scale;
    if (records) {
      const Tensor place = select(amax, 0, which);
      assign_(place, maximum(place, own));
    }
    return scale + own * 0.0;
  }
  Tensor rounded(const Tensor& t, const Tensor& scale, DType to) const {
    const Tensor x = cast(t, kF32) / scale;
    return cast(history.defined() ? clamp(x, -largest(to), largest(to)) : x, to);
  }
};

// A weight that was quantised elsewhere, and the tensor that stands for it.
struct StandIn {
  Tensor weight = {}, values = {}, scale = {}, amax = {};
};

// x [M, K] and w [N, K] -> y [M, N].
class Fp8Function final : public CustomFunction {
 public:
  Fp8Function(Scaling scaling, const StandIn* quantised, DType out)
      : scaling_(std::move(scaling)), quantised_(quantised), out_(out) {}
  std::string_view name() const override { return "fp8_linear"; }

  Tensors forward(std::span<const Tensor> in) override {
    x_ = in[0].dtype(), w_ = in[1].dtype();
    const Quantized x = scaling_.quantized(in[0], kF8E4M3, kX);
    const StandIn* there = std::exchange(quantised_, nullptr);
    const Quantized w =
        there ? Quantized{there->values, scaling_.noted(there->scale, there->amax, kW)}
              : scaling_.quantized(in[1], kF8E4M3, kW);
    // The weight is quantised again in backward, so that a gathered one need not be kept.
    w_is_quantised_ = there;
    if (wanted(0)) save(there ? w.values : in[1]), save(w.scale);
    if (wanted(1)) save(x.values), save(x.scale);
    return {scaled_matmul(x.values, w.values, x.scale, w.scale, out_)};
  }

  Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) override {
    TESSERA_CHECK_AS(NotDifferentiable, !grad_enabled(),
                     "fp8_linear has no second derivative; leave layers that need one as they are "
                     "(Fp8Options::skip)");
    const Quantized dy = scaling_.quantized(cot[0], kF8E5M2, kGrad);
    const auto transposed = [](const Tensor& t) { return permute(t, {1, 0}); };
    Tensor dx, dw;
    if (wanted(0)) {
      const Tensor& w_scale = saved[1];
      const Tensor w = w_is_quantised_ ? saved[0] : scaling_.rounded(saved[0], w_scale, kF8E4M3);
      dx = scaled_matmul(dy.values, transposed(w), dy.scale, w_scale, x_);
    }
    if (wanted(1)) {
      const Tensor &x = saved[saved.size() - 2], &x_scale = saved[saved.size() - 1];
      dw = scaled_matmul(transposed(dy.values), transposed(x), dy.scale, x_scale, w_);
    }
    return {dx, dw};
  }

 private:
  const Scaling scaling_;
  const StandIn* quantised_;  // of the call of forward
  const DType out_;
  DType x_ = kF32, w_ = kF32;
  bool w_is_quantised_ = false;
};

class Fp8Product final : public LinearProduct, public Fp8Weight {
 public:
  Fp8Product(Linear& layer, const Fp8Options& options) : options_(options) {
    buffers_.powers_of_two = options.power_of_two_scales;
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
    const bool stands = stand_in_.weight.defined() && weight.impl() == stand_in_.weight.impl();
    Tensor y = apply_function(
        Ref<CustomFunction>(new Fp8Function(scaling, stands ? &stand_in_ : nullptr, out)),
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
    std::string text = options_.recipe == Fp8Recipe::kCurrent ? "fp8=current" : "fp8=delayed";
    if (options_.power_of_two_scales) text += ", scales=powers of two";
    if (options_.gather_in_eight_bits) text += ", gathered in eight bits";
    return text;
  }
  const Tensor& amax() const { return buffers_.amax; }
  const Fp8Options& options() const { return options_; }

  // Fp8Weight
  Tensor scale_of(const Tensor& amax) const override {
    return local_of(buffers_.scale_of(amax, kF8E4M3, kW));
  }
  uint32_t version() const override {
    const Tensor& history = buffers_.history;
    return history.defined() ? local_of(history).storage()->version() : 0;
  }
  Tensor quantised(const Tensor& piece, const Tensor& scale) const override {
    return buffers_.rounded(piece, scale, kF8E4M3);
  }
  void stand_in(const Tensor& weight, const Tensor& values, const Tensor& scale,
                const Tensor& amax) override {
    stand_in_ = {weight, values, scale, amax};
  }

 private:
  const Fp8Options options_;
  Scaling buffers_;
  StandIn stand_in_;
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

std::shared_ptr<Fp8Weight> fp8_weight_to_gather(const Linear& layer) {
  auto product = std::dynamic_pointer_cast<Fp8Product>(layer.product());
  return product && product->options().gather_in_eight_bits ? product : nullptr;
}

bool is_fp8_history(std::string_view name) { return names(kHistory, std::string(name)); }

}  // namespace tessera::nn
