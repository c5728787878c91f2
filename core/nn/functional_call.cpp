#include "core/nn/functional_call.h"

namespace tessera::nn {

Substituted::Substituted(Module& module, std::span<const Tensor> params) : module_(module) {
  const std::vector<NamedTensor> own = module.named_parameters();
  const std::vector<Slot> slots = module.slots();
  TESSERA_CHECK(own.size() == params.size(), "functional_call: {} tensors for {} parameters of {}",
                params.size(), own.size(), module.type_name());
  for (size_t i = 0; i < own.size(); ++i) put(slots, own[i].tensor, params[i], own[i].name);
  ++module_.substituted_;
}

Substituted::Substituted(Module& module, std::span<const NamedTensor> tensors) : module_(module) {
  const std::vector<Slot> slots = module.slots();
  for (const NamedTensor& t : tensors) put(slots, Tensor(module.slot(t.name)), t.tensor, t.name);
  ++module_.substituted_;
}

void Substituted::put(const std::vector<Slot>& slots, const Tensor& old, const Tensor& now,
                      std::string_view name) {
  if (now.shape() != old.shape() || now.dtype() != old.dtype()) {
    for (auto& [slot, tensor] : before_) *slot = tensor;
    throw ShapeError(
        fmt::format("functional_call: {} is {}, given {}", name, describe(old), describe(now)));
  }
  for (const Slot& s : slots)
    if (s.tensor->is_same(old)) before_.emplace_back(s.tensor, old), *s.tensor = now;
}

Substituted::~Substituted() {
  --module_.substituted_;
  for (auto& [slot, tensor] : before_) *slot = tensor;
}

}  // namespace tessera::nn
