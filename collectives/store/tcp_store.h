// A rank's client of the store that the launcher serves. A call uses an idle connection, or opens
// one when all are busy, so one thread may block in wait() while others go on. Invariant: both ends
// prove that they know the job's key before anything else is sent; the server keeps the deadlines,
// and the client notices when the server itself does not answer.
#pragma once
#include "collectives/store/store.h"

namespace tessera {

class TcpStore : public Store {
 public:
  /// Connects at once, and tries for `timeout` while no server listens. Throws CommError when there
  /// is no answer, and UserError when the host does not resolve, or the peer is not a Tessera store
  /// of this version or has another key.
  TcpStore(const std::string& host, int port, const std::string& key, Millis timeout);
  ~TcpStore() override;

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
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
