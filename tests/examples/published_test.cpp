// The peaks that vendors publish, by the names that drivers give.
#include "examples/bench/published.h"

#include <gtest/gtest.h>

namespace tessera::bench {
namespace {

TEST(Published, ACardIsFoundByItsName) {
  EXPECT_EQ(published_product_peak("NVIDIA H200, 139.8 GiB, sm_90", kBF16), 989.5e12);
  EXPECT_EQ(published_product_peak("NVIDIA H100 80GB HBM3, 79.2 GiB, sm_90", kF16), 989.5e12);
  EXPECT_EQ(published_product_peak("NVIDIA H100 80GB HBM3, 79.2 GiB, sm_90", kF32), 67e12);
  EXPECT_EQ(published_product_peak("NVIDIA A100-SXM4-80GB, 79.1 GiB, sm_80", kBF16), 312e12);
}

TEST(Published, VariantsOfACardHaveTheirOwn) {
  EXPECT_EQ(published_product_peak("NVIDIA H100 PCIe, 79.6 GiB, sm_90", kBF16), 756.5e12);
  EXPECT_EQ(published_product_peak("NVIDIA H100 NVL, 93.0 GiB, sm_90", kBF16), 835.5e12);
  EXPECT_EQ(published_product_peak("NVIDIA H200 NVL, 139.8 GiB, sm_90", kBF16), 835.5e12);
}

TEST(Published, NothingIsGuessed) {
  EXPECT_FALSE(published_product_peak("virtual GPU, 4.0 GiB, sm_90", kBF16));
  EXPECT_FALSE(published_product_peak("NVIDIA H100, 79.2 GiB, sm_90", kBF16));
  EXPECT_FALSE(published_product_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb, 9.5 GiB, sm_90", kBF16));
  EXPECT_FALSE(published_product_peak("NVIDIA H200, 139.8 GiB, sm_90", kF64));
}

}  // namespace
}  // namespace tessera::bench
