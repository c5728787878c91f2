// Generates text: one token per forward, drawn on the host with a uniform number that depends only
// on the key and the position.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/autograd/autograd.h"
#include "core/ops/views.h"
#include "core/tensor/philox.h"
#include "examples/models/gpt.h"

namespace tessera::models {
namespace {

// Draws an index from softmax(logits / temperature) among the top_k largest; `u` is in [0, 1).
int64_t draw_from(const std::vector<double>& logits, const GenerateOptions& o, double u) {
  std::vector<int64_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  auto likelier = [&](int64_t a, int64_t b) {
    return logits[size_t(a)] != logits[size_t(b)] ? logits[size_t(a)] > logits[size_t(b)] : a < b;
  };
  if (o.temperature == 0) return *std::ranges::min_element(ids, likelier);
  size_t keep = o.top_k > 0 ? std::min(size_t(o.top_k), ids.size()) : ids.size();
  std::partial_sort(ids.begin(), ids.begin() + int64_t(keep), ids.end(), likelier);
  ids.resize(keep);
  std::vector<double> sums;
  double total = 0;
  for (int64_t id : ids)
    sums.push_back(total +=
                   std::exp((logits[size_t(id)] - logits[size_t(ids[0])]) / o.temperature));
  size_t at = size_t(std::ranges::upper_bound(sums, u * total) - sums.begin());
  return ids[std::min(at, keep - 1)];
}

std::vector<double> last_logits(Gpt& model, const std::vector<int64_t>& ids) {
  int64_t T = std::min<int64_t>(int64_t(ids.size()), model.options.context);
  Tensor window = from_values<int64_t>(std::span(ids).last(size_t(T)), {1, T});
  const Tensor logits = model(window.to(model.parameters().front().device()));
  const Tensor row = contiguous(select(select(logits, 0, 0), 0, T - 1)).to(kF64).cpu();
  return {row.values<double>(), row.values<double>() + row.numel()};
}

}  // namespace

std::vector<int64_t> generate(Gpt& model, std::vector<int64_t> prompt, GenerateOptions o) {
  TESSERA_CHECK(!prompt.empty(), "generate: the prompt is empty; give at least one token");
  TESSERA_CHECK(o.temperature >= 0 && o.top_k >= 0 && o.tokens >= 0,
                "generate: temperature {}, top_k {} or tokens {} is negative", o.temperature,
                o.top_k, o.tokens);
  InferenceMode off;
  bool was_training = model.training();
  model.eval();
  for (int64_t i = 0; i < o.tokens; ++i) {
    double u = double(low64(philox4x32(o.key, 0, uint64_t(i))) >> 11) * 0x1p-53;
    prompt.push_back(draw_from(last_logits(model, prompt), o, u));
  }
  model.train(was_training);
  return prompt;
}

}  // namespace tessera::models
