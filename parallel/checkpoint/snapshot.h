// Preserves the bytes of a save as they were when it was requested, while training goes on. Nothing
// on the CPU is copied at that moment: each tensor is marked as being read (Storage::add_reader),
// and the writer thread copies one after the other into a bounded buffer. A thread that is about to
// overwrite a tensor before that first copies what is left of it. Tensors of a device are copied to
// memory of the host, beside that buffer, by copies that run beside its kernels: a kernel that
// overwrites one waits for its copy on the device, and no thread but the writer does. Invariants: a
// tensor is overwritten only after all its bytes are in the buffer, or after the save was given up;
// bytes come out in the order of the list; the buffer is at most `limit`, allocated once and reused
// by every save.
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

  /// Makes a buffer of at most `limit` bytes; 0: of as many as reserve() requests.
  explicit Snapshot(size_t limit);
  /// Gives up a save in progress.
  ~Snapshot();

  /// Allocates room for `bytes`, or for the limit, and touches every page, so that copying causes
  /// no page faults. No save may be in progress.
  void reserve(size_t bytes);
  size_t capacity() const { return pages_.bytes(); }

  /// Begins a save: from here on, it has the values that `tensors` (plain ones, dense or strided)
  /// have now. Waits for pending writes to tensors on the CPU, and copies nothing; copies of a
  /// device's tensors to memory of the host are enqueued there. Where the tensors do not fit into
  /// the buffer, a write to one of them waits until the disk has made room; a write that has waited
  /// for `patience` while no room was made gives the save up. No other save may be in progress.
  void begin(std::vector<Tensor> tensors, Clock::duration patience);
  /// Copies everything, on all threads of the calling thread, and waits for room as a write does,
  /// and for copies from a device. Throws what a kernel before them failed with.
  void copy_all();
  /// Copies what there is room for on the calling thread, first what is likely to be overwritten
  /// first. Only the thread that calls take() may call it.
  void copy_some();
  /// Returns the next bytes: `most`, or fewer at the end of the buffer or of the list. If a save is
  /// taken in equal multiples of 4 KiB, all parts but the last begin and end at such multiples.
  /// Empty when the save was given up. Throws what failed on a device before the save began.
  std::span<const std::byte> take(size_t most);
  /// Makes room: the oldest `bytes` are no longer needed.
  void release(size_t bytes);
  /// Ends all waits; returns when no thread copies any more.
  void give_up();

  /// How long writes to the tensors of the last begin() were delayed, over all threads, by waiting
  /// or by copying themselves.
  double held_up_seconds() const;

 private:
  class Copying;
  Pages pages_;
  size_t limit_;
  Ref<Copying> copying_;  // null before the first begin()
};

}  // namespace tessera::checkpoint
