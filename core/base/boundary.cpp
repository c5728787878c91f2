#include "core/base/boundary.h"

namespace tessera {
namespace {

std::atomic<uint8_t> met[kNumBoundaries];

}  // namespace

namespace detail {

std::atomic<int> boundary_counters = 0;

void record_boundary(int index, int64_t extent, int64_t limit) {
  const int64_t beside = extent - limit + 1;
  if (beside >= 0 && beside <= 2) met[index].fetch_or(uint8_t(1 << beside));
}

}  // namespace detail

CountBoundaries::CountBoundaries() { ++detail::boundary_counters; }
CountBoundaries::~CountBoundaries() { --detail::boundary_counters; }

uint8_t boundary_met(int index) { return met[index]; }

}  // namespace tessera
