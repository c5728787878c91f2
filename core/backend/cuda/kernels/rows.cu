// Softmax, log-softmax, layer-norm and rms-norm with their gradients, a row by a warp or a block. A
// row is read once and stays in registers (ITEMS elements a thread); longer ones are read again for
// each pass. After math.h and held_rows.h. Invariant: a row's results depend on its values alone.
namespace tessera::device {

template <class H, bool kLog>
TESSERA_FN void softmax(const RowsCall& c) {
  using T = typename H::Element;
  using C = typename H::C;
  own_row<H>(c.rows, [&](long row) {
    const auto cols = H::columns(c.n, c.packs);
    typename H::R x;
    H::fetch(x, cols, static_cast<const T*>(c.in) + row * c.n);
    C top = Max::start<C>();
    each(cols, [&](int j, unsigned k) { top = Max::join(top, at(x, j, k)); });
    top = join<Max, H>(top);
    T* out = static_cast<T*>(c.out) + row * c.n;
    const C total = sum<H>(cols, [&](int j, unsigned k) { return fn::exp(at(x, j, k) - top); });
    if constexpr (kLog) {
      const C rest = fn::log(total);
      write(cols, out, [&](int j, unsigned k) { return (at(x, j, k) - top) - rest; });
    } else {
      const C scale = C(1) / total;
      write(cols, out, [&](int j, unsigned k) { return fn::exp(at(x, j, k) - top) * scale; });
    }
  });
}

/// dx = y (g - sum(g y)), or g - exp(y) sum(g) of log-softmax.
template <class H, bool kLog>
TESSERA_FN void softmax_grad(const RowsCall& c) {
  using T = typename H::Element;
  using C = typename H::C;
  own_row<H>(c.rows, [&](long row) {
    const auto cols = H::columns(c.n, c.packs);
    typename H::R y, g;
    H::fetch(y, cols, static_cast<const T*>(c.in) + row * c.n);
    H::fetch(g, cols, static_cast<const T*>(c.other) + row * c.n);
    const C total = sum<H>(
        cols, [&](int j, unsigned k) { return kLog ? at(g, j, k) : at(g, j, k) * at(y, j, k); });
    write(cols, static_cast<T*>(c.out) + row * c.n, [&](int j, unsigned k) {
      if constexpr (kLog)
        return at(g, j, k) - fn::exp(at(y, j, k)) * total;
      else
        return at(y, j, k) * (at(g, j, k) - total);
    });
  });
}

/// y = (x - mean) rstd w + b; without `kCentred` the mean is 0.
template <class H, bool kCentred>
TESSERA_FN void norm(const RowsCall& c) {
  using T = typename H::Element;
  using C = typename H::C;
  own_row<H>(c.rows, [&](long row) {
    const auto cols = H::columns(c.n, c.packs);
    typename H::R x;
    H::fetch(x, cols, static_cast<const T*>(c.in) + row * c.n);
    C mean = C(0);
    if constexpr (kCentred)
      mean = sum<H>(cols, [&](int j, unsigned k) { return at(x, j, k); }) / C(c.n);
    const C variance = sum<H>(cols,
                              [&](int j, unsigned k) {
                                const C d = at(x, j, k) - mean;
                                return d * d;
                              }) /
                       C(c.n);
    const C rstd = C(1) / fn::sqrt(variance + C(c.eps));
    if (cols.thread == 0) {
      if (kCentred && c.mean) static_cast<C*>(c.mean)[row] = mean;
      static_cast<C*>(c.rstd)[row] = rstd;
    }
    const T *w = static_cast<const T*>(c.weight), *b = static_cast<const T*>(c.bias);
    write(cols, static_cast<T*>(c.out) + row * c.n, [&](int j, unsigned k) {
      C y = (at(x, j, k) - mean) * rstd;
      if (w) y = y * widen(w[k]);
      if (b) y = y + widen(b[k]);
      return y;
    });
  });
}

/// With h = (x - mean) rstd and q = g w: dx = rstd (q - mean(q) - h mean(q h)); rms-norm has no
/// mean(q).
template <class H, bool kCentred>
TESSERA_FN void norm_grad(const RowsCall& c) {
  using T = typename H::Element;
  using C = typename H::C;
  own_row<H>(c.rows, [&](long row) {
    const auto cols = H::columns(c.n, c.packs);
    typename H::R x, g;
    H::fetch(x, cols, static_cast<const T*>(c.in) + row * c.n);
    H::fetch(g, cols, static_cast<const T*>(c.other) + row * c.n);
    const C mean = kCentred ? static_cast<const C*>(c.mean)[row] : C(0);
    const C rstd = static_cast<const C*>(c.rstd)[row];
    const T* w = static_cast<const T*>(c.weight);
    auto q = [&](int j, unsigned k) { return w ? at(g, j, k) * widen(w[k]) : at(g, j, k); };
    auto h = [&](int j, unsigned k) { return (at(x, j, k) - mean) * rstd; };
    C total = C(0);
    if constexpr (kCentred) total = sum<H>(cols, q) / C(c.n);
    const C dot = sum<H>(cols, [&](int j, unsigned k) { return q(j, k) * h(j, k); }) / C(c.n);
    write(cols, static_cast<T*>(c.out) + row * c.n,
          [&](int j, unsigned k) { return rstd * (q(j, k) - total - h(j, k) * dot); });
  });
}

/// Partial sums of dw = g (x - mean) rstd and db = g: a block takes 32 columns of a piece of rows,
/// lanes are columns, warps take every eighth row.
template <class T>
TESSERA_FN void norm_sums(const RowsCall& c) {
  using C = Compute<T>;
  constexpr unsigned kRows = 8;
  __shared__ C sums[2][kRows][kWarp];
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned k = blockIdx.x * kWarp + lane, begin = blockIdx.y * c.piece;
  const unsigned end = begin + c.piece < c.rows ? begin + c.piece : c.rows;
  C dw = C(0), db = C(0);
  if (k < c.n)
    for (unsigned r = begin + warp; r < end; r += kRows) {
      const long i = long(r) * c.n + k;
      const C g = widen(static_cast<const T*>(c.other)[i]),
              x = widen(static_cast<const T*>(c.in)[i]);
      const C mean = c.mean ? static_cast<const C*>(c.mean)[r] : C(0);
      dw += g * ((x - mean) * static_cast<const C*>(c.rstd)[r]);
      db += g;
    }
  sums[0][warp][lane] = dw, sums[1][warp][lane] = db;
  __syncthreads();
  if (warp != 0 || k >= c.n) return;
#pragma unroll
  for (unsigned w = 1; w < kRows; ++w) dw += sums[0][w][lane], db += sums[1][w][lane];
  const long at = long(blockIdx.y) * c.n + k;
  if (c.dw) static_cast<C*>(c.dw)[at] = dw;
  if (c.db) static_cast<C*>(c.db)[at] = db;
}

}  // namespace tessera::device

