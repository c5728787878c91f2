// Files that bypass the page cache: every size around the borders of pages, writes and the staging
// buffer. This program's own fcntl() and write() simulate file systems that do not support it.
// Invariant: the contents of the disk are the same either way.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <filesystem>

#include "collectives/loopback/run_ranks.h"
#include "core/core.h"
#include "core/io/safetensors.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/load.h"
#include "parallel/checkpoint/verify.h"
#include "tests/parallel/checkpoint/cutting.h"
#include "tests/support/temp_folder.h"

namespace {

enum class Refuse { kNothing, kAsking, kWriting, kHanging };
std::atomic<Refuse> refuse = Refuse::kNothing;
std::atomic<int> direct_writes = 0;
std::atomic<const char*> hanging_file = nullptr;  // part of its path; null: every one

bool hangs(int fd) {
  const char* part = hanging_file;
  if (!part) return true;
  std::error_code ignored;
  return std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", fd), ignored)
             .string()
             .find(part) != std::string::npos;
}

bool is_direct(int fd) { return syscall(SYS_fcntl, fd, F_GETFL) & O_DIRECT; }

}  // namespace

extern "C" int fcntl(int fd, int command, ...) {
  va_list rest;
  va_start(rest, command);
  long argument = va_arg(rest, long);
  va_end(rest);
  if (refuse == Refuse::kAsking && command == F_SETFL && argument & O_DIRECT) {
    errno = EINVAL;
    return -1;
  }
  return int(syscall(SYS_fcntl, fd, command, argument));
}

extern "C" ssize_t write(int fd, const void* data, size_t bytes) {
  if (is_direct(fd)) {
    if (refuse == Refuse::kHanging && hangs(fd)) refuse.wait(Refuse::kHanging);
    if (refuse == Refuse::kWriting) {
      errno = EINVAL;
      return -1;
    }
    ++direct_writes;
  }
  return syscall(SYS_write, fd, data, bytes);
}

