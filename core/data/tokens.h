// Token sequences, made from text files and folders by a tokenizer, or read from raw token files as
// nanoGPT writes them. Invariant: a sequence is immutable and shared; the first 90 % of a text
// (counted in characters) are for training, the rest is for validation.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/data/tokenizer.h"
#include "core/io/hash.h"
#include "core/io/mapping.h"

namespace tessera::data {

/// A sequence of ids, 2 bytes each where they fit, else 4; in memory or mapped from a file. Copies
/// share it. Where a mapped file is cut off meanwhile, ids read as 0; check_unchanged finds that
/// out.
class Tokens {
 public:
  Tokens() = default;
  static Tokens from_ids(std::span<const TokenId> ids);
  /// Raw little-endian u16 (nanoGPT's .bin), or u32 when the name ends in .u32 or .u32.bin. Mapped,
  /// not read. Throws UserError for a missing or empty file or a size that is no multiple of the
  /// width.
  static Tokens map_file(const std::string& path);

  int64_t size() const { return size_; }
  TokenId operator[](int64_t i) const {
    return wide_ ? TokenId(static_cast<const uint32_t*>(data_)[i])
                 : TokenId(static_cast<const uint16_t*>(data_)[i]);
  }
  /// Elements [begin, end).
  Tokens slice(int64_t begin, int64_t end) const;
  /// Largest id, -1 when empty; reads everything. In the same pass the ids enter `hash`, as u32
  /// whatever their width here. Throws io::FileChanged.
  TokenId max_and_hash(io::Xxh128& hash) const;
  /// Call it after reading: throws io::FileChanged when what was read so far may differ from what
  /// the file held when it was mapped. Does nothing for tokens in memory.
  void check_unchanged() const;

 private:
  std::shared_ptr<const void> owner_;  // of ids in memory
  Ref<io::Mapping> mapping_;           // of ids in a file
  const void* data_ = nullptr;
  int64_t size_ = 0;
  bool wide_ = false;
};

/// Text of a file, or of every text file below a folder, concatenated in the order of their paths.
/// Left out of folders: names that begin with a dot, build trees (they hold CMakeCache.txt),
/// symbolic links, and, with one warning, files that are not UTF-8 text. Throws UserError for a
/// missing, unreadable or empty path.
std::string read_text(const std::string& path);

struct TextSplit {
  std::string_view train, validation;
};
/// Cut after floor(0.9 * characters): code points for UTF-8 text, else bytes.
TextSplit split_text(std::string_view text);

struct TokenSplit {
  Tokens train, validation;
  int64_t vocab_size = 0;
  std::shared_ptr<const Tokenizer> tokenizer;  // null for token files without one
  io::Digest hash;  // of the ids of both splits, so of all that models learn from
};

/// `text:PATH`: the text of read_text, encoded by make_tokenizer(tokenizer, whole text) and split
/// 90/10; a folder with train.txt and validation.txt is split into these. `tokens:PATH`: a token
/// file, split 90/10, or a folder with train.bin and val.bin; `tokenizer` may be empty, then
/// vocab_size is the largest id + 1. Either way the ids are read once, for their hash. Throws
/// UserError for another kind, and what read_text, map_file and the tokenizer throw.
TokenSplit load_tokens(const std::string& kind_and_path, const std::string& tokenizer);

}  // namespace tessera::data
