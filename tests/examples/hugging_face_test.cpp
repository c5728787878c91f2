// Folders of Hugging Face's transformers: our models give their logits, what is saved again equals
// what was read, and errors name what is wrong (scripts/reference/make_golden_hugging_face.py made
// the folders).
#include "examples/models/hugging_face.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "core/autograd/autograd.h"
#include "core/io/file.h"
#include "core/io/safetensors.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using namespace models;

std::string golden(const std::string& name) {
  const char* source = std::getenv("TESSERA_SOURCE");
  return std::string(source ? source : ".") + "/tests/golden/hugging_face/" + name;
}

void expect_logits(const std::string& name, const std::function<Tensor(const Tensor&)>& model) {
  auto file = io::SafetensorsFile::open(golden(name + "_logits.safetensors"));
  Tensor want = file.load("logits"), got = model(file.load("ids"));
  ASSERT_EQ(got.shape(), want.shape());
  EXPECT_LT(amax(abs(got - want)).item<float>(), 2e-6f * amax(abs(want)).item<float>());
}

// Names, dtypes and bits.
void expect_same_weights(const std::string& folder, const std::string& other) {
  std::vector<NamedTensor> a = io::load_safetensors(folder), b = io::load_safetensors(other);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].name, b[i].name);
    ASSERT_EQ(describe(a[i].tensor), describe(b[i].tensor)) << a[i].name;
    EXPECT_EQ(std::memcmp(a[i].tensor.raw(), b[i].tensor.raw(), a[i].tensor.nbytes()), 0)
        << a[i].name;
  }
}

void expect_error(const std::function<void()>& call, std::initializer_list<const char*> parts) {
  try {
    call();
    ADD_FAILURE() << "nothing thrown";
  } catch (const UserError& e) {
    for (const char* part : parts)
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what() << "\n" << part;
  }
}

TEST(HuggingFace, Gpt2HasItsLogitsAndIsSavedAsItWas) {
  NoGrad off;
  GptOptions o = gpt_from_hugging_face(golden("gpt2"));
  GptPtr model = gpt(o);
  EXPECT_TRUE(load_hugging_face(*model, golden("gpt2")).empty());
  model->eval();
  expect_logits("gpt2", [&](const Tensor& ids) { return (*model)(ids); });
  TempFolder folder;
  save_hugging_face(folder / "out", o, model->state());
  expect_same_weights(folder / "out", golden("gpt2"));
  GptOptions again = gpt_from_hugging_face(folder / "out");
  EXPECT_EQ(std::tie(again.vocab, again.context, again.layers, again.heads, again.dim,
                     again.dropout, again.bias, again.tanh_gelu, again.tied),
            std::tie(o.vocab, o.context, o.layers, o.heads, o.dim, o.dropout, o.bias, o.tanh_gelu,
                     o.tied));
  o.bias = false;
  expect_error([&] { save_hugging_face(folder / "out", o, model->state()); }, {"--set bias=true"});
}

TEST(HuggingFace, BertHasItsLogitsAndIsSavedAsItWas) {
  NoGrad off;
  BertOptions o = bert_from_hugging_face(golden("bert"));
  BertForMaskedLMPtr model = bert_for_masked_lm(o);
  EXPECT_TRUE(load_hugging_face(*model, golden("bert")).empty());
  model->eval();
  expect_logits("bert", [&](const Tensor& ids) {
    return (*model)({.ids = ids, .segments = {}, .key_mask = {}});
  });
  TempFolder folder;
  save_hugging_face(folder / "out", o, model->state());
  expect_same_weights(folder / "out", golden("bert"));
  BertOptions again = bert_from_hugging_face(folder / "out");
  EXPECT_EQ(std::tie(again.vocab, again.context, again.segments, again.layers, again.heads,
                     again.dim, again.hidden, again.dropout, again.attention_dropout, again.eps),
            std::tie(o.vocab, o.context, o.segments, o.layers, o.heads, o.dim, o.hidden, o.dropout,
                     o.attention_dropout, o.eps));
}

// bert-base-uncased has these names, because it was converted from TensorFlow.
TEST(HuggingFace, OldNamesOfLayerNormsAreKnown) {
  NoGrad off;
  std::vector<NamedTensor> state = io::load_safetensors(golden("bert"));
  int renamed = 0;
  for (NamedTensor& t : state)
    for (auto [now, before] : {std::pair{"LayerNorm.weight", "LayerNorm.gamma"},
                               std::pair{"LayerNorm.bias", "LayerNorm.beta"}})
      if (t.name.ends_with(now))
        t.name = t.name.substr(0, t.name.size() - std::strlen(now)) + before, ++renamed;
  EXPECT_GT(renamed, 4);
  TempFolder folder;
  io::save_safetensors(folder / "model.safetensors", state);
  folder.write("config.json", io::read_file(golden("bert/config.json"), "test"));
  BertForMaskedLMPtr model = bert_for_masked_lm(bert_from_hugging_face(folder.str()));
  EXPECT_TRUE(load_hugging_face(*model, folder.str()).empty());
  model->eval();
  expect_logits("bert", [&](const Tensor& ids) {
    return (*model)({.ids = ids, .segments = {}, .key_mask = {}});
  });
}

// Writes the golden BERT and `more` tensors, such as the pooler of a BertForPreTraining.
void write_bert_and(const TempFolder& folder, const std::vector<NamedTensor>& more) {
  std::vector<NamedTensor> state = io::load_safetensors(golden("bert"));
  state.insert(state.end(), more.begin(), more.end());
  io::save_safetensors(folder / "model.safetensors", state);
  folder.write("config.json", io::read_file(golden("bert/config.json"), "test"));
}

