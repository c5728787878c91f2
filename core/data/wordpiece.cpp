#include "core/data/wordpiece.h"

#include <utf8proc.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/data/utf8.h"
#include "core/io/file.h"

namespace tessera::data {
namespace {

constexpr uint64_t kMaxFileBytes = 64 << 20;
constexpr size_t kMaxCharacters = 100;  // of a word that is looked up

enum class Kind { kDropped, kSpace, kAlone, kLetter };

bool is_cjk(uint32_t c) {  // blocks of Chinese characters, each of which BERT takes as a word
  constexpr std::pair<uint32_t, uint32_t> kBlocks[] = {
      {0x4E00, 0x9FFF},   {0x3400, 0x4DBF},   {0x20000, 0x2A6DF}, {0x2A700, 0x2B73F},
      {0x2B740, 0x2B81F}, {0x2B820, 0x2CEAF}, {0xF900, 0xFAFF},   {0x2F800, 0x2FA1F}};
  return std::any_of(std::begin(kBlocks), std::end(kBlocks),
                     [c](auto block) { return c >= block.first && c <= block.second; });
}

Kind kind_of(uint32_t c) {
  if (c < 0x80) {
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r') return Kind::kSpace;
    if (c < 0x20 || c == 0x7F) return Kind::kDropped;
    bool letter = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    return letter ? Kind::kLetter : Kind::kAlone;
  }
  if (c == 0xFFFD) return Kind::kDropped;
  switch (utf8proc_category(utf8proc_int32_t(c))) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN: return Kind::kDropped;
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP: return Kind::kSpace;
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO: return Kind::kAlone;
    default: return is_cjk(c) ? Kind::kAlone : Kind::kLetter;
  }
}

/// Calls `word` with each word of `text`, normalised.
template <class F>
void for_each_word(std::string_view text, bool lower_case, F word) {
  std::string now;
  auto end = [&] {
    if (!now.empty()) word(now);
    now.clear();
  };
  auto take = [&](uint32_t c) {
    switch (kind_of(c)) {
      case Kind::kDropped: return;
      case Kind::kSpace: return end();
      case Kind::kAlone:
        end();
        append_utf8(now, c);
        return end();
      case Kind::kLetter: append_utf8(now, c);
    }
  };
  for (size_t at = 0; at < text.size();) {
    CodePoint c = decode_utf8(text, at);
    if (c.bytes == 0) check_utf8(text, "tokenizer wordpiece");
    at += c.bytes;
    if (!lower_case) {
      take(c.value);
    } else if (c.value < 0x80) {
      take(c.value >= 'A' && c.value <= 'Z' ? c.value + 32 : c.value);
    } else if (kind_of(c.value) != Kind::kDropped) {
      // The canonical decomposition, without its non-spacing marks.
      utf8proc_int32_t parts[16];
      auto lower = utf8proc_tolower(utf8proc_int32_t(c.value));
      utf8proc_ssize_t n = utf8proc_decompose_char(
          lower, parts, 16, utf8proc_option_t(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), nullptr);
      for (utf8proc_ssize_t i = 0; i < std::min<utf8proc_ssize_t>(n, 16); ++i)
        if (utf8proc_category(parts[i]) != UTF8PROC_CATEGORY_MN) take(uint32_t(parts[i]));
    }
  }
  end();
}

}  // namespace

std::shared_ptr<const WordPieceTokenizer> WordPieceTokenizer::open(const std::string& path,
                                                                   WordPieceOptions options) {
  std::string where = fmt::format("tokenizer: {}", io::quote(path));
  std::string text = io::read_file(path, "tokenizer", kMaxFileBytes);
  check_utf8(text, where);
  std::vector<std::string> pieces;
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line = std::string_view(text).substr(at, end - at);
    if (line.ends_with('\r')) line.remove_suffix(1);
    TESSERA_CHECK(!line.empty(), "{} line {}: is empty; a vocabulary has one piece a line", where,
                  pieces.size() + 1);
    pieces.emplace_back(line);
    at = end + 1;
  }
  return std::shared_ptr<const WordPieceTokenizer>(
      new WordPieceTokenizer(std::move(pieces), options, where));
}

WordPieceTokenizer::WordPieceTokenizer(std::vector<std::string> pieces, WordPieceOptions options,
                                       const std::string& where)
    : pieces_(std::move(pieces)), options_(options) {
  for (size_t id = 0; id < pieces_.size(); ++id) {
    std::string_view piece = pieces_[id];
    bool inside = piece.starts_with("##") && piece.size() > 2;
    auto& of = inside ? rest_ : first_;
    bool fresh = of.emplace(inside ? piece.substr(2) : piece, TokenId(id)).second;
    TESSERA_CHECK(fresh, "{} line {}: {} was given before", where, id + 1, io::quote(piece));
  }
  pad_ = special("[PAD]", where);
  unk_ = special("[UNK]", where);
  cls_ = special("[CLS]", where);
  sep_ = special("[SEP]", where);
  mask_ = special("[MASK]", where);
}

TokenId WordPieceTokenizer::special(const char* piece, const std::string& where) const {
  auto at = first_.find(piece);
  TESSERA_CHECK(at != first_.end(), "{}: has no piece {}; is it a WordPiece vocabulary?", where,
                piece);
  return at->second;
}

std::vector<TokenId> WordPieceTokenizer::encode(std::string_view text) const {
  std::vector<TokenId> ids;
  for_each_word(text, options_.lower_case, [&](std::string_view word) { cut(word, ids); });
  return ids;
}

/// The longest piece that the rest of the word begins with, again and again.
void WordPieceTokenizer::cut(std::string_view word, std::vector<TokenId>& out) const {
  size_t before = out.size();
  bool known = count_code_points(word) <= kMaxCharacters;
  for (size_t begin = 0; known && begin < word.size();) {
    const auto& pieces = begin == 0 ? first_ : rest_;
    size_t end = word.size();
    auto at = pieces.end();
    while (end > begin && (at = pieces.find(word.substr(begin, end - begin))) == pieces.end()) {
      --end;  // back to where a code point begins
      while (end > begin && (static_cast<unsigned char>(word[end]) & 0xC0) == 0x80) --end;
    }
    known = end > begin;
    if (known) out.push_back(at->second);
    begin = end;
  }
  if (known) return;
  out.resize(before);
  out.push_back(unk_);
}

std::string WordPieceTokenizer::decode(std::span<const TokenId> ids) const {
  std::string text;
  for (TokenId id : ids) {
    check_id(id);
    std::string_view piece = pieces_[size_t(id)];
    bool inside = piece.starts_with("##") && piece.size() > 2;
    if (!inside && !text.empty()) text += ' ';
    text += inside ? piece.substr(2) : piece;
  }
  return text;
}

}  // namespace tessera::data
