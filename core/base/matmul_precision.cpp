#include "core/base/matmul_precision.h"

#include <atomic>

#include "core/base/error.h"

namespace tessera {
namespace {

std::atomic<MatmulPrecision> precision = MatmulPrecision::kHighest;

}  // namespace

void set_float32_matmul_precision(std::string_view name) {
  TESSERA_CHECK(name == "highest" || name == "high",
                "set_float32_matmul_precision: unknown precision \"{}\"; expected highest or high",
                name);
  precision.store(name == "high" ? MatmulPrecision::kHigh : MatmulPrecision::kHighest,
                  std::memory_order_relaxed);
}
MatmulPrecision float32_matmul_precision() { return precision.load(std::memory_order_relaxed); }

}  // namespace tessera
