// Objects on disk that take long to make, as compiled code does, found by the hash of what they
// were made of. Invariant: an entry is used only if it is whole and is what its maker wrote (a hash
// at its end proves it). Makers of one entry wait for each other, and a maker that dies leaves
// nothing behind that is used or waited for.
// Internal: not part of the public interface.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "core/base/error.h"
#include "core/base/function_ref.h"
#include "core/base/ref.h"
#include "core/io/mapping.h"

namespace tessera::io {

/// A cache cannot be read or written. What belongs there can still be made.
class CacheError : public UserError {
 public:
  using UserError::UserError;
};

/// Thread-safe.
class ObjectCache {
 public:
  /// `who` begins errors. `suffix` (".so") ends the names of files, so that objects of several
  /// kinds share a folder. An empty `folder` means TESSERA_COMPILE_CACHE, or ~/.cache/tessera if
  /// that is not set; throws CacheError where there is no HOME either.
  ObjectCache(std::string folder, std::string suffix, std::string who);

  struct Entry {
    std::string path;   // what a loader of shared objects takes: the hash follows the object
    Ref<Mapping> file;  // the same
    size_t bytes = 0;   // of the object
    std::string_view object() const { return {reinterpret_cast<const char*>(file->data()), bytes}; }
  };
  /// The entry `key`, a name of letters, digits and '-'; nothing where there is none or it is not
  /// whole. Throws CacheError where it is there and cannot be read.
  std::optional<Entry> find(const std::string& key) const;
  /// The entry `key`. Where there is none, calls make(work), which returns the object and may write
  /// into the folder `work`, while other makers of this entry wait; `*made` says whether that
  /// happened. Another maker is waited for at most as long as a collective (TESSERA_TIMEOUT); then
  /// one of the waiting processes makes the entry. `work` is removed unless `make` throws. Throws
  /// CacheError where the folder cannot be written, before or after the call of `make`.
  using Maker = FunctionRef<std::string(const std::string& work)>;
  Entry find_or_make(const std::string& key, Maker make, bool* made) const;

  const std::string& folder() const { return folder_; }

 private:
  class Lock;
  [[noreturn]] void cannot_write(const std::string& why) const;
  std::string fresh_folder(const std::string& key) const;
  void remove_stale() const;
  /// Makes the entry under the lock named `maker`.
  Entry make_entry(const std::string& key, const std::string& maker, Maker make) const;
  std::string path_of(const std::string& key) const { return folder_ + "/" + key + suffix_; }

  std::string folder_, suffix_, who_;
};

}  // namespace tessera::io