// Two blocks: registers for eight of them are too few, and spilling costs more than waiting.

// instances: T, THREADS of a row, ITEMS of a thread
KERNEL(softmax, RowsCall, 256, 2) { softmax<Held<T, THREADS, ITEMS>, false>(c); }
KERNEL(log_softmax, RowsCall, 256, 2) { softmax<Held<T, THREADS, ITEMS>, true>(c); }
KERNEL(softmax_grad, RowsCall, 256, 2) { softmax_grad<Held<T, THREADS, ITEMS>, false>(c); }
KERNEL(log_softmax_grad, RowsCall, 256, 2) { softmax_grad<Held<T, THREADS, ITEMS>, true>(c); }
KERNEL(layer_norm, RowsCall, 256, 2) { norm<Held<T, THREADS, ITEMS>, true>(c); }
KERNEL(rms_norm, RowsCall, 256, 2) { norm<Held<T, THREADS, ITEMS>, false>(c); }
KERNEL(layer_norm_grad, RowsCall, 256, 2) { norm_grad<Held<T, THREADS, ITEMS>, true>(c); }
KERNEL(rms_norm_grad, RowsCall, 256, 2) { norm_grad<Held<T, THREADS, ITEMS>, false>(c); }
KERNEL(norm_sums, RowsCall, 256, 2) { norm_sums<T>(c); }
