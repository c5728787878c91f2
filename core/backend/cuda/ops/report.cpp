#include "core/backend/cuda/ops/report.h"

#include "core/backend/cuda/copy.h"
#include "core/tensor/device_runtime.h"

namespace tessera::cuda {

ReportWord::ReportWord(const Stream& stream)
    : stream_(stream), word_(empty({1}, kI64, stream.device)) {
  cuda::fill(data(), 0, 4, sizeof(Report) / 4, stream);
}

std::optional<int64_t> ReportWord::first() const {
  Report found = 0;
  DeviceRuntime& runtime = runtime_of(stream_.device);
  runtime.copy(&found, kCPU, data(), stream_.device, sizeof found, stream_);
  runtime.synchronize(stream_);
  if (found == 0) return std::nullopt;
  return int64_t(~found);
}

}  // namespace tessera::cuda
