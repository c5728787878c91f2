// Batch-norm over rows of channels [rows, channels], dense: moments, normalisation with residual
// and relu, and the gradient. A block has 32 channels (lanes) of a piece of rows, which its 8 warps
// share; what pieces found meets in double, in their order. After device.h. Invariant: pieces
// depend on the extents alone, so moments and sums have the same bits every time.
namespace tessera::device {

inline constexpr unsigned kNormRows = 8;  // warps of a block
inline constexpr int kNormLoads = 4;      // rows that a thread reads before it writes the first

/// The channel of this thread and the rows [begin, end) of its block, of which it has every eighth
/// from `first` on; none where it has no channel.
struct NormPart {
  unsigned channel, begin, end, first;
};
TESSERA_FN NormPart part_of(const BatchNormCall& c) {
  NormPart p;
  p.channel = blockIdx.x * kWarp + threadIdx.x % kWarp;
  p.begin = blockIdx.y * c.piece, p.end = p.begin + c.piece < c.rows ? p.begin + c.piece : c.rows;
  p.first = p.channel < c.channels ? p.begin + threadIdx.x / kWarp : p.end;
  return p;
}
/// Calls f(row) for every row of this thread; f writes nothing.
template <class F>
TESSERA_FN void read_rows(const NormPart& p, F f) {
#pragma unroll 4
  for (unsigned r = p.first; r < p.end; r += kNormRows) f(r);
}
/// Calls read(row, j) for some rows of this thread, then write(row, j) for them, until it has had
/// all: `j` is below kNormLoads and names what was read.
template <class Read, class Write>
TESSERA_FN void rewrite_rows(const NormPart& p, Read read, Write write) {
  for (unsigned r = p.first; r < p.end; r += kNormRows * kNormLoads) {
#pragma unroll
    for (int j = 0; j < kNormLoads; ++j)
      if (r + kNormRows * j < p.end) read(r + kNormRows * j, j);
#pragma unroll
    for (int j = 0; j < kNormLoads; ++j)
      if (r + kNormRows * j < p.end) write(r + kNormRows * j, j);
  }
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
/// Writes what the block found of its channels to first and second [pieces, channels].
template <class C>
TESSERA_FN void write_part(const BatchNormCall& c, const NormPart& p, C first, C second) {
  if (p.channel >= c.channels || threadIdx.x >= kWarp) return;
  const long at = long(blockIdx.y) * c.channels + p.channel;
  static_cast<C*>(c.first)[at] = first, static_cast<C*>(c.second)[at] = second;
}
/// The channel of a thread that has one alone, which may be beyond the last.
TESSERA_FN unsigned channel_of_thread() { return blockIdx.x * 256 + threadIdx.x; }
/// The sum over pieces of f(piece, its place in first and second), in their order.
template <class F>
TESSERA_FN double over_pieces(const BatchNormCall& c, unsigned channel, F f) {
  double sum = 0;
  for (unsigned p = 0; p < c.pieces; ++p) sum += f(p, long(p) * c.channels + channel);
  return sum;
}

template <class T>
TESSERA_FN T element(const void* x, const BatchNormCall& c, unsigned row, unsigned channel) {
  return static_cast<const T*>(x)[long(row) * c.channels + channel];
}
template <class C>
TESSERA_FN C of_channel(const void* values, unsigned channel, C otherwise) {
  return values ? static_cast<const C*>(values)[channel] : otherwise;
}
template <class C>
TESSERA_FN double rstd_of(const BatchNormCall& c, unsigned channel) {
  return 1 / fn::sqrt(double(static_cast<const C*>(c.var)[channel]) + c.eps);
}
/// The cotangent g of what comes before a relu, whose result is y.
template <class T>
TESSERA_FN T before_relu(const BatchNormCall& c, T g, unsigned row, unsigned channel) {
  return c.y == nullptr || widen(element<T>(c.y, c, row, channel)) > Compute<T>(0) ? g : T{};
}

/// first [pieces, channels] = means, second = squared deviations from them.
template <class T>
TESSERA_FN void moments(const BatchNormCall& c) {
  using C = Compute<T>;
  const NormPart p = part_of(c);
  C sum = C(0), squares = C(0);
  read_rows(p, [&](unsigned r) { sum += widen(element<T>(c.x, c, r, p.channel)); });
  const C mean = over_warps(sum) / C(p.end - p.begin);
  read_rows(p, [&](unsigned r) {
    const C d = widen(element<T>(c.x, c, r, p.channel)) - mean;
    squares += d * d;
  });
  write_part(c, p, mean, over_warps(squares));
}
/// mean and var of channels from those of pieces (Chan, Golub, LeVeque 1983).
template <class C>
TESSERA_FN void join_moments(const BatchNormCall& c) {
  const unsigned channel = channel_of_thread();
  if (channel >= c.channels) return;
  const C *means = static_cast<const C*>(c.first), *squares = static_cast<const C*>(c.second);
  auto rows_of = [&](unsigned p) {
    const unsigned left = c.rows - p * c.piece;
    return double(left < c.piece ? left : c.piece);
  };
  const double share = 1 / double(c.rows);
  const double mean =
      over_pieces(c, channel, [&](unsigned p, long at) { return double(means[at]) * rows_of(p); }) *
      share;
  const double within =
      over_pieces(c, channel, [&](unsigned, long at) { return double(squares[at]); });
  const double between = over_pieces(c, channel, [&](unsigned p, long at) {
    const double d = double(means[at]) - mean;
    return d * d * rows_of(p);
  });
  static_cast<C*>(c.mean)[channel] = C(mean);
  static_cast<C*>(c.var)[channel] = C((within + between) * share);
}

/// mean and var of channels from their sums and those of their squares, in f64: what rounding the
/// sums to f32 leaves of a variance far below the squares may be less than 0.
template <class C>
TESSERA_FN void moments_of_sums(const BatchNormCall& c) {
  const unsigned channel = channel_of_thread();
  if (channel >= c.channels) return;
  const double mean = double(static_cast<const C*>(c.first)[channel]) * c.share,
               square = double(static_cast<const C*>(c.second)[channel]) * c.share,
               var = square - mean * mean;
  static_cast<C*>(c.mean)[channel] = C(mean);
  static_cast<C*>(c.var)[channel] = C(var < 0 ? 0 : var);
}

/// y = (x - mean) rstd w + b, plus the residual, then relu.
template <class T>
TESSERA_FN void normalize(const BatchNormCall& c) {
  using C = Compute<T>;
  const NormPart p = part_of(c);
  if (p.channel >= c.channels) return;
  const C mean = static_cast<const C*>(c.mean)[p.channel];
  const C scale = of_channel(c.weight, p.channel, C(1)) * C(rstd_of<C>(c, p.channel));
  const C shift = of_channel(c.bias, p.channel, C(0));
  T x[kNormLoads], residual[kNormLoads];
  rewrite_rows(
      p,
      [&](unsigned r, int j) {
        x[j] = element<T>(c.x, c, r, p.channel);
        if (c.residual) residual[j] = element<T>(c.residual, c, r, p.channel);
      },
      [&](unsigned r, int j) {
        C y = (widen(x[j]) - mean) * scale + shift;
        if (c.residual) y += widen(residual[j]);
        if (c.relu) y = y < C(0) ? C(0) : y;
        static_cast<T*>(c.out)[long(r) * c.channels + p.channel] = Narrow<T>::from(y);
      });
}

/// What a thread, then its block, finds of a gradient g beside x: sums of g and of g (x - mean).
template <class C>
struct GradSums {
  C mean, sum, products;
};
template <class C>
TESSERA_FN GradSums<C> no_sums(const BatchNormCall& c, const NormPart& p) {
  return {p.channel < c.channels ? static_cast<const C*>(c.mean)[p.channel] : C(0), C(0), C(0)};
}
template <class C>
TESSERA_FN void add(GradSums<C>& s, C g, C x) {
  s.sum += g, s.products += g * (x - s.mean);
}
template <class C>
TESSERA_FN void write_sums(const BatchNormCall& c, const NormPart& p, const GradSums<C>& s) {
  const C sum = over_warps(s.sum), products = over_warps(s.products);
  write_part(c, p, sum, products);
}

/// first [pieces, channels] = sums of g, second = sums of g (x - mean).
template <class T>
TESSERA_FN void grad_sums(const BatchNormCall& c) {
  using C = Compute<T>;
  const NormPart p = part_of(c);
  GradSums<C> sums = no_sums<C>(c, p);
  read_rows(p, [&](unsigned r) {
    const C g = widen(before_relu(c, element<T>(c.g, c, r, p.channel), r, p.channel));
    add(sums, g, widen(element<T>(c.x, c, r, p.channel)));
  });
  write_sums(c, p, sums);
}
/// The same of h, which is written to dresidual: g, or where there is a residual its sum with that,
/// as the whole tensor would be rounded.
template <class T>
TESSERA_FN void masked_sums(const BatchNormCall& c) {
  using C = Compute<T>;
  const NormPart p = part_of(c);
  GradSums<C> sums = no_sums<C>(c, p);
  T x[kNormLoads], h[kNormLoads];
  rewrite_rows(
      p,
      [&](unsigned r, int j) {
        x[j] = element<T>(c.x, c, r, p.channel);
        h[j] = element<T>(c.g, c, r, p.channel);
        if (c.residual)
          h[j] = Narrow<T>::from(widen(h[j]) + widen(element<T>(c.residual, c, r, p.channel)));
        h[j] = before_relu(c, h[j], r, p.channel);
      },
      [&](unsigned r, int j) {
        static_cast<T*>(c.dresidual)[long(r) * c.channels + p.channel] = h[j];
        add(sums, widen(h[j]), widen(x[j]));
      });
  write_sums(c, p, sums);
}
/// sum_g and sum_product of channels; dw = sum_product rstd and db = sum_g where they are wanted.
template <class C>
TESSERA_FN void join_sums(const BatchNormCall& c) {
  const unsigned channel = channel_of_thread();
  if (channel >= c.channels) return;
  auto total = [&](const void* of) {
    return over_pieces(c, channel,
                       [&](unsigned, long at) { return double(static_cast<const C*>(of)[at]); });
  };
  const double sum = total(c.first), products = total(c.second);
  static_cast<C*>(c.sum_g)[channel] = C(sum * c.share);
  static_cast<C*>(c.sum_product)[channel] = C(products * c.share);
  if (c.dw) static_cast<C*>(c.dw)[channel] = C(products * rstd_of<C>(c, channel));
  if (c.db) static_cast<C*>(c.db)[channel] = C(sum);
}
/// dx = (g - mean_g - (x - mean) slope) w rstd, slope = mean_product rstd^2; the residual's is g.
template <class T>
TESSERA_FN void grad(const BatchNormCall& c) {
  using C = Compute<T>;
  const NormPart p = part_of(c);
  if (p.channel >= c.channels) return;
  const C mean = static_cast<const C*>(c.mean)[p.channel];
  const C mean_g = static_cast<const C*>(c.sum_g)[p.channel];
  const double rstd = rstd_of<C>(c, p.channel);
  const C slope = C(double(static_cast<const C*>(c.sum_product)[p.channel]) * rstd * rstd);
  const C scale = of_channel(c.weight, p.channel, C(1)) * C(rstd);
  T x[kNormLoads], g[kNormLoads];
  rewrite_rows(
      p,
      [&](unsigned r, int j) {
        x[j] = element<T>(c.x, c, r, p.channel);
        g[j] = before_relu(c, element<T>(c.g, c, r, p.channel), r, p.channel);
      },
      [&](unsigned r, int j) {
        const long at = long(r) * c.channels + p.channel;
        const C dx = (widen(g[j]) - mean_g - (widen(x[j]) - mean) * slope) * scale;
        static_cast<T*>(c.out)[at] = Narrow<T>::from(dx);
        if (c.dresidual) static_cast<T*>(c.dresidual)[at] = g[j];
      });
}

}  // namespace tessera::device

// instances: T
KERNEL(moments, BatchNormCall, 256) { moments<T>(c); }
KERNEL(join_moments, BatchNormCall, 256) { join_moments<Compute<T>>(c); }
KERNEL(moments_of_sums, BatchNormCall, 256) { moments_of_sums<Compute<T>>(c); }
KERNEL(normalize, BatchNormCall, 256) { normalize<T>(c); }
KERNEL(grad_sums, BatchNormCall, 256) { grad_sums<T>(c); }
KERNEL(masked_sums, BatchNormCall, 256) { masked_sums<T>(c); }
KERNEL(join_sums, BatchNormCall, 256) { join_sums<Compute<T>>(c); }
KERNEL(grad, BatchNormCall, 256) { grad<T>(c); }
