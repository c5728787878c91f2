// A switch that a program sets between steps and that decides what a step does: training or
// evaluation, whether gradients are reduced. Invariant: who records a step is told of every read
// and change, so a step that was recorded under one value is never replayed under another.
#pragma once
#include "core/dispatch/context.h"

namespace tessera {

class Setting {
 public:
  explicit Setting(int64_t value) : cell_(new Cell(value)) {}
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

  int64_t get() const {
    if (Backend* b = context().backend) [[unlikely]]
      b->setting_read(*cell_, cell_->value);
    return cell_->value;
  }
  void set(int64_t value) {
    if (Backend* b = context().backend) [[unlikely]]
      b->setting_changes(*cell_, cell_->value);
    cell_->value = value;
  }

 private:
  // Apart from whoever has the setting, so that it can be compared when that is gone.
  struct Cell final : RefCounted {
    explicit Cell(int64_t v) : value(v) {}
    int64_t value;
  };
  Ref<Cell> cell_;
};

}  // namespace tessera
