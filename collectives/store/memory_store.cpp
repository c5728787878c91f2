#include "collectives/store/memory_store.h"

#include <condition_variable>

namespace tessera {

std::vector<std::string> MemoryStore::await(const char* call, std::span<const std::string> keys,
                                            bool want_values, Millis timeout) {
  struct Answer {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::vector<std::string> values;
  };
  auto answer = std::make_shared<Answer>();
  auto deadline = detail::deadline_after(timeout);
  uint64_t waiter = table_->wait({keys.begin(), keys.end()}, want_values,
                                 [answer](std::vector<std::string> values) {
                                   std::lock_guard lock(answer->mutex);
                                   answer->values = std::move(values);
                                   answer->done = true;
                                   answer->changed.notify_one();
                                 });
  std::unique_lock lock(answer->mutex);
  if (!answer->changed.wait_until(lock, deadline, [&] { return answer->done; })) {
    lock.unlock();
    if (auto absent = table_->cancel(waiter))
      throw StoreTimeout(call, std::move(*absent), keys.size(), timeout);
    lock.lock();  // the last key has just been set: its callback is running
    answer->changed.wait(lock, [&] { return answer->done; });
  }
  return std::move(answer->values);
}

void MemoryStore::multi_set(std::span<const std::string> keys,
                            std::span<const std::string> values) {
  table_->set(keys, values);
}

std::vector<std::string> MemoryStore::multi_get(std::span<const std::string> keys, Millis timeout) {
  return await("get", keys, true, timeout);
}

void MemoryStore::wait(std::span<const std::string> keys, Millis timeout) {
  await("wait", keys, false, timeout);
}

int64_t MemoryStore::add(const std::string& key, int64_t delta) { return table_->add(key, delta); }

int64_t MemoryStore::append(const std::string& key, std::string_view suffix) {
  return table_->append(key, suffix);
}

std::string MemoryStore::compare_set(const std::string& key, std::string_view expected,
                                     std::string_view desired) {
  return table_->compare_set(key, expected, desired);
}

bool MemoryStore::check(std::span<const std::string> keys) { return table_->check(keys); }

bool MemoryStore::delete_key(const std::string& key) { return table_->remove(key); }

int64_t MemoryStore::num_keys(const std::string& prefix) { return table_->count(prefix); }

}  // namespace tessera
