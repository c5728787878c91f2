// Loading state: names and shapes are compared as a whole first, so a model is never left half
// loaded and one error tells everything that is wrong.
#include <map>
#include <set>

#include "core/autograd/autograd.h"
#include "core/nn/module.h"
#include "core/ops/update.h"

namespace tessera::nn {
namespace {

constexpr size_t kNamesInError = 8;

std::string list(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return {};
  std::string text = fmt::format("\n  {} {}: ", names.size(), what);
  for (size_t i = 0; i < names.size() && i < kNamesInError; ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > kNamesInError) text += ", ...";
  return text;
}

}  // namespace

void Module::load_state(std::span<const NamedTensor> state, LoadOptions options) {
  std::map<std::string, Tensor*> slot_of;
  for (Slot& s : slots())
    if (s.persistent) slot_of.emplace(s.name, s.tensor);

  std::set<const TensorImpl*> found;
  std::vector<std::string> missing, unexpected, mismatched;
  for (const NamedTensor& t : state) {
    auto it = slot_of.find(t.name);
    if (it == slot_of.end()) {
      unexpected.push_back(t.name);
      continue;
    }
    found.insert(it->second->impl());
    if (!(t.tensor.shape() == it->second->shape()))
      mismatched.push_back(fmt::format("{} is {} here, {} in the state", t.name,
                                       tessera::to_string(it->second->shape()),
                                       tessera::to_string(t.tensor.shape())));
  }
  for (NamedTensor& own : this->state())
    if (!found.contains(own.tensor.impl())) missing.push_back(own.name);
  if (!options.strict) missing.clear(), unexpected.clear();
  TESSERA_CHECK(missing.empty() && unexpected.empty() && mismatched.empty(),
                "load_state: the state does not fit {}{}{}{}", type_name(),
                list("missing", missing), list("unexpected", unexpected),
                list("of another shape", mismatched));

  NoGrad off;
  for (const NamedTensor& t : state)
    if (auto it = slot_of.find(t.name); it != slot_of.end()) assign_(*it->second, t.tensor);
}

}  // namespace tessera::nn
