// Functions with a derivative of their own, at every level. forward runs once, unrecorded, and each
// level from the innermost to the outermost records a node. The node of a level runs the vjp at the
// innermost level, on the samples of the vmaps in between, and sums the gradients over those
// samples for an input that is the same for all of them.
#include <algorithm>

#include "core/autograd/autograd.h"
#include "core/autograd/custom_op_types.h"
#include "core/autograd/level.h"
#include "core/dispatch/observer.h"
#include "core/dispatch/sharding.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

using Cotangents = std::span<const Tensor>;
using Vjp = std::function<Tensors(Cotangents)>;

class CustomNode final : public GradNode {
 public:
  CustomNode(std::string_view name, Vjp vjp, size_t results)
      : name_(name), vjp_(std::move(vjp)), results_(results) {}
  Tensors vjp(Cotangents cot, uint32_t, bool) override {
    TESSERA_CHECK(vjp_,
                  "backward: the graph of a custom function was released by an earlier backward; "
                  "pass retain_graph");
    Tensors all(cot.begin(), cot.end());
    all.resize(results_);
    return vjp_(all);
  }
  std::string_view name() const override { return name_; }
  void release_saved() override { vjp_ = nullptr; }
  bool released() const override { return !vjp_; }

 private:
  std::string name_;
  Vjp vjp_;
  size_t results_;
};

struct Flags {
  SmallVector<bool, 4> in, out;
};

// `vjp`, which runs at `level`, as a function of tensors of the level outside.
Vjp seen_outside(Ref<Level> level, Flags batched, Vjp vjp) {
  return [level = std::move(level), batched = std::move(batched),
          vjp = std::move(vjp)](Cotangents outside) {
    Tensors grads;
    SmallVector<bool, 4> whole;
    {
      Level::Enter enter(*level);
      Level::Unrecorded unrecorded(*level);
      NoGrad off;
      Tensors cot;
      for (size_t i = 0; i < outside.size(); ++i)
        cot.push_back(outside[i].defined() ? level->wrap(outside[i], batched.out[i]) : Tensor());
      for (const Tensor& g : vjp(cot)) {
        bool b = false;
        grads.push_back(g.defined() ? level->inner(g, b) : Tensor());
        whole.push_back(b);
      }
    }
    for (size_t i = 0; i < grads.size() && i < batched.in.size(); ++i) {
      if (!grads[i].defined() || whole[i] == batched.in[i]) continue;
      if (whole[i]) {
        grads[i] = sum(grads[i], {0});
      } else {  // each sample's own gradient, the same for all
        Shape s = grads[i].shape();
        s.insert(0, level->batch());
        grads[i] = expand(unsqueeze(grads[i], 0), s);
      }
    }
    return grads;
  };
}

// Gives `out` the history of this level and of the levels outside.
void attach(std::string_view name, std::span<const Tensor> in, Tensors& out, const Vjp& vjp) {
  Tensors at_level(in.begin(), in.end());
  if (Level* level = current_level()) {
    Flags batched;
    Tensors inner_in, inner_out;
    bool b;
    for (Tensor& t : at_level) {
      t = level->adopt(t);
      inner_in.push_back(level->inner(t, b)), batched.in.push_back(b);
    }
    for (const Tensor& t : out) inner_out.push_back(level->inner(t, b)), batched.out.push_back(b);
    {
      Level::Outside scope(*level);
      attach(name, inner_in, inner_out, seen_outside(Ref<Level>(level), batched, vjp));
    }
    for (size_t i = 0; i < out.size(); ++i) out[i] = level->wrap(inner_out[i], batched.out[i]);
  }
  bool record = false;
  for (const Tensor& t : at_level) record |= grad_meta(t) != nullptr;
  if (!record || !grad_enabled()) return;
  auto node = make_ref<CustomNode>(name, vjp, out.size());
  for (const Tensor& t : at_level) node->add_input(grad_meta(t));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = without_history(out[i]);  // forward may have returned an input itself
    if (is_differentiable(out[i].dtype())) attach_grad_meta(out[i], node, int(i));
  }
}

