// Files: exact reads, atomic replacement, and what is left after failures.
#include "core/io/file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "tests/support/disk_tracer.h"
#include "tests/support/small_disk.h"
#include "tests/support/temp_folder.h"

namespace tessera::io {
namespace {

TEST(File, ReadsExactRanges) {
  TempFolder dir;
  File f = File::open(dir.write("a", "0123456789"), "test");
  char to[4] = {};
  f.read_at(to, 4, 3);
  EXPECT_EQ(std::string(to, 4), "3456");
  expect_contains(error_of([&] { f.read_at(to, 4, 8); }), "truncated");
  EXPECT_EQ(read_file(dir / "a", "test"), "0123456789");
  expect_contains(error_of([&] { read_file(dir / "a", "test", 5); }), "at most 5");
}

TEST(File, AChangeAfterItWasOpenedIsTold) {
  TempFolder dir;
  File f = File::open(dir.write("a", "0123456789"), "test");
  f.check_unchanged();
  std::filesystem::resize_file(dir / "a", 4);
  char to[8];
  expect_contains(error_of([&] { f.read_at(to, 8, 0); }), "was truncated from 10 to 4 bytes");
  std::filesystem::resize_file(dir / "a", 10);
  std::filesystem::last_write_time(dir / "a", std::filesystem::file_time_type());
  expect_contains(error_of([&] { f.check_unchanged(); }), "was written to");
}

TEST(File, OpenErrorsNamePathAndReason) {
  TempFolder dir;
  std::string text = error_of([&] { File::open(dir / "absent", "load"); });
  expect_contains(text, "load: cannot open");
  expect_contains(text, "absent': No such file");
  expect_contains(error_of([&] { File::open(dir.str(), "load"); }), "is a folder");
  ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);
  expect_contains(error_of([&] { File::open(dir / "pipe", "load"); }), "device or pipe");
}

TEST(File, MappingIsPrivate) {
  TempFolder dir;
  Ref<Mapping> m = File::open(dir.write("a", "hello"), "test").map();
  m->data()[0] = std::byte('J');
  EXPECT_EQ(dir.read("a"), "hello");
  EXPECT_EQ(File::open(dir.write("empty", ""), "test").map()->bytes(), 0u);
}

TEST(AtomicFile, ReplacesOnlyAtCommit) {
  TempFolder dir;
  dir.write("a", "old");
  {
    AtomicFile f(dir / "a", "save");
    f.write("new", 3);
    EXPECT_EQ(dir.read("a"), "old");
  }
  EXPECT_EQ(dir.read("a"), "old");
  EXPECT_EQ(dir.count(), 1u);
  write_file(dir / "a", "newer", "save");
  EXPECT_EQ(dir.read("a"), "newer");
  EXPECT_EQ(dir.count(), 1u);
}

// Without the first sync power loss may leave an empty file under the new name, without the last
// one the old file.
TEST(AtomicFile, IsOnDiskOnceItIsCommitted) {
  TempFolder dir;
  const std::string path = dir / "a";
  TracedRun run = run_traced([&] { return write_file(path, "new", "save"), 0; }, {});
  ASSERT_EQ(run.exit_status, 0);
  std::vector<std::string> calls;
  for (const DiskCall& c : run.calls) {
    if (!c.path.starts_with(dir.str())) continue;
    const char* what = c.path == path ? " a" : c.path == dir.str() ? " folder" : " temporary";
    calls.push_back((c.name.starts_with("rename") ? "rename" : c.name) + what);
  }
  EXPECT_EQ(calls, (std::vector<std::string>{"openat temporary", "write temporary",
                                             "fsync temporary", "rename a", "fsync folder"}));
}

TEST(AtomicFile, FollowsASymbolicLink) {
  TempFolder dir;
  dir.write("target", "old");
  std::filesystem::create_symlink("target", dir / "link");
  write_file(dir / "link", "new", "save");
  EXPECT_TRUE(std::filesystem::is_symlink(dir / "link"));
  EXPECT_EQ(dir.read("target"), "new");
}

TEST(AtomicFile, RefusesFoldersAndMissingFolders) {
  TempFolder dir;
  expect_contains(error_of([&] { write_file(dir.str(), "x", "save"); }), "not a regular file");
  expect_contains(error_of([&] { write_file(dir / "no/such", "x", "save"); }), "No such file");
}

// The temporary name is longer than the name itself, which may be as long as names can be.
TEST(AtomicFile, TakesTheLongestNamesAndRefusesLongerOnesAtOnce) {
  TempFolder dir;
  for (const std::string& name : {std::string(255, 'n'), std::string(240, 'n'), [] {
                                    std::string wide;  // 3 bytes each
                                    for (int i = 0; i < 85; ++i) wide += "東";
                                    return wide;
                                  }()}) {
    write_file(dir / name, "new", "save");
    EXPECT_EQ(dir.read(name), "new");
  }
  EXPECT_EQ(dir.count(), 3u);
  const std::string text = error_of([&] { AtomicFile(dir / std::string(256, 'n'), "save"); });
  expect_contains(text, "File name too long");
  expect_contains(text, "give it a shorter name or path");
  EXPECT_EQ(dir.count(), 3u);
}

TEST(File, AHardLinkIsDetached) {
  TempFolder dir;
  dir.write("a", "old");
  detach(dir / "a", "test");
  EXPECT_EQ(dir.read("a"), "old");  // no other name
  detach(dir / "absent", "test");
  std::filesystem::create_hard_link(dir / "a", dir / "b");
  detach(dir / "b", "test");
  EXPECT_EQ(dir.read("b"), "");
  dir.write("b", "new");
  EXPECT_EQ(dir.read("a"), "old");
}

// Runs write_file in a child process with less room than it needs. Returns 0 where its error says
// how far it came and `reason`, and the old file is unchanged and alone in its folder.
int status_of_failed_write(const TempFolder& dir, const std::string& reason) {
  try {
    write_file(dir / "a", std::string(100'000, 'x'), "save");
  } catch (const UserError& e) {
    std::string text = e.what();
    bool told = text.find("save: cannot write") == 0 &&
                text.find("after 4096 bytes") != std::string::npos &&
                text.find(reason) != std::string::npos;
    return told && dir.read("a") == "old" && dir.count() == 1 ? 0 : 2;
  }
  return 1;
}

TEST(AtomicFile, FailedWriteLeavesTheOldFile) {
  TempFolder dir;
  dir.write("a", "old");
  pid_t child = fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit limit{4096, 4096};
    setrlimit(RLIMIT_FSIZE, &limit);
    _exit(status_of_failed_write(dir, "File too large"));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(AtomicFile, AFullDiskLeavesTheOldFile) {
  TempFolder dir;
  pid_t child = fork();
  if (child == 0) {
    if (!mount_small_disk(dir.str(), 2 * 4096))
      _exit(77);  // a page for the old file, one for the new
    dir.write("a", "old");
    _exit(status_of_failed_write(dir, "No space left on device"));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
    GTEST_SKIP() << "this system lets no test mount a file system";
  EXPECT_EQ(status, 0);
}

TEST(Quote, EscapesAndShortens) {
  EXPECT_EQ(quote("a\nb"), "'a\\x0ab'");
  std::string text = quote(std::string(1000, 'x'));
  EXPECT_LT(text.size(), 300u);
  expect_contains(text, "(1000 bytes)");
}

}  // namespace
}  // namespace tessera::io
