// The secret of a job: where it comes from, and which files are refused.
#include "launcher/agents/secret.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <set>

#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

using launcher::fingerprint;
using launcher::job_secret;

/// With a home of its own.
class SecretTest : public ::testing::Test {
 protected:
  SecretTest() {
    ::setenv("HOME", home.str().c_str(), 1);
    ::unsetenv("TESSERA_JOB_KEY");
  }
  ~SecretTest() override {
    ::unsetenv("TESSERA_JOB_KEY");
    ::setenv("HOME", home_before.c_str(), 1);
  }
  std::string write(const std::string& text, mode_t mode = 0600) {
    const std::string path = home.write("file", text);
    EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    return path;
  }
  // The text of the refusal, which tells no secret.
  std::string refusal(const std::string& path) {
    const std::string text = error_of([&] { job_secret(path); });
    EXPECT_EQ(text.find(kLongEnough.substr(0, 8)), std::string::npos) << text;
    return text;
  }

  const std::string kLongEnough = "0123456789abcdef";
  const std::string home_before = std::getenv("HOME") ? std::getenv("HOME") : "";
  TempFolder home;
};

TEST_F(SecretTest, IsMadeOnceAndOnlyItsOwnerReadsIt) {
  const mode_t before = ::umask(0);
  const auto secret = job_secret("");
  ::umask(before);
  EXPECT_EQ(secret.source, home / ".tessera/key");
  ASSERT_EQ(secret.bytes.size(), 64u);
  EXPECT_EQ(secret.bytes.find_first_not_of("0123456789abcdef"), std::string::npos);
  struct stat file {
  }, folder{};
  ASSERT_EQ(::stat(secret.source.c_str(), &file), 0);
  ASSERT_EQ(::stat((home / ".tessera").c_str(), &folder), 0);
  EXPECT_EQ(file.st_mode & 07777, 0600u);
  EXPECT_EQ(folder.st_mode & 07777, 0700u);
  EXPECT_EQ(job_secret("").bytes, secret.bytes);
  TempFolder other;
  ::setenv("HOME", other.str().c_str(), 1);
  EXPECT_NE(job_secret("").bytes, secret.bytes);
}

TEST_F(SecretTest, TheFirstSourceCounts) {
  const std::string path = write(" \n" + kLongEnough + "file\r\n\n");
  ::setenv("TESSERA_JOB_KEY", (kLongEnough + "variable\n").c_str(), 1);
  EXPECT_EQ(job_secret(path).bytes, kLongEnough + "file");
  EXPECT_EQ(job_secret(path).source, path);
  EXPECT_EQ(job_secret("").bytes, kLongEnough + "variable");
  EXPECT_EQ(job_secret("").source, "TESSERA_JOB_KEY");
  EXPECT_FALSE(std::filesystem::exists(home / ".tessera"));
  ::setenv("TESSERA_JOB_KEY", "", 1);
  EXPECT_EQ(job_secret("").source, home / ".tessera/key");
}

TEST_F(SecretTest, FilesThatOthersMayReadOrWriteAreRefused) {
  for (const mode_t mode : {0640u, 0620u, 0604u, 0602u, 0644u, 0666u, 0444u}) {
    const std::string path = write(kLongEnough, mode);
    expect_contains(refusal(path), "others can read or write " + path);
    expect_contains(refusal(path), "chmod 600 " + path);
  }
  for (const mode_t mode : {0600u, 0400u, 0700u})
    EXPECT_EQ(job_secret(write(kLongEnough, mode)).bytes, kLongEnough);
  job_secret("");
  ::chmod((home / ".tessera/key").c_str(), 0644);
  expect_contains(refusal(""), "others can read or write");
}

TEST_F(SecretTest, FilesOfOtherUsersAreRefused) {
  std::string path = "/etc/passwd";
  if (::geteuid() == 0) {
    path = write(kLongEnough);
    ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
  }
  expect_contains(refusal(path), path + " belongs to user ");
}

TEST_F(SecretTest, OnlyFilesOfTheRightLength) {
  expect_contains(refusal(write("")), "has 0 characters, expected 16 to 4096");
  expect_contains(refusal(write(" \n\n")), "has 0 characters");
  expect_contains(refusal(write(kLongEnough.substr(1) + "\n")), "has 15 characters");
  EXPECT_EQ(job_secret(write(kLongEnough)).bytes, kLongEnough);
  EXPECT_EQ(job_secret(write(std::string(4096, 'x') + "\n")).bytes.size(), 4096u);
  expect_contains(refusal(write(std::string(4097, 'x'))), "has more characters");
  expect_contains(refusal(write(std::string(1 << 20, 'x'))), "has more characters");
  ::setenv("TESSERA_JOB_KEY", "0123456789abcde", 1);
  expect_contains(refusal(""), "TESSERA_JOB_KEY has 15 characters");
}

