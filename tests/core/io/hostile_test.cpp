// Malicious files: every one is refused with a clear text, quickly and in little memory.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "core/io/safetensors.h"
#include "tests/support/temp_folder.h"

namespace tessera::io {
namespace {

std::string file_of(uint64_t length, const std::string& rest) {
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + rest;
}
std::string with_header(const std::string& json, size_t data_bytes = 0) {
  return file_of(json.size(), json + std::string(data_bytes, 'd'));
}
std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" + offsets +
         "]}";
}

class Hostile : public testing::Test {
 protected:
  std::string refused(const std::string& bytes) {
    dir_.write("f", bytes);
    return error_of([&] { SafetensorsFile::open(dir_ / "f"); });
  }
  void refused_with(const std::string& bytes, const std::string& part) {
    std::string text = refused(bytes);
    expect_contains(text, part);
    expect_contains(text, dir_ / "f");
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    EXPECT_LT(text.size(), 1200u);
  }
  TempFolder dir_;
};

TEST_F(Hostile, Lengths) {
  refused_with("", "cannot hold");
  refused_with("1234567", "cannot hold");
  refused_with(file_of(uint64_t(1) << 63, "{}"), "the format allows");
  refused_with(file_of(~0ull, "{}"), "the format allows");
  refused_with(file_of(100'000'001, "{}"), "the format allows");
  refused_with(file_of(100'000'000, "{}"), "truncated");
  refused_with(file_of(0, ""), "does not begin with '{'");
  refused_with(file_of(2, "[]"), "does not begin with '{'");
  refused_with(file_of(2, " {}"), "does not begin with '{'");
}

TEST_F(Hostile, Syntax) {
  refused_with(with_header("{"), "not JSON");
  refused_with(with_header("{}x"), "not JSON");
  refused_with(with_header("{\"a\":}"), "not JSON");
  refused_with(with_header("{\"a\xff\":{}}"), "not JSON");
  refused_with(with_header("{\"a\nb\":{}}"), "not JSON");
  refused_with(with_header("{}{}"), "not JSON");
  refused_with(with_header("{\"a\":1}"), "has a number in a place");
  refused_with(with_header("{\"a\":null}"), "has null");
  refused_with(with_header("{\"a\":\"b\"}"), "has a string");
  refused_with(with_header("{\"a\":[]}"), "has an array");
  refused_with(with_header("{\"a\":{\"dtype\":{}}}"), "has an object");
  refused_with(with_header("{\"a\":{\"shape\":[[1]]}}"), "has an array");
  refused_with(with_header("{\"a\":{\"shape\":[{}]}}"), "has an object");
  refused_with(with_header("{\"a\":{\"shape\":[\"1\"]}}"), "has a string");
  refused_with(with_header("{\"a\":{\"colour\":1}}"), "unknown field 'colour'");
  refused_with(with_header("{\"a\":{\"dtype\":\"F32\"}}"), "lacks");
  refused_with(with_header("{\"a\":{}}"), "lacks");
  refused_with(with_header("{\"__metadata__\":{\"a\":1}}"), "has a number");
  refused_with(with_header("{\"__metadata__\":{\"a\":{}}}"), "has an object");
  refused_with(with_header("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}"), "twice");
  refused_with(with_header("{\"__metadata__\":{},\"__metadata__\":{}}"), "twice");
  refused_with(with_header("{\"__metadata__\":\"x\"}"), "has a string");
}

TEST_F(Hostile, Layout) {
  auto two = [](const std::string& a, const std::string& b) {
    return "{\"a\":" + a + ",\"b\":" + b + "}";
  };
  std::string ok = entry("F32", "2", "0,8");
  refused_with(with_header(two(ok, entry("F32", "2", "4,12")), 12), "overlaps");
  refused_with(with_header(two(ok, ok), 8), "overlaps");
  refused_with(with_header(two(ok, entry("F32", "2", "12,20")), 20), "hole of 4 bytes");
  refused_with(with_header("{\"a\":" + entry("F32", "2", "4,12") + "}", 12), "hole of 4 bytes");
  refused_with(with_header("{\"a\":" + ok + "}", 9), "1 bytes follow");
  refused_with(with_header("{\"a\":" + ok + "}", 7), "truncated");
  refused_with(with_header("{\"a\":" + ok + ",\"a\":" + entry("F32", "2", "8,16") + "}", 16),
               "'a' is there twice");
  refused_with(with_header("{\"a\":" + entry("F32", "3", "0,8") + "}", 8), "needs 12 bytes");
  refused_with(with_header("{\"a\":" + entry("F32", "2", "8,0") + "}", 8), "before it begins");
  refused_with(with_header("{\"a\":" + entry("F32", "2", "0,8,8") + "}", 8), "3 data_offsets");
  refused_with(with_header("{\"a\":" + entry("F32", "2", "0") + "}", 8), "1 data_offsets");
  refused_with(with_header("{\"a\":" + entry("F8_E8M0", "2", "0,2") + "}", 2),
               "supported are BOOL");
  refused_with(with_header("{\"a\":" + entry("F32", "-2", "0,8") + "}", 8), "negative");
  refused_with(with_header("{\"a\":" + entry("F32", "2.0", "0,8") + "}", 8), "integer");
  refused_with(with_header("{\"a\":" + entry("F32", "1e300", "0,8") + "}", 8), "integer");
  refused_with(with_header("{\"a\":" + entry("F32", "1,1,1,1,1,1,1,1,2", "0,8") + "}", 8),
               "more than 8 dims");
  refused_with(with_header("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}"), "'dtype' twice");
}

TEST_F(Hostile, Overflow) {
  std::string max = "9223372036854775807", big = "4294967296", u64 = "18446744073709551615";
  refused_with(with_header("{\"a\":" + entry("F32", big + "," + big, "0,0") + "}"), "overflows");
  refused_with(with_header("{\"a\":" + entry("F32", max + "," + max, "0,0") + "}"), "overflows");
  refused_with(with_header("{\"a\":" + entry("F64", max, "0,0") + "}"), "overflows");
  refused_with(with_header("{\"a\":" + entry("U8", "0," + max + "," + max, "0,0") + "}"),
               "overflows");
  refused_with(with_header("{\"a\":" + entry("U8", u64, "0,0") + "}"), "beyond 2^63");
  refused_with(with_header("{\"a\":" + entry("U8", max, "0," + max) + "}"), "truncated");
  refused_with(with_header("{\"a\":" + entry("U8", "1", u64 + "," + u64) + "}"), "needs 1 bytes");
  refused_with(with_header("{\"a\":" + entry("U8", "184467440737095516160", "0,1") + "}"),
               "integer");
}

TEST_F(Hostile, TruncatedAtEveryLength) {
  save_safetensors(dir_ / "good",
                   std::vector<NamedTensor>{{"w", from_values<float>({1, 2, 3}, {3})},
                                            {"v", from_values<int64_t>({1, 2}, {2})}},
                   {{"k", "v"}});
  std::string good = dir_.read("good");
  for (size_t n = 0; n < good.size(); ++n) refused(good.substr(0, n));
  refused(good + "x");
}

// A header with one damaged byte either is refused or yields a file that is sound.
TEST_F(Hostile, DamagedBytes) {
  save_safetensors(dir_ / "good",
                   std::vector<NamedTensor>{{"w", from_values<float>({1, 2, 3}, {3})},
                                            {"v", from_values<int64_t>({1, 2}, {2})}});
  const std::string good = dir_.read("good");
  std::mt19937 random(7);
  int opened = 0;
  for (int i = 0; i < 500; ++i) {
    std::string bad = good;
    int changes = 1 + int(random() % 3);
    for (int k = 0; k < changes; ++k) bad[random() % (good.size() - 28)] = char(random());
    dir_.write("f", bad);
    try {
      SafetensorsFile f = SafetensorsFile::open(dir_ / "f");
      for (const TensorInfo& t : f.tensors()) f.load(t.name);
      ++opened;
    } catch (const UserError&) {
    }
  }
  EXPECT_LT(opened, 400);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kSecondsAllowed = 20;
constexpr long kKilobytesAllowed = 1 << 20;
#else
constexpr double kSecondsAllowed = 1;
constexpr long kKilobytesAllowed = 64 << 10;
#endif

// Runs in a child process, which has a peak memory and a processor time of its own.
void refused_cheaply(const std::string& path) {
  pid_t child = fork();
  if (child == 0) {
    // A limit on growth: what the parent holds already is part of the child's address space.
    rusage before{};
    getrusage(RUSAGE_SELF, &before);
    bool refused = false;
    try {
      SafetensorsFile::open(path);
    } catch (const UserError& e) {
      refused = true;
    }
    rusage after{};
    getrusage(RUSAGE_SELF, &after);
    _exit(!refused ? 1 : after.ru_maxrss - before.ru_maxrss > kKilobytesAllowed ? 2 : 0);
  }
  int status = 0;
  rusage used{};
  ASSERT_EQ(wait4(child, &status, 0, &used), child);
  EXPECT_EQ(WEXITSTATUS(status), 0)
      << (WEXITSTATUS(status) == 1 ? "not refused" : "more than 64 MiB");
  EXPECT_TRUE(WIFEXITED(status));
  auto seconds = [](timeval t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  EXPECT_LT(seconds(used.ru_utime) + seconds(used.ru_stime), kSecondsAllowed);
}

TEST_F(Hostile, ManyKeys) {
  std::string json = "{";
  for (int i = 0; i < 1'000'000; ++i)
    json += (i ? ",\"" : "\"") + std::to_string(i) +
            "\":" + entry("U8", "1", std::to_string(i) + "," + std::to_string(i + 1));
  dir_.write("f", with_header(json + "}", 1'000'000));
  refused_cheaply(dir_ / "f");
}

TEST_F(Hostile, DeepNesting) {
  dir_.write("f", with_header("{\"a\":" + std::string(50'000'000, '[')));
  refused_cheaply(dir_ / "f");
  std::string objects;
  for (int i = 0; i < 1'000'000; ++i) objects += "{\"a\":";
  dir_.write("f", with_header(objects));
  refused_cheaply(dir_ / "f");
}

TEST_F(Hostile, HugeStringsAndNumbers) {
  dir_.write("f", with_header("{\"" + std::string(99'000'000, 'a')));
  refused_cheaply(dir_ / "f");
  dir_.write("f", with_header("{\"a\":" + std::string(99'000'000, '1')));
  refused_cheaply(dir_ / "f");
  std::string json = "{\"__metadata__\":{";
  for (int i = 0; i < 100; ++i)
    json += (i ? ",\"" : "\"") + std::to_string(i) + "\":\"" + std::string(900'000, 'v') + "\"";
  dir_.write("f", with_header(json + "}}"));
  refused_cheaply(dir_ / "f");
  json = "{\"a\":{\"shape\":[";
  for (int i = 0; i < 40'000'000; ++i) json += "1,";
  dir_.write("f", with_header(json));
  refused_cheaply(dir_ / "f");
}

TEST_F(Hostile, HugeBlankHeader) {
  dir_.write("f", with_header("{" + std::string(99'000'000, ' ')));
  refused_cheaply(dir_ / "f");
}

}  // namespace
}  // namespace tessera::io
