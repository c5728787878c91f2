#include "core/tensor/named_tensor.h"

namespace tessera {
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
