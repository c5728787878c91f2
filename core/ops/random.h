// Random tensors and dropout. Without an explicit key each call takes the next key of
// default_generator().
#pragma once
#include "core/dispatch/context.h"
#include "core/ops/create.h"
#include "core/tensor/random.h"

namespace tessera {

/// Uniform in [0, 1).
Tensor rand(const Shape& shape, TensorOptions options = {}, Tensor key = {});
/// Standard normal (Box, Muller 1958).
Tensor randn(const Shape& shape, TensorOptions options = {}, Tensor key = {});
/// Uniform integers in [low, high), i64 unless options say otherwise.
Tensor randint(int64_t low, int64_t high, const Shape& shape, TensorOptions options = {},
               Tensor key = {});
/// A random permutation of 0 .. n - 1, i64.
Tensor randperm(int64_t n, Tensor key = {});
/// True with probability p (0-d or tensor, broadcast to its own shape); no element is looked at:
/// below 0 and NaN are never true, above 1 is always.
Tensor bernoulli(const Tensor& p, Tensor key = {});

/// While one lives, dropout on the calling thread draws by these sample numbers, i64 [B] (those of
/// a data::Batch), and not by position: ranks with one seed drop other elements, and a sample loses
/// the same ones whichever rank has it.
class SampleScope : public Scoped<Tensor> {
 public:
  explicit SampleScope(Tensor numbers) : Scoped(context().samples, std::move(numbers)) {}
};

/// x with each element zeroed with probability p, the others divided by 1 - p. `samples` i64 [B]
/// numbers the samples along dim 0 of x; undefined: those of SampleScope when their extent divides
/// dim 0, else elements are indexed by position.
Tensor dropout(const Tensor& x, double p, Tensor key = {}, Tensor samples = {});

void register_random_ops(OpRegistry& registry);

}  // namespace tessera
