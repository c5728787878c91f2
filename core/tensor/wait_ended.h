// Waits of those who need memory and no values: an allocator, a writer that waits for readers. What
// the producer failed with is left to those who use its result.
#pragma once
#include "core/tensor/event.h"

namespace tessera {

/// Blocks until `event` has happened, or its producer has failed.
void wait_ended(Event& event) noexcept;
/// Whether the calling thread is inside wait_ended(). An event that throws its error only once must
/// not throw it then, but keep it for the next wait.
bool waits_for_memory();

}  // namespace tessera
