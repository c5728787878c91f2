#include "compile/quantization/observer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dispatch/copy.h"

namespace tessera::quant {

QuantizationParameters parameters_of_range(double low, double high) {
  low = std::min(low, 0.0), high = std::max(high, 0.0);
  // All values are zero: any scale serves.
  if (high - low < 1e-30) return {1.0, 0};
  // The scale is rounded to f32, as it is stored, so that a loaded model computes the same.
  const double scale = double(float((high - low) / 255));
  return {scale, int(std::clamp(std::nearbyint(-low / scale), 0.0, 255.0))};
}

void Observed::see(const Tensor& given, std::string_view what) {
  const Tensor t = given.is_contiguous() || given.is_contiguous(MemoryFormat::kChannelsLast)
                       ? given
                       : dense_copy(given);
  const float* x = t.values<float>();
  const int64_t n = t.numel();
  if (n == 0) return;
  float low = x[0], high = x[0];
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    bad += !(std::abs(x[i]) <= std::numeric_limits<float>::max());
    low = std::min(low, x[i]), high = std::max(high, x[i]);
  }
  TESSERA_CHECK(bad == 0,
                "calibration: {} of {} values of {} are not finite; look at the weights and at the "
                "batch",
                bad, n, what);
  const double before = min_;  // while there are no bins, the one value seen so far
  const int64_t seen = count_;
  min_ = count_ ? std::min(min_, double(low)) : low;
  max_ = count_ ? std::max(max_, double(high)) : high;
  count_ += n;
  if (kind_ != Observer::kHistogram || min_ == max_) return;
  if (width_ > 0) {
    grow(low, high);
  } else {
    low_ = min_, width_ = (max_ - min_) / kBins * (1 + 1e-9);
    bins_.assign(kBins, 0), squares_.assign(kBins, 0);
    if (before != 0) {
      const size_t bin = size_t(std::clamp((before - low_) / width_, 0.0, kBins - 1.0));
      bins_[bin] = double(seen) / (before * before), squares_[bin] = double(seen);
    }
  }
  add_to_bins(t);
}

void Observed::grow(double low, double high) {
  while (low < low_) {
    for (std::vector<double>* v : {&bins_, &squares_}) {
      for (int i = kBins - 1; i >= kBins / 2; --i)
        (*v)[size_t(i)] = (*v)[size_t(2 * i - kBins)] + (*v)[size_t(2 * i - kBins + 1)];
      std::fill_n(v->begin(), kBins / 2, 0.0);
    }
    low_ -= width_ * kBins, width_ *= 2;
  }
  while (high >= low_ + width_ * kBins) {
    for (std::vector<double>* v : {&bins_, &squares_}) {
      for (int i = 0; i < kBins / 2; ++i)
        (*v)[size_t(i)] = (*v)[size_t(2 * i)] + (*v)[size_t(2 * i + 1)];
      std::fill_n(v->begin() + kBins / 2, kBins / 2, 0.0);
    }
    width_ *= 2;
  }
}

// Each sample (index of dim 0) has weight 1 / its mean square, so that errors are relative to the
// sample: one with values a hundred times as large does not decide the range for all others.
void Observed::add_to_bins(const Tensor& t) {
  const float* x = t.values<float>();
  const int64_t samples = t.ndim() > 1 ? t.shape()[0] : 1, each = t.numel() / samples;
  const float low = float(low_), per = float(1 / width_);
  for (int64_t s = 0; s < samples; ++s, x += each) {
    double squares = 0;
    for (int64_t i = 0; i < each; ++i) squares += double(x[i]) * x[i];
    if (squares == 0) continue;
    const double weight = double(each) / squares;
    for (int64_t i = 0; i < each; ++i) {
      const int bin = std::clamp(int((x[i] - low) * per), 0, kBins - 1);
      bins_[size_t(bin)] += x[i] != 0 ? weight : 0;
      squares_[size_t(bin)] += weight * x[i] * x[i];
    }
  }
}

// The squared error of rounding is step^2 / 12 on average, and never more than the squared value,
// since 0 is exact. So a sample that is far smaller than the others costs at most its own squares,
// however large its weight.
std::pair<double, double> Observed::best_range() const {
  constexpr int kTries = 64;
  const double least = std::min(min_, 0.0), most = std::max(max_, 0.0);
  // Weights of bins that even the finest step rounds to 0 are bounded by those that it just does
  // not round: unbounded weights would drown the others in the sums.
  const double finest = (most - least) / kTries / 255, bound = 12 / (finest * finest);
  // Prefix sums over bins of weight times 1, v and v^2, so that each range costs the same to
  // evaluate.
  std::vector<double> n(kBins + 1, 0), s(kBins + 1, 0), q(kBins + 1, 0);
  for (int i = 0; i < kBins; ++i) {
    const double v = low_ + (i + 0.5) * width_,
                 c = std::min(bins_[size_t(i)], bound * squares_[size_t(i)]);
    n[size_t(i) + 1] = n[size_t(i)] + c, s[size_t(i) + 1] = s[size_t(i)] + c * v;
    q[size_t(i) + 1] = q[size_t(i)] + c * v * v;
  }
  auto bin_of = [&](double v) {
    return size_t(std::clamp((v - low_) / width_, 0.0, double(kBins)));
  };
  // The clipping error: sum c (v - edge)^2 over bins [a, b).
  auto clipped = [&](size_t a, size_t b, double edge) {
    return (q[b] - q[a]) - 2 * edge * (s[b] - s[a]) + edge * edge * (n[b] - n[a]);
  };
  // The rounding error over bins [a, b): only within one step of 0 can a value be less than its
  // error.
  auto rounded = [&](size_t a, size_t b, double step) {
    const double each = step * step / 12;
    const size_t from = std::clamp(bin_of(-step), a, b), to = std::clamp(bin_of(step) + 1, from, b);
    double e = each * ((n[from] - n[a]) + (n[b] - n[to]));
    for (size_t i = from; i < to; ++i) e += std::min(each * (n[i + 1] - n[i]), squares_[i]);
    return e;
  };
  auto error = [&](double low, double high) {
    const size_t a = bin_of(low), b = bin_of(high);
    return rounded(a, b, (high - low) / 255) + clipped(0, a, low) + clipped(b, kBins, high);
  };
  std::pair<double, double> best{least, most};
  double smallest = error(least, most);
  for (int i = least < 0 ? 1 : kTries; i <= kTries; ++i)
    for (int j = 1; j <= kTries; ++j) {
      const double low = least * i / kTries, high = most * j / kTries;
      if (high - low <= 0) continue;
      if (double e = error(low, high); e < smallest) smallest = e, best = {low, high};
    }
  return best;
}

QuantizationParameters Observed::parameters() const {
  if (kind_ == Observer::kMinMax || width_ == 0) return parameters_of_range(min_, max_);
  auto [low, high] = best_range();
  return parameters_of_range(low, high);
}

}  // namespace tessera::quant