TEST_F(SecretTest, OnlyFiles) {
  expect_contains(refusal(home / "none"), "cannot open " + (home / "none"));
  expect_contains(refusal(home.str()), "is not a file");
  ASSERT_EQ(::mkfifo((home / "pipe").c_str(), 0600), 0);
  expect_contains(refusal(home / "pipe"), "is not a file");  // and is not waited for
  expect_contains(refusal("/dev/zero"), "is not a file");
}

TEST_F(SecretTest, SaysThatItCannotBeMade) {
  ::unsetenv("HOME");
  expect_contains(refusal(""), "HOME is not set");
  ::setenv("HOME", "", 1);
  expect_contains(refusal(""), "HOME is not set");
  ::setenv("HOME", (home / "none").c_str(), 1);
  expect_contains(refusal(""), "cannot make " + (home / "none/.tessera/key"));
  home.write("file", "x");
  ::setenv("HOME", (home / "file").c_str(), 1);
  expect_contains(refusal(""), "cannot open " + (home / "file/.tessera/key"));
  ::setenv("HOME", home.str().c_str(), 1);
  ASSERT_EQ(::chmod(home.str().c_str(), 0555), 0);
  const bool is_root = ::geteuid() == 0;  // to whom modes mean nothing
  if (is_root) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  const std::string text = refusal("");
  if (is_root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  ASSERT_EQ(::chmod(home.str().c_str(), 0755), 0);
  expect_contains(text, "cannot make " + (home / ".tessera/key") + " (Permission denied)");
  expect_contains(text, "TESSERA_JOB_KEY");
  EXPECT_FALSE(std::filesystem::exists(home / ".tessera"));
  // A folder that is there, but not to be written to, and one that is a file.
  ::mkdir((home / ".tessera").c_str(), 0555);
  if (is_root) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  const std::string again = refusal("");
  if (is_root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  expect_contains(again, "(Permission denied)");
}

// All have the same one then, whoever made it, and nothing is left beside it.
TEST_F(SecretTest, EightProcessesMayMakeItAtOnce) {
  constexpr int kProcesses = 8;
  for (int round = 0; round < 40; ++round) {
    const std::string house = home / std::to_string(round);
    ASSERT_EQ(::mkdir(house.c_str(), 0700), 0);
    ::setenv("HOME", house.c_str(), 1);
    int gate[2], results[2];
    ASSERT_EQ(::pipe(gate), 0);
    ASSERT_EQ(::pipe(results), 0);
    std::vector<pid_t> children;
    for (int i = 0; i < kProcesses; ++i) {
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        ::close(gate[1]);
        char c;
        if (::read(gate[0], &c, 1) != 0) ::_exit(2);
        try {
          const std::string bytes = job_secret("").bytes;
          ::_exit(bytes.size() == 64 && ::write(results[1], bytes.data(), 64) == 64 ? 0 : 3);
        } catch (const std::exception&) {
          ::_exit(4);
        }
      }
      children.push_back(child);
    }
    ::close(gate[0]);
    ::close(gate[1]);
    for (pid_t child : children) {
      int status = -1;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
    }
    ::close(results[1]);
    std::set<std::string> secrets;
    std::string bytes(64, '\0');
    int count = 0;
    for (; ::read(results[0], bytes.data(), 64) == 64; ++count) secrets.insert(bytes);
    ::close(results[0]);
    EXPECT_EQ(count, kProcesses);
    ASSERT_EQ(secrets.size(), 1u);
    EXPECT_EQ(*secrets.begin(), job_secret("").bytes);
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(house + "/.tessera"))
      files += entry.exists();
    EXPECT_EQ(files, 1);
  }
}

TEST_F(SecretTest, FingerprintsTellSecretsApart) {
  const auto one = job_secret("");
  EXPECT_EQ(fingerprint(one).size(), 8u);
  EXPECT_EQ(fingerprint(one).find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(fingerprint(one), fingerprint({one.bytes, "elsewhere"}));
  EXPECT_NE(fingerprint(one), fingerprint({one.bytes + "x", one.source}));
  EXPECT_EQ(one.bytes.find(fingerprint(one)), std::string::npos);
  // HMAC-SHA256 by another implementation: openssl dgst -sha256 -hmac 0123456789abcdef
  EXPECT_EQ(fingerprint({kLongEnough, ""}), "153dcb61");
}

}  // namespace
}  // namespace tessera::testing
