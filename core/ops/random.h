// Random tensors and dropout. Without an explicit key each call takes the next key of
// default_generator().
#pragma once
#include "core/dispatch/scoped.h"
#include "core/ops/create.h"
#include "core/tensor/random.h"

namespace tessera {

/// Uniform in [0, 1).
Tensor rand(const Shape& shape, TensorOptions options = {}, Tensor key = {});
/// Standard normal (Box, Muller 1958).
Tensor randn(const Shape& shape, TensorOptions options = {}, Tensor key = {});
Tensor rand_like(const Tensor& x, Tensor key = {});
Tensor randn_like(const Tensor& x, Tensor key = {});
/// Normal with these means and deviations, which broadcast.
Tensor normal(const Tensor& mean, const Tensor& deviation, Tensor key = {});
/// Overwrites `t` with draws of the exponential distribution of this rate.
void exponential_(const Tensor& t, double rate = 1, Tensor key = {});
/// Uniform integers in [low, high), i64 unless options say otherwise.
Tensor randint(int64_t low, int64_t high, const Shape& shape, TensorOptions options = {},
               Tensor key = {});
/// A random permutation of 0 .. n - 1, i64.
Tensor randperm(int64_t n, Tensor key = {});
/// True with probability p; the result has p's shape. Values of p are not checked: below 0 and NaN
/// never give true, above 1 always does.
Tensor bernoulli(const Tensor& p, Tensor key = {});

/// `count` positions, i64 [count] or [rows, count], drawn by weights [N] or [rows, N], which need
/// not sum to 1, with replacement or without. Reads the weights, and throws UserError for negative
/// or infinite ones and where fewer than needed are positive.
Tensor multinomial(const Tensor& weights, int64_t count, bool replacement = false, Tensor key = {});
/// A relaxed draw from the classes of `dim`: softmax((logits + Gumbel noise) / tau). With `hard`,
/// the one-hot of its largest class, which has the gradient of the relaxed draw. Jang et al. 2017,
/// Maddison et al. 2017.
Tensor gumbel_softmax(const Tensor& logits, double tau = 1, bool hard = false, int64_t dim = -1,
                      Tensor key = {});

/// While one lives, dropout on the calling thread draws by these sample numbers, i64 [B] (those of
/// a data::Batch), instead of by position: ranks with one seed drop different elements, and a
/// sample loses the same elements on whichever rank it is.
class SampleScope : public Scoped<Tensor> {
 public:
  explicit SampleScope(Tensor numbers);
};

/// What a call of dropout draws by: a key and maybe sample numbers.
struct DropoutDraw {
  Tensor key, samples;
};
/// What dropout(x, .., key, samples) draws by. Reads the extent of dim 0 of x and its device.
DropoutDraw dropout_draw(const Tensor& x, Tensor key = {}, Tensor samples = {});
struct DropoutAttributes;
/// The op dropout, which functions of several ops call: `x` may be a part of a tensor.
Tensor apply_dropout(const DropoutAttributes& attributes, const Tensor& x, const DropoutDraw& draw);

/// x with each element zeroed with probability p and the others divided by 1 - p. `samples` i64 [B]
/// numbers the samples along dim 0 of x. If undefined, those of SampleScope are used when their
/// extent divides dim 0; otherwise elements are drawn by position.
Tensor dropout(const Tensor& x, double p, Tensor key = {}, Tensor samples = {});

/// As dropout, of whole channels: x [N, C, H, W]. Tompson et al. 2015.
Tensor dropout2d(const Tensor& x, double p, Tensor key = {}, Tensor samples = {});

void register_random_ops(OpRegistry& registry);

}  // namespace tessera
