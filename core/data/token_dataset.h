// Windows of a token sequence for language models. A window of context T at `start` has the inputs
// tokens[start .. start+T) and the targets tokens[start+1 .. start+T+1). Invariant: where a window
// starts depends on the seed and the global sample number alone.
#pragma once
#include <string>

#include "core/data/dataset.h"
#include "core/data/tokens.h"

namespace tessera::data {

/// Windows over `tokens`; the base of both datasets below. `what` names the data in errors
/// ("training split").
class TokenDataset : public Dataset {
 public:
  /// Throws UserError, with both lengths, when not even one window fits. `vocab_size` > 0: ids at
  /// or above it are an error of read().
  TokenDataset(Tokens tokens, int64_t context, int64_t vocab_size, std::string what);

  const Tokens& tokens() const { return tokens_; }
  int64_t context() const { return context_; }
  /// Windows that do not overlap: (tokens - 1) / context. What remains at the end is left out.
  int64_t num_windows() const { return (tokens_.size() - 1) / context_; }
  /// First token of the sample's window.
  virtual int64_t start(const Sample& sample) const = 0;

  Batch allocate(int64_t rows) const override;
  void read(const Sample& sample, int64_t row, const Batch& to) const override;
  /// Throws io::FileChanged where the file behind the tokens was changed meanwhile.
  Batch finish(Batch read) const override;

 private:
  [[noreturn]] void refuse(int64_t id, int64_t at) const;
  Tokens tokens_;
  int64_t context_, vocab_size_;
  std::string what_;
};

/// Training: endless; sample number s starts at a place uniform in [0, tokens - context), drawn by
/// (seed, s).
class RandomWindows final : public TokenDataset {
 public:
  RandomWindows(Tokens tokens, int64_t context, uint64_t seed, int64_t vocab_size = 0,
                std::string what = "training split")
      : TokenDataset(std::move(tokens), context, vocab_size, std::move(what)), seed_(seed) {}
  int64_t size() const override { return 0; }
  int64_t start(const Sample& sample) const override;

 private:
  uint64_t seed_;
};

/// Validation: item i is the i-th of the windows that do not overlap.
class ConsecutiveWindows final : public TokenDataset {
 public:
  ConsecutiveWindows(Tokens tokens, int64_t context, int64_t vocab_size = 0,
                     std::string what = "validation split")
      : TokenDataset(std::move(tokens), context, vocab_size, std::move(what)) {}
  int64_t size() const override { return num_windows(); }
  int64_t start(const Sample& sample) const override { return sample.index * context(); }
};

}  // namespace tessera::data
