// Convolutions over one, two or three spatial dims, their gradients and their transposes. Names,
// defaults and semantics are PyTorch's (what is called convolution is cross-correlation). Results
// are laid out channels-last, which is how the library computes; indexing does not see it.
#pragma once
#include <optional>
#include <string_view>

#include "core/primitive/registry.h"

namespace tessera {

/// One number for every spatial dim, or one for each.
class PerDim {
 public:
  PerDim(int64_t n) : v_{n} {}
  PerDim(int n) : v_{int64_t(n)} {}
  PerDim(std::initializer_list<int64_t> v) : v_(v) {}
  explicit PerDim(const Dims& v) : v_(v) {}
  /// One number for each of `dims`; throws ShapeError naming `op` and `argument` when it has
  /// another count, or a number is less than `least`.
  Dims expand(int dims, int64_t least, std::string_view op, std::string_view argument) const;

 private:
  Dims v_;
};

/// Zeros around x: so many before and after each spatial dim, or, as `kSame`, as many as keep the
/// extents at stride 1 (of an odd number, one more goes behind).
struct Same {};
inline constexpr Same kSame;
class Padding {
 public:
  Padding(int64_t n) : both_(n) {}
  Padding(int n) : both_(n) {}
  Padding(std::initializer_list<int64_t> v) : both_(v) {}
  Padding(PerDim v) : both_(v) {}
  Padding(Same) : both_(0), same_(true) {}
  const PerDim& both() const { return both_; }
  bool same() const { return same_; }

 private:
  PerDim both_;
  bool same_ = false;
};

struct ConvGeometry {
  PerDim stride = 1;
  Padding padding = 0;
  PerDim dilation = 1;
  int64_t groups = 1;
};
/// x [N, C, L] or [C, L], weight [O, C / groups, K] -> [N, O, (L + 2 padding - dilation (K - 1) -
/// 1) / stride + 1], plus bias [O] where given; conv2d and conv3d have as many spatial dims. f32,
/// f64, bf16, f16; the 16-bit ones are summed in f32. Throws ShapeError naming what does not fit.
///
/// On the CPU, kernels of 3 x 3 without strides may run by minimal filtering (Winograd), in f32 and
/// for the gradient by a bf16 weight. There an Inf or NaN in x, weight or a gradient may reach
/// neighbours that plain sums would not give it to (outputs of the same tile of 2 x 2, taps of the
/// same weight), an Inf also as NaN; and finite values overflow earlier: they, and sums of their
/// products, have to be below 1e36 (for the gradient by a bf16 weight, sums below 1e33).
Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              const ConvGeometry& options = {});
Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              const ConvGeometry& options = {});
Tensor conv3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              const ConvGeometry& options = {});

struct ConvTransposeOptions {
  PerDim stride = 1;
  PerDim padding = 0;
  PerDim output_padding = 0;  // less than stride or dilation
  int64_t groups = 1;
  PerDim dilation = 1;
};
/// The gradient of a convolution by its input. x [N, C, L] or [C, L], weight [C, O / groups, K] ->
/// [N, O, (L - 1) stride - 2 padding + dilation (K - 1) + output_padding + 1].
Tensor conv_transpose1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions& options = {});
Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions& options = {});
Tensor conv_transpose3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions& options = {});

}  // namespace tessera
