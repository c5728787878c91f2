// Shared objects of compiled kernels, in the cache on disk (core/io/object_cache.h).
#pragma once
#include <string>

#include "core/base/function_ref.h"
#include "core/base/ref.h"
#include "core/io/object_cache.h"

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

  /// Returns the entry `key`, loaded. Where there is none, calls make(work, object) to write it to
  /// the file `object`, with a folder `work` for temporary files; waits for other makers and throws
  /// as io::ObjectCache::find_or_make does.
  using Maker = FunctionRef<void(const std::string& work, const std::string& object)>;
  Ref<LoadedObject> find_or_make(const std::string& key, Maker make, bool* made);

 private:
  io::ObjectCache objects_;
};

}  // namespace tessera::compiler
