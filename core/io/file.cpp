#include "core/io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr uint64_t kSliceBytes = uint64_t(1)
                                 << 30;  // Linux moves at most 0x7ffff000 bytes per call

// `path` with `suffix` behind, the name cut where that would be too long for a file system.
std::string beside(const std::string& path, const std::string& suffix) {
  const size_t name = path.rfind('/') + 1;  // 0 without one
  size_t end = std::min(path.size(), name + NAME_MAX - suffix.size());
  // The cut is not within a character of UTF-8, which some file systems refuse.
  while (end > name && end < path.size() && (path[end] & 0xC0) == 0x80) --end;
  return path.substr(0, end) + suffix;
}

}  // namespace

std::string advice(int error) {
  switch (error) {
    case ENOENT: return "check the path";
    case EACCES:
    case EPERM: return "check its permissions";
    case ENOSPC:
    case EDQUOT: return "free space or write elsewhere";
    case EROFS: return "write elsewhere";
    case ENAMETOOLONG: return "give it a shorter name or path";
    case EFBIG: return "raise the file-size limit (ulimit -f) or write elsewhere";
    case EMFILE: return "raise the limit of open files (ulimit -n)";
    default: return "check the disk";
  }
}

std::string quote(std::string_view text) {
  constexpr size_t kMax = 240, kKeep = 100;
  std::string out = "'";
  auto append = [&](std::string_view part) {
    for (char c : part) {
      auto byte = static_cast<unsigned char>(c);
      if (byte < 0x20 || byte == 0x7f)
        out += fmt::format("\\x{:02x}", byte);
      else
        out += c;
    }
  };
  if (text.size() <= kMax) {
    append(text);
  } else {
    append(text.substr(0, kKeep));
    out += fmt::format("...({} bytes)...", text.size());
    append(text.substr(text.size() - kKeep));
  }
  return out + "'";
}

File::File(int fd, std::string path, std::string who)
    : fd_(fd), path_(std::move(path)), who_(std::move(who)) {}

int set_direct(int fd, bool on) {
  int flags = fcntl(fd, F_GETFL);
  if (flags >= 0) flags = fcntl(fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT);
  return flags < 0 ? errno : 0;
}

File File::open(const std::string& path, std::string who) {
  // Without O_NONBLOCK, opening a named pipe would wait for its writer.
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  TESSERA_CHECK(fd >= 0, "{}: cannot open {}: {}; {}", who, quote(path), std::strerror(errno),
                advice(errno));
  File file(fd, path, std::move(who));
  struct stat info {};
  TESSERA_CHECK(fstat(fd, &info) == 0, "{}: cannot read {}: {}; {}", file.who_, quote(path),
                std::strerror(errno), advice(errno));
  TESSERA_CHECK(S_ISREG(info.st_mode), "{}: {} is {}, not a regular file; name a file", file.who_,
                quote(path), S_ISDIR(info.st_mode) ? "a folder" : "a device or pipe");
  file.opened_ = state_of(fd, file.who_, path);
  return file;
}

