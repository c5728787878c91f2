// A thread that makes existing memory pending although others may read it meanwhile (a recording
// that puts its ops off) changes Storage::ready under this lock, and a thread that waits reads it
// under the lock. Whether anything is pending (Storage::pending) may be asked without it.
#pragma once
#include <mutex>

namespace tessera {

/// One lock for all storages: it is taken only where something is pending.
std::mutex& ready_lock();

}  // namespace tessera