// True where the current level or one further out records what is computed from `in`. A backward
// that its own level does not record may be recorded further out.
bool recorded(std::span<const Tensor> in) {
  bring_up_to_date(in);
  Level* level = current_level();
  Tensors outside;
  for (const Tensor& t : in) {
    if (grad_enabled() && grad_meta(t) && (!level || level->mine(t))) return true;
    bool batched;
    if (level) outside.push_back(level->inner(t, batched));
  }
  if (!level) return false;
  Level::Outside scope(*level);
  return recorded(outside);
}

// While one lives, the observer knows that the program's own code runs.
class Announced {
 public:
  explicit Announced(const CustomFunction& f) : f_(f) {
    notify(events::CustomFunctionRuns{.name = f_.name(), .begins = true});
  }
  ~Announced() { notify(events::CustomFunctionRuns{.name = f_.name(), .begins = false}); }
  Announced(const Announced&) = delete;
  Announced& operator=(const Announced&) = delete;

 private:
  const CustomFunction& f_;
};

}  // namespace

// One call of a function.
struct AppliedFunction {
  Ref<CustomFunction> f;
  std::vector<SavedTensor> saved;
  std::vector<int> output;  // which result a saved tensor is; -1: none of them
  Tensors in;               // operands, kept where results were saved, whose history is this call's
  Tensors differentiated;   // shapes of the inputs that need a gradient; others are undefined
  size_t results;

  void tell_wanted() const {
    f->wanted_ = 0;
    for (size_t i = 0; i < differentiated.size() && i < 64; ++i)
      f->wanted_ |= uint64_t(differentiated[i].defined()) << i;
  }
};

namespace {

Tensors vjp_of(const std::shared_ptr<const AppliedFunction>& call, Cotangents cot) {
  Tensors values, again;
  SmallVector<size_t, 4> position;
  for (size_t i = 0; i < call->saved.size(); ++i) {
    values.push_back(call->saved[i].unpack(call->f->name(), "saved tensor", i, {}));
    if (call->output[i] >= 0) again.push_back(values[i]), position.push_back(i);
  }
  if (!again.empty()) {  // results need a history where this backward is recorded
    attach(call->f->name(), call->in, again, [call, position](Cotangents of_saved) {
      Tensors all(call->results);
      for (size_t k = 0; k < of_saved.size(); ++k) {
        Tensor& sum = all[size_t(call->output[position[k]])];
        if (of_saved[k].defined()) sum = sum.defined() ? sum + of_saved[k] : of_saved[k];
      }
      return vjp_of(call, all);
    });
    for (size_t k = 0; k < again.size(); ++k) values[position[k]] = again[k];
  }
  Tensors grads = [&] {
    const Announced vjp(*call->f);
    call->tell_wanted();
    return call->f->vjp(values, cot);
  }();
  TESSERA_CHECK(grads.size() == call->differentiated.size(),
                "{}: vjp returned {} gradients for {} inputs", call->f->name(), grads.size(),
                call->differentiated.size());
  for (size_t i = 0; i < grads.size(); ++i)
    if (const Tensor& in = call->differentiated[i]; in.defined())
      grads[i] = detail::fit_gradient(call->f->name(), i, std::move(grads[i]), in);
  return grads;
}

}  // namespace

Tensors apply_function(Ref<CustomFunction> f, std::span<const Tensor> in) {
  const bool record = recorded(in);
  auto call = std::make_shared<AppliedFunction>(AppliedFunction{f, {}, {}, {}, {}, 0});
  for (const Tensor& t : in)
    call->differentiated.push_back(record && recorded({&t, 1}) ? without_values(t) : Tensor());
  call->tell_wanted();
  Tensors out;
  {
    NoGrad off;
    f->saved_.clear();
    const Announced forward(*f);
    out = f->forward(in);
  }
  if (!record) return out;
  call->results = out.size();
  for (const Tensor& t : f->saved_) {
    auto same = std::ranges::find(out, t.impl(), [](const Tensor& o) { return o.impl(); });
    call->saved.push_back(SavedTensor::input(t));
    call->output.push_back(same == out.end() ? -1 : int(same - out.begin()));
    if (same != out.end()) call->in = Tensors(in.begin(), in.end());
  }
  f->saved_.clear();
  attach(f->name(), in, out, [call](Cotangents cot) { return vjp_of(call, cot); });
  return out;
}

}  // namespace tessera
