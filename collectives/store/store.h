// The store: a small map of byte strings that all ranks of a job can reach. Ranks use it to find
// each other and to announce deaths, never for tensor data. Invariant: every call that may block
// has a deadline on the monotonic clock, and the error of a missed one names the keys that were
// absent.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"

namespace tessera {

using Millis = std::chrono::milliseconds;

inline constexpr size_t kMaxStoreKeyBytes = 1024;
inline constexpr size_t kMaxStoreValueBytes = (size_t{1} << 20) - 8192;

/// The error of a blocking call that missed its deadline; keys() are those that were not set.
class StoreTimeout : public CommError {
 public:
  StoreTimeout(const std::string& call, std::vector<std::string> absent, size_t asked,
               Millis timeout);
  const std::vector<std::string>& keys() const { return keys_; }
  /// Returns the same error for a caller whose keys lack the first `prefix_bytes` of these.
  StoreTimeout without_prefix(size_t prefix_bytes) const;

 private:
  std::string call_;
  std::vector<std::string> keys_;
  size_t asked_;
  Millis timeout_;
};

/// All calls are atomic and may come from any thread. Keys have 1 to kMaxStoreKeyBytes bytes,
/// values at most kMaxStoreValueBytes. Calls throw UserError for an invalid argument, StoreTimeout
/// for a missed deadline and CommError when the store cannot be reached any more.
class Store {
 public:
  virtual ~Store() = default;

  virtual void multi_set(std::span<const std::string> keys,
                         std::span<const std::string> values) = 0;
  /// Waits until all keys are set and returns their values, all read at the same moment (a TcpStore
  /// may need several when the values exceed one frame of 1 MiB).
  virtual std::vector<std::string> multi_get(std::span<const std::string> keys, Millis timeout) = 0;
  /// Waits until all keys are set.
  virtual void wait(std::span<const std::string> keys, Millis timeout) = 0;
  /// Adds to a counter, which starts at 0 and is stored as decimal text; returns the new value.
  virtual int64_t add(const std::string& key, int64_t delta) = 0;
  /// Appends to a value, which starts empty; returns the new size in bytes.
  virtual int64_t append(const std::string& key, std::string_view suffix) = 0;
  /// Sets `key` to `desired` if it holds `expected`, or if it is absent and `expected` is empty.
  /// Returns what the key holds afterwards ("" when it is still absent).
  virtual std::string compare_set(const std::string& key, std::string_view expected,
                                  std::string_view desired) = 0;
  /// True when all keys are set; does not wait.
  virtual bool check(std::span<const std::string> keys) = 0;
  /// Returns true when the key existed.
  virtual bool delete_key(const std::string& key) = 0;
  /// The number of keys that begin with `prefix`; a cheap way to poll for changes.
  virtual int64_t num_keys(const std::string& prefix = "") = 0;

  void set(const std::string& key, std::string_view value);
  std::string get(const std::string& key, Millis timeout);
};

/// While this object lives, calls of its thread give up when the store does not answer for `limit`
/// (beyond the time they wait for keys) instead of for some seconds. Where it has not answered such
/// a call, the calls that follow within `limit` fail at once, so that a series of them lasts no
/// longer than one.
class StoreTimeLimit {
 public:
  explicit StoreTimeLimit(Millis limit);
  ~StoreTimeLimit();
  StoreTimeLimit(const StoreTimeLimit&) = delete;
  StoreTimeLimit& operator=(const StoreTimeLimit&) = delete;
  /// The calling thread's limit; `otherwise` where it has none, or a longer one.
  static Millis of_thread(Millis otherwise);

 private:
  const Millis before_;
};

/// The part of another store whose keys begin with `prefix`; users of this store do not see the
/// prefix.
class PrefixStore : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store);

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
  std::vector<std::string> with_prefix(std::span<const std::string> keys) const;

  std::string prefix_;
  std::shared_ptr<Store> store_;
};

namespace detail {
/// Throws UserError unless the key and the value fit the store's limits.
void check_key(const std::string& key);
void check_value(const std::string& key, size_t value_bytes);
/// The number that the counter `key` holds; throws UserError when its text is not a number.
int64_t counter_value(const std::string& key, const std::string& text);
/// a + b; throws UserError when the sum does not fit.
int64_t counter_sum(const std::string& key, int64_t a, int64_t b);
/// The time `timeout` from now on the monotonic clock; a negative one counts as 0, more than 30
/// days as 30 days.
std::chrono::steady_clock::time_point deadline_after(Millis timeout);
}  // namespace detail

}  // namespace tessera
