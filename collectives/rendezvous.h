// How ranks find each other and agree on a backend: each leaves a record in the store, reads all
// others', and all draw the same conclusion. Invariant: the conclusion depends on the records only.
#pragma once
#include "collectives/backend_group.h"
#include "collectives/shm/engine.h"
#include "collectives/store/store.h"

namespace tessera::detail {

struct JoinOptions {
  std::string backend;           // "shm", "gloo", "mpi" or "" (chosen by where ranks are)
  std::shared_ptr<Store> store;  // the job's, where deaths are announced
  std::string prefix;            // of this group's and its sub-groups' keys
  Millis timeout{0};             // deadline of each collective
  Millis join_timeout{0};        // deadline of joining
  std::string host = {};         // tells this rank's host from others; "": TESSERA_HOST_ID
  int store_keeper = -1;         // rank of the world that serves the store; -1: the launcher
  std::shared_ptr<Watchdog> watchdog = nullptr;  // of this rank; null: it gets one
};

/// A group of processes (or of threads, with gloo) that meet in a store.
Ref<ProcessGroup> join_by_store(Membership members, const JoinOptions& options);

/// A group of threads that meet in a hub
/// (`options.watchdog` null: each gets one).
Ref<ProcessGroup> join_threads(Membership members, std::shared_ptr<Hub> hub, Millis timeout,
                               ShmOptions options);

/// The members of a world of `size` ranks.
Membership make_world(const std::string& name, int rank, int size);
/// TESSERA_TIMEOUT: of each collective.
Millis default_timeout();
/// TESSERA_JOIN_TIMEOUT: of joining the world.
Millis join_timeout();

}  // namespace tessera::detail
