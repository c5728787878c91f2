// Mapped files that others change: check() reports every change, and none ends the process.
#include "core/io/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>
#include <vector>

#include "core/io/file.h"
#include "core/io/safetensors.h"
#include "core/ops/create.h"
#include "tests/support/temp_folder.h"

namespace tessera::io {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBytes = 1 << 20;

Ref<Mapping> map(const std::string& path) { return File::open(path, "data").map(); }

uint64_t sum(const Mapping& m) {
  uint64_t total = 0;
  for (size_t i = 0; i < m.bytes(); ++i) total += uint64_t(m.data()[i]);
  return total;
}

class Mapped : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = folder_.write("a.bin", std::string(kBytes, '\1'));
    // Writes within one tick of the file system's clock are not told apart.
    fs::last_write_time(path_, fs::last_write_time(path_) - std::chrono::hours(1));
  }
  TempFolder folder_;
  std::string path_;
};

TEST_F(Mapped, AFileThatIsLeftAloneIsFine) {
  Ref<Mapping> m = map(path_);
  EXPECT_EQ(sum(*m), kBytes);
  m->check();
  EXPECT_EQ(m->checked([] { return 7; }), 7);
}

TEST_F(Mapped, WhatIsCutOffReadsAsZerosAndIsTold) {
  Ref<Mapping> m = map(path_);
  fs::resize_file(path_, 4096);
  EXPECT_EQ(sum(*m), 4096u);
  m->data()[kBytes - 1] = std::byte(1);  // what is private stays writable
  const std::string text = error_of([&] { m->check(); });
  expect_contains(text, "data: '" + path_ + "' was truncated from 1048576 to 4096 bytes while");
  expect_contains(text, "Put the file back");
  EXPECT_THROW(m->checked([] { return 7; }), FileChanged);
  EXPECT_THROW(m->checked([]() -> int { throw UserError("damaged"); }), FileChanged);
}

TEST_F(Mapped, AFileThatIsBackAtItsSizeIsNotTheSameFile) {
  Ref<Mapping> m = map(path_);
  fs::resize_file(path_, 0);
  EXPECT_EQ(sum(*m), 0u);
  fs::resize_file(path_, kBytes);
  expect_contains(error_of([&] { m->check(); }), "was written to (it has 1048576 bytes as before)");
}

TEST_F(Mapped, GrowingAndRewritingAreTold) {
  Ref<Mapping> m = map(path_), other = map(path_);
  std::fstream(path_, std::ios::in | std::ios::out | std::ios::binary) << "changed";
  expect_contains(error_of([&] { m->check(); }), "was written to");
  std::ofstream(path_, std::ios::app) << "more";
  expect_contains(error_of([&] { other->check(); }), "grew from 1048576 to 1048580 bytes");
}

TEST_F(Mapped, AFileThatIsReplacedOrRemovedIsStillTheOneThatWasOpened) {
  Ref<Mapping> m = map(path_);
  write_file(path_, "another file", "test");
  m->check();
  fs::remove(path_);
  EXPECT_EQ(sum(*m), kBytes);
  m->check();
}

TEST_F(Mapped, ManyThreadsReadWhatIsCutOff) {
  for (int round = 0; round < 20; ++round) {
    const std::string path = folder_.write("b.bin", std::string(kBytes, '\1'));
    Ref<Mapping> m = map(path);
    std::atomic<int> told{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] {
        while (true) {
          const uint64_t total = sum(*m);
          try {
            m->check();
            if (total != kBytes) return;  // not told
          } catch (const FileChanged&) {
            ++told;
            return;
          }
        }
      });
    fs::resize_file(path, 100);
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(told, 4);
  }
}

TEST_F(Mapped, RangesAreUsedAgain) {
  for (int i = 0; i < 200; ++i) {
    Ref<Mapping> first = map(path_), second = map(path_);
    first = nullptr;
    second->check();
  }
  Ref<Mapping> m = map(path_);
  fs::resize_file(path_, 0);
  EXPECT_EQ(sum(*m), 0u);
  EXPECT_THROW(m->check(), FileChanged);
}

TEST_F(Mapped, ViewsOfTensorsAreChecked) {
  const std::string file = folder_ / "w.safetensors";
  save_safetensors(file, std::vector<NamedTensor>{{"w", ones({100000})}});
  const SafetensorsSet set = SafetensorsSet::open(file);
  Tensor w = set.view("w");
  set.check_unchanged();
  fs::resize_file(file, 4096);
  EXPECT_EQ(w.data<float>()[99999], 0.0f);
  expect_contains(error_of([&] { set.check_unchanged(); }), "w.safetensors' was truncated from");
}

using MappedDeathTest = Mapped;

// A mapping that is not ours, beside one that is.
TEST_F(MappedDeathTest, OtherBusErrorsEndTheProcessAsBefore) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        Ref<Mapping> ours = map(path_);
        const int fd = open((folder_ / "a.bin").c_str(), O_RDONLY);
        auto* at = static_cast<volatile char*>(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0));
        fs::resize_file(path_, 0);
        (void)*at;
      },
      ::testing::KilledBySignal(SIGBUS), "");
  EXPECT_EXIT(
      {
        Ref<Mapping> ours = map(path_);
        raise(SIGBUS);
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

void leave(int) { _exit(7); }

TEST_F(MappedDeathTest, AHandlerThatWasThereBeforeGetsThem) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        signal(SIGBUS, leave);
        Ref<Mapping> ours = map(path_);
        raise(SIGBUS);
      },
      ::testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace tessera::io
