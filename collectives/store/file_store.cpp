#include "collectives/store/file_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <thread>

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr const char* kLockName = "%lock";  // no escape has this form, so no key is in its way
constexpr const char* kFreshName = "%new";

std::string escape(const std::string& key) {
  std::string name;
  for (char c : key) {
    bool plain = std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' ||
                 (c == '.' && !name.empty());
    name += plain ? std::string(1, c) : fmt::format("%{:02X}", uint8_t(c));
  }
  return name;
}

std::optional<std::string> read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(in), {});
}

}  // namespace

/// Excludes other threads and other processes.
class FileStore::Lock {
 public:
  explicit Lock(FileStore& store) : guard_(store.mutex_), fd_(store.lock_fd_) {
    while (::flock(fd_, LOCK_EX) != 0)
      TESSERA_CHECK(errno == EINTR, "store: cannot lock {}: {}", store.directory_.string(),
                    std::strerror(errno));
  }
  ~Lock() { ::flock(fd_, LOCK_UN); }

 private:
  std::lock_guard<std::mutex> guard_;
  int fd_;
};

FileStore::FileStore(fs::path directory) : directory_(std::move(directory)) {
  std::error_code error;
  fs::create_directories(directory_, error);
  lock_fd_ = ::open((directory_ / kLockName).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  TESSERA_CHECK(lock_fd_ >= 0, "store: cannot write in {} ({}); choose another directory",
                directory_.string(), std::strerror(errno));
}

FileStore::~FileStore() { ::close(lock_fd_); }

fs::path FileStore::path_of(const std::string& key) const {
  detail::check_key(key);
  std::string name = escape(key);
  TESSERA_CHECK(name.size() <= 250, "store: key \"{}\" needs a file name of {} bytes; use 250",
                key.substr(0, 64), name.size());
  return directory_ / name;
}

void FileStore::write(const std::string& key, std::string_view value) {
  detail::check_value(key, value.size());
  fs::path path = path_of(key), fresh = directory_ / kFreshName;
  std::ofstream out(fresh, std::ios::binary | std::ios::trunc);
  out.write(value.data(), std::streamsize(value.size()));
  out.close();
  TESSERA_CHECK(out.good(), "store: cannot write {} ({}); is the disk full?", fresh.string(),
                std::strerror(errno));
  fs::rename(fresh, path);
}

void FileStore::multi_set(std::span<const std::string> keys, std::span<const std::string> values) {
  TESSERA_CHECK(keys.size() == values.size(), "store set: {} keys but {} values", keys.size(),
                values.size());
  Lock lock(*this);
  for (size_t i = 0; i < keys.size(); ++i) write(keys[i], values[i]);
}

void FileStore::await(const char* call, std::span<const std::string> keys, Millis timeout,
                      const std::function<void()>& then) {
  auto deadline = detail::deadline_after(timeout);
  for (Millis pause(1);; pause = std::min(2 * pause, Millis(20))) {
    std::vector<std::string> absent;
    {
      Lock lock(*this);
      for (const std::string& key : keys)
        if (!fs::exists(path_of(key))) absent.push_back(key);
      if (absent.empty()) return then();
    }
    auto now = Clock::now();
    if (now >= deadline) throw StoreTimeout(call, std::move(absent), keys.size(), timeout);
    std::this_thread::sleep_until(std::min(deadline, now + pause));
  }
}

std::vector<std::string> FileStore::multi_get(std::span<const std::string> keys, Millis timeout) {
  std::vector<std::string> values;
  await("get", keys, timeout, [&] {
    for (const std::string& key : keys) values.push_back(read_file(path_of(key)).value_or(""));
  });
  return values;
}

void FileStore::wait(std::span<const std::string> keys, Millis timeout) {
  await("wait", keys, timeout, [] {});
}

int64_t FileStore::add(const std::string& key, int64_t delta) {
  Lock lock(*this);
  auto text = read_file(path_of(key));
  int64_t sum = detail::counter_sum(key, text ? detail::counter_value(key, *text) : 0, delta);
  write(key, std::to_string(sum));
  return sum;
}

int64_t FileStore::append(const std::string& key, std::string_view suffix) {
  Lock lock(*this);
  std::string text = read_file(path_of(key)).value_or("");
  text.append(suffix);
  write(key, text);
  return int64_t(text.size());
}

std::string FileStore::compare_set(const std::string& key, std::string_view expected,
                                   std::string_view desired) {
  Lock lock(*this);
  std::string text = read_file(path_of(key)).value_or("");
  if (text != expected) return text;
  write(key, desired);
  return std::string(desired);
}

bool FileStore::check(std::span<const std::string> keys) {
  Lock lock(*this);
  return std::all_of(keys.begin(), keys.end(),
                     [&](const std::string& key) { return fs::exists(path_of(key)); });
}

bool FileStore::delete_key(const std::string& key) {
  Lock lock(*this);
  return fs::remove(path_of(key));
}

int64_t FileStore::num_keys(const std::string& prefix) {
  Lock lock(*this);
  std::string start = escape(prefix);
  int64_t n = 0;
  for (const auto& entry : fs::directory_iterator(directory_)) {
    std::string name = entry.path().filename().string();
    n += name != kLockName && name != kFreshName && name.starts_with(start);
  }
  return n;
}

}  // namespace tessera