namespace tessera::checkpoint {
namespace {

constexpr int64_t kMiB = 1 << 20;

State state_of(Random& r, std::vector<int64_t> sizes) {
  State s;
  for (size_t i = 0; i < sizes.size(); ++i)
    s.pieces.push_back(whole(fmt::format("t{}", i), random_tensor(r, kU8, {sizes[i]})));
  return s;
}

// Saves, compares what load and a plain reader of safetensors return, and returns the file.
std::string round_trip(const TempFolder& dir, const State& state, const SaveOptions& options) {
  static int64_t step = 0;
  std::string folder = dir / std::to_string(++step);
  Checkpointer saver(folder, nullptr, options);
  saver.save(step, state);
  saver.wait();
  EXPECT_TRUE(verify(folder).findings.empty());
  State back = state;
  for (Piece& p : back.pieces) p.values = zeros(p.values.shape(), {kU8});
  load(folder, back.pieces);
  std::string file = folder + "/" + step_name(step) + "/" + rank_file_name(0, 1);
  auto plain = io::SafetensorsFile::open(file);
  for (size_t i = 0; i < state.pieces.size(); ++i) {
    const Piece& p = state.pieces[i];
    EXPECT_TRUE(same_bytes(back.pieces[i].values, p.values)) << p.name;
    EXPECT_TRUE(same_bytes(plain.load(p.name), p.values)) << p.name;
  }
  return dir.read(file.substr(dir.str().size() + 1));
}

TEST(Direct, EverySizeRoundTrips) {
  Random r(7);
  TempFolder dir;
  for (int64_t total : {kMiB - 1, kMiB, kMiB + 1, kMiB + 4095, 8 * kMiB, 8 * kMiB + 4096,
                        16 * kMiB - 1, 19 * kMiB + 77})
    for (size_t staging : {size_t(0), size_t(2 << 20), size_t(6 << 20)}) {
      SCOPED_TRACE(fmt::format("{} bytes through {} of staging", total, staging));
      int64_t first = draw(r, 0, total), second = draw(r, 0, total - first);
      direct_writes = 0;
      std::string file = round_trip(dir, state_of(r, {first, second, total - first - second}),
                                    {.staging_bytes = staging});
      EXPECT_EQ(direct_writes > 0, total >= kMiB);
      // Only large files have a padded header.
      EXPECT_EQ((file.size() - size_t(total)) % 4096 == 0, total >= kMiB);
      EXPECT_LT(file.size() - size_t(total), 4097u);
    }
}

// Two saves; returns their files without headers, which name the step.
std::vector<std::string> data_of_two(const TempFolder& dir, const std::string& folder,
                                     const State& state) {
  std::vector<std::string> out;
  Checkpointer saver(dir / folder);
  for (int64_t step : {1, 2}) {
    saver.save(step, state);
    saver.wait();
    out.push_back(dir.read(folder + "/" + step_name(step) + "/" + rank_file_name(0, 1)));
    out.back().erase(0, read_manifest(dir / folder + "/" + step_name(step)).files[0].header_bytes);
  }
  EXPECT_TRUE(verify(dir / folder).findings.empty());
  return out;
}

TEST(Direct, WhereTheFileSystemCannotTheBytesAreTheSameAndOneLineSaysSo) {
  Random r(8);
  TempFolder dir;
  State state = state_of(r, {5 * kMiB + 3, 12 * kMiB});
  std::vector<std::string> expected = data_of_two(dir, "direct", state);
  ASSERT_EQ(expected[0].size(), size_t(17 * kMiB + 3));
  for (Refuse mode : {Refuse::kAsking, Refuse::kWriting}) {
    testing::internal::CaptureStderr();
    direct_writes = 0;
    refuse = mode;
    std::vector<std::string> got = data_of_two(dir, mode == Refuse::kAsking ? "a" : "b", state);
    refuse = Refuse::kNothing;
    std::string said = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(got == expected);
    EXPECT_EQ(direct_writes, 0);
    EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
    expect_contains(said, "does not write past the page cache (Invalid argument)");
  }
}

// Neither wait() nor the destructor waits for a writer that makes no progress.
TEST(Direct, ADiskThatHangsIsAnErrorAtTheDeadlineAndHoldsUpNoEnd) {
  Random r(9);
  TempFolder dir;
  auto saver = std::make_unique<Checkpointer>(
      dir / "save", nullptr, SaveOptions{.timeout = std::chrono::milliseconds(400)});
  testing::internal::CaptureStderr();
  refuse = Refuse::kHanging;
  saver->save(3, state_of(r, {2 * kMiB}));
  std::string error;
  try {
    saver->wait();
  } catch (const CommError& e) {
    error = e.what();
    EXPECT_EQ(e.ranks(), std::vector<int>{0});
  }
  const std::string hangs =
      "the save of step 3 into '" + (dir / "save") + "' has not got on for 0.4 s";
  expect_contains(error, hangs);
  saver.reset();
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(said, '\n'), 2) << said;  // one of each kind
  expect_contains(said, "[error] checkpoint: " + hangs);
  expect_contains(said,
                  "s for the save of step 3 into '" + (dir / "save") + "', which last got on 0.");
  refuse = Refuse::kNothing;
  refuse.notify_all();
  // The writer goes on where it was, with a folder that is to be there until it is done.
  while (!std::filesystem::exists((dir / "save") + "/" + kLatestName))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(verify(dir / "save").findings.empty());
}

// Its peers wait for it outside of collectives, too: a rank that hangs in its own work in the
// middle of a save is given up at the same deadline.
TEST(Direct, ARankWhoseDiskHangsIsNamedByItsPeer) {
  static TempFolder dir;  // as long as the writer that is left behind
  Random r(10);
  const State state = state_of(r, {2 * kMiB, 2 * kMiB});
  const std::string file = rank_file_name(1, 2);
  hanging_file = file.c_str();
  refuse = Refuse::kHanging;
  std::string errors[2];
  std::vector<int> named[2];
  double seconds[2];
  run_ranks(2, [&](ProcessGroup& g) {
    const auto rank = size_t(g.rank());
    Checkpointer saver(dir / "save", &g, {.timeout = std::chrono::milliseconds(500)});
    const auto start = std::chrono::steady_clock::now();
    try {
      saver.save(3, state);
      saver.wait();
    } catch (const CommError& e) {
      errors[rank] = e.what();
      named[rank] = e.ranks();
    }
    seconds[rank] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  });
  for (size_t rank : {0, 1}) {
    EXPECT_EQ(named[rank], std::vector<int>{1}) << errors[rank];
    EXPECT_GE(seconds[rank], 0.5);
    EXPECT_LT(seconds[rank], 30);
  }
  expect_contains(errors[0], "saving into '" + (dir / "save") + "'");
  refuse = Refuse::kNothing;
  refuse.notify_all();
  hanging_file = nullptr;
}

}  // namespace
}  // namespace tessera::checkpoint
