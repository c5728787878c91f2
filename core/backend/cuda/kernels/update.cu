// Optimizer steps of many tensors in one launch: a block has one piece of one parameter, from a
// table on the device. Learning rate, step count and scale are read there, so nothing waits for the
// host. After device.h. Invariant: element by element the arithmetic is that of the CPU, in its
// order, so f32 parameters have its bits (but for pow of the step count, which is libm's).
namespace tessera::device {

inline constexpr int kUpdateThreads = 256;

template <class T>
TESSERA_FN T* element(const UpdateCall& c, int list, const UpdatePiece& piece) {
  return static_cast<T*>(c.lists[list * c.tensors + piece.tensor]) + piece.begin;
}
TESSERA_FN bool finite(double x) { return x - x == 0.0; }

/// Kingma, Ba 2015; decoupled decay: Loshchilov, Hutter 2019. Where `if_finite` and the scale is
/// not, results are the operands. Coupled decay of 0 is left out: an infinite parameter times 0 is
/// NaN.
template <class T>
TESSERA_FN void adam(const UpdateCall& c) {
  const UpdatePiece piece = c.pieces[blockIdx.x];
  const double lr = *c.lr, count = *c.step, grad_scale = *c.scale;
  const bool keeps = c.if_finite && !finite(grad_scale);
  const double correction1 = 1 - ::pow(c.beta1, count), correction2 = 1 - ::pow(c.beta2, count);
  const T scale = T(grad_scale), beta1 = T(c.beta1), beta2 = T(c.beta2), rest1 = T(1 - c.beta1);
  const T rest2 = T(1 - c.beta2), eps = T(c.eps), decay = T(c.weight_decay);
  const T keep = c.decoupled ? T(1 - lr * c.weight_decay) : T(1);
  const bool coupled = !c.decoupled && c.weight_decay != 0;
  const T step = T(lr / correction1), inverse_root = T(1 / fn::sqrt(correction2));
  const T *p = element<T>(c, 0, piece), *g = element<T>(c, 1, piece), *m = element<T>(c, 2, piece),
          *v = element<T>(c, 3, piece);
  T *p2 = element<T>(c, 4, piece), *m2 = element<T>(c, 5, piece), *v2 = element<T>(c, 6, piece);
  for (unsigned i = threadIdx.x; i < piece.count; i += kUpdateThreads) {
    const T old = p[i], m1 = m[i], v1 = v[i];
    T grad = g[i] * scale;
    if (coupled) grad = grad + decay * old;
    const T mi = beta1 * m1 + rest1 * grad, vi = beta2 * v1 + rest2 * grad * grad;
    m2[i] = keeps ? m1 : mi, v2[i] = keeps ? v1 : vi;
    p2[i] = keeps ? old : old * keep - step * mi / (fn::sqrt(vi) * inverse_root + eps);
  }
}

template <class T, bool kMomentum>
TESSERA_FN void sgd(const UpdateCall& c) {
  const UpdatePiece piece = c.pieces[blockIdx.x];
  const double grad_scale = *c.scale;
  const bool keeps = c.if_finite && !finite(grad_scale), first = c.first, nesterov = c.nesterov;
  const T lr = T(*c.lr), scale = T(grad_scale), decay = T(c.weight_decay);
  const T momentum = T(c.momentum), fresh = T(1 - c.dampening);
  const T *p = element<T>(c, 0, piece), *g = element<T>(c, 1, piece);
  const T* b = kMomentum ? element<T>(c, 2, piece) : nullptr;
  T* p2 = element<T>(c, kMomentum ? 3 : 2, piece);
  T* b2 = kMomentum ? element<T>(c, 4, piece) : nullptr;
  for (unsigned i = threadIdx.x; i < piece.count; i += kUpdateThreads) {
    const T old = p[i];
    T grad = g[i] * scale;
    if (c.weight_decay != 0) grad = grad + decay * old;
    if constexpr (kMomentum) {
      // Buffers hold no values before the first step, unless it is not taken.
      const T before = first && !keeps ? T(0) : b[i];
      const T buffer = first ? grad : momentum * before + fresh * grad;
      b2[i] = keeps ? before : buffer;
      grad = nesterov ? grad + momentum * buffer : buffer;
    }
    p2[i] = keeps ? old : old - lr * grad;
  }
}

/// A block for each row: squares are added by threads, lanes and warps, in double.
template <class T>
TESSERA_FN void row_squares(const NormCall& c) {
  for (long row = blockIdx.x; row < c.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(c.in) + row * c.each;
    double sum = 0;
    for (long i = threadIdx.x; i < c.each; i += kUpdateThreads) {
      const double v = double(x[i]);
      sum += v * v;
    }
    sum = block_join<Sum, kUpdateThreads>(sum);
    if (threadIdx.x == 0) c.values[row] = sum;
  }
}

/// The largest magnitude of each piece; NaN is larger than all.
template <class T>
TESSERA_FN void magnitudes(const UpdateCall& c) {
  const UpdatePiece piece = c.pieces[blockIdx.x];
  const T* x = element<T>(c, 0, piece);
  double most = 0;
  for (unsigned i = threadIdx.x; i < piece.count; i += kUpdateThreads)
    most = Max::join(double(fn::abs(x[i])), most);
  most = block_join<Max, kUpdateThreads>(most);
  if (threadIdx.x == 0) c.out[blockIdx.x] = most;
}

/// The balanced tree of the CPU over n values, halves cut at (n + 1) / 2, by one block. Level by
/// level from the leaves: node i of a level of `parts` has the values of a range that the cuts
/// above it leave. Values are overwritten.
TESSERA_FN double tree_sum(double* values, long n) {
  if (n == 0) return 0;
  int levels = 0;
  while ((1L << levels) < n) ++levels;
  for (int level = levels - 1; level >= 0; --level) {
    for (long node = threadIdx.x; node < 1L << level; node += kUpdateThreads) {
      long begin = 0, count = n;
      for (int bit = level - 1; bit >= 0; --bit) {
        const long half = (count + 1) / 2;
        if (node >> bit & 1)
          begin += half, count -= half;
        else
          count = half;
      }
      if (count > 1) values[begin] = values[begin] + values[begin + (count + 1) / 2];
    }
    __syncthreads();
  }
  return values[0];
}
/// out[i] = the tree sum of values[begin[i], begin[i + 1]); a block for each.
TESSERA_FN void tree_sums(const NormCall& c) {
  const long begin = c.begin[blockIdx.x];
  const double sum = tree_sum(c.values + begin, c.begin[blockIdx.x + 1] - begin);
  if (threadIdx.x == 0) c.out[blockIdx.x] = sum;
}
/// out[0] = the root of the tree sum of n values, or, where `rows` is 1, their largest.
TESSERA_FN void norm(const NormCall& c) {
  if (c.rows == 1) {
    double most = 0;
    for (int i = threadIdx.x; i < c.n; i += kUpdateThreads) most = Max::join(c.values[i], most);
    most = block_join<Max, kUpdateThreads>(most);
    if (threadIdx.x == 0) c.out[0] = most;
    return;
  }
  const double sum = tree_sum(c.values, c.n);
  if (threadIdx.x == 0) c.out[0] = fn::sqrt(sum);
}

}  // namespace tessera::device

// instances: T
KERNEL(adam, UpdateCall, 256) { adam<T>(c); }
KERNEL(sgd, UpdateCall, 256) { sgd<T, false>(c); }
KERNEL(sgd_momentum, UpdateCall, 256) { sgd<T, true>(c); }
KERNEL(row_squares, NormCall, 256) { row_squares<T>(c); }
KERNEL(magnitudes, UpdateCall, 256) { magnitudes<T>(c); }
KERNEL(tree_sums, NormCall, 256) { tree_sums(c); }
KERNEL(norm, NormCall, 256) { norm(c); }
