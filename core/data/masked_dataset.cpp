#include "core/data/masked_dataset.h"

#include <algorithm>
#include <cmath>

#include "core/base/error.h"
#include "core/data/permutation.h"

namespace tessera::data {

MaskedDataset::MaskedDataset(Tokens tokens, const MaskingOptions& options, std::string what)
    : tokens_(std::move(tokens)), o_(options), what_(std::move(what)) {
  TESSERA_CHECK(o_.length >= 3,
                "data: sequence length {} is out of range; use at least 3: a token "
                "between [CLS] and [SEP]",
                o_.length);
  words_ = o_.length - 2;
  TESSERA_CHECK(o_.share > 0 && o_.share <= 1, "data: mask share {} is out of range; use (0, 1]",
                o_.share);
  TESSERA_CHECK(tokens_.size() >= words_,
                "data: the {} has {} tokens, a sequence of length {} needs {}; use a shorter "
                "length or more data",
                what_, tokens_.size(), o_.length, words_);
  targets_ = std::max<int64_t>(1, std::llround(o_.share * double(words_)));
}

int64_t MaskedDataset::size() const { return o_.random_windows ? 0 : tokens_.size() / words_; }

Batch MaskedDataset::allocate(int64_t rows) const {
  return {empty({rows, o_.length}, kI64), empty({rows, o_.length}, kI64)};
}

void MaskedDataset::read(const Sample& sample, int64_t row, const Batch& to) const {
  auto number = uint64_t(o_.random_windows ? sample.number : sample.index);
  int64_t from = o_.random_windows ? uniform_below(tokens_.size() - words_ + 1, o_.seed,
                                                   RandomUse::kWindow, number)
                                   : sample.index * words_;
  int64_t* inputs = to.inputs.data<int64_t>() + row * o_.length;
  int64_t* targets = to.targets.data<int64_t>() + row * o_.length;
  std::fill_n(targets, o_.length, kNoTarget);
  inputs[0] = o_.cls;
  inputs[o_.length - 1] = o_.sep;
  for (int64_t t = 0; t < words_; ++t) {
    int64_t id = tokens_[from + t];
    if (id < 0 || id >= o_.vocab_size) refuse(id, from + t);
    inputs[1 + t] = id;
  }
  // The first positions of a permutation of the row, which this sample alone has.
  uint64_t key = low64(philox4x32(o_.seed, uint64_t(RandomUse::kMask) << 56, number));
  for (int64_t k = 0; k < targets_; ++k) {
    int64_t t = 1 + permute(k, words_, key, 0);
    targets[t] = inputs[t];
    int64_t fate = uniform_below(10, key, RandomUse::kMask, uint64_t(2 * k));
    if (fate < 8)
      inputs[t] = o_.mask;
    else if (fate == 8)
      inputs[t] = uniform_below(o_.vocab_size, key, RandomUse::kMask, uint64_t(2 * k + 1));
  }
}

void MaskedDataset::refuse(int64_t id, int64_t at) const {
  tokens_.check_unchanged();  // throws where that is why
  throw UserError(fmt::format(
      "data: the {} has id {} at token {}, but the vocabulary has {}; was another tokenizer used?",
      what_, id, at, o_.vocab_size));
}

Batch MaskedDataset::finish(Batch read) const {
  tokens_.check_unchanged();
  return read;
}

}  // namespace tessera::data
