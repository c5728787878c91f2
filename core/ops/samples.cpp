#include "core/ops/samples.h"

namespace tessera {
namespace {

// splitmix64 (Steele, Lea, Flood 2014).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

Tensor sample_values(const Shape& shape, double low, double high, uint64_t key) {
  Tensor t = empty(shape, kF64);
  double* p = t.data<double>();
  for (int64_t i = 0; i < t.numel(); ++i)
    p[i] = low + (high - low) * double(mix(key * 1000003 + uint64_t(i)) >> 11) * 0x1p-53;
  return t;
}

Tensor sample_integers(const Shape& shape, int64_t low, int64_t high, uint64_t key) {
  Tensor t = empty(shape, kI64);
  int64_t* p = t.data<int64_t>();
  for (int64_t i = 0; i < t.numel(); ++i)
    p[i] = low + int64_t(mix(key * 1000003 + uint64_t(i)) % uint64_t(high - low));
  return t;
}

}  // namespace tessera
