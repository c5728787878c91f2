// Token sequences, their sources, and the windows cut from them.
#include "core/data/tokens.h"

#include <filesystem>
#include <fstream>
#include <set>

#include "core/data/loader.h"
#include "core/data/token_dataset.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

std::vector<TokenId> ids_of(const Tokens& t) {
  std::vector<TokenId> out;
  for (int64_t i = 0; i < t.size(); ++i) out.push_back(t[i]);
  return out;
}
Tokens counting(int64_t n) {
  std::vector<TokenId> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(TokenId(i));
  return Tokens::from_ids(ids);
}

TEST(Tokens, NarrowAndWide) {
  for (TokenId top : {65535, 65536, 200'000}) {
    std::vector<TokenId> ids{1, top, 7};
    Tokens t = Tokens::from_ids(ids);
    EXPECT_EQ(ids_of(t), ids);
    io::Xxh128 hash;
    EXPECT_EQ(t.max_and_hash(hash), top);
    EXPECT_EQ(ids_of(t.slice(1, 2)), std::vector<TokenId>{top});
  }
  io::Xxh128 hash;
  EXPECT_EQ(Tokens::from_ids({}).max_and_hash(hash), -1);
}

// The hash is that of the ids, in whatever file they are.
TEST(Tokens, HashesOfSplits) {
  TempFolder dir;
  std::string narrow, wide;
  for (int i = 0; i < 100'000; ++i) {
    const int id = i * 31 % 1000;
    narrow += {char(id), char(id >> 8)};
    wide += {char(id), char(id >> 8), 0, 0};
  }
  auto hash = [&](const std::string& name, const std::string& bytes) {
    return load_tokens("tokens:" + dir.write(name, bytes), "").hash;
  };
  const io::Digest first = hash("a.bin", narrow);
  EXPECT_EQ(hash("b.bin", narrow), first);
  EXPECT_EQ(hash("c.u32", wide), first);
  for (size_t at : {size_t(0), narrow.size() / 2, narrow.size() - 2}) {
    std::string other = narrow;
    other[at] ^= 1;
    EXPECT_FALSE(hash("d.bin", other) == first) << at;
  }
  // The same ids, cut elsewhere.
  dir.write("parts/train.bin", narrow.substr(0, 100'000));
  dir.write("parts/val.bin", narrow.substr(100'000));
  EXPECT_FALSE(load_tokens("tokens:" + (dir / "parts"), "").hash == first);
  auto text = [&](const std::string& bytes) {
    return load_tokens("text:" + dir.write("t.txt", bytes), "char").hash;
  };
  const std::string line = "some text to be cut into characters";
  EXPECT_EQ(text(line), text(line));
  EXPECT_FALSE(text(line) == text("emos" + line.substr(4)));  // the same vocabulary
}

TEST(Tokens, AFileThatChangesIsAnErrorOfTheNextBatch) {
  TempFolder dir;
  for (int workers : {0, 1, 3}) {
    const std::string path = dir.write("a.bin", std::string(1 << 20, '\0'));
    auto windows = std::make_shared<RandomWindows>(Tokens::map_file(path), 16, 1, 10);
    DataLoader loader(
        windows, DistributedSampler({.micro_batches = 1, .micro_batch_size = 4, .repeat = true}),
        {.prefetch = workers, .workers = std::max(workers, 1)});
    EXPECT_TRUE(loader.next());
    std::filesystem::resize_file(path, 64);
    const std::string text = error_of([&] {
      for (int i = 0; i < 5; ++i) loader.next();
    });
    expect_contains(text, "a.bin' was truncated from 1048576 to 64 bytes");
    EXPECT_THROW(loader.next(), io::FileChanged);  // and stays one
  }
}

TEST(Tokens, IdsOfAnotherFileAreNotBlamedOnTheTokenizer) {
  TempFolder dir;
  const std::string path = dir.write("a.bin", std::string(1 << 16, '\0'));
  const RandomWindows windows(Tokens::map_file(path), 16, 1, 10);
  const Batch batch = windows.allocate(1);
  windows.read({0, 0}, 0, batch);
  std::filesystem::last_write_time(path, std::filesystem::file_time_type());
  std::fstream(path, std::ios::in | std::ios::out) << std::string(1 << 16, '\1');
  expect_contains(error_of([&] { windows.read({0, 0}, 0, batch); }), "a.bin' was written to");
}

TEST(Tokens, Files) {
  TempFolder dir;
  EXPECT_EQ(ids_of(Tokens::map_file(dir.write("a.bin", std::string("\1\0\2\1", 4)))),
            (std::vector<TokenId>{1, 258}));
  EXPECT_EQ(ids_of(Tokens::map_file(dir.write("a.u32", std::string("\1\0\2\0", 4)))),
            std::vector<TokenId>{131073});
  expect_contains(error_of([&] { Tokens::map_file(dir.write("odd.bin", "abc")); }),
                  "no multiple of 2");
  expect_contains(error_of([&] { Tokens::map_file(dir.write("e.bin", "")); }), "empty");
  expect_contains(error_of([&] { Tokens::map_file(dir / "none.bin"); }), "No such file");
}

TEST(LoadTokens, FromTokenFilesAndFolders) {
  TempFolder dir;
  std::string bytes;
  for (int i = 0; i < 20; ++i) bytes += {char(i), 0};
  dir.write("d/train.bin", bytes);
  TokenSplit one = load_tokens("tokens:" + (dir / "d/train.bin"), "");
  EXPECT_EQ(one.train.size(), 18);
  EXPECT_EQ(ids_of(one.validation), (std::vector<TokenId>{18, 19}));
  EXPECT_EQ(one.vocab_size, 20);
  expect_contains(error_of([&] { load_tokens("tokens:" + (dir / "d"), ""); }), "no val.bin");
  dir.write("d/val.bin", bytes.substr(0, 4));
  TokenSplit two = load_tokens("tokens:" + (dir / "d"), "byte");
  EXPECT_EQ(two.train.size(), 20);
  EXPECT_EQ(two.validation.size(), 2);
  EXPECT_EQ(two.vocab_size, 256);
}

TEST(LoadTokens, BadKinds) {
  for (const char* bad : {"", "text", "pictures:x", ":x"})
    expect_contains(error_of([&] { load_tokens(bad, "byte"); }), "not text:PATH or tokens:PATH");
  expect_contains(error_of([&] { load_tokens("text:", "byte"); }), "has no path after the colon");
  expect_contains(error_of([&] { load_tokens("text:/no/such", "byte"); }), "No such file");
  expect_contains(error_of([&] { load_tokens("tokens:/no/such", "char"); }),
                  "not known from tokens");
}

TEST(ReadText, FolderInNameOrderWithoutBinariesAndHiddenFiles) {
  TempFolder dir;
  dir.write("src/b.txt", "B");
  dir.write("src/a/z.txt", "A");
  dir.write("src/c.bin", std::string("\0x", 2));
  dir.write("src/d.bin", "\xff");
  dir.write("src/.hidden", "H");
  dir.write("src/.git/config", "H");
  dir.write("src/build/CMakeCache.txt", "X");
  dir.write("src/build/x.txt", "X");
  std::filesystem::create_symlink("b.txt", dir / "src/link.txt");
  EXPECT_EQ(read_text(dir / "src"), "AB");
  EXPECT_EQ(read_text(dir / "src/b.txt"), "B");
  expect_contains(error_of([&] { read_text(dir.write("empty", "")); }), "is empty");
  std::filesystem::create_directories(dir / "none");
  expect_contains(error_of([&] { read_text(dir / "none"); }), "no text");
}

TEST(SplitText, CountsCharacters) {
  TextSplit s = split_text("ééééééééé東");
  EXPECT_EQ(s.train, "ééééééééé");
  EXPECT_EQ(s.validation, "東");
  s = split_text(
      "\xff"
      "123456789");
  EXPECT_EQ(s.validation, "9");
  EXPECT_EQ(split_text("123456789012345").train.size(), 13u);
  EXPECT_EQ(split_text("").train.size(), 0u);
}

Batch read_one(const TokenDataset& d, int64_t number) {
  Batch b = d.allocate(1);
  d.read({number, number}, 0, b);
  return b;
}

TEST(Windows, TargetsFollowInputs) {
  ConsecutiveWindows d(counting(20), 6);
  EXPECT_EQ(d.size(), 3);  // needs 19 tokens
  for (int64_t i = 0; i < 3; ++i) {
    Batch b = read_one(d, i);
    EXPECT_EQ(b.inputs.shape(), (Shape{1, 6}));
    for (int t = 0; t < 6; ++t) {
      EXPECT_EQ(b.inputs.data<int64_t>()[t], i * 6 + t);
      EXPECT_EQ(b.targets.data<int64_t>()[t], i * 6 + t + 1);
    }
  }
}

TEST(Windows, RandomStartsCoverAllAndDependOnSeedAndNumberOnly) {
  RandomWindows d(counting(12), 4, 1), same(counting(12), 4, 1), other(counting(12), 4, 2);
  std::set<int64_t> starts;
  int different = 0;
  for (int64_t i = 0; i < 500; ++i) {
    int64_t s = d.start({i, i});
    EXPECT_EQ(s, same.start({i, 0}));
    different += s != other.start({i, i});
    starts.insert(s);
  }
  EXPECT_EQ(starts.size(), 8u);
  EXPECT_EQ(*starts.begin(), 0);
  EXPECT_EQ(*starts.rbegin(), 7);
  EXPECT_GT(different, 300);
}

TEST(Windows, TooShortAndOutOfVocabulary) {
  std::string text = error_of([] { RandomWindows d(counting(64), 64, 0); });
  expect_contains(text, "training split has 64 tokens");
  expect_contains(text, "context 64 needs 65");
  expect_contains(error_of([] { RandomWindows d(counting(64), INT64_MAX, 0); }),
                  "needs 9223372036854775808");
  EXPECT_NO_THROW(RandomWindows(counting(65), 64, 0));
  expect_contains(error_of([] { ConsecutiveWindows d(Tokens(), 8); }),
                  "validation split has 0 tokens");
  expect_contains(error_of([] { ConsecutiveWindows d(counting(5), 0); }), "context 0");
  ConsecutiveWindows d(counting(20), 6, 10);
  read_one(d, 0);
  expect_contains(error_of([&] { read_one(d, 1); }),
                  "id 10 at token 10, but the vocabulary has 10");
}

}  // namespace
}  // namespace tessera::data
