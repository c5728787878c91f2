// What the tests share. They run in the latest order and then under several seeds, as many as
// MIRROR_SEEDS says (5).
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>

#include "core/tensor/tensor.h"
#include "mirror.h"
#include "schedule.h"

namespace mirror {

inline void for_each_seed(const std::function<void()>& test) {
  const char* n = std::getenv("MIRROR_SEEDS");
  for (uint64_t seed = 0; seed <= (n ? std::stoull(n) : 5); ++seed) {
    SCOPED_TRACE(seed ? "seed " + std::to_string(seed) : "as late as possible");
    set_seed(seed ? std::optional(seed) : std::nullopt);
    test();
    if (testing::Test::HasFailure()) break;
  }
  set_seed({});
}

inline bool same_bits(const tessera::Tensor& a, const tessera::Tensor& b) {
  const tessera::Tensor x = a.cpu().contiguous(), y = b.cpu().contiguous();
  return x.shape() == y.shape() && x.dtype() == y.dtype() &&
         (x.nbytes() == 0 || std::memcmp(x.raw_values(), y.raw_values(), x.nbytes()) == 0);
}

}  // namespace mirror
