// The store's server: one thread, one table, any number of connections. Invariants: it listens only
// where the chosen host is reached; a peer that has not proved that it knows the job's key within 5
// s is closed and never reaches the request parser; each connection holds at most one request and
// one answer of 1 MiB; at most 256 peers may be unproven at a time (the oldest is closed), so
// strangers cannot exhaust it.
#pragma once
#include <memory>
#include <string>

#include "collectives/store/memory_store.h"

namespace tessera {

class TcpStoreServer {
 public:
  /// Listens on host:port; port 0 is any free one. Where `host` is a name of this machine that it
  /// takes for one of loopback itself (127.0.1.1 in /etc/hosts), on all addresses. `key` is the
  /// job's secret and not empty. Throws UserError, which for a port in use names the process that
  /// has it.
  TcpStoreServer(const std::string& host, int port, const std::string& key);
  /// Closes all connections; clients then throw CommError.
  ~TcpStoreServer();

  int port() const;
  /// The served table as a store, for the process that serves it.
  std::shared_ptr<Store> store();
  /// Removes all keys that begin with `prefix`.
  void forget(const std::string& prefix);
  /// The number of connections that are open, proven or not.
  int num_connections() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes a new 256-bit secret, as 64 hexadecimal digits.
std::string make_store_key();

}  // namespace tessera
