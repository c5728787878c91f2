// What calibration remembers of one tensor of a model, and the range that follows from it.
// Invariant: the bins of a histogram are equally wide and cover all values seen. Where a value lies
// outside, the histogram doubles its range, which merges bins in pairs and loses nothing else. Each
// sample is weighted by one over its mean square, because in some networks a few images have values
// a hundred times those of the others, and a range chosen for these few would round the other
// images' values to zero. The rounding error of a value counts as the value itself at most, since 0
// is exact, so a sample that is nearly zero does not shrink the range for the others.
// Internal: not part of the public interface.
#pragma once
#include <string_view>
#include <vector>

#include "core/ops/quantized.h"

namespace tessera::quant {

enum class Observer : uint8_t {
  kMinMax,     // from the least value to the largest
  kHistogram,  // the range with the least squared error, relative to each sample's mean square;
               // tails may be clipped, and samples far dimmer than the others round to 0
};

class Observed {
 public:
  explicit Observed(Observer kind) : kind_(kind) {}
  /// Takes the values of `t` (f32) into account. Throws UserError naming `what` where one is not
  /// finite.
  void see(const Tensor& t, std::string_view what);
  bool empty() const { return count_ == 0; }
  double min() const { return min_; }
  double max() const { return max_; }
  /// Returns the scale and zero point of u8 for the values seen: 0 is always represented exactly.
  QuantizationParameters parameters() const;

  static constexpr int kBins = 2048;

 private:
  void grow(double low, double high);
  void add_to_bins(const Tensor& t);
  /// Returns the ends of the range with the least squared error of rounding and clipping.
  std::pair<double, double> best_range() const;

  Observer kind_;
  int64_t count_ = 0;
  double min_ = 0, max_ = 0;
  double low_ = 0, width_ = 0;  // of the first bin; width 0: there are no bins yet
  // For each bin, the sum of its values' weights and of their weighted squares. Zeros, which are
  // exact in any range, are not counted.
  std::vector<double> bins_, squares_;
};

/// Scale and zero point for values in [low, high], widened to hold 0.
QuantizationParameters parameters_of_range(double low, double high);

}  // namespace tessera::quant
