#include "core/data/token_dataset.h"

#include "core/base/error.h"
#include "core/data/permutation.h"

namespace tessera::data {

TokenDataset::TokenDataset(Tokens tokens, int64_t context, int64_t vocab_size, std::string what)
    : tokens_(std::move(tokens)),
      context_(context),
      vocab_size_(vocab_size),
      what_(std::move(what)) {
  TESSERA_CHECK(context_ >= 1, "data: context {} is out of range; use at least 1", context_);
  TESSERA_CHECK(tokens_.size() - 1 >= context_,
                "data: the {} has {} tokens, a window of context {} needs {}; use a shorter "
                "context or more data",
                what_, tokens_.size(), context_, uint64_t(context_) + 1);
}

Batch TokenDataset::allocate(int64_t rows) const {
  return {empty({rows, context_}, kI64), empty({rows, context_}, kI64)};
}

void TokenDataset::read(const Sample& sample, int64_t row, const Batch& to) const {
  int64_t from = start(sample);
  TESSERA_ASSERT(from >= 0 && from + context_ < tokens_.size(), "window at {} of {} tokens", from,
                 tokens_.size());
  int64_t* inputs = to.inputs.data<int64_t>() + row * context_;
  int64_t* targets = to.targets.data<int64_t>() + row * context_;
  for (int64_t t = 0; t <= context_; ++t) {
    int64_t id = tokens_[from + t];
    if (id < 0 || (vocab_size_ != 0 && id >= vocab_size_)) refuse(id, from + t);
    if (t < context_) inputs[t] = id;
    if (t > 0) targets[t - 1] = id;
  }
}

void TokenDataset::refuse(int64_t id, int64_t at) const {
  tokens_.check_unchanged();  // throws where that is why
  throw UserError(fmt::format(
      "data: the {} has id {} at token {}, but the vocabulary has {}; was another tokenizer used?",
      what_, id, at, vocab_size_));
}

Batch TokenDataset::finish(Batch read) const {
  tokens_.check_unchanged();
  return read;
}

int64_t RandomWindows::start(const Sample& sample) const {
  return uniform_below(tokens().size() - context(), seed_, RandomUse::kWindow,
                       uint64_t(sample.number));
}

}  // namespace tessera::data
