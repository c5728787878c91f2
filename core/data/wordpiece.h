// WordPiece as BERT has it (Devlin et al. 2019; Wu et al. 2016): text is cleaned, lower-cased and
// stripped of accents where the vocabulary is uncased, then cut at spaces and punctuation; each
// word is cut from its front into the longest pieces that the vocabulary has. Ids equal those of
// Hugging Face's BertTokenizer, with two exceptions: special tokens in the text are plain text
// here, and the tables of utf8proc (2.8: Unicode 15) and of Hugging Face differ in the newest code
// points and in unassigned ones. Invariant: any UTF-8 text can be encoded; unlike the other
// tokenizers this one does not keep all of it, so decode() gives the normalised text.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "core/data/tokenizer.h"

namespace tessera::data {

struct WordPieceOptions {
  bool lower_case = true;  // and strip accents: "uncased" vocabularies
};

class WordPieceTokenizer final : public Tokenizer {
 public:
  /// Reads a vocabulary of one piece a line, ids from 0; pieces within words begin with "##". Must
  /// have [UNK], [CLS], [SEP], [PAD] and [MASK]. Throws UserError naming file and line.
  static std::shared_ptr<const WordPieceTokenizer> open(const std::string& path,
                                                        WordPieceOptions options = {});

  std::string_view name() const override { return "wordpiece"; }
  int64_t vocab_size() const override { return int64_t(pieces_.size()); }
  /// Takes UTF-8 and adds no special tokens around it. A word that no pieces make up, or of more
  /// than 100 characters, becomes one unk().
  std::vector<TokenId> encode(std::string_view text) const override;
  /// Words with a space between them.
  std::string decode(std::span<const TokenId> ids) const override;

  TokenId pad() const { return pad_; }
  TokenId unk() const { return unk_; }
  TokenId cls() const { return cls_; }
  TokenId sep() const { return sep_; }
  TokenId mask() const { return mask_; }

 private:
  WordPieceTokenizer(std::vector<std::string> pieces, WordPieceOptions options,
                     const std::string& where);
  TokenId special(const char* piece, const std::string& where) const;
  void cut(std::string_view word, std::vector<TokenId>& out) const;

  std::vector<std::string> pieces_;                             // by id
  std::unordered_map<std::string_view, TokenId> first_, rest_;  // views of pieces_, without "##"
  WordPieceOptions options_;
  TokenId pad_, unk_, cls_, sep_, mask_;
};

}  // namespace tessera::data
