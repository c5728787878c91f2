#include "core/data/image_dataset.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/data/image_transforms.h"
#include "core/io/file.h"
#include "core/ops/views.h"

namespace tessera::data {

ImageDataset::ImageDataset(std::shared_ptr<const ImageSource> source,
                           const ImageDatasetOptions& options)
    : source_(std::move(source)), o_(options) {
  TESSERA_CHECK(o_.size >= 1 && o_.size <= 1 << 14,
                "data: image size {} is out of range; use 1 to 16384", o_.size);
  TESSERA_CHECK(o_.resize == 0 || o_.resize >= o_.size,
                "data: images resized to {} cannot be cut to {}", o_.resize, o_.size);
  TESSERA_CHECK(source_->size() > 0, "data: there are no images");
  for (size_t c = 0; c < 3; ++c)
    for (size_t v = 0; v < 256; ++v)
      normalised_[c][v] = (float(v) / 255.0f - o_.mean[c]) / o_.deviation[c];
}

Batch ImageDataset::allocate(int64_t rows) const {
  return {.inputs = permute(empty({rows, o_.size, o_.size, 3}, kF32), {0, 3, 1, 2}),
          .targets = empty({rows}, kI64)};
}

Image ImageDataset::transformed(Image image, const Sample& sample) const {
  const AugmentDraws draws(o_.seed, sample.number);
  if (o_.augment == Augment::kResizedCrop) {
    image = resize(crop(image, draws.random_area(image)), o_.size, o_.size);
  } else {
    const int64_t side = o_.augment == Augment::kNone && o_.resize ? o_.resize : o_.size;
    if (std::min(image.height, image.width) != side) image = resize_shorter(image, side);
    if (image.height != o_.size || image.width != o_.size)
      image = crop(image, center_box(image, o_.size));
    if (o_.augment == Augment::kCrop)
      image = crop(image, draws.random_box(image, o_.size, o_.size / 8));
  }
  return o_.augment != Augment::kNone && draws.flip() ? flip_horizontally(std::move(image))
                                                      : std::move(image);
}

// The pixels of the item as the sample's random choices make them. Throws BadImage with the item's
// name.
Image ImageDataset::row_of(int64_t item, const Sample& sample) const {
  try {
    return transformed(source_->read(item), sample);
  } catch (const io::FileChanged&) {
    throw;  // no image of a file that has changed can be trusted
  } catch (const UserError& e) {
    const std::string_view text = e.what();
    const std::string name = source_->name(item);
    if (text.find(name) != text.npos) throw BadImage(e.what());
    throw BadImage(fmt::format("data: {}: {}", io::quote(name),
                               text.substr(text.starts_with("data: ") ? 6 : 0)));
  }
}

bool ImageDataset::try_item(int64_t item, const Sample& sample, Image& image) const {
  try {
    image = row_of(item, sample);
    return true;
  } catch (const BadImage& e) {
    if (o_.bad == BadImages::kStop) throw;
    std::lock_guard lock(named_mutex_);
    if (named_.insert(item).second) logging::warn("{}; skipped", e.what());
    return false;
  }
}

void ImageDataset::read(const Sample& sample, int64_t row, const Batch& to) const {
  constexpr int64_t kTries =
      100;  // failures in a row: beyond that the data are not worth training on
  int64_t& target = to.targets.data<int64_t>()[row];
  const int64_t pixels = o_.size * o_.size;
  float* out = to.inputs.data<float>() + row * pixels * 3;
  Image image;
  int64_t item = sample.index;
  if (!try_item(item, sample, image)) {
    skipped_.fetch_add(1, std::memory_order_relaxed);
    if (!o_.training) {
      std::fill_n(out, pixels * 3, 0.0f);
      target = kNoTarget;
      return;
    }
    int64_t tries = 1;
    do {
      TESSERA_CHECK(tries++ < std::min(kTries, size()),
                    "data: {} images in a row cannot be read, from '{}' on", tries - 1,
                    source_->name(sample.index));
      item = (item + 1) % size();
    } while (!try_item(item, sample, image));
  }
  target = source_->label(item);
  const uint8_t* from = image.pixels.data();
  for (int64_t i = 0; i < pixels; ++i)
    for (size_t c = 0; c < 3; ++c) *out++ = normalised_[c][*from++];
}

}  // namespace tessera::data
