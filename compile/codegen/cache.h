// Compiled objects on disk, found by the hash of what they were made of. Invariant: an entry is
// used only if it is whole and is what its maker wrote (a hash at its end proves it). Makers of one
// entry wait for each other, and a maker that dies leaves nothing behind that is used or waited
// for.
#pragma once
#include <string>

#include "core/base/function_ref.h"
#include "core/base/ref.h"

namespace tessera::compiler {

/// A shared object, loaded for as long as there is a reference to it.
class LoadedObject final : public RefCounted {
 public:
  /// Throws UserError where the loader refuses `path`.
  explicit LoadedObject(const std::string& path);
  ~LoadedObject() override;
  /// The address of `name`; throws BugError where there is none.
  void* symbol(const std::string& name) const;

 private:
  std::string path_;
  void* handle_;
};

class Cache {
 public:
  /// An empty `folder` means TESSERA_COMPILE_CACHE, or ~/.cache/tessera if that is not set.
  explicit Cache(const std::string& folder);

  /// Returns the entry `key`, or null where there is none or it is not whole.
  Ref<LoadedObject> find(const std::string& key) const;
  /// Returns the entry `key`. Where there is none, calls make(work, object) to write it to the file
  /// `object`, with a folder `work` for temporary files, while other makers of this entry wait;
  /// `*made` says whether that happened. Another maker is waited for at most as long as a
  /// collective (TESSERA_TIMEOUT); then one of the waiting processes makes the entry. Throws
  /// UserError where the folder cannot be written.
  using Maker = FunctionRef<void(const std::string& work, const std::string& object)>;
  Ref<LoadedObject> find_or_make(const std::string& key, Maker make, bool* made);

 private:
  /// Makes the entry under the lock named `maker`.
  Ref<LoadedObject> make_entry(const std::string& key, const std::string& maker, Maker make);
  std::string path_of(const std::string& key) const { return folder_ + "/" + key + ".so"; }
  std::string folder_;
};

}  // namespace tessera::compiler
