// Maps a file into memory (mmap) although others may change it while it is read. Touching a page
// behind the new end of a file that was cut off, or one that the disk does not deliver, raises
// SIGBUS. A handler puts zeros there and marks the mapping; a SIGBUS outside of these mappings goes
// to the handler that was there before. Invariant: a caller that reads and then calls check() has
// read what the file held when it was opened, or gets an error that says what became of the file.
//
// pread would not do: libarchive and decoders take memory, an archive is listed without being read,
// and a copy would show that a file became shorter but not that it was rewritten. Nor would a look
// at the size before each read: the file can still be cut off in between. check() costs one fstat,
// 0.2 microseconds, once for each batch or image.
// Internal: not part of the public interface.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/base/error.h"
#include "core/base/ref.h"

namespace tessera::io {

/// A file is not what it was when it was opened. This is no error of one sample: nothing that is
/// read from the file later can be trusted.
class FileChanged : public UserError {
 public:
  using UserError::UserError;
};

/// What changes when a file is written to: its size in bytes, and the time, in ns since 1970.
struct FileState {
  uint64_t bytes = 0;
  int64_t modified_ns = 0;
  bool operator==(const FileState&) const = default;
};
/// The state of an open file. Throws UserError, which begins with `who` and names `path`.
FileState state_of(int fd, const std::string& who, const std::string& path);
/// Throws FileChanged unless the state of an open file is `opened` still; `failed`: a page of it
/// could not be read.
void check_state(int fd, const FileState& opened, const std::string& who, const std::string& path,
                 bool failed = false);

namespace detail {
struct GuardedRange;
}

/// A whole file. Private and writable: writes stay in memory and never reach the file. Pages are
/// read when touched.
class Mapping final : public RefCounted {
 public:
  /// Maps the regular file `fd`, of which a duplicate is kept, as `opened` says that it was. An
  /// empty file gives an empty mapping. Errors are UserError, begin with `who` and name `path`.
  Mapping(int fd, const FileState& opened, std::string path, std::string who);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() override;
  std::byte* data() const { return data_; }
  size_t bytes() const { return size_t(opened_.bytes); }

  /// Throws FileChanged unless all that was read so far is what the file held when it was opened:
  /// after a change of its size or modification time, and where a page could not be read. A file
  /// that was replaced by a rename or removed is still the one that was opened. Thread-safe.
  void check() const;
  /// Calls `f`, which reads, and returns what it returns. Where the file was changed it throws
  /// FileChanged instead, also in place of a UserError of `f`.
  template <class F>
  auto checked(F&& f) const {
    try {
      auto result = f();
      check();
      return result;
    } catch (const FileChanged&) {
      throw;
    } catch (const UserError&) {
      check();  // throws where that is why
      throw;
    }
  }

 private:
  FileState opened_;
  std::string path_, who_;
  int fd_ = -1;
  std::byte* data_ = nullptr;
  detail::GuardedRange* range_ = nullptr;
};

}  // namespace tessera::io
