// Convolutions and attention by cuDNN, where it is found and can. Each function returns false where
// Tessera's own kernels are to compute instead.
#pragma once
#include "core/backend/cuda/cudnn/graphs.h"
#include "core/backend/cuda/ops/batch_norm.h"
#include "core/base/function_ref.h"
#include "core/ops/conv_norm.h"
#include "core/ops/fused_attributes.h"
#include "core/tensor/stream.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {

/// Enqueues the convolution of x [N, C, ..] with w [O, C / groups, ..] to y [N, O, ..], of which
/// `kind` names the result. A result of conv and conv_grad_input lies channels-last; operands are
/// copied where they do not. `own` does the same by our own kernels, which may be faster for f32.
bool library_conv(dnn::ConvKind kind, const ConvAttributes& a, const Tensor& x, const Tensor& w,
                  const Tensor& y, FunctionRef<void()> own, const Stream& stream);
/// Enqueues the convolution of x with w to y in 16 bits, and the sums of each channel of y and of
/// their squares, f32 [O]. `apart` enqueues what the caller wants of these without the graph, which
/// may be faster.
bool library_conv_sums(const ConvAttributes& a, const Tensor& x, const Tensor& w, const Tensor& y,
                       const Tensor& sum, const Tensor& squares, FunctionRef<void()> apart,
                       const Stream& stream);
/// Enqueues conv_norm: `in` has its operands. `apart` does the same by other calls, which may be
/// faster.
bool library_conv_norm(const ConvNormAttributes& a, std::span<const Tensor> in, const Tensor& y,
                       FunctionRef<void()> apart, const Stream& stream);

/// Enqueues the h of conv_grad_norm by g and w of 16 bits, and the sums of each channel of h and of
/// h (x - mean), f32 [C]. `apart` enqueues the whole op by other calls, which may be faster.
bool library_conv_grad_sums(const ConvAttributes& a, const Tensor& g, const Tensor& w,
                            const GradSums& s, const Tensor& sum, const Tensor& products,
                            FunctionRef<void()> apart, const Stream& stream);

/// Enqueues attention: `in` has q, k, v and maybe a mask, `results` out and the dense lse. Operands
/// are copied, and results too, where the library does not read and write them as they lie. It does
/// not drop the weights that Tessera does, so calls with dropout are left to our own kernels.
bool library_attention(const AttentionAttributes& a, std::span<const Tensor> in,
                       std::span<const Tensor> results, const Stream& stream);
/// Enqueues its gradient: `in` has g, q, k, v, out, lse and maybe a mask, `results` dq, dk and dv.
bool library_attention_grad(const AttentionAttributes& a, std::span<const Tensor> in,
                            std::span<const Tensor> results, const Stream& stream);

}  // namespace tessera::cuda