File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      who_(std::move(other.who_)),
      opened_(other.opened_) {}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(who_, other.who_);
  std::swap(opened_, other.opened_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

void File::read_at(void* to, uint64_t bytes, uint64_t offset) const {
  uint64_t done = read_up_to(to, bytes, offset);
  if (done < bytes) check_unchanged();
  TESSERA_CHECK(
      done == bytes,
      "{}: {} ends at offset {}, but bytes [{}, {}) were asked for; the file is truncated", who_,
      quote(path_), offset + done, offset, offset + bytes);
}

uint64_t File::read_up_to(void* to, uint64_t bytes, uint64_t offset) const {
  uint64_t done = 0;
  while (done < bytes) {
    ssize_t n = pread(fd_, static_cast<char*>(to) + done, std::min(bytes - done, kSliceBytes),
                      off_t(offset + done));
    if (n < 0 && errno == EINTR) continue;
    // Some file systems accept O_DIRECT and then refuse the read.
    if (n < 0 && errno == EINVAL && (fcntl(fd_, F_GETFL) & O_DIRECT) && set_direct(fd_, false) == 0)
      continue;
    TESSERA_CHECK(n >= 0, "{}: cannot read {} at offset {}: {}; {}", who_, quote(path_),
                  offset + done, std::strerror(errno), advice(errno));
    done += uint64_t(n);
    // This is the end of the file; another read from there would not be aligned.
    if (n == 0 || offset + done >= size()) break;
  }
  return done;
}

void File::check_unchanged() const { check_state(fd_, opened_, who_, path_); }

void File::bypass_cache() { set_direct(fd_, true); }

Ref<Mapping> File::map() const { return make_ref<Mapping>(fd_, opened_, path_, who_); }

std::string read_file(const std::string& path, const std::string& who, uint64_t max_bytes) {
  File file = File::open(path, who);
  TESSERA_CHECK(file.size() <= max_bytes,
                "{}: {} has {} bytes, at most {} are accepted; is it the right file?", who,
                quote(path), file.size(), max_bytes);
  std::string bytes(file.size(), '\0');
  file.read_at(bytes.data(), bytes.size(), 0);
  return bytes;
}

AtomicFile::AtomicFile(const std::string& path, std::string who)
    : path_(path), who_(std::move(who)) {
  namespace fs = std::filesystem;
  static std::atomic<uint64_t> serial{0};
  std::error_code error;
  if (fs::is_symlink(path, error)) {
    fs::path target = fs::weakly_canonical(path, error);
    if (!error) path_ = target.string();
  }
  struct stat info {};
  if (lstat(path_.c_str(), &info) != 0 && errno != ENOENT) fail("cannot create", errno);
  fs::file_status status = fs::status(path_, error);
  TESSERA_CHECK(!fs::exists(status) || fs::is_regular_file(status),
                "{}: {} exists and is not a regular file; name another path", who_, quote(path_));
  temporary_ = beside(path_, fmt::format(".tmp.{}.{}", getpid(), serial.fetch_add(1)));
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("cannot create", errno);
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* what, int error) {
  throw UserError(
      fmt::format("{}: {} {} (after {} bytes): {}; {}; what was there before is unchanged", who_,
                  what, quote(path_), written_, std::strerror(error), advice(error)));
}

void AtomicFile::write(const void* data, uint64_t bytes) {
  TESSERA_ASSERT(fd_ >= 0, "write to {} after commit", path_);
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    ssize_t n = ::write(fd_, from, std::min(bytes, kSliceBytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot write", errno);
    from += n;
    bytes -= uint64_t(n);
    written_ += uint64_t(n);
  }
}

void AtomicFile::commit() {
  TESSERA_ASSERT(fd_ >= 0, "commit of {} twice", path_);
  if (fsync(fd_) != 0) fail("cannot sync", errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0)
    fail("cannot rename the new file to", errno);
  ::close(fd_);
  fd_ = -1;
  // The rename is an entry of the directory: it survives power loss only once that is on disk, too.
  std::string folder = std::filesystem::path(path_).parent_path().string();
  int dir = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int error = dir < 0 ? errno : fsync(dir) != 0 ? errno : 0;
  if (dir >= 0) ::close(dir);
  // Some file systems cannot sync a directory and say so by EINVAL; a directory may also be
  // writable yet unreadable.
  TESSERA_CHECK(error == 0 || error == EINVAL || error == EACCES,
                "{}: {} is written, but its folder cannot be synced: {}; check the disk", who_,
                quote(path_), std::strerror(error));
}

void detach(const std::string& path, const std::string& who) {
  std::error_code error;
  if (std::filesystem::is_regular_file(path, error) &&
      std::filesystem::hard_link_count(path, error) > 1)
    write_file(path, "", who);
}

void write_file(const std::string& path, std::string_view bytes, const std::string& who) {
  AtomicFile file(path, who);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

}  // namespace tessera::io
