#include "examples/models/registry.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "core/base/spelling.h"
#include "core/nn/scope.h"
#include "core/ops/fused.h"

namespace tessera::models {

// The rows of one file each. They are called by name, because a static library's object file that
// is not referred to is not linked.
using Rows = std::vector<ModelSpec>;
Rows gpt_models(), bert_models(), resnet_models(), mlp_models();

namespace {

std::vector<std::string_view> needed_options(Data data) {
  switch (data) {
    case Data::kText:
    case Data::kMaskedText: return {"vocab", "context"};
    case Data::kImages: return {"classes"};
    case Data::kValues: return {"in", "out"};
  }
  throw BugError("there is no such kind of data");
}

void add(std::deque<ModelSpec>& models, ModelSpec spec) {
  TESSERA_CHECK(!spec.name.empty() && spec.make, "register_model: \"{}\": give a name and make",
                spec.name);
  TESSERA_CHECK(std::ranges::find(models, spec.name, &ModelSpec::name) == models.end(),
                "register_model: there is a model \"{}\" already; take another name", spec.name);
  for (std::string_view key : needed_options(spec.data))
    TESSERA_CHECK(spec.options.find_integer(key),
                  "register_model: {}: its kind of data sets an integer option \"{}\", which it "
                  "does not have; add it to fields_of",
                  spec.name, key);
  models.push_back(std::move(spec));
}

std::deque<ModelSpec>& models() {
  static std::deque<ModelSpec> all = [] {
    std::deque<ModelSpec> of_this_tree;
    for (auto* rows : {gpt_models, bert_models, resnet_models, mlp_models})
      for (ModelSpec& spec : rows()) add(of_this_tree, std::move(spec));
    return of_this_tree;
  }();
  return all;
}

std::vector<std::string> names_of(const Data* data) {
  std::vector<std::string> names;
  for (const ModelSpec& spec : models())
    if (!data || spec.data == *data) names.push_back(spec.name);
  return names;
}

}  // namespace

std::optional<int64_t> ModelOptions::find_integer(std::string_view key) const {
  std::any copy = value_;
  for (const Field& f : fields_(copy).fields)
    if (auto* value = std::get_if<int64_t*>(&f.value); value && f.name == key) return **value;
  return std::nullopt;
}

int64_t ModelOptions::integer(std::string_view key) const {
  const std::optional<int64_t> value = find_integer(key);
  TESSERA_ASSERT(value, "a model has no integer option \"{}\"", key);
  return *value;
}

std::vector<std::pair<std::string, std::string>> ModelOptions::texts() const {
  std::any copy = value_;
  std::vector<std::pair<std::string, std::string>> all;
  for (const Field& f : fields_(copy).fields)
    all.emplace_back(f.name, std::visit([](auto* v) { return fmt::format("{}", *v); }, f.value));
  return all;
}

void register_model(ModelSpec spec) { add(models(), std::move(spec)); }
const std::deque<ModelSpec>& registered_models() { return models(); }

const ModelSpec& find_model(std::string_view program, std::string_view name) {
  for (const ModelSpec& spec : models())
    if (spec.name == name) return spec;
  const std::string meant = nearest_word(name, names_of(nullptr));
  throw UserError(fmt::format("{}: unknown model \"{}\"{}; expected one of {}", program, name,
                              meant.empty() ? "" : fmt::format(" (is {} meant?)", meant),
                              model_names()));
}

Loss loss_of(const ModelSpec& spec, double label_smoothing) {
  return [own = spec.loss, label_smoothing](const Tensor& prediction, const Tensor& targets) {
    nn::Scope scope("loss");
    return own ? own(prediction, targets)
               : cross_entropy(prediction, targets,
                               {.label_smoothing = label_smoothing, .dim = -1});
  };
}

std::string model_names() { return fmt::format("{}", fmt::join(names_of(nullptr), ", ")); }
std::string model_names(Data data) { return fmt::format("{}", fmt::join(names_of(&data), ", ")); }

}  // namespace tessera::models
