#include "core/data/bpe.h"

#include <charconv>
#include <queue>

#include "core/base/error.h"
#include "core/data/utf8.h"
#include "core/io/file.h"

namespace tessera::data {
namespace {

constexpr uint64_t kMaxFileBytes = 64 << 20;
constexpr size_t kMaxRanks = 1 << 20;
constexpr size_t kCachedWordBytes = 32, kCachedWords = 1 << 16;
constexpr std::string_view kEndOfText = "<|endoftext|>";

int base64_value(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

}  // namespace

bool decode_base64(std::string_view text, std::string* out) {
  out->clear();
  if (text.empty() || text.size() % 4 != 0) return false;
  size_t padding = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    bool pad = i >= text.size() - padding;
    int value = pad ? 0 : base64_value(text[i]);
    if (value < 0) return false;
    bits = bits << 6 | uint32_t(value);
    if (i % 4 == 3) out->append({char(bits >> 16), char(bits >> 8), char(bits)});
  }
  out->resize(out->size() - padding);
  return true;
}

std::shared_ptr<const BpeTokenizer> BpeTokenizer::open(const std::string& path) {
  std::string where = fmt::format("tokenizer: {}", io::quote(path));
  std::string text = io::read_file(path, "tokenizer", kMaxFileBytes);
  std::vector<std::string> tokens;
  std::vector<bool> given;
  size_t line_number = 0;
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line = std::string_view(text).substr(at, end - at);
    at = end + 1;
    ++line_number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    size_t space = std::min(line.find(' '), line.size());
    std::string_view digits = line.substr(std::min(space + 1, line.size()));
    std::string bytes;
    size_t rank = 0;
    auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
    TESSERA_CHECK(decode_base64(line.substr(0, space), &bytes) && error == std::errc() &&
                      stop == digits.data() + digits.size() && rank < kMaxRanks,
                  "{}: line {} is {}, expected `base64 rank` as in tiktoken's files; give a ranks "
                  "file, byte or char",
                  where, line_number, io::quote(line));
    if (rank >= tokens.size()) tokens.resize(rank + 1), given.resize(rank + 1);
    TESSERA_CHECK(!given[rank], "{}: line {} gives rank {} a second time; get the file again",
                  where, line_number, rank);
    given[rank] = true;
    tokens[rank] = std::move(bytes);
  }
  TESSERA_CHECK(!tokens.empty(), "{}: the file is empty; give a tiktoken ranks file, byte or char",
                where);
  for (size_t rank = 0; rank < given.size(); ++rank)
    TESSERA_CHECK(given[rank], "{}: rank {} is missing below {}; get the file again", where, rank,
                  given.size());
  // cl100k_base and o200k_base have their own patterns: GPT-2's would give plausible, wrong tokens.
  TESSERA_CHECK(tokens.size() != 100256 && tokens.size() != 199998,
                "{}: {} ranks are of a newer tokenizer with another word pattern, which is not "
                "supported; use GPT-2's "
                "(50256 ranks)",
                where, tokens.size());
  return std::shared_ptr<const BpeTokenizer>(new BpeTokenizer(std::move(tokens), where));
}

BpeTokenizer::BpeTokenizer(std::vector<std::string> tokens, const std::string& where)
    : tokens_(std::move(tokens)) {
  rank_of_.reserve(tokens_.size());
  for (size_t rank = 0; rank < tokens_.size(); ++rank)
    TESSERA_CHECK(rank_of_.emplace(tokens_[rank], TokenId(rank)).second,
                  "{}: rank {} has the same bytes as an earlier one; get the file again", where,
                  rank);
  for (int byte = 0; byte < 256; ++byte) {
    char c = char(byte);
    TESSERA_CHECK(rank_of({&c, 1}) >= 0,
                  "{}: the single byte 0x{:02x} has no rank; get the file again", where, byte);
  }
}

TokenId BpeTokenizer::rank_of(std::string_view bytes) const {
  auto at = rank_of_.find(bytes);
  return at == rank_of_.end() ? -1 : at->second;
}

// Parts are a linked list over byte offsets; candidate pairs wait in a heap, lowest rank and then
// leftmost first. An entry is stale when its left part is gone or the pair no longer ends where it
// did. O(n log n) in the word's length.
void BpeTokenizer::merge(std::string_view word, std::vector<TokenId>& out) const {
  struct Pair {
    TokenId rank;
    uint32_t left, end;
    bool operator>(const Pair& o) const { return rank != o.rank ? rank > o.rank : left > o.left; }
  };
  const uint32_t n = uint32_t(word.size());
  std::vector<uint32_t> next(n),
      previous(n);  // of the part that begins at an offset; `next` is also its end
  std::vector<bool> alive(n, true);
  std::priority_queue<Pair, std::vector<Pair>, std::greater<>> heap;
  auto consider = [&](uint32_t left) {
    if (next[left] >= n) return;
    uint32_t end = next[next[left]];
    TokenId rank = rank_of(word.substr(left, end - left));
    if (rank >= 0) heap.push({rank, left, end});
  };
  for (uint32_t i = 0; i < n; ++i) next[i] = i + 1, previous[i] = i - 1;
  for (uint32_t i = 0; i < n; ++i) consider(i);
  while (!heap.empty()) {
    Pair p = heap.top();
    heap.pop();
    if (!alive[p.left] || next[p.left] >= n || next[next[p.left]] != p.end) continue;
    alive[next[p.left]] = false;
    next[p.left] = p.end;
    if (p.end < n) previous[p.end] = p.left;
    consider(p.left);
    if (p.left > 0) consider(previous[p.left]);
  }
  for (uint32_t i = 0; i < n; i = next[i]) out.push_back(rank_of(word.substr(i, next[i] - i)));
}

std::vector<TokenId> BpeTokenizer::encode(std::string_view text) const {
  check_utf8(text, "tokenizer gpt2-bpe");
  std::vector<TokenId> out;
  std::unordered_map<std::string_view, std::pair<uint32_t, uint32_t>>
      seen;  // word -> where in `out` its ids are
  split_.for_each(text, [&](std::string_view word) {
    if (TokenId whole = rank_of(word); whole >= 0) {
      out.push_back(whole);
      return;
    }
    TESSERA_CHECK(
        word.size() < (uint64_t(1) << 31) && out.size() < (uint64_t(1) << 32) - word.size(),
        "tokenizer gpt2-bpe: the text is too long for one call; encode it in parts");
    if (word.size() <= kCachedWordBytes) {
      if (auto at = seen.find(word); at != seen.end()) {
        for (uint32_t i = at->second.first; i < at->second.second; ++i)
          out.push_back(TokenId(out[i]));
        return;
      }
    }
    uint32_t begin = uint32_t(out.size());
    merge(word, out);
    if (word.size() <= kCachedWordBytes && seen.size() < kCachedWords)
      seen.emplace(word, std::pair(begin, uint32_t(out.size())));
  });
  return out;
}

std::string BpeTokenizer::decode(std::span<const TokenId> ids) const {
  std::string out;
  for (TokenId id : ids) {
    check_id(id);
    out += id == end_of_text() ? kEndOfText : std::string_view(tokens_[size_t(id)]);
  }
  return out;
}

}  // namespace tessera::data
