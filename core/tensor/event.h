// The end of something that runs elsewhere: a kernel on a stream, a collective, a save. Host code
// that needs values waits for an event; a stream that needs them is told to wait, and the host
// goes on.
#pragma once
#include "core/base/ref.h"
#include "core/tensor/stream.h"

namespace tessera {

class Event : public RefCounted {
 public:
  /// Whether it has happened. Asking hurries no producer.
  virtual bool done() const = 0;
  /// Blocks until done; throws what the producer failed with. A wait has the deadline of its
  /// producer.
  virtual void wait() = 0;
  /// Lets what is enqueued on `stream` from now on run after the event. A device's event tells the
  /// device and returns at once; the default blocks the calling thread until done.
  virtual void wait_on(const Stream& /*stream*/) { wait(); }
  /// Tells the producer that a thread needs the result and waits for it in another way: a producer
  /// that delays its work should delay it no longer.
  virtual void hurry() {}
};

}  // namespace tessera
