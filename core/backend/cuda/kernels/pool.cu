// Largest and average of windows of up to three spatial dims, and their gradients. A thread has one
// element of the result (of the operand, for gradients) with channels innermost, whatever the
// operands' strides. After convert.h and device.h. Invariant: a gradient is added up by its owner,
// window after window in their order, so the sums are those of the CPU.
namespace tessera::device {

inline constexpr unsigned kPoolThreads = 256;

struct PoolWindow {
  int first, end, step;
};
/// Window o of dim d without its places outside of the operand.
TESSERA_FN PoolWindow window(const PoolCall& c, int d, int o) {
  const PoolDim& p = c.dim[d];
  if (c.adaptive) return {o * p.in / p.out, ((o + 1) * p.in + p.out - 1) / p.out, 1};
  int first = o * p.stride - p.padding;
  const int last = first + (p.kernel - 1) * p.dilation + 1, end = last < p.in ? last : p.in;
  if (first < 0) first += (-first + p.dilation - 1) / p.dilation * p.dilation;
  return {first, end, p.dilation};
}
/// Places by which an average over window o of dim d divides.
TESSERA_FN int counted(const PoolCall& c, int d, int o) {
  const PoolDim& p = c.dim[d];
  if (!c.adaptive && c.count_padding) {
    const int first = o * p.stride - p.padding, end = first + p.kernel, most = p.in + p.padding;
    return (end < most ? end : most) - first;
  }
  const PoolWindow w = window(c, d, o);
  return w.end - w.first;
}
/// The windows of dim d that may hold place i: [low, high].
TESSERA_FN void windows_at(const PoolCall& c, int d, int i, int& low, int& high) {
  const PoolDim& p = c.dim[d];
  if (c.adaptive) {
    low = i * p.out / p.in, high = ((i + 1) * p.out + p.in - 1) / p.in - 1;
  } else {
    const int reach = i + p.padding - (p.kernel - 1) * p.dilation;
    low = reach > 0 ? (reach + p.stride - 1) / p.stride : 0, high = (i + p.padding) / p.stride;
  }
  if (high >= p.out) high = p.out - 1;
}
TESSERA_FN bool holds(const PoolWindow& w, int i) {
  return i >= w.first && i < w.end && (i - w.first) % w.step == 0;
}

/// Channel, spatial place and image of element e of [images, spatial, channels].
struct PoolPlace {
  int channel, at[3], image;
};
TESSERA_FN PoolPlace place_of(const PoolCall& c, unsigned e, bool of_out) {
  PoolPlace p;
  p.channel = e % c.channels, e /= c.channels;
#pragma unroll
  for (int d = 2; d >= 0; --d) {
    const unsigned extent = unsigned(of_out ? c.dim[d].out : c.dim[d].in);
    p.at[d] = e % extent, e /= extent;
  }
  p.image = e;
  return p;
}
TESSERA_FN long offset_of(const PoolStrides& s, const PoolPlace& p, int i, int j, int k) {
  return p.image * s.image + p.channel * s.channel + i * s.dim[0] + j * s.dim[1] + k * s.dim[2];
}

/// The largest of a window and its place in the image; the first of equal ones, the last NaN.
template <class T>
TESSERA_FN void max_pool(const PoolCall& c) {
  const unsigned e = blockIdx.x * kPoolThreads + threadIdx.x;
  if (e >= c.count) return;
  const PoolPlace p = place_of(c, e, true);
  const PoolWindow a = window(c, 0, p.at[0]), b = window(c, 1, p.at[1]), w = window(c, 2, p.at[2]);
  Compute<T> best = Max::start<Compute<T>>();
  int at = -1;
  for (int i = a.first; i < a.end; i += a.step)
    for (int j = b.first; j < b.end; j += b.step) {
      const T* line = static_cast<const T*>(c.in) + offset_of(c.x, p, i, j, 0);
      const int place = (i * c.dim[1].in + j) * c.dim[2].in;
#pragma unroll 1
      for (int k = w.first; k < w.end; k += w.step) {
        const Compute<T> v = widen(line[k * c.x.dim[2]]);
        if (at < 0 || v > best || v != v) best = v, at = place + k;
      }
    }
  const long to = offset_of(c.y, p, p.at[0], p.at[1], p.at[2]);
  static_cast<T*>(c.out)[to] = Narrow<T>::from(best);
  if (c.places) c.places[to] = at;
}
template <class T>
TESSERA_FN void avg_pool(const PoolCall& c) {
  const unsigned e = blockIdx.x * kPoolThreads + threadIdx.x;
  if (e >= c.count) return;
  const PoolPlace p = place_of(c, e, true);
  const PoolWindow a = window(c, 0, p.at[0]), b = window(c, 1, p.at[1]), w = window(c, 2, p.at[2]);
  const T* x = static_cast<const T*>(c.in);
  Compute<T> sum = 0;
  for (int i = a.first; i < a.end; i += a.step)
    for (int j = b.first; j < b.end; j += b.step)
      for (int k = w.first; k < w.end; k += w.step) sum += widen(x[offset_of(c.x, p, i, j, k)]);
  const long divisor =
      c.divisor ? c.divisor
                : counted(c, 0, p.at[0]) * counted(c, 1, p.at[1]) * counted(c, 2, p.at[2]);
  static_cast<T*>(c.out)[offset_of(c.y, p, p.at[0], p.at[1], p.at[2])] =
      Narrow<T>::from(sum / Compute<T>(divisor));
}
/// dx (strides x) from the cotangent `in` (strides y): of the windows whose largest it was, or a
/// part of every window's.
template <class T, bool kLargest>
TESSERA_FN void pool_grad(const PoolCall& c) {
  const unsigned e = blockIdx.x * kPoolThreads + threadIdx.x;
  if (e >= c.count) return;
  const PoolPlace p = place_of(c, e, false);
  const int place = (p.at[0] * c.dim[1].in + p.at[1]) * c.dim[2].in + p.at[2];
  int low[3], high[3];
#pragma unroll
  for (int d = 0; d < 3; ++d) windows_at(c, d, p.at[d], low[d], high[d]);
  const T* g = static_cast<const T*>(c.in);
  Compute<T> sum = 0;
  for (int i = low[0]; i <= high[0]; ++i)
    for (int j = low[1]; j <= high[1]; ++j)
      for (int k = low[2]; k <= high[2]; ++k) {
        const long from = offset_of(c.y, p, i, j, k);
        if constexpr (kLargest) {
          if (c.places[from] == place) sum += widen(g[from]);
        } else {
          if (!holds(window(c, 0, i), p.at[0]) || !holds(window(c, 1, j), p.at[1]) ||
              !holds(window(c, 2, k), p.at[2]))
            continue;
          const long divisor =
              c.divisor ? c.divisor : counted(c, 0, i) * counted(c, 1, j) * counted(c, 2, k);
          sum += widen(g[from]) / Compute<T>(divisor);
        }
      }
  static_cast<T*>(c.out)[offset_of(c.x, p, p.at[0], p.at[1], p.at[2])] = Narrow<T>::from(sum);
}

}  // namespace tessera::device

// Two blocks: registers for eight of them are too few, and spilling costs more than waiting.

// instances: T
KERNEL(max_pool, PoolCall, 256, 2) { max_pool<T>(c); }
KERNEL(max_pool_grad, PoolCall, 256, 2) { pool_grad<T, true>(c); }
KERNEL(avg_pool, PoolCall, 256, 2) { avg_pool<T>(c); }
KERNEL(avg_pool_grad, PoolCall, 256, 2) { pool_grad<T, false>(c); }
