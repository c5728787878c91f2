// Tokenizers: exact round trips, known encodings, refusals. GPT-2's ranks come from
// TESSERA_TEST_DATA.
#include "core/data/tokenizer.h"

#include "core/data/bpe.h"
#include "core/data/tokens.h"
#include "core/data/utf8.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

using Ids = std::vector<TokenId>;
constexpr std::string_view kMixed =
    "Déjà vu, it's 42 \t\n\n  o'clock — 東京 🙂\u00a0x\u2003y\r\n";

TEST(Utf8, AcceptsAndRefuses) {
  EXPECT_EQ(find_invalid_utf8(kMixed), std::string_view::npos);
  EXPECT_EQ(count_code_points("aé東🙂"), 4u);
  for (std::string_view bad :
       {"\x80", "\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xE6\x9D", "\xC3"})
    EXPECT_EQ(find_invalid_utf8(std::string("12345678 ok ") + std::string(bad)), 12u);
  std::string all;
  for (uint32_t c = 0; c < 0x110000; c = c == 0xD7FF ? 0xE000 : c + 1) append_utf8(all, c);
  EXPECT_EQ(find_invalid_utf8(all), std::string_view::npos);
  EXPECT_EQ(count_code_points(all), 0x110000u - 0x800);
}

TEST(Utf8, AnyBytesAreEscapedAndGivenBack) {
  std::string all;
  for (int i = 0; i < 256; ++i) all += char(i);
  for (const std::string& bytes :
       {all, std::string(kMixed), std::string("n\xff/\\x41\\"), std::string("\xff\xfe\\"),
        std::string("\xE6\x9D"), std::string()}) {
    const std::string text = escape_bytes(bytes);
    EXPECT_EQ(find_invalid_utf8(text), std::string_view::npos);
    EXPECT_EQ(unescape_bytes(text), bytes);
  }
  EXPECT_EQ(escape_bytes(kMixed), kMixed);
  EXPECT_EQ(escape_bytes("n\xff\\"), R"(n\xff\\)");
  EXPECT_EQ(unescape_bytes(R"(a\b\x4)"), R"(a\b\x4)");  // escapes nothing
}

TEST(ByteTokenizer, AnyBytes) {
  auto t = make_tokenizer("byte", "");
  std::string all;
  for (int i = 0; i < 256; ++i) all += char(i);
  EXPECT_EQ(t->vocab_size(), 256);
  EXPECT_EQ(t->encode(all)[200], 200);
  EXPECT_EQ(t->decode(t->encode(all)), all);
  expect_contains(error_of([&] { t->decode(Ids{256}); }), "cannot decode 256");
  expect_contains(error_of([&] { t->decode(Ids{-1}); }), "[0, 256)");
}

TEST(CharTokenizer, SortedCodePoints) {
  auto t = make_tokenizer("char", "bé a東");
  EXPECT_EQ(t->vocab_size(), 5);
  EXPECT_EQ(t->encode(" abé東"), (Ids{0, 1, 2, 3, 4}));
  EXPECT_EQ(t->decode(Ids{4, 1}), "東a");
  EXPECT_EQ(t->state(), " abé東");
  EXPECT_EQ(make_tokenizer("char", t->state())->encode("é"), Ids{3});
  std::string text = error_of([&] { t->encode("ab?"); });
  expect_contains(text, "U+003F");
  expect_contains(text, "offset 2");
  expect_contains(error_of([&] { t->encode("ü"); }), "U+00FC");  // between é and 東
  expect_contains(error_of([&] { make_tokenizer("char", "ab\xff"); }), "not UTF-8 at offset 2");
  expect_contains(error_of([&] { t->encode("ab\xff"); }), "not UTF-8 at offset 2");
  expect_contains(error_of([&] { make_tokenizer("char", ""); }), "empty");
}

std::string base64(std::string_view bytes) {
  const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k)
      bits = bits << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0);
    for (size_t k = 0; k < 4; ++k)
      out += i + k > bytes.size() ? '=' : digits[bits >> (18 - 6 * k) & 63];
  }
  return out;
}

std::string ranks_of(const std::vector<std::string>& merged) {
  std::string out;
  for (int i = 0; i < 256; ++i)
    out += base64(std::string(1, char(i))) + " " + std::to_string(i) + "\n";
  for (size_t i = 0; i < merged.size(); ++i)
    out += base64(merged[i]) + " " + std::to_string(256 + i) + "\n";
  return out;
}

TEST(Bpe, MergesLowestRankThenLeftmost) {
  TempFolder dir;
  auto t = make_tokenizer(dir.write("r", ranks_of({"ab", "bc", "abc", "aa", "aaaa"})), "");
  EXPECT_EQ(t->vocab_size(), 262);
  EXPECT_EQ(t->encode("abcbc"), (Ids{258, 257}));
  EXPECT_EQ(t->encode("aaa"), (Ids{259, 'a'}));
  EXPECT_EQ(t->encode("aaaaaaa"), (Ids{260, 259, 'a'}));
  EXPECT_EQ(t->decode(Ids{258, 261}), "abc<|endoftext|>");
  EXPECT_EQ(t->decode(t->encode(kMixed)), kMixed);
}

