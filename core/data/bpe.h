// Byte-level BPE as GPT-2 does it (Radford et al. 2019; Sennrich, Haddow and Birch 2016): the text
// is split into words by GPT-2's pattern, then in each word the adjacent pair whose bytes have the
// lowest rank is merged until none has one. Invariant: every single byte has a rank, so any UTF-8
// text can be encoded and comes back unchanged.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "core/data/gpt2_split.h"
#include "core/data/tokenizer.h"

namespace tessera::data {

class BpeTokenizer final : public Tokenizer {
 public:
  /// Reads a tiktoken ranks file: lines `base64 rank`, ranks 0, 1, 2, ... in any order. Throws
  /// UserError naming file and line for anything else, and for vocabularies known to need another
  /// split than GPT-2's.
  static std::shared_ptr<const BpeTokenizer> open(const std::string& path);

  std::string_view name() const override { return "gpt2-bpe"; }
  /// One more than there are ranks: the id after the last rank is <|endoftext|>. GPT-2 has 50,257.
  int64_t vocab_size() const override { return int64_t(tokens_.size()) + 1; }
  TokenId end_of_text() const { return TokenId(tokens_.size()); }
  /// Takes UTF-8; "<|endoftext|>" inside it is encoded as plain text.
  std::vector<TokenId> encode(std::string_view text) const override;
  /// Returns bytes, perhaps no UTF-8: ids from the middle of a text may begin or end inside a
  /// character.
  std::string decode(std::span<const TokenId> ids) const override;

 private:
  BpeTokenizer(std::vector<std::string> tokens, const std::string& where);
  TokenId rank_of(std::string_view bytes) const;
  void merge(std::string_view word, std::vector<TokenId>& out) const;

  std::vector<std::string> tokens_;                        // by rank
  std::unordered_map<std::string_view, TokenId> rank_of_;  // views of tokens_
  Gpt2Split split_;
};

/// Decodes base64 with padding (RFC 4648); false when `text` is not that.
bool decode_base64(std::string_view text, std::string* out);

}  // namespace tessera::data
