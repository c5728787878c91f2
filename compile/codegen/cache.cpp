#include "compile/codegen/cache.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "core/base/error.h"
#include "core/io/file.h"

namespace tessera::compiler {

LoadedObject::LoadedObject(const std::string& path)
    : path_(path), handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (!handle_) throw UserError(fmt::format("codegen: {} cannot be loaded: {}", path, dlerror()));
}
LoadedObject::~LoadedObject() { dlclose(handle_); }

void* LoadedObject::symbol(const std::string& name) const {
  void* address = dlsym(handle_, name.c_str());
  TESSERA_ASSERT(address, "codegen: {} has no {}", path_, name);
  return address;
}

Cache::Cache(const std::string& folder) : objects_(folder, ".so", "codegen") {}

Ref<LoadedObject> Cache::find_or_make(const std::string& key, Maker make, bool* made) {
  const auto make_bytes = [&](const std::string& work) {
    const std::string object = work + "/object.so";
    make(work, object);
    return io::read_file(object, "codegen");
  };
  return make_ref<LoadedObject>(objects_.find_or_make(key, make_bytes, made).path);
}

}  // namespace tessera::compiler
