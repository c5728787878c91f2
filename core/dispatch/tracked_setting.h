// A switch that a program sets between steps and that changes what a step does: training or
// evaluation, whether gradients are reduced. Invariant: an observer that records a step is told of
// every read and every change, so a step that was recorded under one value is never replayed under
// another.
#pragma once
#include "core/dispatch/observer.h"

namespace tessera {

class TrackedSetting {
 public:
  explicit TrackedSetting(int64_t value) : cell_(new Cell(value)) {}
  TrackedSetting(const TrackedSetting&) = delete;
  TrackedSetting& operator=(const TrackedSetting&) = delete;

  int64_t read() const {
    notify(events::SettingRead{*cell_, cell_->value});
    return cell_->value;
  }
  void write(int64_t value) {
    notify(events::SettingChange{*cell_, cell_->value});
    cell_->value = value;
  }

 private:
  // On the heap, so that a recorder can compare the value after the object that has it is gone.
  struct Cell final : RefCounted {
    explicit Cell(int64_t v) : value(v) {}
    int64_t value;
  };
  Ref<Cell> cell_;
};

/// The same for something that is no number, such as a list of hooks or a function: the tracked
/// value is the number of its changes.
class TrackedChanges {
 public:
  /// To be called where what the thread does next depends on what is tracked.
  void note_use() const { (void)count_.read(); }
  /// To be called where that changes.
  void note_change() { count_.write(count_.read() + 1); }

 private:
  TrackedSetting count_{0};
};

}  // namespace tessera
