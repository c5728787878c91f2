#include "compile/codegen/cache.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "core/base/env.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/silence.h"
#include "core/io/file.h"
#include "core/io/hash.h"

namespace tessera::compiler {
namespace {

namespace fs = std::filesystem;

constexpr size_t kDigest = 32;                  // hex digits at the end of an entry
constexpr auto kKept = std::chrono::hours(24);  // sources that an error has named
constexpr std::string_view kWork = ".work-";

std::string digest_of(const void* data, size_t bytes) {
  return io::to_string(io::xxh128(data, bytes));
}

bool whole(const std::string& path) {
  Ref<io::Mapping> file = io::File::open(path, "codegen").map();
  if (file->bytes() <= kDigest) return false;
  size_t bytes = file->bytes() - kDigest;
  return digest_of(file->data(), bytes) ==
         std::string_view(reinterpret_cast<const char*>(file->data()) + bytes, kDigest);
}

[[noreturn]] void cannot_write(const std::string& folder, const std::string& why) {
  throw UserError(
      fmt::format("codegen: the cache {} cannot be written: {}; set TESSERA_COMPILE_CACHE to a "
                  "folder that can",
                  folder, why));
}

// The lock that the one process that makes an entry holds. The kernel drops it when that process
// ends, however it ends. Others wait for it, at most until the deadline of a collective; after that
// they go on without it.
class Lock {
 public:
  Lock(const std::string& folder, const std::string& path)
      : fd_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    if (fd_ < 0) cannot_write(folder, std::strerror(errno));
    const std::chrono::duration<double> deadline(env::get_seconds("TESSERA_TIMEOUT", 60));
    Silence silence(std::chrono::duration_cast<Silence::Clock::duration>(deadline));
    while (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      int error = errno;
      if (error != EWOULDBLOCK && error != EINTR) {
        close(fd_);
        cannot_write(folder, std::strerror(error));
      }
      if (silence.over())
        logging::warn("codegen: has waited {:.3g} s for the process that compiles and holds {}",
                      silence.waited(), path);
      if (silence.waited() > deadline.count()) {
        close(std::exchange(fd_, -1));
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() {
    if (fd_ >= 0) close(fd_);
  }
  bool held() const { return fd_ >= 0; }

 private:
  int fd_;
};

// Removes what makers of any entry left behind a day ago or earlier because they were killed or
// failed with an error that names their sources. Where a lock is held, its maker is still at work.
void remove_stale(const std::string& folder) {
  std::error_code ignored;
  const auto before = fs::file_time_type::clock::now() - kKept;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    const std::string key = name.substr(0, name.find('.'));
    const bool left = name.substr(key.size()).starts_with(kWork) ||
                      name.substr(key.size()).starts_with(".so.tmp.");
    if (!left || entry.last_write_time(ignored) > before) continue;
    const std::string lock = fmt::format("{}/{}.lock", folder, key);
    const int fd = open(lock.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) continue;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) fs::remove_all(entry.path(), ignored);
    close(fd);
  }
}

// Makes a folder with a name of its own for the maker of `key`: the compiler of a killed maker may
// outlive it and goes on writing to the folder it was given. Removes what killed makers left. The
// caller holds the lock.
std::string fresh_folder(const std::string& folder, const std::string& key) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    std::string name = entry.path().filename().string();
    if (name.starts_with(key + ".") && name != key + ".so" && name != key + ".lock")
      fs::remove_all(entry.path(), ignored);
  }
  std::string work = fmt::format("{}/{}{}XXXXXX", folder, key, kWork);
  if (!mkdtemp(work.data())) cannot_write(folder, std::strerror(errno));
  return work;
}

}  // namespace

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

Cache::Cache(const std::string& folder) : folder_(folder) {
  if (folder_.empty()) folder_ = env::get("TESSERA_COMPILE_CACHE");
  if (!folder_.empty()) return;
  const char* home = std::getenv("HOME");
  TESSERA_CHECK(home && *home,
                "codegen: HOME is not set; set TESSERA_COMPILE_CACHE to a folder for compiled "
                "kernels");
  folder_ = std::string(home) + "/.cache/tessera";
}

Ref<LoadedObject> Cache::find(const std::string& key) const {
  std::string path = path_of(key);
  if (access(path.c_str(), R_OK) != 0) return {};
  if (!whole(path)) {
    logging::warn("codegen: {} is damaged and is made again", path);
    return {};
  }
  return make_ref<LoadedObject>(path);
}

// If the maker is stopped by a signal, its peers hang where no collective could report it. Once
// they have waited for as long as for a collective, one of them makes the entry under another lock,
// which the rest wait for in the same way. No process gives up: with other kernels than its peers
// it would compute other bits.
Ref<LoadedObject> Cache::find_or_make(const std::string& key, Maker make, bool* made) {
  *made = false;
  if (Ref<LoadedObject> entry = find(key)) return entry;
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) cannot_write(folder_, error.message());
  for (int turn = 0;; ++turn) {
    const std::string maker = turn == 0 ? key : fmt::format("{}-again{}", key, turn);
    Lock lock(folder_, fmt::format("{}/{}.lock", folder_, maker));
    if (Ref<LoadedObject> entry = find(key)) return entry;  // made while this process waited
    if (!lock.held()) continue;
    Ref<LoadedObject> entry = make_entry(key, maker, make);
    *made = true;
    return entry;
  }
}

Ref<LoadedObject> Cache::make_entry(const std::string& key, const std::string& maker, Maker make) {
  remove_stale(folder_);
  std::string work = fresh_folder(folder_, maker), object = work + "/object.so";
  make(work, object);
  std::string bytes = io::read_file(object, "codegen");
  bytes += digest_of(bytes.data(), bytes.size());
  io::write_file(path_of(key), bytes, "codegen");
  std::error_code ignored;
  fs::remove_all(work, ignored);
  return make_ref<LoadedObject>(path_of(key));
}

}  // namespace tessera::compiler
