// Files. A read of a range returns exactly that range or throws; a write goes to a temporary file
// that replaces the old one in a single rename. Invariant: at any moment, also after a power loss,
// a reader of the final path sees either the whole old file or the whole new one.
// Internal: not part of the public interface.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/io/mapping.h"

namespace tessera::io {

/// `text` in single quotes for an error message: control characters escaped, the middle of long
/// texts elided.
std::string quote(std::string_view text);
/// What a user can do about a failed call on a file, by its errno: "free space or write elsewhere".
std::string advice(int error);

inline constexpr size_t kDirectAlign = 4096;  // for O_DIRECT; a disk with larger sectors refuses it
/// Turns O_DIRECT of an open file on or off; returns 0, or the errno of a file system that has
/// none.
int set_direct(int fd, bool on);

/// A regular file open for reading. Errors are UserError, begin with `who`, and name path and
/// reason.
class File {
 public:
  /// Throws unless `path` is a readable regular file (never blocks on a pipe or device).
  static File open(const std::string& path, std::string who);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  const std::string& path() const { return path_; }
  uint64_t size() const { return opened_.bytes; }  // when opened
  /// Reads exactly [offset, offset + bytes) or throws. Thread-safe.
  void read_at(void* to, uint64_t bytes, uint64_t offset) const;
  /// As read_at, but stops at the end of the file; returns how many bytes that were.
  uint64_t read_up_to(void* to, uint64_t bytes, uint64_t offset) const;
  /// Throws FileChanged where the file is not what it was when it was opened: what was read from it
  /// so far may mix two versions.
  void check_unchanged() const;
  /// From now on reads go past the page cache where the file system can do that: no copy, and no
  /// page of others pushed out. Addresses, offsets and counts of reads must then be multiples of
  /// kDirectAlign; counts may reach beyond the end of the file.
  void bypass_cache();
  /// The whole file, as it was when opened; Mapping::check() throws where it has changed.
  Ref<Mapping> map() const;

 private:
  File(int fd, std::string path, std::string who);
  int fd_;
  std::string path_, who_;
  FileState opened_;
};

/// The bytes of a regular file; throws UserError when it is missing, unreadable or larger than
/// `max_bytes`.
std::string read_file(const std::string& path, const std::string& who,
                      uint64_t max_bytes = UINT64_MAX);

/// A file that appears under its path only when it is complete. It is written beside it under a
/// temporary name (the first 200 and some bytes of its own, and a number); commit() calls fsync,
/// renames it, and calls fsync on the directory. One that ends before commit() leaves nothing
/// behind. A symbolic link at `path` is followed, not replaced.
class AtomicFile {
 public:
  /// Creates the temporary file; throws UserError when the directory is missing or not writable, or
  /// the name or path is too long.
  AtomicFile(const std::string& path, std::string who);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  /// Appends. On failure (disk full, quota, ...) throws UserError with path, bytes and reason; the
  /// old file is intact.
  void write(const void* data, uint64_t bytes);
  /// Makes the new file visible and durable.
  void commit();

 private:
  [[noreturn]] void fail(const char* what, int error);
  std::string path_, temporary_, who_;
  int fd_ = -1;
  uint64_t written_ = 0;
};

/// Where the file at `path` has other names too (hard links), replaces it under this name by an
/// empty file, so that a write to it does not change what the others name.
void detach(const std::string& path, const std::string& who);

/// Writes `bytes` to `path` through an AtomicFile.
void write_file(const std::string& path, std::string_view bytes, const std::string& who);

}  // namespace tessera::io
