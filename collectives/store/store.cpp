#include "collectives/store/store.h"

#include <algorithm>
#include <charconv>

namespace tessera {
namespace {

std::string timeout_text(const std::string& call, const std::vector<std::string>& absent,
                         size_t asked, Millis timeout) {
  constexpr size_t kShown = 8;
  std::string names;
  for (size_t i = 0; i < std::min(absent.size(), kShown); ++i)
    names += fmt::format("{}\"{}\"", i ? ", " : "", absent[i]);
  if (absent.size() > kShown) names += fmt::format(" and {} more", absent.size() - kShown);
  return fmt::format(
      "store {}: {} of {} key{} not set within {} ms: {}; the ranks that set them have not arrived",
      call, absent.size(), asked, asked == 1 ? "" : "s", timeout.count(), names);
}

thread_local Millis time_limit = Millis::max();

}  // namespace

StoreTimeout::StoreTimeout(const std::string& call, std::vector<std::string> absent, size_t asked,
                           Millis timeout)
    : CommError(timeout_text(call, absent, asked, timeout), "store", 0, {}),
      call_(call),
      keys_(std::move(absent)),
      asked_(asked),
      timeout_(timeout) {}

StoreTimeout StoreTimeout::without_prefix(size_t prefix_bytes) const {
  std::vector<std::string> keys;
  for (const std::string& key : keys_) keys.push_back(key.substr(prefix_bytes));
  return StoreTimeout(call_, std::move(keys), asked_, timeout_);
}

void Store::set(const std::string& key, std::string_view value) {
  std::string text(value);
  multi_set({&key, 1}, {&text, 1});
}

std::string Store::get(const std::string& key, Millis timeout) {
  return std::move(multi_get({&key, 1}, timeout)[0]);
}

StoreTimeLimit::StoreTimeLimit(Millis limit) : before_(time_limit) {
  time_limit = std::min(time_limit, limit);
}
StoreTimeLimit::~StoreTimeLimit() { time_limit = before_; }
Millis StoreTimeLimit::of_thread(Millis otherwise) { return std::min(time_limit, otherwise); }

PrefixStore::PrefixStore(std::string prefix, std::shared_ptr<Store> store)
    : prefix_(std::move(prefix)), store_(std::move(store)) {}

std::vector<std::string> PrefixStore::with_prefix(std::span<const std::string> keys) const {
  std::vector<std::string> full;
  full.reserve(keys.size());
  for (const std::string& key : keys) {
    detail::check_key(key);
    full.push_back(prefix_ + key);
  }
  return full;
}

void PrefixStore::multi_set(std::span<const std::string> keys,
                            std::span<const std::string> values) {
  store_->multi_set(with_prefix(keys), values);
}

std::vector<std::string> PrefixStore::multi_get(std::span<const std::string> keys, Millis timeout) {
  try {
    return store_->multi_get(with_prefix(keys), timeout);
  } catch (const StoreTimeout& e) {
    throw e.without_prefix(prefix_.size());
  }
}

void PrefixStore::wait(std::span<const std::string> keys, Millis timeout) {
  try {
    store_->wait(with_prefix(keys), timeout);
  } catch (const StoreTimeout& e) {
    throw e.without_prefix(prefix_.size());
  }
}

int64_t PrefixStore::add(const std::string& key, int64_t delta) {
  return store_->add(prefix_ + key, delta);
}

int64_t PrefixStore::append(const std::string& key, std::string_view suffix) {
  return store_->append(prefix_ + key, suffix);
}

std::string PrefixStore::compare_set(const std::string& key, std::string_view expected,
                                     std::string_view desired) {
  return store_->compare_set(prefix_ + key, expected, desired);
}

bool PrefixStore::check(std::span<const std::string> keys) {
  return store_->check(with_prefix(keys));
}

bool PrefixStore::delete_key(const std::string& key) { return store_->delete_key(prefix_ + key); }

int64_t PrefixStore::num_keys(const std::string& prefix) {
  return store_->num_keys(prefix_ + prefix);
}

namespace detail {

void check_key(const std::string& key) {
  TESSERA_CHECK(!key.empty() && key.size() <= kMaxStoreKeyBytes,
                "store: key \"{}\" has {} bytes; use 1 to {}", key.substr(0, 64), key.size(),
                kMaxStoreKeyBytes);
}

void check_value(const std::string& key, size_t value_bytes) {
  TESSERA_CHECK(value_bytes <= kMaxStoreValueBytes,
                "store: value of key \"{}\" has {} bytes; at most {} fit, split it", key,
                value_bytes, kMaxStoreValueBytes);
}

int64_t counter_value(const std::string& key, const std::string& text) {
  int64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TESSERA_CHECK(error == std::errc() && end == text.data() + text.size(),
                "store add: key \"{}\" holds {} bytes that are no number; use another key", key,
                text.size());
  return value;
}

int64_t counter_sum(const std::string& key, int64_t a, int64_t b) {
  int64_t sum = 0;
  TESSERA_CHECK(!__builtin_add_overflow(a, b, &sum),
                "store add: counter \"{}\" overflows, {} + {}; delete the key to start again", key,
                a, b);
  return sum;
}

std::chrono::steady_clock::time_point deadline_after(Millis timeout) {
  constexpr Millis kLongest = std::chrono::hours(24 * 30);
  return std::chrono::steady_clock::now() + std::clamp(timeout, Millis(0), kLongest);
}

}  // namespace detail
}  // namespace tessera
