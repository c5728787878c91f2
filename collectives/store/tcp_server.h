// The store's server: one thread, one table, any number of connections. Invariants: it listens on
// the chosen address only; a peer that has not proved the job's key within 5 s is closed and never
// reaches the request parser; each connection holds at most one request and one answer of 1 MiB; at
// most 256 peers may be unproven at a time (the oldest is closed), so strangers cannot use it up.
#pragma once
#include <memory>
#include <string>

#include "collectives/store/memory_store.h"

namespace tessera {

class TcpStoreServer {
 public:
  /// Listens on host:port, port 0 for any free one. `key` is the job's secret, not empty. Throws
  /// UserError, for a port in use naming the process that has it.
  TcpStoreServer(const std::string& host, int port, const std::string& key);
  /// Closes all connections; clients get CommError.
  ~TcpStoreServer();

  int port() const;
  /// The served table, for the process that serves it.
  std::shared_ptr<Store> store();
  /// Removes all keys that begin with `prefix`.
  void forget(const std::string& prefix);
  /// Connections now open, proven or not.
  int num_connections() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A fresh 256-bit secret as 64 hexadecimal digits.
std::string make_store_key();

}  // namespace tessera
