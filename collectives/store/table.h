// The map behind MemoryStore and the TCP server. A waiter is listed at the first of its keys that
// is absent and moves on when that key is set, so n ranks that wait for n keys cost one list
// insertion each, without polling. Invariant: a waiter's callback is called exactly once, or never
// if cancel() returned its absent keys; it is called without the table's lock.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::detail {

class Table {
 public:
  /// Receives the values of a waiter's keys, or nothing if it did not ask for values.
  using Done = std::function<void(std::vector<std::string> values)>;

  /// Keys and values together may take at most `max_bytes`; a call that needs more throws
  /// UserError.
  explicit Table(size_t max_bytes = size_t{256} << 20) : max_bytes_(max_bytes) {}

  void set(std::span<const std::string> keys, std::span<const std::string> values);
  int64_t add(const std::string& key, int64_t delta);
  int64_t append(const std::string& key, std::string_view suffix);
  std::string compare_set(const std::string& key, std::string_view expected,
                          std::string_view desired);
  bool check(std::span<const std::string> keys) const;
  bool remove(const std::string& key);
  int64_t count(const std::string& prefix) const;
  /// Removes all keys that begin with `prefix`; returns how many.
  int64_t remove_all(const std::string& prefix);

  /// Calls `done` once all keys are set, possibly before returning. Returns a number for cancel().
  uint64_t wait(std::vector<std::string> keys, bool want_values, Done done);
  /// Forgets a waiter and returns its absent keys; nullopt when its callback has run or is about
  /// to.
  std::optional<std::vector<std::string>> cancel(uint64_t waiter);

 private:
  struct Waiter {
    std::vector<std::string> keys;
    bool want_values;
    Done done;
    size_t next = 0;        // index of its first key that may be absent
    uint64_t removals = 0;  // removals_ when the keys before that were seen
  };
  struct Ready {
    Done done;
    std::vector<std::string> values;
  };

  void put(const std::string& key, std::string value, std::vector<Ready>& ready);
  /// Moves a waiter to its next absent key, or out of the table into `ready`.
  void advance(uint64_t id, std::vector<Ready>& ready);
  static void run(std::vector<Ready> ready);

  mutable std::mutex mutex_;
  std::map<std::string, std::string> values_;  // ordered: count() walks one prefix
  // Absent key -> waiters listed there.
  std::unordered_map<std::string, std::vector<uint64_t>> sitting_;
  std::unordered_map<uint64_t, Waiter> waiters_;
  uint64_t next_waiter_ = 1;
  uint64_t removals_ = 0;
  size_t bytes_ = 0;
  const size_t max_bytes_;
};

}  // namespace tessera::detail
