#include "core/optim/optimizer.h"

#include <map>
#include <set>

#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/dispatch/sharding.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "core/tensor/memory_label.h"

namespace tessera::optim {

Params::Params(const std::vector<Tensor>& params) : groups(1) {
  for (const Tensor& p : params)
    groups[0].params.push_back({std::to_string(groups[0].params.size()), p});
}

Params::Params(std::vector<NamedTensor> params) : groups(1) {
  groups[0].params = std::move(params);
}

Params decay_matrices_only(std::vector<NamedTensor> params, double weight_decay) {
  std::vector<ParamGroup> groups(2);
  groups[0].weight_decay = weight_decay;
  groups[1].weight_decay = 0.0;
  for (NamedTensor& p : params) groups[p.tensor.ndim() < 2].params.push_back(std::move(p));
  std::erase_if(groups, [](auto& g) { return g.params.empty(); });
  return groups;
}

namespace {

// Where the numbers of a step are: beside the parameters, so that an update reads nothing of the
// host. Parameters on kMeta get their memory later.
Device device_of_numbers(const Params& params) {
  for (const ParamGroup& g : params.groups)
    for (const NamedTensor& p : g.params)
      if (p.tensor.defined() && !p.tensor.device().is_meta()) return p.tensor.device();
  return kCPU;
}

}  // namespace

Optimizer::Optimizer(Params params, double lr, double weight_decay, std::vector<std::string> kinds)
    : kinds_(std::move(kinds)),
      step_count_(scalar_tensor(0.0, kF64, device_of_numbers(params))),
      one_(scalar_tensor(1.0, kF64, step_count_.device())) {
  TESSERA_CHECK(lr >= 0, "optimizer: lr {} is negative", lr);
  std::set<const TensorImpl*> seen;
  std::set<std::string> names;
  bool trains = false;
  for (ParamGroup& from : params.groups) {
    Group& group = groups_.emplace_back();
    double own = from.lr.value_or(lr);
    group.lr = scalar_tensor(own, kF64, step_count_.device());
    group.lr_ratio = own == lr || lr == 0 ? 1 : own / lr;
    group.weight_decay = from.weight_decay.value_or(weight_decay);
    TESSERA_CHECK(own >= 0 && group.weight_decay >= 0,
                  "optimizer: lr {} or weight_decay {} of a group is negative", own,
                  group.weight_decay);
    group.params = std::move(from.params);
    group.state.resize(kinds_.size());
    for (const NamedTensor& p : group.params) {
      TESSERA_CHECK(p.tensor.defined(), "optimizer: parameter {} is undefined", p.name);
      GradMeta* meta = grad_meta(p.tensor);
      TESSERA_CHECK(
          !meta || !meta->producer,
          "optimizer: parameter {} ({}) is the result of an op; pass the leaf it comes from",
          p.name, describe(p.tensor));
      TESSERA_CHECK(seen.insert(p.tensor.impl()).second, "optimizer: parameter {} is given twice",
                    p.name);
      TESSERA_CHECK(names.insert(p.name).second,
                    "optimizer: two parameters are called {}, and state goes by names; put "
                    "something before the names of each module's",
                    p.name);
      trains |= p.tensor.requires_grad();
      set_memory_holder(p.tensor, MemoryUse::kParameters, module_of(p.name));
      MemoryLabel label(MemoryUse::kOptimizerState, module_of(p.name));
      for (auto& kind : group.state)
        kind.push_back(p.tensor.requires_grad() ? zeros_like(p.tensor) : Tensor());
    }
  }
  TESSERA_CHECK(trains, "optimizer: got {}",
                seen.empty() ? "no parameters" : "only parameters that do not require grad");
}

/// Makes the state of a parameter that was frozen when the optimizer was made.
void Optimizer::begin(Group& group, size_t i) {
  EagerScope untraced;  // it happens once: no part of a step
  MemoryLabel label(MemoryUse::kOptimizerState, module_of(group.params[i].name));
  for (auto& kind : group.state)
    if (!kind[i].defined()) kind[i] = zeros_like(group.params[i].tensor);
}

void Optimizer::collect(Group& group) {
  lists_.params.clear(), lists_.grads.clear(), lists_.index.clear();
  lists_.state.resize(kinds_.size());
  for (auto& kind : lists_.state) kind.clear();
  for (size_t i = 0; i < group.params.size(); ++i) {
    Tensor grad = group.params[i].tensor.grad();
    if (!grad.defined()) continue;
    begin(group, i);
    lists_.index.push_back(i);
    lists_.params.push_back(group.params[i].tensor);
    lists_.grads.push_back(std::move(grad));
    for (size_t k = 0; k < kinds_.size(); ++k) lists_.state[k].push_back(group.state[k][i]);
  }
}

// Its gradients go to the tensor that stands in the model now: steps would do nothing, silently.
void Optimizer::check_not_replaced() const {
  for (const Group& g : groups_)
    for (const NamedTensor& p : g.params) {
      GradMeta* meta = grad_meta(p.tensor);
      TESSERA_CHECK(!meta || !meta->replaced,
                    "optimizer: {} ({}) is no parameter of its model any more, another tensor took "
                    "its place; make the optimizer after fully_shard, parallelize_module, "
                    "materialize and to()",
                    p.name, describe(p.tensor));
    }
}

void Optimizer::step(const Tensor& scale) {
  check_not_replaced();
  NoGrad off;
  Scoped<Phase> phase(context().phase, Phase::kUpdate);
  MemoryLabel label(MemoryUse::kOptimizerState);
  add_(step_count_, one_);
  run(scale);
}

void Optimizer::step_if_finite(const Tensor& scale) {
  check_not_replaced();
  NoGrad off;
  Scoped<Phase> phase(context().phase, Phase::kUpdate);
  MemoryLabel label(MemoryUse::kOptimizerState);
  const ShardingLayer* sharding = sharding_of(scale);  // every rank has the value
  add_(step_count_, cast(isfinite(sharding ? sharding->whole_value() : scale), kF64));
  Scoped<bool> guarded(lists_.if_finite, true);
  run(scale);
}

void Optimizer::set_weight_decay(size_t group, double weight_decay) {
  TESSERA_CHECK(group < groups_.size() && weight_decay >= 0,
                "optimizer: weight_decay {} of group {}: expected a number from 0 and one of {} "
                "groups",
                weight_decay, group, groups_.size());
  groups_[group].weight_decay = weight_decay;
  weight_decays_.note_change();
}

void Optimizer::run(const Tensor& scale) {
  weight_decays_.note_use();
  for (Group& group : groups_) {
    collect(group);
    if (!lists_.params.empty()) update(group, lists_, scale);
  }
  Group none;
  collect(none);  // let go of the gradients
}

void Optimizer::zero_grad() {
  for (Group& g : groups_)
    for (NamedTensor& p : g.params)
      if (grad_meta(p.tensor)) p.tensor.set_grad({});
}

void Optimizer::set_lr(double lr) {
  for (Group& g : groups_) fill_(g.lr, lr * g.lr_ratio);
}

double Optimizer::lr() const {
  for (const Group& g : groups_)
    if (g.lr_ratio != 0) return g.lr.item<double>() / g.lr_ratio;
  return 0;
}

std::vector<Tensor> Optimizer::parameters() const {
  std::vector<Tensor> out;
  for (const Group& g : groups_)
    for (const NamedTensor& p : g.params) out.push_back(p.tensor);
  return out;
}

std::vector<NamedTensor> Optimizer::named_state() const {
  std::vector<NamedTensor> out{{"step", step_count_}};
  for (size_t g = 0; g < groups_.size(); ++g)
    out.push_back({"lr." + std::to_string(g), groups_[g].lr});
  for (const Group& g : groups_)
    for (size_t k = 0; k < kinds_.size(); ++k)
      for (size_t i = 0; i < g.params.size(); ++i)
        if (g.state[k][i].defined())
          out.push_back({kinds_[k] + "." + g.params[i].name, g.state[k][i]});
  return out;
}

void Optimizer::load_state(std::span<const NamedTensor> state) {
  std::set<std::string_view> given;
  for (const NamedTensor& t : state) given.insert(t.name);
  for (Group& g : groups_)  // frozen now, but not in the run that was saved
    for (size_t i = 0; i < g.params.size(); ++i)
      for (const std::string& kind : kinds_)
        if (given.contains(kind + "." + g.params[i].name)) begin(g, i);
  std::map<std::string, Tensor> own;
  for (NamedTensor& t : named_state()) own.emplace(std::move(t.name), std::move(t.tensor));
  StateMisfit misfit;
  std::set<std::string> found;
  for (const NamedTensor& t : state) {
    auto it = own.find(t.name);
    if (it == own.end())
      misfit.unexpected.push_back(t.name);
    else
      misfit.compare(t.name, it->second, t.tensor), found.insert(t.name);
  }
  for (auto& [name, tensor] : own)
    if (!found.contains(name)) misfit.missing.push_back(name);
  misfit.check("the optimizer");
  for (const NamedTensor& t : state) assign_(own.at(t.name), t.tensor);
}

}  // namespace tessera::optim
