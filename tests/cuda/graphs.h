// Graphs of cuDNN beside our own kernels, as tests compare them.
#pragma once
#include <functional>

#include "core/autograd/autograd.h"
#include "core/backend/cuda/cudnn/plans.h"
#include "core/ops/conv.h"
#include "core/ops/conv_stats.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "tests/core/ops/sweep.h"
#include "tests/cuda/card.h"
#include "tests/cuda/counters.h"

namespace tessera::cuda {

inline double tolerance(DType t) { return t == kF32 ? 1e-5 : t == kF16 ? 4e-3 : 3e-2; }
inline Tensor values(const Shape& s, DType t, int64_t seed) {
  return (rand(s, {kF32}, from_values<int64_t>({seed, 3}, {2})) - 0.5).to(t).to(device_of(0));
}

class CudaGraphs : public OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (device_count() && !cudnn()) GTEST_SKIP() << why_no_cudnn();
  }
  using Computed = std::vector<Tensor>;
  /// `compute` by the library, which has to run `counted` graphs of these names, and by our own
  /// kernels.
  static void compare(const std::function<Computed()>& compute, DType t,
                      std::initializer_list<std::pair<const char*, int64_t>> counted) {
    std::vector<int64_t> before;
    for (const auto& [name, runs] : counted) before.push_back(runs_of(name));
    const Computed got = compute();
    size_t i = 0;
    for (const auto& [name, runs] : counted) {
      if (before[i] >= 0) {
        EXPECT_EQ(runs_of(name) - before[i], runs) << name;
      }
      ++i;
    }
    const OwnGraphs own;
    const Computed want = compute();
    for (size_t k = 0; k < got.size(); ++k)
      sweep::expect_close(got[k].cpu(), want[k].cpu(), tolerance(t), fmt::format("result {}", k));
  }
};

inline constexpr DType kTypes[] = {kF32, kF16, kBF16};

/// The result and the gradients of all operands.
inline std::vector<Tensor> with_gradients(
    const std::function<Tensor(const std::vector<Tensor>&)>& f, std::vector<Tensor> in) {
  for (Tensor& t : in) t = t.detach().requires_grad_();
  const Tensor y = f(in), seed = values(y.shape(), y.dtype(), 9).to(y.device());
  std::vector<Tensor> all{y.detach()};
  for (Tensor& g : grad({&y, 1}, in, {&seed, 1})) all.push_back(g);
  return all;
}

inline PrimRef stats_of_conv() { return conv_stats_op({{{1, 1}, {1, 1}, {1, 1}, {1, 1}, 1}}); }

}  // namespace tessera::cuda
