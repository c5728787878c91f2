// Writes numbers over steps to event files, which TensorBoard reads. A file is a sequence of
// TFRecords, each an Event in protobuf's wire format; the few fields that numbers need are encoded
// here by hand. Invariant: a record reaches the file in one write, so a reader sees whole records
// and at most one that is cut off, the last.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace tessera::io {

struct EventWriterOptions {
  /// For a run that continues an earlier one in the same folder: TensorBoard hides what the earlier
  /// run wrote from this step on, since it will be written again.
  std::optional<int64_t> purge_from = {};
};

class EventWriter {
 public:
  using Scalar = std::pair<std::string_view, double>;  // "train/loss", 2.5: kept as a float

  /// Makes `folder` where it is missing, and in it a file of its own,
  /// events.out.tfevents.SECONDS.HOST.PID.N. Throws UserError when it cannot.
  explicit EventWriter(const std::string& folder, EventWriterOptions options = {});
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  /// The values of one step, with the time of the call. Throws UserError when the disk refuses.
  void scalars(int64_t step, std::span<const Scalar> values);
  void scalar(int64_t step, std::string_view tag, double value) {
    Scalar one{tag, value};
    scalars(step, {&one, 1});
  }
  const std::string& path() const { return path_; }

 private:
  void write(std::string_view event);
  std::string path_;
  int fd_ = -1;
};

/// CRC-32C (Castagnoli; RFC 3720 B.4) of `bytes`.
uint32_t crc32c(std::string_view bytes);

}  // namespace tessera::io
