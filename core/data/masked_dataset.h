// Rows for masked language modelling (Devlin et al. 2019): [CLS], T - 2 tokens of a window, [SEP].
// A fixed share of a row's tokens is chosen (for training, anew each time a window is drawn): 80 %
// of those become [MASK], 10 % a random token, 10 % stay; they alone are targets. Invariant: what a
// row holds depends on the seed and the sample alone, and every row has equally many targets, so a
// mean over targets is the mean over ranks' means.
#pragma once
#include <string>

#include "core/data/dataset.h"
#include "core/data/tokens.h"

namespace tessera::data {

struct MaskingOptions {
  int64_t length = 128;    // T, special tokens included
  double share = 0.15;     // of the T - 2 tokens; at least one
  int64_t vocab_size = 0;  // random tokens are drawn from [0, vocab_size)
  TokenId cls = 0, sep = 0, mask = 0;
  uint64_t seed = 0;
  bool random_windows = true;  // training: endless; false: windows that do not overlap, in order
};

class MaskedDataset final : public Dataset {
 public:
  /// What a position that is no target has as target; cross_entropy leaves it out.
  static constexpr int64_t kNoTarget = -100;

  /// `what` names the data in errors. Throws UserError when not one window fits.
  MaskedDataset(Tokens tokens, const MaskingOptions& options, std::string what);

  int64_t size() const override;
  Batch allocate(int64_t rows) const override;
  void read(const Sample& sample, int64_t row, const Batch& to) const override;
  /// Throws io::FileChanged where the file behind the tokens was changed meanwhile.
  Batch finish(Batch read) const override;
  /// Targets of a row.
  int64_t num_targets() const { return targets_; }

 private:
  [[noreturn]] void refuse(int64_t id, int64_t at) const;
  Tokens tokens_;
  MaskingOptions o_;
  std::string what_;
  int64_t words_, targets_;
};

}  // namespace tessera::data
