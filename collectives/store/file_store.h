// A store in a directory that all ranks can write to, for tests and for jobs without a launcher.
// Each key is a file of that name; bytes other than letters, digits, '.', '_' and '-' are written
// as %XX. Invariant: a value appears as a whole, by rename; changes hold the lock file. Waiting
// polls, at most 20 ms apart. A directory serves one job only: what an earlier job left would be
// taken as current.
#pragma once
#include <filesystem>
#include <functional>
#include <mutex>

#include "collectives/store/store.h"

namespace tessera {

class FileStore : public Store {
 public:
  /// Creates the directory if needed. Throws UserError when it cannot be written. Keys may have at
  /// most 250 bytes after the escapes.
  explicit FileStore(std::filesystem::path directory);
  ~FileStore() override;
  FileStore(const FileStore&) = delete;
  FileStore& operator=(const FileStore&) = delete;

  void multi_set(std::span<const std::string> keys, std::span<const std::string> values) override;
  std::vector<std::string> multi_get(std::span<const std::string> keys, Millis timeout) override;
  void wait(std::span<const std::string> keys, Millis timeout) override;
  int64_t add(const std::string& key, int64_t delta) override;
  int64_t append(const std::string& key, std::string_view suffix) override;
  std::string compare_set(const std::string& key, std::string_view expected,
                          std::string_view desired) override;
  bool check(std::span<const std::string> keys) override;
  bool delete_key(const std::string& key) override;
  int64_t num_keys(const std::string& prefix = "") override;

 private:
  class Lock;
  std::filesystem::path path_of(const std::string& key) const;
  void write(const std::string& key, std::string_view value);
  void await(const char* call, std::span<const std::string> keys, Millis timeout,
             const std::function<void()>& then);

  std::filesystem::path directory_;
  int lock_fd_ = -1;
  std::mutex mutex_;  // flock does not exclude threads of the same process
};

}  // namespace tessera
