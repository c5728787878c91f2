// The registry of models: every row can be built, cut and told from the others by its name, and the
// command lines list what it has.
#include "examples/models/registry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <set>

#include "examples/models/mlp.h"
#include "tests/examples/command.h"

namespace tessera {
namespace {

using models::ModelSpec;

std::set<std::string> parameter_names(nn::Module& model) {
  std::set<std::string> names;
  for (const NamedTensor& p : model.named_parameters()) names.insert(p.name);
  return names;
}

TEST(Registry, StagesHaveTheParametersOfTheModelBetweenThem) {
  nn::OnDevice without_values(kMeta);
  for (const ModelSpec& spec : models::registered_models()) {
    SCOPED_TRACE(spec.name);
    const auto whole = parameter_names(*spec.make(spec.options));
    ASSERT_FALSE(whole.empty());
    ASSERT_GE(spec.pipeline.places(spec.options), 2);
    std::set<std::string> together, twice;
    for (int stage = 0; stage < 2; ++stage)
      for (const std::string& name : parameter_names(*spec.pipeline.stage(spec.options, stage, 2)))
        if (!together.insert(name).second) twice.insert(name);
    EXPECT_EQ(together, whole);
    std::set<std::string> tied;
    if (spec.pipeline.tied)
      for (const std::string& name : spec.pipeline.tied(spec.options)) tied.insert(name);
    EXPECT_EQ(twice, tied);
    EXPECT_NE(spec.pipeline.remedy(3), "");
  }
}

TEST(Registry, TensorParallelPlansNameModulesOfTheModel) {
  nn::OnDevice without_values(kMeta);
  for (const ModelSpec& spec : models::registered_models()) {
    SCOPED_TRACE(spec.name);
    const auto names = parameter_names(*spec.make(spec.options));
    const parallel::ParallelPlan plan = spec.tensor_parallel.plan(spec.options);
    ASSERT_FALSE(plan.empty());
    for (const auto& [path, style] : plan) {
      const std::string begin = path.substr(0, path.find('*'));
      EXPECT_TRUE(std::any_of(names.begin(), names.end(), [&](const std::string& n) {
        return n.starts_with(begin);
      })) << path;
    }
    const std::string& field = spec.tensor_parallel.field;
    EXPECT_TRUE(field.empty() || spec.options.integer(field) > 1) << field;
  }
}

// What a file of weights says of the options is what they are set from.
TEST(Registry, OptionsAreSetFromTheirOwnTexts) {
  for (const ModelSpec& spec : models::registered_models()) {
    SCOPED_TRACE(spec.name);
    models::ModelOptions options = spec.options;
    for (const auto& [key, value] : spec.options.texts()) options.set(key, value);
    EXPECT_EQ(options.texts(), spec.options.texts());
  }
  models::ModelOptions mlp = models::MlpOptions{.hidden = 7}, copy = mlp;
  copy.set("hidden", 8);
  EXPECT_EQ(mlp.integer("hidden"), 7);
  EXPECT_EQ(copy.as<models::MlpOptions>().hidden, 8);
  EXPECT_EQ(mlp.find_integer("heads"), std::nullopt);
  EXPECT_EQ(mlp.find_integer("dropout"), std::nullopt);  // no integer
}

TEST(Registry, CommandLinesListEveryModel) {
  for (const std::string command : {"train --help", "bench train --help"}) {
    std::string help = run(bin(command)).output;
    std::erase_if(help, [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; });
    std::string names = models::model_names();
    std::erase(names, ' ');
    EXPECT_NE(help.find(names), std::string::npos) << command << "\n" << help;
  }
}

std::string refusal(ModelSpec spec) {
  try {
    models::register_model(std::move(spec));
  } catch (const UserError& e) {
    return e.what();
  }
  return "";
}

TEST(Registry, RowsThatCannotBeAreRefused) {
  const size_t before = models::registered_models().size();
  const auto make = models::on<models::MlpOptions>(models::mlp);
  EXPECT_EQ(refusal({.name = "mlp",
                     .options = models::MlpOptions(),
                     .data = models::Data::kValues,
                     .make = make}),
            "register_model: there is a model \"mlp\" already; take another name");
  EXPECT_EQ(refusal({.name = "empty",
                     .options = models::MlpOptions(),
                     .data = models::Data::kValues,
                     .make = nullptr}),
            "register_model: \"empty\": give a name and make");
  EXPECT_EQ(refusal({.name = "pictures",
                     .options = models::MlpOptions(),
                     .data = models::Data::kImages,
                     .make = make}),
            "register_model: pictures: its kind of data sets an integer option \"classes\", which "
            "it does not have; add it to fields_of");
  EXPECT_EQ(models::registered_models().size(), before);
}

TEST(Registry, ANameThatNothingHasIsToldWithTheNearest) {
  try {
    models::find_model("train", "bert-mimi");
    FAIL();
  } catch (const UserError& e) {
    EXPECT_EQ(std::string(e.what()),
              "train: unknown model \"bert-mimi\" (is bert-mini meant?); expected one of " +
                  models::model_names());
  }
}

}  // namespace
}  // namespace tessera
