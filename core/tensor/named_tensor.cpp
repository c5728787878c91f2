#include "core/tensor/named_tensor.h"

namespace tessera {
namespace {

// Each has a line: a user that renames or reshapes weights needs all of them.
std::string list(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return {};
  std::string text = fmt::format("\n  {} {}:", names.size(), what);
  for (const std::string& name : names) text += "\n    " + name;
  return text;
}

}  // namespace

void StateMisfit::compare(const std::string& name, const Tensor& own, const Tensor& given) {
  if (!given.defined())
    mismatched.push_back(name + " has no value");
  else if (!(own.shape() == given.shape()))
    mismatched.push_back(fmt::format("{} is {} here, {} in the state", name, to_string(own.shape()),
                                     to_string(given.shape())));
}

void StateMisfit::check(std::string_view who) const {
  TESSERA_CHECK(missing.empty() && unexpected.empty() && mismatched.empty(),
                "load_state: the state does not fit {}{}{}{}", who, list("missing", missing),
                list("unexpected", unexpected), list("of another shape", mismatched));
}

}  // namespace tessera