TEST(HuggingFace, APoolerGoesWhereTheModelHasOneAndIsNamedWhereNot) {
  NoGrad off;
  TempFolder folder;
  const BertOptions o = bert_from_hugging_face(golden("bert"));
  const Tensor weight = randn({o.dim, o.dim}), bias = randn({o.dim});
  write_bert_and(folder, {{"bert.pooler.dense.bias", bias},
                          {"bert.pooler.dense.weight", weight},
                          {"cls.seq_relationship.bias", zeros({2})},
                          {"cls.seq_relationship.weight", zeros({2, o.dim})}});
  auto masked = bert_for_masked_lm(o);
  testing::internal::CaptureStderr();
  const std::vector<std::string> left_out = load_hugging_face(*masked, folder.str());
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(left_out,
            (std::vector<std::string>{"bert.pooler.dense.bias", "bert.pooler.dense.weight",
                                      "cls.seq_relationship.bias", "cls.seq_relationship.weight"}));
  for (const std::string& name : left_out) expect_contains(log, name);
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
  setenv("RANK", "1", 1), setenv("WORLD_SIZE", "2", 1);
  testing::internal::CaptureStderr();
  load_hugging_face(*masked, folder.str());
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  unsetenv("RANK"), unsetenv("WORLD_SIZE");
  masked->eval();
  expect_logits("bert", [&](const Tensor& ids) { return (*masked)(ids); });

  auto classifier = bert_for_sequence_classification(o, 3);
  const nn::IncompatibleNames names =
      classifier->load_state(load_hugging_face(folder.str()), {.strict = false});
  EXPECT_EQ(names.missing, (std::vector<std::string>{"classifier.weight", "classifier.bias"}));
  for (const std::string& name : names.unexpected) EXPECT_TRUE(name.starts_with("cls.")) << name;
  EXPECT_EQ(amax(abs(classifier->slot("bert.pooler.dense.weight") - weight)).item<float>(), 0);
  EXPECT_EQ(amax(abs(classifier->slot("bert.pooler.dense.bias") - bias)).item<float>(), 0);

  write_bert_and(folder, {{"bert.encoder.layer.0.adapter.weight", bias}});
  expect_error([&] { load_hugging_face(*masked, folder.str()); },
               {"1 unexpected", "bert.encoder.layer.0.adapter.weight"});
}

TEST(HuggingFace, FieldsThatWouldChangeResultsAreRefusedByName) {
  TempFolder folder;
  auto with = [&](const std::string& kind, const std::string& field) {
    std::string text = io::read_file(golden(kind + "/config.json"), "test");
    folder.write("config.json", "{" + field + "," + text.substr(text.find('{') + 1));
    return folder.str();
  };
  // If a field occurs twice the last one counts, so these are names that the file lacks.
  expect_error(
      [&] { bert_from_hugging_face(with("bert", "\"position_embedding_type\":\"relative\"")); },
      {"config.json", "position_embedding_type", "relative", "absolute"});
  for (const char* field : {"is_decoder", "add_cross_attention"}) {
    std::string text = io::read_file(golden("bert/config.json"), "test");
    const std::string is = "\"" + std::string(field) + "\": ";
    ASSERT_NE(text.find(is + "false"), text.npos);
    folder.write("config.json", text.replace(text.find(is), is.size() + 5, is + "true"));
    expect_error([&] { bert_from_hugging_face(folder.str()); },
                 {"config.json", field, "true", "false"});
  }
  expect_error([&] { gpt_from_hugging_face(golden("bert")); }, {"model_type", "bert", "gpt2"});
  folder.write("config.json", "{\"model_type\": \"gpt2\", \"vocab_size\": -3}");
  expect_error([&] { gpt_from_hugging_face(folder.str()); }, {"vocab_size is -3"});
  folder.write("config.json",
               R"({"model_type": "gpt2", "vocab_size": 8, "n_positions": 8, "n_layer": 1,
                   "n_head": 1, "n_embd": 4611686018427387904})");
  expect_error([&] { gpt_from_hugging_face(folder.str()); }, {"n_embd is 4611686018427387904"});
  folder.write("config.json", "[1");
  expect_error([&] { gpt_from_hugging_face(folder.str()); }, {"no JSON object"});
  EXPECT_FALSE(is_hugging_face(folder / "nothing"));
}

TEST(HuggingFace, AConfigNestedWithoutEndIsRefused) {
  TempFolder folder;
  const std::string open(400'000, '['), close(400'000, ']');
  folder.write("config.json", R"({"model_type": "gpt2", "vocab_size": )" + open + close + "}");
  expect_error([&] { gpt_from_hugging_face(folder.str()); }, {"config.json", "nested deeper than"});
}

TEST(HuggingFace, EveryDifferenceOfTheWeightsIsInOneError) {
  std::vector<NamedTensor> state = load_hugging_face(golden("bert"));
  BertOptions o = bert_from_hugging_face(golden("bert"));
  o.layers = 3, o.hidden = 16;
  expect_error([&] { bert_for_masked_lm(o)->load_state(state); },
               {"16 missing", "bert.encoder.layer.2.attention.self.query.weight",
                "6 of another shape", "bert.encoder.layer.0.intermediate.dense.weight"});
}

}  // namespace
}  // namespace tessera
