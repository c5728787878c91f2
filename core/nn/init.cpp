#include "core/nn/init.h"

#include <xxhash.h>

#include <cmath>
#include <numbers>

#include "core/autograd/autograd.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/default_device.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/update.h"

namespace tessera::nn {
namespace {

Tensor key_tensor(uint64_t seed, uint64_t number) {
  return from_values<int64_t>({int64_t(seed), int64_t(number)}, {2});
}

// Inverse error function of |y| < 1: M. Giles, "Approximating the erfinv function", 2010, and one
// Newton step.
Tensor erf_inverse(const Tensor& y) {
  constexpr double kCentral[] = {2.81022636e-08,  3.43273939e-07, -3.5233877e-06,
                                 -4.39150654e-06, 0.00021858087,  -0.00125372503,
                                 -0.00417768164,  0.246640727,    1.50140941};
  constexpr double kTail[] = {-0.000200214257, 0.000100950558, 0.00134934322,
                              -0.00367342844,  0.00573950773,  -0.0076224613,
                              0.00943887047,   1.00167406,     2.83297682};
  auto horner = [](const double(&c)[9], const Tensor& w) {
    Tensor p = w * c[0] + c[1];
    for (int i = 2; i < 9; ++i) p = p * w + c[i];
    return p;
  };
  Tensor w = -log1p(-square(y));
  Tensor central = horner(kCentral, w - 2.5), tail = horner(kTail, sqrt(maximum(w, 5.0)) - 3.0);
  Tensor x = where(lt(w, 5.0), central, tail) * y;
  return x - (erf(x) - y) * exp(square(x)) * (std::sqrt(std::numbers::pi) / 2);
}

double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::numbers::sqrt2); }

}  // namespace

InitKeys InitKeys::next() {
  const Tensor key = on_host(default_generator().next_key());
  const int64_t* k = key.values<int64_t>();
  return InitKeys(uint64_t(XXH3_64bits(k, 2 * sizeof(int64_t))));
}

Tensor InitKeys::key(std::string_view parameter) const {
  std::string name = prefix_ + std::string(parameter);
  return key_tensor(seed_, XXH3_64bits(name.data(), name.size()));
}

Device parameter_device() { return building().device.value_or(default_device()); }

Building& building() {
  thread_local Building b;
  return b;
}

void constant_(const Tensor& t, double value) {
  if (t.device().is_meta()) return;
  NoGrad off;
  fill_(t, value);
}
void zeros_(const Tensor& t) { constant_(t, 0); }
void ones_(const Tensor& t) { constant_(t, 1); }

void uniform_(const Tensor& t, double low, double high, const Tensor& key) {
  if (t.device().is_meta()) return;
  NoGrad off;
  assign_(t, rand(t.shape(), options_of(t), key) * (high - low) + low);
}

void normal_(const Tensor& t, double mean, double std, const Tensor& key) {
  if (t.device().is_meta()) return;
  NoGrad off;
  assign_(t, randn(t.shape(), options_of(t), key) * std + mean);
}

void trunc_normal_(const Tensor& t, double mean, double std, double low, double high,
                   const Tensor& key) {
  if (t.device().is_meta()) return;
  TESSERA_CHECK(low < high, "trunc_normal_: low {} is not below high {}", low, high);
  NoGrad off;
  double first = 2 * normal_cdf((low - mean) / std) - 1,
         last = 2 * normal_cdf((high - mean) / std) - 1;
  TESSERA_CHECK(last > first, "trunc_normal_: [{}, {}] holds nothing of a normal({}, {})", low,
                high, mean, std);
  Tensor u = rand(t.shape(), options_of(t), key) * (last - first) + first;
  double edge = t.dtype() == kF64 ? 1 - 0x1p-53 : 1 - 0x1p-24;  // erf_inverse(1) is infinite
  Tensor x = erf_inverse(clamp(u, -edge, edge)) * (std * std::numbers::sqrt2) + mean;
  assign_(t, clamp(x, low, high));
}

Fans fans_of(const Shape& weight) {
  TESSERA_CHECK_AS(ShapeError, weight.size() >= 2,
                   "init: fans need a weight of 2 or more dims, not {}", to_string(weight));
  int64_t rest = 1;
  for (int i = 2; i < weight.size(); ++i) rest *= weight[i];
  return {weight[1] * rest, weight[0] * rest};
}

void xavier_uniform_(const Tensor& t, double gain, const Tensor& key) {
  Fans f = fans_of(t.shape());
  double bound = gain * std::sqrt(6.0 / double(f.in + f.out));
  uniform_(t, -bound, bound, key);
}

void xavier_normal_(const Tensor& t, double gain, const Tensor& key) {
  Fans f = fans_of(t.shape());
  normal_(t, 0, gain * std::sqrt(2.0 / double(f.in + f.out)), key);
}

void kaiming_uniform_(const Tensor& t, double slope, const Tensor& key) {
  double bound = std::sqrt(6.0 / (1 + slope * slope) / double(fans_of(t.shape()).in));
  uniform_(t, -bound, bound, key);
}

void kaiming_normal_(const Tensor& t, double slope, const Tensor& key) {
  normal_(t, 0, std::sqrt(2.0 / (1 + slope * slope) / double(fans_of(t.shape()).in)), key);
}

}  // namespace tessera::nn
