// Loading state: names and shapes are compared as a whole before anything is written, so a model is
// never half loaded.
#include <map>
#include <set>

#include "core/autograd/autograd.h"
#include "core/nn/module.h"
#include "core/ops/update.h"

namespace tessera::nn {

IncompatibleNames Module::load_state(std::span<const NamedTensor> state, LoadOptions options) {
  std::map<std::string, Tensor*> slot_of;
  for (Slot& s : slots())
    if (s.persistent) slot_of.emplace(s.name, s.tensor);

  StateMisfit misfit;
  std::set<const TensorImpl*> found;
  for (const NamedTensor& t : state) {
    auto it = slot_of.find(t.name);
    if (it == slot_of.end()) {
      misfit.unexpected.push_back(t.name);
    } else {
      misfit.compare(t.name, *it->second, t.tensor);
      found.insert(it->second->impl());
    }
  }
  for (NamedTensor& own : this->state())
    if (!found.contains(own.tensor.impl())) misfit.missing.push_back(own.name);
  IncompatibleNames left_out;
  if (!options.strict) {
    left_out.missing.swap(misfit.missing);
    left_out.unexpected.swap(misfit.unexpected);
  }
  misfit.check(type_name());

  NoGrad off;
  for (const NamedTensor& t : state)
    if (auto it = slot_of.find(t.name); it != slot_of.end()) assign_(*it->second, t.tensor);
  return left_out;
}

}  // namespace tessera::nn
