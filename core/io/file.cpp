#include "core/io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr uint64_t kSliceBytes = uint64_t(1)
                                 << 30;  // Linux moves at most 0x7ffff000 bytes per call

std::string advice(int error) {
  switch (error) {
    case ENOENT: return "check the path";
    case EACCES:
    case EPERM: return "check its permissions";
    case ENOSPC:
    case EDQUOT: return "free space or write elsewhere";
    case EROFS: return "write elsewhere";
    case EFBIG: return "raise the file-size limit (ulimit -f) or write elsewhere";
    case EMFILE: return "raise the limit of open files (ulimit -n)";
    default: return "check the disk";
  }
}

}  // namespace

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

Mapping::~Mapping() {
  if (bytes_) munmap(data_, bytes_);
}

File::File(int fd, std::string path, std::string who, uint64_t size)
    : fd_(fd), path_(std::move(path)), who_(std::move(who)), size_(size) {}

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
  File file(fd, path, std::move(who), 0);
  struct stat info {};
  TESSERA_CHECK(fstat(fd, &info) == 0, "{}: cannot read {}: {}; {}", file.who_, quote(path),
                std::strerror(errno), advice(errno));
  TESSERA_CHECK(S_ISREG(info.st_mode), "{}: {} is {}, not a regular file; name a file", file.who_,
                quote(path), S_ISDIR(info.st_mode) ? "a folder" : "a device or pipe");
  file.size_ = uint64_t(info.st_size);
  return file;
}

File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      who_(std::move(other.who_)),
      size_(other.size_) {}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(who_, other.who_);
  std::swap(size_, other.size_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

void File::read_at(void* to, uint64_t bytes, uint64_t offset) const {
  uint64_t done = read_up_to(to, bytes, offset);
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
    // The end; asking again from there would be no aligned read.
    if (n == 0 || offset + done >= size_) break;
  }
  return done;
}

void File::bypass_cache() { set_direct(fd_, true); }

Ref<Mapping> File::map() const {
  if (size_ == 0) return make_ref<Mapping>(nullptr, 0);
  void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd_, 0);
  TESSERA_CHECK(p != MAP_FAILED, "{}: cannot map {} ({} bytes): {}; load it by copying instead",
                who_, quote(path_), size_, std::strerror(errno));
  return make_ref<Mapping>(static_cast<std::byte*>(p), size_t(size_));
}

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
  fs::file_status status = fs::status(path_, error);
  TESSERA_CHECK(!fs::exists(status) || fs::is_regular_file(status),
                "{}: {} exists and is not a regular file; name another path", who_, quote(path_));
  temporary_ = fmt::format("{}.tmp.{}.{}", path_, getpid(), serial.fetch_add(1));
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

void write_file(const std::string& path, std::string_view bytes, const std::string& who) {
  AtomicFile file(path, who);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

}  // namespace tessera::io
