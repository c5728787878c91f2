// How a kernel that refuses an operand (a class that is not there, a division of integers by zero)
// tells the host: it notes the position in a word of the device, which the host reads when the
// kernel has run. Reading waits for the stream, so only ops that can refuse have one.
#pragma once
#include <cstdint>
#include <optional>

#include "core/backend/cuda/kernels/parameters.h"
#include "core/tensor/stream.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {

class ReportWord {
 public:
  explicit ReportWord(const Stream& stream);
  Report* data() const { return static_cast<Report*>(word_.device_data()); }
  /// The first position that was refused; none where all were taken. Waits for the stream.
  std::optional<int64_t> first() const;

 private:
  Stream stream_;
  Tensor word_;
};

}  // namespace tessera::cuda
