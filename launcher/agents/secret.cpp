#include "launcher/agents/secret.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "collectives/store/sha256.h"
#include "core/base/env.h"
#include "core/base/error.h"

namespace tessera::launcher {
namespace {

constexpr size_t kFewest = 16, kMost = 4096;  // bytes
constexpr const char* kInstead = "or set TESSERA_JOB_KEY";

/// A file that is closed at the end.
struct File {
  explicit File(int fd) : fd(fd) {}
  ~File() {
    if (fd >= 0) ::close(fd);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd;
};

std::string trimmed(const std::string& text) {
  constexpr const char* kSpace = " \t\r\n";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

Secret checked(const std::string& text, const std::string& source) {
  Secret secret{trimmed(text), source};
  TESSERA_CHECK(secret.bytes.size() >= kFewest && secret.bytes.size() <= kMost,
                "secret: {} has {} characters, expected {} to {}; make one with "
                "\"openssl rand -hex 32\"",
                source, secret.bytes.size() > kMost ? "more" : std::to_string(secret.bytes.size()),
                kFewest, kMost);
  return secret;
}

Secret read_secret(const std::string& path, int fd) {
  const File file(fd);
  struct stat status {};
  TESSERA_CHECK(::fstat(fd, &status) == 0 && S_ISREG(status.st_mode),
                "secret: {} is not a file; name one", path);
  TESSERA_CHECK(status.st_uid == ::geteuid(),
                "secret: {} belongs to user {}, not to you (user {}); use a file of your own, {}",
                path, status.st_uid, ::geteuid(), kInstead);
  TESSERA_CHECK((status.st_mode & 066) == 0,
                "secret: others can read or write {} (mode {:04o}); make a new one, since they may "
                "know it, and keep it to yourself: chmod 600 {}",
                path, status.st_mode & 07777, path);
  std::string text(kMost + 64, '\0');
  size_t n = 0;
  for (ssize_t got; n < text.size(); n += size_t(got)) {
    got = ::read(fd, text.data() + n, text.size() - n);
    if (got < 0 && errno == EINTR)
      got = 0;
    else if (got == 0)
      break;
    TESSERA_CHECK(got >= 0, "secret: cannot read {} ({})", path, std::strerror(errno));
  }
  return checked(text.substr(0, n), path);
}

int open_to_read(const std::string& path) {
  return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe does not block it
}

[[noreturn]] void fail_to_make(const std::string& path) {
  const int why = errno;
  detail::raise<UserError>(fmt::format("secret: cannot make {} ({}); give --key-file, {}", path,
                                       std::strerror(why), kInstead));
}

// Writes a new secret to a file of its own and links it to `path`, which fails if another process
// has done so first, on this host or one that shares the folder: `path` never lacks its content.
void make_secret(const std::string& folder, const std::string& path) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) fail_to_make(path);
  const std::string draft = path + "." + detail::to_hex(detail::random_bytes(8));
  const std::string text = detail::to_hex(detail::random_bytes(32)) + "\n";
  const File file(::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (file.fd < 0) fail_to_make(path);
  bool is_made = ::fchmod(file.fd, 0600) == 0 &&
                 ::write(file.fd, text.data(), text.size()) == ssize_t(text.size()) &&
                 ::fsync(file.fd) == 0;
  if (is_made) is_made = ::link(draft.c_str(), path.c_str()) == 0 || errno == EEXIST;
  const int why = errno;
  ::unlink(draft.c_str());
  errno = why;
  if (!is_made) fail_to_make(path);
}

}  // namespace

Secret job_secret(const std::string& path) {
  if (!path.empty()) {
    const int fd = open_to_read(path);
    TESSERA_CHECK(fd >= 0, "secret: cannot open {} ({}); give a file that you can read", path,
                  std::strerror(errno));
    return read_secret(path, fd);
  }
  if (const std::string key = env::get("TESSERA_JOB_KEY"); !key.empty())
    return checked(key, "TESSERA_JOB_KEY");
  const char* home = std::getenv("HOME");
  TESSERA_CHECK(home && *home, "secret: HOME is not set; give --key-file, {}", kInstead);
  const std::string folder = std::string(home) + "/.tessera", own = folder + "/key";
  int fd = open_to_read(own);
  if (fd < 0 && errno == ENOENT) {
    make_secret(folder, own);
    fd = open_to_read(own);
  }
  TESSERA_CHECK(fd >= 0, "secret: cannot open {} ({}); give --key-file, {}", own,
                std::strerror(errno), kInstead);
  return read_secret(own, fd);
}

std::string fingerprint(const Secret& secret) {
  const detail::Digest digest = detail::hmac_sha256(secret.bytes, "fingerprint");
  return detail::to_hex({reinterpret_cast<const char*>(digest.data()), 4});
}

}  // namespace tessera::launcher
