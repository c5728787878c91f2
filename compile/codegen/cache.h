// Compiled objects on disk, by the hash of what they were made of. Invariant: an entry is whole and
// is what its maker wrote (a hash at its end says so), or it is not used; makers of one entry wait
// for each other, and a maker that dies leaves nothing behind that is used or waited for.
#pragma once
#include <string>

#include "core/base/function_ref.h"
#include "core/base/ref.h"

namespace tessera::compiler {

/// A shared object, loaded as long as anybody holds it.
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
  /// `folder` "": TESSERA_COMPILE_CACHE, else ~/.cache/tessera.
  explicit Cache(const std::string& folder);

  /// The entry `key`, null where there is none or it is not whole.
  Ref<LoadedObject> find(const std::string& key) const;
  /// The entry `key`; where there is none, make(work, object) is called to write it to the file
  /// `object`, with a folder `work` for its own use, while other makers of this entry wait.
  /// `*made`: it was called. Throws UserError where the folder cannot be written. Another maker is
  /// waited for at most as long as a collective (TESSERA_TIMEOUT), then one of those who wait makes
  /// the entry.
  using Maker = FunctionRef<void(const std::string& work, const std::string& object)>;
  Ref<LoadedObject> find_or_make(const std::string& key, Maker make, bool* made);

 private:
  /// Under the lock of `maker`.
  Ref<LoadedObject> make_entry(const std::string& key, const std::string& maker, Maker make);
  std::string path_of(const std::string& key) const { return folder_ + "/" + key + ".so"; }
  std::string folder_;
};

}  // namespace tessera::compiler
