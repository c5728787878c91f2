#include "compile/quantization/quantization.h"

#include <algorithm>

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/base/parallel.h"
#include "core/dispatch/call.h"
#include "core/dispatch/context.h"
#include "core/ops/create.h"
#include "core/ops/quantized_layer.h"

namespace tessera::quant {
namespace {

void check_model(nn::Module* model, const char* who) {
  TESSERA_CHECK(model, "{}: there is no model", who);
  for (auto& [path, module] : model->named_modules())
    TESSERA_CHECK(!module->training(),
                  "{}: {} \"{}\" is in training mode; call eval() on the model first", who,
                  module->type_name(), path);
  for (const nn::Slot& s : model->slots()) {
    const Tensor& t = *s.tensor;
    TESSERA_CHECK(!is_floating(t.dtype()) || t.dtype() == kF32,
                  "{}: {} is {}; quantization takes models in f32: model.to(kF32)", who, s.name,
                  name_of(t.dtype()));
    TESSERA_CHECK(!t.is_sharded() && !t.device().is_meta(),
                  "{}: {} is {}; quantization takes whole models on the CPU", who, s.name,
                  t.is_sharded() ? "sharded" : "on the meta device");
  }
}

void check_call(const nn::Module& model, const Tensor& x, const char* who) {
  TESSERA_CHECK(!context().backend,
                "{}: called while ops are recorded (compile, a trace); a quantized model runs a "
                "graph of its own, call it outside",
                who);
  TESSERA_CHECK(!autocast_on(),
                "{}: called under autocast; layers on bytes have no precision to "
                "choose, call it outside",
                who);
  TESSERA_CHECK(!model.training(), "{}: the model is in training mode; call eval()", who);
  TESSERA_CHECK(!x.is_sharded(), "{}: x is {} and sharded; give each rank its own", who,
                describe(x));
  TESSERA_CHECK(!is_floating(x.dtype()) || x.dtype() == kF32, "{}: x is {}; give it in f32", who,
                describe(x));
}

void add_slots(Contents& to, nn::Module& model) {
  for (const nn::Slot& s : model.slots()) to.add(*s.tensor);
}
Contents contents_of(nn::Module& model) {
  Contents c;
  add_slots(c, model);
  return c;
}

Layers layers_of(nn::Module& model, const Tensor& x, std::span<const std::string> keep_f32) {
  std::vector<NamedTensor> names = model.named_parameters();
  for (NamedTensor& b : model.named_buffers()) names.push_back(std::move(b));
  Layers found =
      find_layers([&](const Tensor& t) { return model(t); }, x, std::move(names), keep_f32);
  for (const std::string& name : keep_f32) {
    if (std::ranges::count(found.kept, name)) continue;
    std::string have;
    for (const Layer& l : found.layers) have += (have.empty() ? "" : ", ") + l.name;
    throw UserError(fmt::format("quantization: keep_f32 names {}, which is no layer; there are {}",
                                name, have));
  }
  return found;
}

}  // namespace

// ---- calibration

Prepared::Prepared(std::shared_ptr<nn::Module> model, PrepareOptions options)
    : model_(std::move(model)), options_(std::move(options)) {
  check_model(model_.get(), "prepare");
  eval();
}

Tensor Prepared::forward(Tensor x) {
  check_call(*model_, x, "calibration");
  NoGrad no_history;
  if (Contents now = contents_of(*model_); !(now == contents_))
    layers_.clear(), contents_ = std::move(now);
  std::shared_ptr<const Layers> layers;
  for (auto& [shape, known] : layers_)
    if (shape == x.shape()) layers = known;
  const bool is_new = !layers;
  if (is_new) layers = std::make_shared<Layers>(layers_of(*model_, x, options_.keep_f32));
  auto observed = observed_;
  Tensor y = run_observed(*layers, x, [&](const Root& root, const Tensor& t) {
    observed.try_emplace(root.name, options_.observer).first->second.see(t, root.name);
  });
  observed_ = std::move(observed);
  if (is_new) layers_.emplace_back(x.shape(), std::move(layers));
  return y;
}

Decisions Prepared::decide() const {
  TESSERA_CHECK(!layers_.empty(),
                "convert: the model was not calibrated, so no scale is known (of {} on); call "
                "(*prepared)(x) on a few batches first",
                [&]() -> std::string {
                  for (const NamedTensor& p : model_->named_parameters())
                    if (p.name.ends_with("weight")) return p.name;
                  return "any layer";
                }());
  TESSERA_CHECK(contents_of(*model_) == contents_,
                "convert: tensors of the model changed after calibration; call (*prepared)(x) "
                "on a few batches again");
  Decisions d;
  for (auto& [shape, layers] : layers_) {
    TESSERA_CHECK(!layers->layers.empty(),
                  "convert: the model has no layer that runs on bytes (convolutions, linear layers "
                  "with a constant f32 weight)");
    for (const Layer& l : layers->layers)
      if (!d.layers.contains(l.name)) d.layers.emplace(l.name, round_weights(l));
  }
  for (auto& [name, observed] : observed_) {
    TESSERA_CHECK(!observed.empty(),
                  "convert: {} saw no value; calibrate with batches that are "
                  "not empty",
                  name);
    d.roots.emplace(name, observed.parameters());
  }
  return d;
}

// ---- the converted model

// A node in the tree of names, with the tensors of a layer, of a value, or of both.
struct Quantized::Part final : nn::Module {
  Tensor weight, weight_scale, bias, scale, zero_point;
  std::string type_name() const override {
    return weight.defined() ? "QuantizedLayer" : scale.defined() ? "QuantizedValue" : "Part";
  }
};

struct Quantized::Plan {
  Meta x;
  int threads;
  Contents contents;  // the state of the tensors it was made from
  Lowered lowered;
  compiler::Executor executor;
};

namespace {

constexpr size_t kMostPlans = 8;

}  // namespace

Quantized::Quantized(std::shared_ptr<nn::Module> model, std::vector<std::string> keep_f32,
                     const Decisions& decisions)
    : model_(std::move(model)), keep_f32_(std::move(keep_f32)) {
  check_model(model_.get(), "quantized model");
  for (auto& [name, t] : decisions.layers) {
    Part& p = part(name);
    p.register_buffer("weight", p.weight, t.weight);
    p.register_buffer("weight_scale", p.weight_scale, t.weight_scale);
    p.register_buffer("bias", p.bias, t.bias);
    layers_.push_back(name);
  }
  for (auto& [name, q] : decisions.roots) {
    Part& p = part(name);
    p.register_buffer("scale", p.scale, scalar_tensor(q.scale, kF32));
    p.register_buffer("zero_point", p.zero_point, scalar_tensor(int64_t(q.zero_point), kI32));
    roots_.push_back(name);
  }
  eval();
}
Quantized::~Quantized() = default;

Quantized::Part& Quantized::part(const std::string& path) {
  if (auto it = parts_.find(path); it != parts_.end()) return *it->second;
  auto made = std::make_shared<Part>();
  const size_t dot = path.rfind('.');
  if (dot == std::string::npos)
    register_module(path, made);
  else
    part(path.substr(0, dot)).register_module(path.substr(dot + 1), made);
  parts_.emplace(path, made);
  return *made;
}

Decisions Quantized::decisions() {
  Decisions d;
  for (const std::string& name : layers_) {
    Part& p = part(name);
    for (const Tensor* t : {&p.weight_scale, &p.bias})
      TESSERA_CHECK(t->dtype() == kF32,
                    "quantized model: a scale or bias of {} is {}; they stay f32, to() is not for "
                    "converted models",
                    name, name_of(t->dtype()));
    d.layers[name] = {p.weight, p.weight_scale, p.bias};
  }
  for (const std::string& name : roots_) {
    Part& p = part(name);
    d.roots[name] = {double(p.scale.item<float>()), int(p.zero_point.item<int64_t>())};
  }
  return d;
}

// The tensors may change by load_state, which writes into them, and by replace, which exchanges
// them. What runs in f32 uses the model's own tensors.
Contents Quantized::contents() const {
  Contents c;
  for (auto& [name, p] : parts_)
    for (const Tensor* t : {&p->weight, &p->weight_scale, &p->bias, &p->scale, &p->zero_point})
      if (t->defined()) c.add(*t);
  add_slots(c, *model_);
  return c;
}

Quantized::Plan& Quantized::plan_for(const Tensor& x) {
  Contents now = contents();
  const int threads = num_threads();
  for (auto& p : plans_)
    if (same_layout(p->x, x.meta()) && p->threads == threads && p->contents == now) return *p;
  std::erase_if(plans_, [&](auto& p) { return !(p->contents == now); });
  if (plans_.size() >= kMostPlans) plans_.erase(plans_.begin());
  Lowered lowered = lower(layers_of(*model_, x, keep_f32_), decisions(), x);
  Graph graph = lowered.graph;
  plans_.push_back(
      std::make_unique<Plan>(Plan{x.meta(), threads, std::move(now), std::move(lowered),
                                  compiler::Executor(std::move(graph))}));
  return *plans_.back();
}

Tensor Quantized::forward(Tensor x) {
  check_call(*this, x, "quantized model");
  TESSERA_CHECK(!(grad_enabled() && x.requires_grad()),
                "quantized model: x requires gradients, and layers on bytes have none; run it "
                "under NoGrad, or train the f32 model");
  std::lock_guard lock(running_);
  NoGrad no_history;
  const Tensor in = x.detach();
  return plan_for(in).executor.run({&in, 1})[0];
}

std::string Quantized::report() const {
  std::lock_guard lock(running_);
  std::string text;
  auto value = [&](const std::string& name) {
    auto it = parts_.find(name);
    return name.empty() ? std::string("f32")
                        : fmt::format("{} ({:.4g}, {})", name, it->second->scale.item<float>(),
                                      it->second->zero_point.item<int64_t>());
  };
  if (plans_.empty()) {
    for (const std::string& name : layers_) text += name + ": not run yet\n";
    return text;
  }
  const Plan& plan = *plans_.back();
  for (const LoweredLayer& l : plan.lowered.layers) {
    const auto prepared = static_cast<const QuantizedLayer&>(*l.op).prepared();
    text += fmt::format("{}: {}, reads {}, gives {}{}{}{}\n", l.name,
                        prepared ? prepared->kernel() : "not run yet", value(l.x), value(l.y),
                        l.folded ? ", norm folded" : "", l.residual ? ", residual" : "",
                        l.relu ? ", relu" : "");
  }
  for (const std::string& name : plan.lowered.kept) text += name + ": f32, as keep_f32 asks\n";
  for (auto& [op, count] : plan.lowered.f32_ops)
    text += fmt::format("{} x {}: f32, no op on bytes computes it\n", count, op);
  return text;
}

// ---- what users call

std::shared_ptr<Prepared> prepare(std::shared_ptr<nn::Module> model, PrepareOptions options) {
  return std::make_shared<Prepared>(std::move(model), std::move(options));
}

std::shared_ptr<Quantized> convert(const std::shared_ptr<Prepared>& prepared) {
  TESSERA_CHECK(prepared, "convert: there is no prepared model");
  return std::make_shared<Quantized>(prepared->model(), prepared->options().keep_f32,
                                     prepared->decide());
}

std::shared_ptr<Quantized> load(std::shared_ptr<nn::Module> model,
                                std::span<const NamedTensor> state,
                                std::vector<std::string> keep_f32) {
  Decisions d;
  std::map<std::string, const Tensor*> by_name;
  for (const NamedTensor& t : state) by_name[t.name] = &t.tensor;
  auto get = [&](const std::string& name, DType dtype) -> const Tensor& {
    auto it = by_name.find(name);
    TESSERA_CHECK(it != by_name.end() && it->second->dtype() == dtype,
                  "quantized model: the state has no {} in {}; it is not that of a converted model",
                  name, name_of(dtype));
    return *it->second;
  };
  for (const NamedTensor& t : state) {
    const size_t dot = t.name.rfind('.');
    const std::string path = t.name.substr(0, dot == std::string::npos ? 0 : dot),
                      last = t.name.substr(dot == std::string::npos ? 0 : dot + 1);
    if (last == "weight") {
      const Tensor& scale = get(path + ".weight_scale", kF32);
      d.layers[path] = {get(t.name, kU8), scale, get(path + ".bias", kF32)};
    } else if (last == "scale") {
      const double scale = double(get(t.name, kF32).item<float>());
      const int64_t zero_point = get(path + ".zero_point", kI32).item<int64_t>();
      TESSERA_CHECK(scale > 0 && zero_point >= 0 && zero_point <= 255,
                    "quantized model: {} has scale={} and zero_point={}; expected a positive scale "
                    "and 0..255",
                    path, scale, zero_point);
      d.roots[path] = {scale, int(zero_point)};
    } else {
      TESSERA_CHECK(last == "weight_scale" || last == "bias" || last == "zero_point",
                    "quantized model: {} is no tensor of a converted model", t.name);
    }
  }
  TESSERA_CHECK(!d.layers.empty(), "quantized model: the state holds no layer");
  return std::make_shared<Quantized>(std::move(model), std::move(keep_f32), d);
}

}  // namespace tessera::quant
