// Transforms images before a model gets them. Invariant: results have the bits of Pillow 13 and of
// torchvision on Pillow images (resize filters where it shrinks), and random choices are a pure
// function of (seed, sample number), so they depend on neither threads, ranks nor the order of
// reading.
#pragma once
#include "core/data/image.h"

namespace tessera::data {

struct Box {
  int64_t top = 0, left = 0, height = 0, width = 0;
  bool operator==(const Box&) const = default;
};

/// The pixels of `box`; what lies outside of the image is black.
Image crop(const Image& image, const Box& box);
/// Bilinear; where it shrinks, each pixel is the weighted mean of all that it covers.
Image resize(const Image& image, int64_t height, int64_t width);
/// The shorter side becomes `side`, the longer one in proportion, rounded down. Throws UserError
/// where that makes more than 2^28 pixels.
Image resize_shorter(const Image& image, int64_t side);
Image flip_horizontally(Image image);
/// The square of `side` in the middle.
Box center_box(const Image& image, int64_t side);

/// The random choices for one sample of a run.
class AugmentDraws {
 public:
  AugmentDraws(uint64_t seed, int64_t sample_number) : seed_(seed), number_(sample_number) {}
  /// True for half of the samples.
  bool flip() const;
  /// A square of `side` anywhere in the image with `padding` around it (negative places are in it).
  Box random_box(const Image& image, int64_t side, int64_t padding) const;
  /// A box of 8 to 100 % of the image's area and sides of ratio 3/4 to 4/3, if one of ten draws
  /// fits, else the largest in the middle. Szegedy et al. 2014; torchvision's RandomResizedCrop.
  Box random_area(const Image& image) const;

 private:
  uint64_t seed_;
  int64_t number_;
};

}  // namespace tessera::data
