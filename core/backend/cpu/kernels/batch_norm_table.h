// The functions of batch-norm that kernels/batch_norm.cpp fills. Plain pointers and integers only.
#pragma once
#include <cstdint>

namespace tessera::cpu {

/// A brain float as it lies in memory; arithmetic on it is in f32.
struct BrainFloat {
  uint16_t bits;
};

/// Rows of dense channels: x, y, their gradients and the residual are [rows, channels] of E, what
/// has one value a channel is T, which arithmetic is done in. Each block of rows is summed from its
/// first row to its last; the sums of blocks are added in their order.
template <class E, class T>
struct BatchNormFns {
  /// The mean of each channel, and the sum of squared deviations from it; rows > 0. `centre` is
  /// scratch [channels].
  void (*moments)(const E* x, int64_t rows, int64_t channels, T* centre, T* mean, T* deviations);
  /// Brings what has one value a channel into the order that normalize and grad read it in.
  void (*arrange)(const T* from, T* to, int64_t channels);
  /// y = (x - mean) scale + shift, plus residual where not null, and the larger of 0 and that where
  /// `relu`. mean, scale and shift are arranged.
  void (*normalize)(const E* x, const E* residual, bool relu, const T* mean, const T* scale,
                    const T* shift, E* y, int64_t rows, int64_t channels);
  /// The sums of g and of g (x - mean); g counts where y > 0, everywhere if y is null.
  void (*grad_sums)(const E* g, const E* x, const E* y, const T* mean, T* sum, T* product,
                    int64_t rows, int64_t channels);
  /// dx = (g - mean_g - (x - mean) slope) scale, and dresidual = g where not null, with g as above;
  /// what has one value a channel is arranged.
  /// A result may lie over any operand.
  void (*grad)(const E* g, const E* x, const E* y, const T* mean, const T* mean_g, const T* slope,
               const T* scale, E* dx, E* dresidual, int64_t rows, int64_t channels);
};
struct BatchNormTable {
  BatchNormFns<float, float> f32;
  BatchNormFns<double, double> f64;
  BatchNormFns<BrainFloat, float> bf16;
};

}  // namespace tessera::cpu
