#include "core/data/tokenizer.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "core/base/error.h"
#include "core/data/bpe.h"
#include "core/data/utf8.h"
#include "core/data/wordpiece.h"
#include "core/io/file.h"

namespace tessera::data {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::string_view name() const override { return "byte"; }
  int64_t vocab_size() const override { return 256; }
  std::vector<TokenId> encode(std::string_view text) const override {
    std::vector<TokenId> ids(text.size());
    std::transform(text.begin(), text.end(), ids.begin(),
                   [](char c) { return TokenId(static_cast<unsigned char>(c)); });
    return ids;
  }
  std::string decode(std::span<const TokenId> ids) const override {
    std::string out;
    for (TokenId id : ids) check_id(id), out += char(id);
    return out;
  }
};

class CharTokenizer final : public Tokenizer {
 public:
  explicit CharTokenizer(std::string_view text) {
    check_utf8(text, "tokenizer char");
    TESSERA_CHECK(!text.empty(),
                  "tokenizer char: the text is empty; its characters are the vocabulary");
    std::vector<bool> seen(0x110000);
    for (size_t at = 0; at < text.size();) {
      CodePoint c = decode_utf8(text, at);
      seen[c.value] = true;
      at += c.bytes;
    }
    ascii_.fill(-1);
    for (uint32_t c = 0; c < seen.size(); ++c) {
      if (!seen[c]) continue;
      if (c < ascii_.size()) ascii_[c] = TokenId(characters_.size());
      characters_.push_back(c);
    }
  }
  std::string_view name() const override { return "char"; }
  int64_t vocab_size() const override { return int64_t(characters_.size()); }
  std::vector<TokenId> encode(std::string_view text) const override {
    std::vector<TokenId> ids;
    ids.reserve(text.size());
    for (size_t at = 0; at < text.size();) {
      CodePoint c = decode_utf8(text, at);
      if (c.bytes == 0) check_utf8(text, "tokenizer char");
      TokenId id = find(c.value);
      TESSERA_CHECK(id >= 0,
                    "tokenizer char: {} (U+{:04X}) at offset {} is not among the {} characters of "
                    "the vocabulary",
                    io::quote(text.substr(at, c.bytes)), c.value, at, characters_.size());
      ids.push_back(id);
      at += c.bytes;
    }
    return ids;
  }
  std::string decode(std::span<const TokenId> ids) const override {
    std::string out;
    for (TokenId id : ids) check_id(id), append_utf8(out, characters_[size_t(id)]);
    return out;
  }
  std::string state() const override {
    std::string out;
    for (uint32_t c : characters_) append_utf8(out, c);
    return out;
  }

 private:
  TokenId find(uint32_t c) const {
    if (c < ascii_.size()) return ascii_[c];
    auto at = std::lower_bound(characters_.begin(), characters_.end(), c);
    return at != characters_.end() && *at == c ? TokenId(at - characters_.begin()) : -1;
  }
  std::vector<uint32_t> characters_;  // ascending
  std::array<TokenId, 128> ascii_;
};

}  // namespace

void Tokenizer::check_id(TokenId id) const {
  TESSERA_CHECK(id >= 0 && id < vocab_size(),
                "tokenizer {}: cannot decode {}, ids are in [0, {}); was another tokenizer "
                "used?",
                name(), id, vocab_size());
}

std::shared_ptr<const Tokenizer> make_tokenizer(const std::string& spec, std::string_view text) {
  if (spec == "byte") return std::make_shared<ByteTokenizer>();
  if (spec == "char") return std::make_shared<CharTokenizer>(text);
  constexpr std::string_view kWordPiece = "wordpiece:";
  if (spec.starts_with(kWordPiece)) return WordPieceTokenizer::open(spec.substr(kWordPiece.size()));
  std::error_code error;
  TESSERA_CHECK(std::filesystem::exists(spec, error),
                "tokenizer: {} is neither byte, char nor wordpiece:PATH nor an existing file; give "
                "one of them",
                io::quote(spec));
  return BpeTokenizer::open(spec);
}

}  // namespace tessera::data
