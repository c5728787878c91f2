// Gradients of layer-norm and rms-norm. Rows that fit registers in packs are read once: threads
// that share a row have a piece of rows, one after the other, and keep their columns' sums for
// weight and bias, whose partial sums a reduction joins (reduce.cu). Other rows are read again by
// norm_sums. After math.h and held_rows.h. Invariant: pieces, and so the
// order of sums, follow from the extents and from whether rows come in packs.
namespace tessera::device {

/// The sums of a row that meet in one exchange.
template <class C>
struct Two {
  C a, b;
};
struct SumTwo {
  template <class C>
  TESSERA_FN Two<C> join(Two<C> x, Two<C> y) {
    return {x.a + y.a, x.b + y.b};
  }
};
template <class C>
TESSERA_FN Two<C> from_lane(Two<C> x, unsigned lanes) {
  return {fn::from_lane(x.a, lanes), fn::from_lane(x.b, lanes)};
}

/// What a thread reads of a row; rows that are not there have no columns.
template <class H>
struct NormRow {
  typename H::R x, g;
  typename H::C mean, rstd;
  typename H::Cols cols;
};
template <class H, bool kCentred>
TESSERA_FN void fetch(NormRow<H>& to, const RowsCall& c, unsigned row, bool there) {
  using T = typename H::Element;
  using C = typename H::C;
  to.cols = H::columns(there ? c.n : 0);
  to.mean = kCentred && there ? static_cast<const C*>(c.mean)[row] : C(0);
  to.rstd = there ? static_cast<const C*>(c.rstd)[row] : C(0);
  H::fetch(to.x, to.cols, static_cast<const T*>(c.in) + long(row) * c.n);
  H::fetch(to.g, to.cols, static_cast<const T*>(c.other) + long(row) * c.n);
}

/// A thread's sums over the rows that it has had: of g (x - mean) rstd and of g.
template <class H>
struct ColumnSums {
  typename H::C dw[H::kItems], db[H::kItems];
};

/// With h = (x - mean) rstd and q = g w: dx = rstd (q - mean(q) - h mean(q h)); rms-norm has no
/// mean(q).
template <class H, bool kCentred>
TESSERA_FN void norm_grad_row(const NormRow<H>& r, const typename H::R& weight, const RowsCall& c,
                              unsigned row, ColumnSums<H>& sums) {
  using T = typename H::Element;
  using C = typename H::C;
  auto q = [&](int j, unsigned k) { return at(r.g, j, k) * at(weight, j, k); };
  auto h = [&](int j, unsigned k) { return (at(r.x, j, k) - r.mean) * r.rstd; };
  Two<C> total = {C(0), C(0)};
  each(r.cols, [&](int j, unsigned k) {
    const C g = at(r.g, j, k), height = h(j, k), slope = q(j, k);
    total.a += slope, total.b += slope * height;
    sums.dw[j] += g * height, sums.db[j] += g;
  });
  total = join<SumTwo, H>(total);
  const C mean = kCentred ? total.a / C(c.n) : C(0), dot = total.b / C(c.n);
  write(r.cols, static_cast<T*>(c.out) + long(row) * c.n,
        [&](int j, unsigned k) { return r.rstd * (q(j, k) - mean - h(j, k) * dot); });
}

/// dx of a piece of rows, and its partial sums of dw and db [pieces, n]. Where registers suffice,
/// the next row is on its way while the threads meet for this one.
template <class H, bool kCentred>
TESSERA_FN void norm_grad_pieces(const RowsCall& c) {
  using T = typename H::Element;
  using C = typename H::C;
  constexpr bool kAhead = sizeof(T) * H::kItems <= (H::kThreads > 256 ? 32 : 16);
  const unsigned piece = blockIdx.x * H::kRows + threadIdx.x / H::kThreads;
  const bool has_piece = piece < c.pieces;
  const unsigned begin = has_piece ? piece * c.piece : 0;
  const unsigned count = !has_piece ? 0 : c.piece < c.rows - begin ? c.piece : c.rows - begin;
  const auto cols = H::columns(has_piece ? c.n : 0);
  typename H::R weight;
  set_ones(weight);
  if (c.weight) H::fetch(weight, cols, static_cast<const T*>(c.weight));
  ColumnSums<H> sums = {};
  NormRow<H> row, next;
  if constexpr (kAhead) fetch<H, kCentred>(next, c, begin, count > 0);
  for (unsigned i = 0; i < c.piece; ++i) {
    if constexpr (kAhead) {
      row = next;
      fetch<H, kCentred>(next, c, begin + i + 1, i + 1 < count);
    } else {
      fetch<H, kCentred>(row, c, begin + i, i < count);
    }
    norm_grad_row<H, kCentred>(row, weight, c, begin + i, sums);
  }
  const long first = long(piece) * c.n;
  C *dw = static_cast<C*>(c.dw), *db = static_cast<C*>(c.db);
  if (dw) each(cols, [&](int j, unsigned k) { dw[first + k] = sums.dw[j]; });
  if (db) each(cols, [&](int j, unsigned k) { db[first + k] = sums.db[j]; });
}

/// dx of other rows.
template <class H, bool kCentred>
TESSERA_FN void norm_grad_long(const RowsCall& c) {
  using T = typename H::Element;
  using C = typename H::C;
  own_row<H>(c.rows, c.n, [&](long row, unsigned n) {
    const auto cols = H::columns(n);
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

template <class H, bool kCentred>
TESSERA_FN void norm_grad(const RowsCall& c) {
  if constexpr (H::kItems != 0)
    norm_grad_pieces<H, kCentred>(c);
  else
    norm_grad_long<H, kCentred>(c);
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

// instances: T, THREADS of a row, ITEMS of a thread, BOUNDS of a launch
KERNEL(layer_norm_grad, RowsCall, BOUNDS) {
  norm_grad<Held<T, THREADS, ITEMS, ITEMS != 0>, true>(c);
}
KERNEL(rms_norm_grad, RowsCall, BOUNDS) {
  norm_grad<Held<T, THREADS, ITEMS, ITEMS != 0>, false>(c);
}
KERNEL(norm_sums, RowsCall, 256, 2) { norm_sums<T>(c); }
