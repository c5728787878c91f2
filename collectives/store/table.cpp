#include "collectives/store/table.h"

#include <algorithm>

#include "collectives/store/store.h"

namespace tessera::detail {

void Table::run(std::vector<Ready> ready) {
  for (Ready& r : ready) r.done(std::move(r.values));
}

void Table::put(const std::string& key, std::string value, std::vector<Ready>& ready) {
  check_key(key);
  check_value(key, value.size());
  auto found = values_.find(key);
  size_t before = found == values_.end() ? 0 : key.size() + found->second.size();
  size_t after = bytes_ - before + key.size() + value.size();
  TESSERA_CHECK(after <= max_bytes_,
                "store: full, \"{}\" would make it {} bytes of {}; delete keys", key, after,
                max_bytes_);
  bytes_ = after;
  if (found != values_.end()) {
    found->second = std::move(value);
    return;
  }
  values_.emplace(key, std::move(value));
  auto sitting = sitting_.find(key);
  if (sitting == sitting_.end()) return;
  std::vector<uint64_t> ids = std::move(sitting->second);
  sitting_.erase(sitting);
  for (uint64_t id : ids) advance(id, ready);
}

void Table::advance(uint64_t id, std::vector<Ready>& ready) {
  auto found = waiters_.find(id);
  if (found == waiters_.end()) return;
  Waiter& w = found->second;
  if (w.removals != removals_) w.next = 0;  // a key seen before may have been removed
  w.removals = removals_;
  while (w.next < w.keys.size() && values_.count(w.keys[w.next])) ++w.next;
  if (w.next < w.keys.size()) {
    sitting_[w.keys[w.next]].push_back(id);
    return;
  }
  Ready r{std::move(w.done), {}};
  if (w.want_values) {
    r.values.reserve(w.keys.size());
    for (const std::string& key : w.keys) r.values.push_back(values_.at(key));
  }
  waiters_.erase(found);
  ready.push_back(std::move(r));
}

void Table::set(std::span<const std::string> keys, std::span<const std::string> values) {
  TESSERA_CHECK(keys.size() == values.size(), "store set: {} keys but {} values", keys.size(),
                values.size());
  for (size_t i = 0; i < keys.size(); ++i) {  // all or nothing, unless the store becomes full
    check_key(keys[i]);
    check_value(keys[i], values[i].size());
  }
  std::vector<Ready> ready;
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < keys.size(); ++i) put(keys[i], values[i], ready);
  }
  run(std::move(ready));
}

int64_t Table::add(const std::string& key, int64_t delta) {
  std::vector<Ready> ready;
  int64_t sum = 0;
  {
    std::lock_guard lock(mutex_);
    auto found = values_.find(key);
    sum = counter_sum(key, found == values_.end() ? 0 : counter_value(key, found->second), delta);
    put(key, std::to_string(sum), ready);
  }
  run(std::move(ready));
  return sum;
}

int64_t Table::append(const std::string& key, std::string_view suffix) {
  std::vector<Ready> ready;
  size_t bytes = 0;
  {
    std::lock_guard lock(mutex_);
    auto found = values_.find(key);
    bytes = (found == values_.end() ? 0 : found->second.size()) + suffix.size();
    check_value(key, bytes);
    std::string text = found == values_.end() ? std::string() : found->second;
    put(key, text.append(suffix), ready);
  }
  run(std::move(ready));
  return int64_t(bytes);
}

std::string Table::compare_set(const std::string& key, std::string_view expected,
                               std::string_view desired) {
  std::vector<Ready> ready;
  std::string now;
  {
    std::lock_guard lock(mutex_);
    auto found = values_.find(key);
    bool matches = found == values_.end() ? expected.empty() : found->second == expected;
    if (matches) put(key, std::string(desired), ready);
    now = matches ? std::string(desired) : found == values_.end() ? "" : found->second;
  }
  run(std::move(ready));
  return now;
}

bool Table::check(std::span<const std::string> keys) const {
  std::lock_guard lock(mutex_);
  return std::all_of(keys.begin(), keys.end(), [&](const auto& k) { return values_.count(k); });
}

bool Table::remove(const std::string& key) {
  std::lock_guard lock(mutex_);
  auto found = values_.find(key);
  if (found == values_.end()) return false;
  bytes_ -= key.size() + found->second.size();
  values_.erase(found);
  ++removals_;
  return true;
}

int64_t Table::count(const std::string& prefix) const {
  std::lock_guard lock(mutex_);
  if (prefix.empty()) return int64_t(values_.size());
  int64_t n = 0;
  for (auto it = values_.lower_bound(prefix); it != values_.end(); ++it, ++n)
    if (!it->first.starts_with(prefix)) break;
  return n;
}

int64_t Table::remove_all(const std::string& prefix) {
  std::lock_guard lock(mutex_);
  int64_t n = 0;
  auto it = values_.lower_bound(prefix);
  while (it != values_.end() && it->first.starts_with(prefix)) {
    bytes_ -= it->first.size() + it->second.size();
    it = values_.erase(it);
    ++n;
  }
  ++removals_;
  return n;
}

uint64_t Table::wait(std::vector<std::string> keys, bool want_values, Done done) {
  for (const std::string& key : keys) check_key(key);
  std::vector<Ready> ready;
  uint64_t id = 0;
  {
    std::lock_guard lock(mutex_);
    id = next_waiter_++;
    waiters_.emplace(id, Waiter{std::move(keys), want_values, std::move(done), 0, removals_});
    advance(id, ready);
  }
  run(std::move(ready));
  return id;
}

std::optional<std::vector<std::string>> Table::cancel(uint64_t waiter) {
  std::lock_guard lock(mutex_);
  auto found = waiters_.find(waiter);
  if (found == waiters_.end()) return std::nullopt;
  Waiter& w = found->second;
  auto sitting = sitting_.find(w.keys[w.next]);
  if (sitting != sitting_.end()) {
    std::erase(sitting->second, waiter);
    if (sitting->second.empty()) sitting_.erase(sitting);
  }
  std::vector<std::string> absent;
  for (const std::string& key : w.keys)
    if (!values_.count(key)) absent.push_back(key);
  waiters_.erase(found);
  return absent;
}

}  // namespace tessera::detail
