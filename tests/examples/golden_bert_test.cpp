// Compares BERT with Hugging Face's transformers from the same weights, in fp64: logits, loss,
// every gradient, with segments and padding (scripts/reference/make_golden_bert.py).
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/autograd/autograd.h"
#include "core/io/safetensors.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "examples/models/bert.h"
#include "tests/support/counted_ops.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr double kBound = 1e-12;  // of the tensor's largest value

double largest(const Tensor& x) { return amax(abs(x)).item<double>(); }

class GoldenBert : public testing::Test {
 protected:
  static std::string path() {
    const char* source = std::getenv("TESSERA_SOURCE");
    return std::string(source ? source : ".") + "/tests/golden/bert_tiny.safetensors";
  }
  GoldenBert() : file_(io::SafetensorsFile::open(path())) {
    json c = json::parse(file_.metadata().at("config"));
    options_ = {.vocab = c["vocab"],
                .context = c["context"],
                .layers = c["layers"],
                .heads = c["heads"],
                .dim = c["dim"],
                .hidden = c["hidden"],
                .dropout = 0,
                .attention_dropout = 0};
    classes_ = c["classes"];
  }
  models::BertInputs inputs() const {
    return {file_.load("ids"), file_.load("segments"), ne(file_.load("key_mask"), 0)};
  }

  void compare(const std::string& name, const Tensor& got) const {
    Tensor want = file_.load(name);
    ASSERT_EQ(got.shape(), want.shape()) << name;
    EXPECT_LE(largest(got.detach() - want), kBound * largest(want)) << name;
  }

  /// The model with the file's weights, its loss and gradients.
  void check(nn::Module& model, const std::string& head, const std::function<Tensor()>& logits_of) {
    model.to(kF64);
    model.eval();
    std::vector<NamedTensor> state;
    for (const io::TensorInfo& t : file_.tensors())
      if (t.name.starts_with(head + "/init/"))
        state.push_back({t.name.substr(head.size() + 6), file_.load(t.name)});
    model.load_state(state);
    Tensor logits = logits_of();
    compare(head + "/logits", logits);
    Tensor loss = cross_entropy(logits, file_.load(head + "/targets"), {.dim = -1});
    compare(head + "/loss", loss);
    loss.backward();
    size_t compared = 0;
    for (auto& [name, p] : model.named_parameters()) {
      ASSERT_TRUE(p.grad().defined()) << name;
      ++compared;
      // Softmax does not see what is added to all scores of a query: this gradient is rounding.
      if (name.ends_with("attention.self.key.bias"))
        EXPECT_LE(largest(p.grad()), 1e-15) << name;
      else
        compare(head + "/grad/" + name, p.grad());
    }
    EXPECT_EQ(compared, state.size());
  }

  io::SafetensorsFile file_;
  models::BertOptions options_;
  int64_t classes_ = 0;
};

TEST_F(GoldenBert, MaskedLanguageModel) {
  auto model = models::bert_for_masked_lm(options_);
  check(*model, "mlm", [&] { return (*model)(inputs()); });
}

TEST_F(GoldenBert, PaddingIsReadByTheTiledKernels) {
  auto model = models::bert_for_masked_lm(options_);
  test::CountedOps ops;
  Tensor(sum((*model)(inputs()))).backward();
  EXPECT_EQ(ops.of("attention"), options_.layers);
  EXPECT_EQ(ops.of("attention_grad"), options_.layers);
  EXPECT_EQ(ops.of("softmax"), 0);
}

TEST_F(GoldenBert, SequenceClassification) {
  auto model = models::bert_for_sequence_classification(options_, classes_);
  check(*model, "cls", [&] { return (*model)(inputs()); });
}

TEST(Bert, HasThePublishedNumberOfParameters) {
  nn::OnDevice nowhere(kMeta);
  nn::SkipInit none;
  EXPECT_EQ(models::Bert(models::bert_mini()).num_parameters(), 11'170'560);
  EXPECT_EQ(models::Bert(models::bert_base()).num_parameters(), 109'482'240);
  EXPECT_EQ(models::Bert(models::bert_large()).num_parameters(), 335'141'888);
  EXPECT_EQ(models::BertForMaskedLM(models::bert_base()).num_parameters(), 109'514'298);
  EXPECT_EQ(models::BertForMaskedLM(models::bert_large()).num_parameters(), 335'174'458);
}

TEST(Bert, RefusesWhatDoesNotFit) {
  models::BertOptions o{.vocab = 10, .context = 4, .layers = 1, .heads = 3, .dim = 8, .hidden = 8};
  EXPECT_THROW(models::Bert{o}, UserError);
  o.heads = 2;
  models::Bert model(o);
  EXPECT_THROW(model(zeros({1, 5}, {kI64})), ShapeError);
}

}  // namespace
}  // namespace tessera
