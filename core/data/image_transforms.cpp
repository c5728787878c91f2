#include "core/data/image_transforms.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/base/error.h"
#include "core/data/image_formats.h"
#include "core/data/permutation.h"

namespace tessera::data {
namespace {

// Resizes one dim: output i is the sum of `weight` times the inputs from `first` on. Fixed point,
// so that every machine rounds alike: Pillow's Resample.c.
constexpr int kFraction = 22;
struct Taps {
  struct Output {
    int64_t first, count;
    size_t weights;  // where they begin
  };
  std::vector<Output> outputs;
  std::vector<int32_t> weights;
};

Taps triangle_taps(int64_t in, int64_t out) {
  Taps taps;
  const double scale = double(in) / double(out), reach = std::max(scale, 1.0);
  std::vector<double> w;
  for (int64_t i = 0; i < out; ++i) {
    const double center = (double(i) + 0.5) * scale;
    const int64_t first = std::max<int64_t>(int64_t(center - reach + 0.5), 0),
                  count = std::min(int64_t(center + reach + 0.5), in) - first;
    double sum = 0;
    w.clear();
    for (int64_t x = 0; x < count; ++x) {
      const double distance = std::abs((double(x + first) - center + 0.5) * (1.0 / reach));
      w.push_back(std::max(0.0, 1.0 - distance));
      sum += w.back();
    }
    taps.outputs.push_back({first, count, taps.weights.size()});
    for (double v : w)
      taps.weights.push_back(int32_t(0.5 + (sum != 0 ? v / sum : v) * (1 << kFraction)));
  }
  return taps;
}

uint8_t rounded(int32_t sum) { return uint8_t(std::clamp(sum >> kFraction, 0, 255)); }

Image resize_width(const Image& in, int64_t width) {
  Image out = black_image(in.height, width);
  const Taps taps = triangle_taps(in.width, width);
  for (int64_t y = 0; y < in.height; ++y) {
    uint8_t* to = out.row(y);
    for (const Taps::Output& o : taps.outputs) {
      const uint8_t* from = in.row(y) + o.first * 3;
      const int32_t* w = taps.weights.data() + o.weights;
      int32_t sum[3] = {1 << (kFraction - 1), 1 << (kFraction - 1), 1 << (kFraction - 1)};
      for (int64_t x = 0; x < o.count; ++x)
        for (int c = 0; c < 3; ++c) sum[c] += from[x * 3 + c] * w[x];
      for (int c = 0; c < 3; ++c) *to++ = rounded(sum[c]);
    }
  }
  return out;
}

Image resize_height(const Image& in, int64_t height) {
  Image out = black_image(height, in.width);
  const Taps taps = triangle_taps(in.height, height);
  const size_t bytes = size_t(in.width) * 3;
  std::vector<int32_t> sums(bytes);
  for (int64_t y = 0; y < height; ++y) {
    const Taps::Output& o = taps.outputs[size_t(y)];
    std::ranges::fill(sums, 1 << (kFraction - 1));
    for (int64_t k = 0; k < o.count; ++k) {
      const uint8_t* from = in.row(o.first + k);
      const int32_t w = taps.weights[o.weights + size_t(k)];
      for (size_t i = 0; i < bytes; ++i) sums[i] += from[i] * w;
    }
    std::ranges::transform(sums, out.row(y), rounded);
  }
  return out;
}

// Uniform in [low, high] from a word of random bits.
double uniform(uint32_t word, double low, double high) {
  return low + (high - low) * double(uniform_float(word));
}
int64_t uniform_int(uint32_t word, int64_t below) {
  return int64_t(uint64_t(word) * uint64_t(below) >> 32);
}

Philox4 draw(uint64_t seed, int64_t number, uint64_t attempt) {
  return philox4x32(seed, uint64_t(RandomUse::kAugment) << 56 | attempt, uint64_t(number));
}
constexpr uint64_t kFlip = 100, kPlace = 101;  // attempts at an area are 0 to 9

int64_t middle(int64_t all, int64_t part) {  // as Python rounds: half to even
  return int64_t(std::nearbyint(double(all - part) / 2.0));
}

}  // namespace

Image crop(const Image& image, const Box& box) {
  Image out = black_image(box.height, box.width);
  const int64_t x0 = std::max<int64_t>(box.left, 0),
                x1 = std::min(box.left + box.width, image.width);
  for (int64_t y = 0; y < box.height && x0 < x1; ++y)
    if (int64_t from = box.top + y; from >= 0 && from < image.height)
      std::memcpy(out.row(y) + (x0 - box.left) * 3, image.row(from) + x0 * 3, size_t(x1 - x0) * 3);
  return out;
}

Image resize(const Image& image, int64_t height, int64_t width) {
  TESSERA_CHECK(height > 0 && width > 0 && image.height > 0 && image.width > 0,
                "data: an image of {} x {} cannot be resized to {} x {}", image.height, image.width,
                height, width);
  if (image.width == width && image.height == height) return image;
  if (image.width == width) return resize_height(image, height);
  Image narrow = resize_width(image, width);
  return image.height == height ? narrow : resize_height(narrow, height);
}

Image resize_shorter(const Image& image, int64_t side) {
  const int64_t h = image.height, w = image.width;
  TESSERA_CHECK(h > 0 && w > 0 && side > 0, "data: an image of {} x {} cannot be resized to {}", h,
                w, side);
  const int64_t to_h = h <= w ? side : side * h / w, to_w = h <= w ? side * w / h : side;
  TESSERA_CHECK(to_h <= kMostPixels / to_w,
                "data: an image of {} x {} whose shorter side becomes {} would be {} x {}; there "
                "may be up to {} pixels",
                h, w, side, to_h, to_w, kMostPixels);
  return resize(image, to_h, to_w);
}

Image flip_horizontally(Image image) {
  for (int64_t y = 0; y < image.height; ++y) {
    uint8_t* row = image.row(y);
    for (int64_t a = 0, b = image.width - 1; a < b; ++a, --b)
      std::swap_ranges(row + a * 3, row + a * 3 + 3, row + b * 3);
  }
  return image;
}

Box center_box(const Image& image, int64_t side) {
  return {middle(image.height, side), middle(image.width, side), side, side};
}

bool AugmentDraws::flip() const { return draw(seed_, number_, kFlip).v[0] >> 31; }

Box AugmentDraws::random_box(const Image& image, int64_t side, int64_t padding) const {
  const int64_t down = image.height + 2 * padding - side, right = image.width + 2 * padding - side;
  TESSERA_CHECK(down >= 0 && right >= 0,
                "data: a crop of {} does not fit into an image of {} x {} with padding {}", side,
                image.height, image.width, padding);
  const Philox4 bits = draw(seed_, number_, kPlace);
  return {uniform_int(bits.v[0], down + 1) - padding, uniform_int(bits.v[1], right + 1) - padding,
          side, side};
}

Box AugmentDraws::random_area(const Image& image) const {
  const int64_t h = image.height, w = image.width;
  const double low = 3.0 / 4.0, high = 4.0 / 3.0, area = double(h * w);
  for (uint64_t attempt = 0; attempt < 10; ++attempt) {
    const Philox4 bits = draw(seed_, number_, attempt);
    const double part = area * uniform(bits.v[0], 0.08, 1.0),
                 ratio = std::exp(uniform(bits.v[1], std::log(low), std::log(high)));
    const auto width = int64_t(std::nearbyint(std::sqrt(part * ratio))),
               height = int64_t(std::nearbyint(std::sqrt(part / ratio)));
    if (width > 0 && width <= w && height > 0 && height <= h)
      return {uniform_int(bits.v[2], h - height + 1), uniform_int(bits.v[3], w - width + 1), height,
              width};
  }
  int64_t height = h, width = w;
  if (double(w) < low * double(h)) height = int64_t(std::nearbyint(double(w) / low));
  if (double(w) > high * double(h)) width = int64_t(std::nearbyint(double(h) * high));
  return {(h - height) / 2, (w - width) / 2, height, width};
}

}  // namespace tessera::data
