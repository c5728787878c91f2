// Softmax and log-softmax with their gradients, layer-norm and rms-norm, a row by half a warp, a
// warp or a block. A row is read once and stays in registers (ITEMS elements a thread); longer ones
// are read again for each pass. After math.h and held_rows.h. Invariant: a row's results depend on
// its values alone.
namespace tessera::device {

template <class H, bool kLog>
TESSERA_FN void softmax(const RowsCall& c) {
  using T = typename H::Element;
  using C = typename H::C;
  own_row<H>(c.rows, c.n, [&](long row, unsigned n) {
    const auto cols = H::columns(n);
    typename H::R x;
    H::fetch(x, cols, static_cast<const T*>(c.in) + row * c.n);
    const Exponentials<H> e = exponentials<H>(cols, x);
    T* out = static_cast<T*>(c.out) + row * c.n;
    if constexpr (kLog) {
      const C rest = fn::log(e.total);
      write(cols, out, [&](int j, unsigned k) { return (at(x, j, k) - e.top) - rest; });
    } else {
      const C scale = C(1) / e.total;
      write(cols, out, [&](int j, unsigned k) { return at(e, j, k) * scale; });
    }
  });
}

/// dx = y (g - sum(g y)), or g - exp(y) sum(g) of log-softmax.
template <class H, bool kLog>
TESSERA_FN void softmax_grad(const RowsCall& c) {
  using T = typename H::Element;
  using C = typename H::C;
  own_row<H>(c.rows, c.n, [&](long row, unsigned n) {
    const auto cols = H::columns(n);
    typename H::R y, g;
    H::fetch(y, cols, static_cast<const T*>(c.in) + row * c.n);
    H::fetch(g, cols, static_cast<const T*>(c.other) + row * c.n);
    const C total = sum<H>(
        cols, [&](int j, unsigned k) { return kLog ? at(g, j, k) : at(g, j, k) * at(y, j, k); });
    write(cols, static_cast<T*>(c.out) + row * c.n, [&](int j, unsigned k) {
      if constexpr (kLog)
        return at(g, j, k) - exp_in_row<T>(at(y, j, k)) * total;
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
  own_row<H>(c.rows, c.n, [&](long row, unsigned n) {
    const auto cols = H::columns(n);
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
    if (leads(cols)) {
      if (kCentred && c.mean) static_cast<C*>(c.mean)[row] = mean;
      static_cast<C*>(c.rstd)[row] = rstd;
    }
    const T *weight = static_cast<const T*>(c.weight), *bias = static_cast<const T*>(c.bias);
    write(cols, static_cast<T*>(c.out) + row * c.n, weight, bias,
          [&](int j, unsigned k, C w, C b) { return (at(x, j, k) - mean) * rstd * w + b; });
  });
}

// ---- rows in packs or not: code for each, so that packs stay packs in registers ----

template <class T, int kThreads, int kItems, bool kLog>
TESSERA_FN void softmax(const RowsCall& c) {
  if (kItems != 0 && c.packs)
    softmax<Held<T, kThreads, kItems, kItems != 0>, kLog>(c);
  else
    softmax<Held<T, kThreads, kItems, false>, kLog>(c);
}
template <class T, int kThreads, int kItems, bool kLog>
TESSERA_FN void softmax_grad(const RowsCall& c) {
  if (kItems != 0 && c.packs)
    softmax_grad<Held<T, kThreads, kItems, kItems != 0>, kLog>(c);
  else
    softmax_grad<Held<T, kThreads, kItems, false>, kLog>(c);
}
template <class T, int kThreads, int kItems, bool kCentred>
TESSERA_FN void norm(const RowsCall& c) {
  if (kItems != 0 && c.packs)
    norm<Held<T, kThreads, kItems, kItems != 0>, kCentred>(c);
  else
    norm<Held<T, kThreads, kItems, false>, kCentred>(c);
}

}  // namespace tessera::device

// instances: T, THREADS of a row, ITEMS of a thread, BOUNDS of a launch
KERNEL(softmax, RowsCall, BOUNDS) { softmax<T, THREADS, ITEMS, false>(c); }
KERNEL(log_softmax, RowsCall, BOUNDS) { softmax<T, THREADS, ITEMS, true>(c); }
KERNEL(softmax_grad, RowsCall, BOUNDS) { softmax_grad<T, THREADS, ITEMS, false>(c); }
KERNEL(log_softmax_grad, RowsCall, BOUNDS) { softmax_grad<T, THREADS, ITEMS, true>(c); }
KERNEL(layer_norm, RowsCall, BOUNDS) { norm<T, THREADS, ITEMS, true>(c); }
KERNEL(rms_norm, RowsCall, BOUNDS) { norm<T, THREADS, ITEMS, false>(c); }
