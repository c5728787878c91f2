// Data drawn by sample number, for when only speed matters.
#pragma once
#include "core/data/dataset.h"

namespace tessera::train {

class Synthetic final : public data::Dataset {
 public:
  /// inputs have shape `input`: ids below `classes` (i64), or normal numbers (f32; with three dims
  /// [C, H, W] they are channels-last in memory). targets: i64 of shape `target`, below `classes`.
  Synthetic(Shape input, Shape target, int64_t classes, bool ids, uint64_t seed)
      : input_(input), target_(target), classes_(classes), ids_(ids), seed_(seed) {}
  int64_t size() const override { return 0; }
  data::Batch allocate(int64_t rows) const override;
  void read(const data::Sample& sample, int64_t row, const data::Batch& to) const override;

 private:
  Shape input_, target_;
  int64_t classes_;
  bool ids_;
  uint64_t seed_;
};

}  // namespace tessera::train