// The heap must do what the definition says: scan for the lowest rank, leftmost first, merge,
// repeat.
TEST(Bpe, EqualsTheSlowDefinition) {
  TempFolder dir;
  std::vector<std::string> merged{"ab",  "ba",  "aa",   "abab",  "bb",  "aba",
                                  "bbb", "aaa", "baab", "ababa", "aabb"};
  auto t = make_tokenizer(dir.write("r", ranks_of(merged)), "");
  auto rank = [&](const std::string& s) {
    if (s.size() == 1) return int(s[0]);
    auto at = std::find(merged.begin(), merged.end(), s);
    return at == merged.end() ? 1 << 30 : 256 + int(at - merged.begin());
  };
  for (uint32_t bits = 0; bits < 4096; ++bits) {
    std::string word;
    for (int i = 0; i < 12; ++i) word += bits >> i & 1 ? 'b' : 'a';
    std::vector<std::string> parts;
    for (char c : word) parts.emplace_back(1, c);
    while (true) {
      int best = 1 << 30;
      size_t at = 0;
      for (size_t i = 0; i + 1 < parts.size(); ++i)
        if (int r = rank(parts[i] + parts[i + 1]); r < best) best = r, at = i;
      if (best == 1 << 30) break;
      parts[at] += parts[at + 1];
      parts.erase(parts.begin() + long(at) + 1);
    }
    Ids want;
    for (const std::string& p : parts) want.push_back(rank(p));
    ASSERT_EQ(t->encode(word), want) << word;
  }
}

TEST(Bpe, BadRanksFiles) {
  TempFolder dir;
  auto with = [&](const std::string& text) {
    dir.write("r", text);
    return error_of([&] { make_tokenizer(dir / "r", ""); });
  };
  std::string good = ranks_of({});
  expect_contains(with(""), "empty");
  expect_contains(with("{\"version\": 1}"), "line 1 is '{\"version\": 1}', expected `base64 rank`");
  expect_contains(with(good + "YWI= x\n"), "line 257");
  expect_contains(with(good + "YWI= -1\n"), "line 257");
  expect_contains(with(good + "YWI= 99999999999999999999\n"), "line 257");
  expect_contains(with(good + "YWI 256\n"), "line 257");
  expect_contains(with(good + "YWI= 255\n"), "second time");
  expect_contains(with(good + "YWI= 257\n"), "rank 256 is missing");
  expect_contains(with(good + "YQ== 256\n"), "same bytes");
  expect_contains(with("YWI= 0\n"), "0x00 has no rank");
  expect_contains(error_of([&] { make_tokenizer("carh", ""); }),
                  "'carh' is neither byte, char nor wordpiece:PATH nor an existing");
  expect_contains(error_of([&] { make_tokenizer(dir.str(), ""); }), "is a folder");
}

TEST(Bpe, LongWordsAreFast) {
  TempFolder dir;
  auto t = make_tokenizer(dir.write("r", ranks_of({"aa", "aaaa", "  "})), "");
  for (char c : {'a', ' ', '\n', '!'}) {
    std::string text(300'000, c);
    EXPECT_EQ(t->decode(t->encode(text)), text);
  }
}

class Gpt2 : public testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("TESSERA_TEST_DATA");
    if (!folder) GTEST_SKIP() << "TESSERA_TEST_DATA is not set";
    data_ = folder;
    if (!std::filesystem::exists(data_ + "/gpt2.tiktoken"))
      GTEST_SKIP() << "no gpt2.tiktoken in " << data_;
  }
  std::string data_;
};

TEST_F(Gpt2, KnownEncodings) {
  auto t = make_tokenizer(data_ + "/gpt2.tiktoken", "");
  EXPECT_EQ(t->vocab_size(), 50257);
  EXPECT_EQ(t->encode("Hello world"), (Ids{15496, 995}));
  EXPECT_EQ(t->encode("Hello, world!"), (Ids{15496, 11, 995, 0}));
  EXPECT_EQ(t->encode(""), Ids{});
  EXPECT_EQ(t->encode("\n\n"), Ids{628});
  EXPECT_EQ(t->encode("hello   world"), (Ids{31373, 220, 220, 995}));
  EXPECT_EQ(t->encode("I'm"), (Ids{40, 1101}));
  EXPECT_EQ(t->encode("<|endoftext|>"), (Ids{27, 91, 437, 1659, 5239, 91, 29}));
  EXPECT_EQ(t->decode(Ids{50256}), "<|endoftext|>");
  EXPECT_EQ(t->decode(t->encode(kMixed)), kMixed);
  std::string every;
  for (uint32_t c = 0; c < 0x30000; c = c == 0xD7FF ? 0xE000 : c + 1) append_utf8(every, c);
  EXPECT_EQ(t->decode(t->encode(every)), every);
  expect_contains(error_of([&] { t->encode("a\xff"); }), "not UTF-8 at offset 1");
}

// nanoGPT's data/shakespeare/readme: 301,966 tokens train, 36,059 validation.
TEST_F(Gpt2, TinyShakespeare) {
  TokenSplit s = load_tokens("text:" + data_ + "/tinyshakespeare.txt", data_ + "/gpt2.tiktoken");
  EXPECT_EQ(s.train.size(), 301'966);
  EXPECT_EQ(s.validation.size(), 36'059);
  EXPECT_EQ(s.vocab_size, 50257);
  TokenSplit c = load_tokens("text:" + data_ + "/tinyshakespeare.txt", "char");
  EXPECT_EQ(c.train.size(), 1'003'854);
  EXPECT_EQ(c.validation.size(), 111'540);
  EXPECT_EQ(c.vocab_size, 65);
}

}  // namespace
}  // namespace tessera::data
