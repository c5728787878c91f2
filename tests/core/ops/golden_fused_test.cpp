// Golden cases of the fused operations of neural networks; and the list of cases that
// nothing here answers, each with its reason: a case that is neither fails.
#include <gtest/gtest.h>

#include <set>

#include "core/ops/contract.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "tests/core/ops/golden.h"

namespace tessera::golden {
namespace {

using C = const Case&;

Call just(Tensor (*f)(C)) {
  return [f](C c) { return std::vector<Tensor>{f(c)}; };
}
Tensor or_none(C c, const char* input) { return c.has(input) ? c[input] : Tensor(); }

const std::map<std::string, std::string> kElsewhere = {
    {"SGD", "tests/core/optim"},
    {"Adam", "tests/core/optim"},
    {"AdamW", "tests/core/optim"},
    {"RMSprop", "tests/core/optim"},
    {"Adagrad", "tests/core/optim"},
    {"Lion", "tests/core/optim"},
    {"clip_grad_norm", "tests/core/optim"},
    {"schedule", "tests/core/optim"},
    {"addmm", "spelled beta * c + alpha * matmul(a, b): a zero beta is the caller's to leave out"},
};
// Single cases of operations that have others.
const std::map<std::string, std::string> kUnanswered = {
    {"cross_entropy/probabilities", "targets are class numbers only"},
};

Tensor attend(C c) {
  AttentionOptions o{.mask = or_none(c, "mask"),
                     .causal = c.variant().starts_with("causal") || c.variant() == "scale"};
  if (c.variant() == "scale") o.scale = c.real("scale");
  Tensor k = c["k"], v = c["v"];
  if (c.variant() == "grouped_queries") {  // each head of k and v serves as many heads of q
    int64_t groups = c["q"].size(-3) / k.size(-3);
    auto grouped = [&](const Tensor& t) {
      Shape s = t.shape();
      s.insert(s.size() - 2, groups);
      return flatten(expand(unsqueeze(t, -3), s), -4, -3);
    };
    k = grouped(k), v = grouped(v);
  }
  return scaled_dot_product_attention(c["q"], k, v, o);
}

Tensor entropy(C c) {
  CrossEntropyOptions o{.weight = or_none(c, "weight")};
  const auto& a = c.entry["attributes"];
  if (a.contains("label_smoothing")) o.label_smoothing = c.real("label_smoothing");
  if (a.contains("ignore_index")) o.ignore_index = c.integer("ignore_index");
  if (c.variant() == "all_ignored_sum") o.reduction = Reduction::kSum;
  if (a.contains("reduction")) {
    std::string r = c.text("reduction");
    o.reduction = r == "mean" ? Reduction::kMean : r == "sum" ? Reduction::kSum : Reduction::kNone;
  }
  return cross_entropy(c["x"], c["target"], o);
}

// Ours normalises the last dim; several dims are flattened into it.
Tensor normalised(C c) {
  int dims = int(c.entry["attributes"]["shape"].size());
  Tensor x = c["x"], weight = or_none(c, "weight"), bias = or_none(c, "bias");
  Tensor flat = dims > 1 ? flatten(x, -dims, -1) : x;
  auto last = [&](const Tensor& t) { return t.defined() && dims > 1 ? reshape(t, {-1}) : t; };
  double eps = c.entry["attributes"].contains("eps") ? c.real("eps") : 0x1p-52;
  Tensor y = c.op() == "layer_norm" ? layer_norm(flat, last(weight), last(bias), eps)
                                    : rms_norm(flat, last(weight), eps);
  return reshape(y, x.shape());
}

}  // namespace

const Table& fused_table() {
  static const Table table = {
      {"softmax", just([](C c) {
         if (c.variant() == "scalar") return softmax(c["x"], 0);
         return c.variant() == "dtype" ? softmax(cast(c["x"], kF64), 0)
                                       : softmax(c["x"], c.integer("dim"));
       })},
      {"log_softmax", just([](C c) { return log_softmax(c["x"], c.integer("dim")); })},
      {"embedding", just([](C c) {
         return c.variant() == "repeats"
                    ? embedding(c["index"], c["weight"])
                    : embedding(c["index"], c["weight"], c.integer("padding_idx"));
       })},
      {"cross_entropy", just(entropy)},
      {"layer_norm", just(normalised)},
      {"rms_norm", just([](C c) {
         return c.variant() == "formula" ? rms_norm(c["x"], c["weight"], c.real("eps"))
                                         : normalised(c);
       })},
      {"scaled_dot_product_attention", just(attend)},
  };
  return table;
}

TEST(Golden, Fused) {
  for (const std::string& name : case_names()) {
    auto it = fused_table().find(name.substr(0, name.find('/')));
    if (it != fused_table().end() && !kUnanswered.contains(name)) check(name, it->second);
  }
}

TEST(Golden, EveryCaseIsAnsweredOrListed) {
  std::set<std::string> known;
  for (const Table* t : {&elementwise_table(), &tensor_table(), &fused_table(), &conv_table(),
                         &linalg_table(), &sparse_table()})
    for (auto& [op, call] : *t) known.insert(op);
  std::set<std::string> all(case_names().begin(), case_names().end()), ops;
  for (const std::string& name : all) {
    std::string op = name.substr(0, name.find('/'));
    ops.insert(op);
    EXPECT_TRUE(known.contains(op) != kElsewhere.contains(op)) << name;
  }
  for (auto& [op, reason] : kElsewhere)
    EXPECT_TRUE(ops.contains(op)) << op << " is listed but has no case";
  for (auto& [name, reason] : kUnanswered)
    EXPECT_TRUE(all.contains(name)) << name << " is listed but is no case";
}

}  // namespace tessera::golden
