#include "examples/bench/published.h"

namespace tessera::bench {
namespace {

struct Card {
  std::string_view name, kind;  // both are in the name that the driver gives
  double f32, half;             // TFLOP/s
};
// From the vendor's data sheets; where these give the rate with sparsity, it is halved. The first
// row that fits holds.
constexpr Card kCards[] = {
    {"H200", "NVL", 60, 835.5},  {"H200", "", 67, 989.5},     {"H100", "NVL", 60, 835.5},
    {"H100", "PCIe", 51, 756.5}, {"H100", "HBM3", 67, 989.5}, {"A100", "", 19.5, 312},
};

}  // namespace

std::optional<double> published_product_peak(std::string_view description, DType dtype) {
  const bool half = dtype == kBF16 || dtype == kF16;
  if ((!half && dtype != kF32) || description.find("MIG") != description.npos) return {};
  for (const Card& card : kCards)
    if (description.find(card.name) != description.npos &&
        description.find(card.kind) != description.npos)
      return (half ? card.half : card.f32) * 1e12;
  return {};
}

}  // namespace tessera::bench
