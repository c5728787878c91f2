// The cache of objects on disk. What it does for processes that compile kernels, and after makers
// were killed or stopped, is in tests/compile/codegen/cache_test.cpp.
#include "core/io/object_cache.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "tests/support/temp_folder.h"

namespace tessera::io {
namespace {

namespace fs = std::filesystem;

/// The object `key`, made of `bytes` where it is not there; counts in `*calls` how often it is.
std::string get(const ObjectCache& cache, const std::string& key, const std::string& bytes,
                int* calls) {
  bool made = false;
  const int before = *calls;
  const ObjectCache::Entry entry = cache.find_or_make(
      key, [&](const std::string&) { return ++*calls, bytes; }, &made);
  EXPECT_EQ(made, *calls > before);
  return std::string(entry.object());
}

TEST(ObjectCache, GivesBackWhatWasMade) {
  TempFolder folder;
  const ObjectCache cache(folder / "a/b", ".cubin", "test");
  EXPECT_FALSE(cache.find("0ab-sm90"));
  int calls = 0;
  const std::string bytes("\0\177ELF\n\0", 7);
  EXPECT_EQ(get(cache, "0ab-sm90", bytes, &calls), bytes);
  EXPECT_EQ(get(cache, "0ab-sm90", "other", &calls), bytes);
  EXPECT_EQ(calls, 1);
  const auto entry = ObjectCache(folder / "a/b", ".cubin", "again").find("0ab-sm90");
  ASSERT_TRUE(entry);
  EXPECT_EQ(entry->object(), bytes);
  EXPECT_EQ(entry->path, folder / "a/b/0ab-sm90.cubin");
}

TEST(ObjectCache, KeepsKindsApart) {
  TempFolder folder;
  const ObjectCache objects(folder.str(), ".so", "test"), cubins(folder.str(), ".cubin", "test");
  int calls = 0;
  EXPECT_EQ(get(objects, "k", "object", &calls), "object");
  EXPECT_EQ(get(cubins, "k", "cubin", &calls), "cubin");
  EXPECT_EQ(get(objects, "k", "", &calls), "object");
  EXPECT_EQ(get(cubins, "k", "", &calls), "cubin");
  EXPECT_EQ(calls, 2);
}

TEST(ObjectCache, LendsAFolderThatIsThenRemoved) {
  TempFolder folder;
  const ObjectCache cache(folder.str(), ".so", "test");
  bool made = false;
  std::string lent;
  cache.find_or_make(
      "k",
      [&](const std::string& work) {
        lent = work;
        std::ofstream(work + "/source") << "text";
        return std::string("object");
      },
      &made);
  EXPECT_TRUE(made);
  EXPECT_EQ(fs::path(lent).parent_path(), folder.str());
  EXPECT_FALSE(fs::exists(lent));
  // The folder of a maker that throws stays, with what the error names.
  EXPECT_THROW(cache.find_or_make(
                   "other",
                   [&](const std::string& work) -> std::string {
                     lent = work;
                     std::ofstream(work + "/source") << "text";
                     throw UserError("does not compile");
                   },
                   &made),
               UserError);
  EXPECT_TRUE(fs::exists(lent + "/source"));
  EXPECT_FALSE(cache.find("other"));
}

TEST(ObjectCache, ADamagedEntryIsMadeAgain) {
  TempFolder folder;
  const ObjectCache cache(folder.str(), ".cubin", "test");
  int calls = 0;
  get(cache, "k", std::string(100, 'x'), &calls);
  const std::string whole = folder.read("k.cubin");
  EXPECT_EQ(whole.size(), 132u);
  for (const size_t length : {whole.size(), size_t(100), size_t(32), size_t(0)}) {
    std::string damaged = whole.substr(0, length);
    if (length == whole.size()) damaged[50] ^= 1;
    folder.write("k.cubin", damaged);
    testing::internal::CaptureStderr();
    EXPECT_FALSE(cache.find("k")) << length;
    expect_contains(testing::internal::GetCapturedStderr(),
                    "test: " + (folder / "k.cubin") + " is damaged and is made again");
    const int before = calls;
    EXPECT_EQ(get(cache, "k", std::string(100, 'x'), &calls), std::string(100, 'x'));
    EXPECT_EQ(calls, before + 1) << length;
    EXPECT_EQ(folder.read("k.cubin"), whole);
  }
}

TEST(ObjectCache, ThreadsWaitForTheOneThatMakes) {
  TempFolder folder;
  const ObjectCache cache(folder.str(), ".cubin", "test");
  std::atomic<int> calls = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i)
    threads.emplace_back([&] {
      bool made = false;
      const auto entry = cache.find_or_make(
          "k",
          [&](const std::string&) {
            ++calls;
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            return std::string("object");
          },
          &made);
      EXPECT_EQ(entry.object(), "object");
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(calls, 1);
}

// What a maker of another kind of object left when it was killed a day ago.
TEST(ObjectCache, RemovesWhatKilledMakersLeft) {
  TempFolder folder;
  for (const char* name : {"dead.cubin.tmp.7.0", "dead.so.tmp.8.1", "k.cubin.tmp.9.0"}) {
    folder.write(name, "part");
    folder.write(fs::path(name).stem().stem().stem().stem().string() + ".lock", "");
    fs::last_write_time(folder / name, fs::file_time_type::clock::now() - std::chrono::hours(30));
  }
  folder.write("k.cubin.tmp.10.0", "part, of today");
  folder.write("young.cubin.tmp.7.0", "part, of today");
  folder.write("young.lock", "");
  int calls = 0;
  get(ObjectCache(folder.str(), ".so", "test"), "k", "object", &calls);
  std::vector<std::string> left;
  for (const auto& f : fs::directory_iterator(folder.str())) left.push_back(f.path().filename());
  std::sort(left.begin(), left.end());
  EXPECT_EQ(left, (std::vector<std::string>{"dead.lock", "k.lock", "k.so", "young.cubin.tmp.7.0",
                                            "young.lock"}));
}

TEST(ObjectCache, SaysThatItCannotBeWrittenByAnErrorOfItsOwn) {
  TempFolder folder;
  folder.write("file", "");
  int calls = 0;
  const auto error = [&](const std::string& where) {
    try {
      get(ObjectCache(where, ".so", "test"), "k", "object", &calls);
    } catch (const CacheError& e) {
      return std::string(e.what());
    }
    return std::string("no CacheError");
  };
  expect_contains(error(folder / "file/cache"),
                  "test: the cache " + (folder / "file/cache") + " cannot be written: ");
  expect_contains(error("/proc/tessera"), "set TESSERA_COMPILE_CACHE to a folder that can");
  EXPECT_EQ(calls, 0);
  // The disk may be full when the object is made: here its name is a folder's.
  fs::create_directory(folder / "k.so");
  EXPECT_NE(error(folder.str()), "no CacheError");
}

TEST(ObjectCache, IsInTheFolderThatTheEnvironmentNames) {
  TempFolder folder;
  const auto with = [&](const char* cache, const char* home) {
    const pid_t pid = fork();
    if (pid == 0) {
      cache ? setenv("TESSERA_COMPILE_CACHE", cache, 1) : unsetenv("TESSERA_COMPILE_CACHE");
      home ? setenv("HOME", home, 1) : unsetenv("HOME");
      try {
        std::ofstream(folder / "said") << ObjectCache("", ".so", "test").folder();
      } catch (const CacheError& e) {
        std::ofstream(folder / "said") << e.what();
      }
      _exit(0);
    }
    waitpid(pid, nullptr, 0);
    return folder.read("said");
  };
  EXPECT_EQ(with("/named", "/me"), "/named");
  EXPECT_EQ(with(nullptr, "/me"), "/me/.cache/tessera");
  EXPECT_EQ(with(nullptr, nullptr),
            "test: HOME is not set; set TESSERA_COMPILE_CACHE to a folder for compiled kernels");
}

}  // namespace
}  // namespace tessera::io
