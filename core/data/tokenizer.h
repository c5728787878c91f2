// A tokenizer turns text into integers and back. Invariant: decode(encode(text)) == text, byte for
// byte, for every text that encode accepts; any other text is an error that names the offset, never
// a silent replacement. WordPiece is the exception, by its definition (wordpiece.h).
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

using TokenId = int32_t;

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string_view name() const = 0;
  /// Ids are in [0, vocab_size()).
  virtual int64_t vocab_size() const = 0;
  /// Thread-safe. Throws UserError, naming the offset, for text that the vocabulary cannot express.
  virtual std::vector<TokenId> encode(std::string_view text) const = 0;
  /// Thread-safe. Throws UserError for ids outside the vocabulary.
  virtual std::string decode(std::span<const TokenId> ids) const = 0;
  /// The text from which make_tokenizer(spec, state()) makes this tokenizer again: the characters
  /// of `char`, empty for the others. Keep it with the weights.
  virtual std::string state() const { return {}; }

 protected:
  void check_id(TokenId id) const;
};

/// `byte`: 256 ids, any text. `char`: the distinct characters (code points) of `text`, sorted;
/// `text` must be UTF-8. `wordpiece:PATH`: BERT's, uncased, with the vocabulary in that file.
/// Anything else: path of a tiktoken ranks file (GPT-2's byte-level BPE).
/// Throws UserError naming the spec.
std::shared_ptr<const Tokenizer> make_tokenizer(const std::string& spec, std::string_view text);

}  // namespace tessera::data
