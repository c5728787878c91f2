#include "core/io/object_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "core/base/env.h"
#include "core/base/log.h"
#include "core/base/silence.h"
#include "core/io/file.h"
#include "core/io/hash.h"

namespace tessera::io {
namespace {

namespace fs = std::filesystem;

constexpr size_t kDigest = 32;                  // hex digits at the end of an entry
constexpr auto kKept = std::chrono::hours(24);  // sources that an error has named
constexpr std::string_view kWork = ".work-";

std::string digest_of(const void* data, size_t bytes) { return to_string(xxh128(data, bytes)); }

bool whole(const Mapping& file) {
  if (file.bytes() <= kDigest) return false;
  size_t bytes = file.bytes() - kDigest;
  return digest_of(file.data(), bytes) ==
         std::string_view(reinterpret_cast<const char*>(file.data()) + bytes, kDigest);
}

std::string key_in(const std::string& name) { return name.substr(0, name.find('.')); }

// Whether a file is of an entry that is being made, or was when its maker was killed: its folder,
// or the file that becomes the entry (AtomicFile).
bool in_the_making(const std::string& name) {
  const std::string_view rest = std::string_view(name).substr(key_in(name).size());
  return rest.starts_with(kWork) || rest.find(".tmp.") != rest.npos;
}

/// Entries that the log has named, until they are whole again.
class DamagedEntries {
 public:
  /// False where it is there.
  bool add(const std::string& path) {
    std::lock_guard lock(mutex_);
    return paths_.insert(path).second;
  }
  void remove(const std::string& path) {
    std::lock_guard lock(mutex_);
    paths_.erase(path);
  }

 private:
  std::mutex mutex_;
  std::set<std::string> paths_;
};
DamagedEntries& damaged_entries() {
  static DamagedEntries& all = *new DamagedEntries;
  return all;
}

}  // namespace

// The lock that the one process that makes an entry holds. The kernel drops it when that process
// ends, however it ends. Others wait for it, at most until the deadline of a collective; after that
// they go on without it.
class ObjectCache::Lock {
 public:
  Lock(const ObjectCache& cache, const std::string& path)
      : fd_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    if (fd_ < 0) cache.cannot_write(std::strerror(errno));
    const std::chrono::duration<double> deadline(env::get_seconds("TESSERA_TIMEOUT", 60));
    Silence silence(std::chrono::duration_cast<Silence::Clock::duration>(deadline));
    while (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      int error = errno;
      if (error != EWOULDBLOCK && error != EINTR) {
        close(fd_);
        cache.cannot_write(std::strerror(error));
      }
      if (silence.over())
        logging::warn("{}: has waited {:.3g} s for the process that compiles and holds {}",
                      cache.who_, silence.waited(), path);
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

ObjectCache::ObjectCache(std::string folder, std::string suffix, std::string who)
    : folder_(std::move(folder)), suffix_(std::move(suffix)), who_(std::move(who)) {
  if (folder_.empty()) folder_ = env::get("TESSERA_COMPILE_CACHE");
  if (!folder_.empty()) return;
  const char* home = std::getenv("HOME");
  TESSERA_CHECK_AS(CacheError, home && *home,
                   "{}: HOME is not set; set TESSERA_COMPILE_CACHE to a folder for compiled "
                   "kernels",
                   who_);
  folder_ = std::string(home) + "/.cache/tessera";
}

void ObjectCache::cannot_write(const std::string& why) const {
  throw CacheError(
      fmt::format("{}: the cache {} cannot be written: {}; set TESSERA_COMPILE_CACHE to a folder "
                  "that can",
                  who_, folder_, why));
}

// Removes what makers of any entry, also of another kind, left behind a day ago or earlier because
// they were killed or failed with an error that names their sources. Where a lock is held, its
// maker is still at work.
void ObjectCache::remove_stale() const {
  std::error_code ignored;
  const auto before = fs::file_time_type::clock::now() - kKept;
  for (const auto& entry : fs::directory_iterator(folder_, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!in_the_making(name) || entry.last_write_time(ignored) > before) continue;
    const std::string lock = fmt::format("{}/{}.lock", folder_, key_in(name));
    const int fd = open(lock.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) continue;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) fs::remove_all(entry.path(), ignored);
    close(fd);
  }
}

// Makes a folder with a name of its own for the maker of `key`: the compiler of a killed maker may
// outlive it and goes on writing to the folder it was given. Removes what killed makers left. The
// caller holds the lock.
std::string ObjectCache::fresh_folder(const std::string& key) const {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder_, ignored)) {
    const std::string name = entry.path().filename().string();
    if (key_in(name) == key && in_the_making(name)) fs::remove_all(entry.path(), ignored);
  }
  std::string work = fmt::format("{}/{}{}XXXXXX", folder_, key, kWork);
  if (!mkdtemp(work.data())) cannot_write(std::strerror(errno));
  return work;
}

std::optional<ObjectCache::Entry> ObjectCache::find(const std::string& key) const {
  std::string path = path_of(key);
  if (access(path.c_str(), R_OK) != 0) return {};
  try {
    Ref<Mapping> file = File::open(path, who_).map();
    if (whole(*file)) {
      damaged_entries().remove(path);
      const size_t bytes = file->bytes() - kDigest;
      return Entry{std::move(path), std::move(file), bytes};
    }
  } catch (const UserError& e) {
    throw CacheError(e.what());
  }
  if (damaged_entries().add(path)) logging::warn("{}: {} is damaged and is made again", who_, path);
  return {};
}

// If the maker is stopped by a signal, its peers hang where no collective could report it. Once
// they have waited for as long as for a collective, one of them makes the entry under another lock,
// which the rest wait for in the same way. No process gives up: with other kernels than its peers
// it would compute other bits.
ObjectCache::Entry ObjectCache::find_or_make(const std::string& key, Maker make, bool* made) const {
  *made = false;
  if (std::optional<Entry> entry = find(key)) return *std::move(entry);
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) cannot_write(error.message());
  for (int turn = 0;; ++turn) {
    const std::string maker = turn == 0 ? key : fmt::format("{}-again{}", key, turn);
    Lock lock(*this, fmt::format("{}/{}.lock", folder_, maker));
    if (std::optional<Entry> entry = find(key)) return *std::move(entry);  // made meanwhile
    if (!lock.held()) continue;
    Entry entry = make_entry(key, maker, make);
    *made = true;
    return entry;
  }
}

ObjectCache::Entry ObjectCache::make_entry(const std::string& key, const std::string& maker,
                                           Maker make) const {
  remove_stale();
  const std::string work = fresh_folder(maker);
  std::string bytes = make(work);
  bytes += digest_of(bytes.data(), bytes.size());
  std::error_code ignored;
  fs::remove_all(work, ignored);
  try {
    write_file(path_of(key), bytes, who_);
  } catch (const UserError& e) {
    throw CacheError(e.what());
  }
  std::optional<Entry> entry = find(key);
  if (!entry) cannot_write("what was written is not there");
  return *std::move(entry);
}

}  // namespace tessera::io
