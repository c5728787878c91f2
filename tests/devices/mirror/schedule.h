// Streams whose work runs on the threads that wait for it, and as late or as oddly as events allow.
// An op runs after those before it on its stream and after the event that it waits for; nothing
// else orders ops. Invariant: one op runs at a time, under the settings of the thread that enqueued
// it.
#pragma once
#include <functional>
#include <optional>

#include "core/tensor/event.h"

namespace mirror {

/// How ops are chosen. Without a seed, an op runs when the host waits for something that needs it.
/// With one, any op that may run is drawn, also ones that nobody waits for, and some run at submit.
void set_seed(std::optional<uint64_t> seed);
/// A fault on purpose: while set, streams do not wait for events.
void lose_stream_waits(bool on);

/// The calling thread's stream on `device`. A thread that ends leaves its streams to others, so a
/// handle is valid until the program ends.
tessera::Stream stream_of_thread(tessera::Device device);
/// Others of the calling thread, for copies: of turn 0 and 1.
tessera::Stream copy_stream_of_thread(tessera::Device device, int turn);
/// Lets stream_of_thread return `stream`; returns what it was.
tessera::Stream exchange_stream(const tessera::Stream& stream);
void enqueue(const tessera::Stream& stream, std::function<void()> run);
/// The end of what is on `stream` now; null where it has ended.
tessera::Ref<tessera::Event> record(const tessera::Stream& stream);
/// How often a thread has waited for the device.
int64_t host_waits();
/// Runs ops until all that is on `stream` now has run. Throws what an op of it threw, once.
void synchronize(const tessera::Stream& stream);

}  // namespace mirror
