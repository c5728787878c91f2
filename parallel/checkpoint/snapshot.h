// The bytes of a save as they were when it was asked for, while training goes on. Nothing is copied
// then: each tensor is marked as being read (Storage::add_reader), and a thread with nothing better
// to do copies one after the other into a bounded buffer. Who is about to overwrite a tensor before
// that copies what is left of this one itself. Invariants: a tensor is overwritten only after all
// its bytes are in the buffer, or after the save was given up; bytes come out in the order of the
// list; the buffer is at most `limit`, allocated once and reused by every save.
#pragma once
#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

#include "core/tensor/tensor.h"
#include "parallel/checkpoint/pages.h"

namespace tessera::checkpoint {

class Snapshot {
 public:
  using Clock = std::chrono::steady_clock;

  /// A buffer of at most `limit` bytes; 0: of as many as reserve() asks for.
  explicit Snapshot(size_t limit);
  /// Gives up what is under way.
  ~Snapshot();

  /// Room for `bytes`, or for the limit; touches every page, so that copying meets no page fault.
  /// Only while nothing is under way.
  void reserve(size_t bytes);
  size_t capacity() const { return pages_.bytes(); }

  /// From here on, the values of `tensors` (plain ones of the CPU, dense or strided) are those of
  /// the save. Waits for pending writes, copies nothing. Where they do not fit the buffer, a write
  /// to one of them waits until the disk has made room; one that has waited for `patience` while
  /// none came free gives the save up. Only while nothing is under way.
  void begin(std::vector<Tensor> tensors, Clock::duration patience);
  /// Copies everything, with the threads of the calling thread, waiting for room as a write does.
  void copy_all();
  /// Copies what there is room for, on the calling thread: what is likely to be overwritten first,
  /// first. Of the thread that takes.
  void copy_some();
  /// The next bytes: `most`, or what lies before the buffer's end or the list's where that is less.
  /// Of a save taken by equal multiples of 4 KiB, all but the last begin and end at such multiples.
  /// Empty when the save was given up.
  std::span<const std::byte> take(size_t most);
  /// Makes room: the oldest `bytes` are done with.
  void release(size_t bytes);
  /// Nobody waits any more; returns when nobody copies any more.
  void give_up();

  /// How long writes to the tensors of the last begin() were held up, over all threads: waiting, or
  /// copying themselves.
  double held_up_seconds() const;

 private:
  class Copying;
  Pages pages_;
  size_t limit_;
  Ref<Copying> copying_;  // null before the first begin()
};

}  // namespace tessera::checkpoint
