// Who makes existing memory pending although other threads may read it meanwhile (a recording that
// puts its ops off) changes Storage::ready under this lock; who waits looks at it under the lock.
// Whether anything is pending at all (Storage::pending) may be asked without.
#pragma once
#include <mutex>

namespace tessera {

/// One for all storages: it is taken where something is pending, never on the way past.
std::mutex& ready_lock();

}  // namespace tessera
