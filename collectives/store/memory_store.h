// A store inside one process, for ranks that are threads and for jobs of one rank. A TcpStoreServer
// offers one that works on the table it serves.
#pragma once
#include "collectives/store/store.h"
#include "collectives/store/table.h"

namespace tessera {

class MemoryStore : public Store {
 public:
  MemoryStore() : MemoryStore(std::make_shared<detail::Table>()) {}
  explicit MemoryStore(std::shared_ptr<detail::Table> table) : table_(std::move(table)) {}

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
  std::vector<std::string> await(const char* call, std::span<const std::string> keys,
                                 bool want_values, Millis timeout);

  std::shared_ptr<detail::Table> table_;
};

}  // namespace tessera
