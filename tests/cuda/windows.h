// Samples of a language model that follow from their numbers.
#pragma once
#include "core/data/dataset.h"
#include "core/ops/create.h"

namespace tessera::cuda {

/// Windows of six tokens out of eleven, without end.
class Windows final : public data::Dataset {
 public:
  int64_t size() const override { return 0; }
  data::Batch allocate(int64_t rows) const override {
    return {empty({rows, 6}, kI64), empty({rows, 6}, kI64)};
  }
  void read(const data::Sample& s, int64_t row, const data::Batch& to) const override {
    for (int64_t t = 0; t < 6; ++t) {
      to.inputs.data<int64_t>()[row * 6 + t] = (s.number * 7 + t * t) % 11;
      to.targets.data<int64_t>()[row * 6 + t] = (s.number * 7 + (t + 1) * (t + 1)) % 11;
    }
  }
};

}  // namespace tessera::cuda
