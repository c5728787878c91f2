// Batch-norm over rows of channels [rows, channels], dense: moments, normalisation with residual
// and relu, and the gradient. A block has 32 channels (lanes) of a piece of rows, which its 8 warps
// share; what pieces found meets in double, in their order. After device.h. Invariant: pieces
// depend on the extents alone, so moments and sums have the same bits every time.
namespace tessera::device {

inline constexpr unsigned kNormRows = 8;  // warps of a block

/// The channel of this thread and the rows [begin, end) of its block, of which it has every eighth.
struct NormPart {
  unsigned channel, begin, end, warp;
};
TESSERA_FN NormPart part_of(const BatchNormCall& c) {
  NormPart p;
  p.channel = blockIdx.x * kWarp + threadIdx.x % kWarp, p.warp = threadIdx.x / kWarp;
  p.begin = blockIdx.y * c.piece, p.end = p.begin + c.piece < c.rows ? p.begin + c.piece : c.rows;
  return p;
}
/// The sum over the block's warps, for all of them.
template <class C>
TESSERA_FN C over_warps(C x) {
  __shared__ C sums[kNormRows][kWarp];
  const unsigned lane = threadIdx.x % kWarp;
  sums[threadIdx.x / kWarp][lane] = x;
  __syncthreads();
  C total = sums[0][lane];
#pragma unroll
  for (unsigned w = 1; w < kNormRows; ++w) total += sums[w][lane];
  __syncthreads();
  return total;
}
template <class T>
TESSERA_FN Compute<T> element(const void* x, const BatchNormCall& c, unsigned row,
                              unsigned channel) {
  return widen(static_cast<const T*>(x)[long(row) * c.channels + channel]);
}
template <class C>
TESSERA_FN C of_channel(const void* values, unsigned channel, C otherwise) {
  return values ? static_cast<const C*>(values)[channel] : otherwise;
}
/// The cotangent of what comes before a relu.
template <class T>
TESSERA_FN Compute<T> cotangent(const BatchNormCall& c, unsigned row, unsigned channel) {
  const Compute<T> g = element<T>(c.g, c, row, channel);
  return c.y == nullptr || element<T>(c.y, c, row, channel) > Compute<T>(0) ? g : Compute<T>(0);
}

/// first [pieces, channels] = means, second = squared deviations from them.
template <class T>
TESSERA_FN void moments(const BatchNormCall& c) {
  using C = Compute<T>;
  const NormPart p = part_of(c);
  const bool there = p.channel < c.channels;
  C sum = C(0), squares = C(0);
  for (unsigned r = p.begin + p.warp; there && r < p.end; r += kNormRows)
    sum += element<T>(c.x, c, r, p.channel);
  const C mean = over_warps(sum) / C(p.end - p.begin);
  for (unsigned r = p.begin + p.warp; there && r < p.end; r += kNormRows) {
    const C d = element<T>(c.x, c, r, p.channel) - mean;
    squares += d * d;
  }
  squares = over_warps(squares);
  if (!there || p.warp != 0) return;
  const long at = long(blockIdx.y) * c.channels + p.channel;
  static_cast<C*>(c.first)[at] = mean, static_cast<C*>(c.second)[at] = squares;
}
/// mean and var of channels from those of pieces (Chan, Golub, LeVeque 1983).
template <class C>
TESSERA_FN void join_moments(const BatchNormCall& c) {
  const unsigned channel = blockIdx.x * 256 + threadIdx.x;
  if (channel >= c.channels) return;
  double sum = 0, within = 0, between = 0;
  auto rows_of = [&](unsigned p) {
    const unsigned left = c.rows - p * c.piece;
    return double(left < c.piece ? left : c.piece);
  };
  for (unsigned p = 0; p < c.pieces; ++p) {
    const long at = long(p) * c.channels + channel;
    sum += double(static_cast<const C*>(c.first)[at]) * rows_of(p);
    within += double(static_cast<const C*>(c.second)[at]);
  }
  const double share = 1 / double(c.rows), mean = sum * share;
  for (unsigned p = 0; p < c.pieces; ++p) {
    const double d = double(static_cast<const C*>(c.first)[long(p) * c.channels + channel]) - mean;
    between += d * d * rows_of(p);
  }
  static_cast<C*>(c.mean)[channel] = C(mean);
  static_cast<C*>(c.var)[channel] = C((within + between) * share);
}

/// y = (x - mean) rstd w + b, plus the residual, then relu.
template <class T>
TESSERA_FN void normalize(const BatchNormCall& c) {
  using C = Compute<T>;
  const NormPart p = part_of(c);
  if (p.channel >= c.channels) return;
  const C mean = of_channel(c.mean, p.channel, C(0)), shift = of_channel(c.bias, p.channel, C(0));
  const C rstd = C(1 / fn::sqrt(double(of_channel(c.var, p.channel, C(1))) + c.eps));
  const C scale = of_channel(c.weight, p.channel, C(1)) * rstd;
  for (unsigned r = p.begin + p.warp; r < p.end; r += kNormRows) {
    C y = (element<T>(c.x, c, r, p.channel) - mean) * scale + shift;
    if (c.residual) y += element<T>(c.residual, c, r, p.channel);
    if (c.relu) y = y < C(0) ? C(0) : y;
    static_cast<T*>(c.out)[long(r) * c.channels + p.channel] = Narrow<T>::from(y);
  }
}

/// first [pieces, channels] = sums of g, second = sums of g (x - mean).
template <class T>
TESSERA_FN void grad_sums(const BatchNormCall& c) {
  using C = Compute<T>;
  const NormPart p = part_of(c);
  const bool there = p.channel < c.channels;
  const C mean = there ? of_channel(c.mean, p.channel, C(0)) : C(0);
  C sum = C(0), products = C(0);
  for (unsigned r = p.begin + p.warp; there && r < p.end; r += kNormRows) {
    const C g = cotangent<T>(c, r, p.channel);
    sum += g, products += g * (element<T>(c.x, c, r, p.channel) - mean);
  }
  sum = over_warps(sum), products = over_warps(products);
  if (!there || p.warp != 0) return;
  const long at = long(blockIdx.y) * c.channels + p.channel;
  static_cast<C*>(c.first)[at] = sum, static_cast<C*>(c.second)[at] = products;
}
/// sum_g and sum_product of channels; dw = sum_product rstd and db = sum_g where they are wanted.
template <class C>
TESSERA_FN void join_sums(const BatchNormCall& c) {
  const unsigned channel = blockIdx.x * 256 + threadIdx.x;
  if (channel >= c.channels) return;
  double sum = 0, products = 0;
  for (unsigned p = 0; p < c.pieces; ++p) {
    const long at = long(p) * c.channels + channel;
    sum += double(static_cast<const C*>(c.first)[at]);
    products += double(static_cast<const C*>(c.second)[at]);
  }
  static_cast<C*>(c.sum_g)[channel] = C(sum * c.share);
  static_cast<C*>(c.sum_product)[channel] = C(products * c.share);
  const double rstd =
      c.var ? 1 / fn::sqrt(double(static_cast<const C*>(c.var)[channel]) + c.eps) : 0;
  if (c.dw) static_cast<C*>(c.dw)[channel] = C(products * rstd);
  if (c.db) static_cast<C*>(c.db)[channel] = C(sum);
}
/// dx = (g - mean_g - (x - mean) slope) w rstd, slope = mean_product rstd^2; the residual's is g.
template <class T>
TESSERA_FN void grad(const BatchNormCall& c) {
  using C = Compute<T>;
  const NormPart p = part_of(c);
  if (p.channel >= c.channels) return;
  const C mean = of_channel(c.mean, p.channel, C(0)), mean_g = of_channel(c.sum_g, p.channel, C(0));
  const double rstd = 1 / fn::sqrt(double(of_channel(c.var, p.channel, C(1))) + c.eps);
  const C slope = C(double(of_channel(c.sum_product, p.channel, C(0))) * rstd * rstd);
  const C scale = of_channel(c.weight, p.channel, C(1)) * C(rstd);
  for (unsigned r = p.begin + p.warp; r < p.end; r += kNormRows) {
    const C g = cotangent<T>(c, r, p.channel), d = element<T>(c.x, c, r, p.channel) - mean;
    const long at = long(r) * c.channels + p.channel;
    static_cast<T*>(c.out)[at] = Narrow<T>::from((g - mean_g - d * slope) * scale);
    if (c.dresidual) static_cast<T*>(c.dresidual)[at] = Narrow<T>::from(g);
  }
}

}  // namespace tessera::device

// instances: T
extern "C" __global__ void __launch_bounds__(256) NAME_moments(tessera::cuda::BatchNormCall c) {
  using namespace tessera::device;
  moments<T>(c);
}
extern "C" __global__ void __launch_bounds__(256)
    NAME_join_moments(tessera::cuda::BatchNormCall c) {
  using namespace tessera::device;
  join_moments<Compute<T>>(c);
}
extern "C" __global__ void __launch_bounds__(256) NAME_normalize(tessera::cuda::BatchNormCall c) {
  using namespace tessera::device;
  normalize<T>(c);
}
extern "C" __global__ void __launch_bounds__(256) NAME_grad_sums(tessera::cuda::BatchNormCall c) {
  using namespace tessera::device;
  grad_sums<T>(c);
}
extern "C" __global__ void __launch_bounds__(256) NAME_join_sums(tessera::cuda::BatchNormCall c) {
  using namespace tessera::device;
  join_sums<Compute<T>>(c);
}
extern "C" __global__ void __launch_bounds__(256) NAME_grad(tessera::cuda::BatchNormCall c) {
  using namespace tessera::device;
  grad<T>(c);
}
