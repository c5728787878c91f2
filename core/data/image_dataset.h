// Turns images into rows of a batch: decodes, augments or fits, and normalises them. Rows have
// their channels last in memory. Invariant: what a row holds depends on the seed and the sample
// alone.
#pragma once
#include <array>
#include <atomic>
#include <mutex>
#include <set>

#include "core/data/dataset.h"
#include "core/data/image_source.h"

namespace tessera::data {

enum class Augment {
  kNone,  // the shorter side becomes `size`, the square in the middle stays
  kCrop,  // as kNone, then shifted by up to size / 8 with black around, half of them mirrored
  kResizedCrop,  // a random area, resized to the square, half of them mirrored
};

struct ImageDatasetOptions {
  int64_t size = 224;  // of rows, a square
  Augment augment = Augment::kNone;
  // Without augmentation the shorter side is resized to this (0: to `size`), then the square of
  // `size` in the middle is cut out.
  int64_t resize = 0;
  std::array<float, 3> mean = {0.485f, 0.456f, 0.406f}, deviation = {0.229f, 0.224f, 0.225f};
  uint64_t seed = 0;
  BadImages bad = BadImages::kStop;
  // Under kSkip, in place of a sample with an image that cannot be read: in training the next item
  // that can be, else a row of zeros with the target kNoTarget.
  bool training = true;
};

/// inputs f32 [B, 3, size, size]: (value / 255 - mean) / deviation, in memory [B, size, size, 3];
/// targets i64 [B].
class ImageDataset final : public Dataset {
 public:
  static constexpr int64_t kNoTarget = -100;  // cross_entropy leaves it out

  ImageDataset(std::shared_ptr<const ImageSource> source, const ImageDatasetOptions& options);

  int64_t size() const override { return source_->size(); }
  Batch allocate(int64_t rows) const override;
  void read(const Sample& sample, int64_t row, const Batch& to) const override;

  /// How many samples so far had an image that could not be read; the log names each file once.
  int64_t skipped() const { return skipped_.load(std::memory_order_relaxed); }

 private:
  Image row_of(int64_t item, const Sample& sample) const;
  bool try_item(int64_t item, const Sample& sample, Image& image) const;
  Image transformed(Image image, const Sample& sample) const;
  std::shared_ptr<const ImageSource> source_;
  ImageDatasetOptions o_;
  std::array<std::array<float, 256>, 3> normalised_;  // [channel][value]
  mutable std::atomic<int64_t> skipped_{0};
  mutable std::mutex named_mutex_;
  mutable std::set<int64_t> named_;  // items that the log has named
};

}  // namespace tessera::data
