// How ranks find each other and agree on a backend: each writes a record to the store and reads all
// others, and all draw the same conclusion. Invariant: the conclusion depends only on the records.
#pragma once
#include "collectives/backend_group.h"
#include "collectives/shm/engine.h"
#include "collectives/store/store.h"

namespace tessera::detail {

struct JoinOptions {
  std::string backend;           // "shm", "gloo", "mpi" or "" (chosen by where ranks are)
  std::shared_ptr<Store> store;  // the job's, where deaths are announced
  std::string prefix;            // of the keys of this group and its sub-groups
  Millis timeout{0};             // deadline of each collective
  Millis join_timeout{0};        // deadline of joining
  std::string host = {};         // identifies this rank's host; "": TESSERA_HOST_ID
  int store_keeper = -1;  // the rank of the world that serves the store; -1: the launcher does
  std::shared_ptr<Watchdog> watchdog = nullptr;  // this rank's; null: it gets one
};

/// Makes a group of processes (or with gloo also of threads) that meet in a store.
Ref<ProcessGroup> join_by_store(Membership members, const JoinOptions& options);

/// Makes a group of threads that meet in a hub. If `options.watchdog` is null, each rank gets one.
Ref<ProcessGroup> join_threads(Membership members, std::shared_ptr<Hub> hub, Millis timeout,
                               ShmOptions options);

/// The members of a world of `size` ranks.
Membership make_world(const std::string& name, int rank, int size);
/// The deadline of each collective: TESSERA_TIMEOUT.
Millis default_timeout();
/// The deadline of joining the world: TESSERA_JOIN_TIMEOUT.
Millis join_timeout();

}  // namespace tessera::detail
