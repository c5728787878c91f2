// WordPiece: pieces, normalisation, refusals; with BERT's vocabulary (TESSERA_TEST_DATA) ids that
// transformers gives.
#include "core/data/wordpiece.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

using Ids = std::vector<TokenId>;

std::string vocabulary(const TempFolder& folder, const std::string& more) {
  return folder.write("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n" + more);
}

TEST(WordPiece, TakesTheLongestPieceFromTheFront) {
  TempFolder folder;
  auto t = WordPieceTokenizer::open(
      vocabulary(folder, "un\n##aff\n##able\nunaff\n,\n##a\naffable\n##\n東\n"));
  EXPECT_EQ(t->vocab_size(), 14);
  EXPECT_EQ(t->encode("unaffable"), (Ids{8, 7}));
  EXPECT_EQ(t->encode("  UNAFF,Affable\n"), (Ids{8, 9, 11}));
  EXPECT_EQ(t->encode("unaffx una"), (Ids{1, 5, 10})) << "a word is whole or unknown";
  EXPECT_EQ(t->encode("un東\u0001un"), (Ids{5, 13, 5}));
  EXPECT_EQ(t->encode(std::string(101, 'a')), Ids{1});
  EXPECT_EQ(t->encode(""), Ids{});
  EXPECT_EQ(t->decode(Ids{2, 8, 7, 9, 3}), "[CLS] unaffable , [SEP]");
  EXPECT_EQ(t->mask(), 4);
}

TEST(WordPiece, StripsAccentsAndCaseOnlyWhereAsked) {
  TempFolder folder;
  std::string path = vocabulary(folder, "deja\nvu\nDéjà\ni\n");
  EXPECT_EQ(WordPieceTokenizer::open(path)->encode("DÉJÀ vu\u0301 İ"), (Ids{5, 6, 8}));
  EXPECT_EQ(WordPieceTokenizer::open(path, {.lower_case = false})->encode("Déjà VU"), (Ids{7, 1}));
}

TEST(WordPiece, RefusesBadVocabulariesByLine) {
  TempFolder folder;
  auto refused = [&](const std::string& more, const char* part) {
    std::string path = vocabulary(folder, more);
    expect_contains(error_of([&] { WordPieceTokenizer::open(path); }), part);
  };
  refused("a\n\nb\n", "line 7: is empty");
  refused("a\na\n", "line 7: 'a' was given before");
  refused("\xff\n", "not UTF-8");
  std::string path = folder.write("short.txt", "[PAD]\na\n");
  expect_contains(error_of([&] { WordPieceTokenizer::open(path); }), "has no piece [UNK]");
  expect_contains(error_of([&] { WordPieceTokenizer::open("/no/such"); }), "/no/such");
  expect_contains(
      error_of([&] { WordPieceTokenizer::open(vocabulary(folder, "a\n"))->encode("a\xff"); }),
      "not UTF-8 at offset 1");
}

TEST(WordPiece, GivesTheIdsOfTransformers) {
  const char* data = std::getenv("TESSERA_TEST_DATA");
  std::string path = std::string(data ? data : "") + "/bert-base-uncased-vocab.txt";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no BERT vocabulary in TESSERA_TEST_DATA";
  auto t = WordPieceTokenizer::open(path);
  EXPECT_EQ(t->vocab_size(), 30522);
  const std::pair<std::string, Ids> kCases[] = {
      {"Hello, World! It's 42.", {7592, 1010, 2088, 999, 2009, 1005, 1055, 4413, 1012}},
      {"Déjà vu — naïve café's résumé…",
       {2139, 3900, 24728, 1517, 15743, 7668, 1005, 1055, 13746, 1529}},
      {"東京タワー is tall; 北京大学!",
       {1879, 1755, 1709, 30262, 30265, 2003, 4206, 1025, 1781, 1755, 1810, 1817, 999}},
      {"don't stop-gap @-@ e.g. 3.14%",
       {2123, 1005, 1056, 2644, 1011, 6578, 1030, 1011, 1030, 1041, 1012, 1043, 1012, 1017, 1012,
        2403, 1003}},
      {"\u00a0tab\tnew\nline\u2003em\u200bzero", {21628, 2047, 2240, 7861, 6290, 2080}},
      {"Ｆｕｌｌ width ǅ İstanbul ſtraße ΑΣΑΣ",
       {100, 9381, 100, 9960, 100, 1155, 29733, 14608, 29733}},
      {"supercalifragilisticexpialidocious antidisestablishmentarianism",
       {3565, 9289, 10128, 29181, 24411, 4588, 10288, 19312, 21273, 10085, 6313, 3424, 10521, 4355,
        7875, 13602, 3672, 12199, 2964}},
      {"🙂 emoji “quotes” ‘single’ $5 ^caret` ~tilde",
       {100, 7861, 29147, 2072, 1523, 16614, 1524, 1520, 2309, 1521, 1002, 1019, 1034, 2729, 2102,
        1036, 1066, 18681, 3207}},
      {"ﬁne ligature ½ cup №5 x²", {1984, 2638, 8018, 11244, 1092, 2452, 1578, 2629, 1060, 10701}},
      {"हिन्दी ไทย العربية עברית",
       {1339, 29877, 29863, 29861, 29878, 100, 1270, 23673, 29830, 17149, 29816, 14498, 19433, 1259,
        29789, 29811, 29796, 29813}},
      {"\u0301combining e\u0301", {11566, 1041}},
      {"<unk> = Title = \n", {1026, 4895, 2243, 1028, 1027, 2516, 1027}},
  };
  for (const auto& [text, ids] : kCases) EXPECT_EQ(t->encode(text), ids) << text;
  // All of WikiText-2's validation text: how many ids, and a polynomial of them.
  std::ifstream file(std::string(data) + "/wikitext2-valid.txt");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  Ids ids = t->encode(text);
  __extension__ using Wide = unsigned __int128;
  Wide hash = 0;
  for (TokenId id : ids) hash = (hash * 1000003 + Wide(id)) % (Wide(1) << 61);
  EXPECT_EQ(ids.size(), 260172u);
  EXPECT_EQ(uint64_t(hash), 1485614628906681899u);
}

}  // namespace
}  // namespace tessera::data
