// What the sweeps over the op registry share: walking every sample, running it on other values or
// layouts of its operands, comparing.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "core/primitive/registry.h"

namespace tessera::sweep {

using List = std::vector<Tensor>;

/// Calls `check` for every sample of every op, under a trace that names both. An exception fails
/// the sample.
void for_each_sample(const std::function<void(const Sample&)>& check);

/// Results of the op; the operands stay as they are.
List run(const Primitive& prim, const List& in);
List run(const PrimRef& prim, const List& in);
std::vector<Meta> infer(const Primitive& prim, const List& in);
AxisMap axes(const Primitive& prim, const List& in);

bool is_float(const Tensor& t);
/// Element `i` in row-major order.
double at(const Tensor& t, int64_t i);
/// A copy of `x` with `step` added to element `i`.
Tensor nudged(const Tensor& x, int64_t i, double step);
/// Copies with other strides: dims in another order in memory, and an offset.
Tensor restrided(const Tensor& x);
/// Operands of floats in `dtype`; 0-d ones stay f64 when `keep_numbers` (learning rates are so).
List with_dtype(const List& in, DType dtype, bool keep_numbers);
/// Fixed values in [-1, 1) of the shape and dtype of `like`.
Tensor weights_like(const Tensor& like, uint64_t key);

/// Fails unless both have one shape and dtype, and elements differ by at most `tolerance` times the
/// largest magnitude (at least 1). NaN equals NaN.
void expect_close(const Tensor& got, const Tensor& want, double tolerance, const std::string& what);
void expect_close(const List& got, const List& want, double tolerance, const std::string& what);

}  // namespace tessera::sweep
