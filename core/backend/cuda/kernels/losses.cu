// Cross-entropy of rows of logits and its gradient, a row by a block or a warp that reads it once
// (rows that registers do not hold, again for the gradient). Three launches: `count` finds what the
// mean divides by, for the gradient alone, `rows` makes a term and the gradient of each row,
// `finish` adds the terms. After math.h and held_rows.h. Invariant: the order of a sum
// follows from the length of rows and from whether they come in packs.
namespace tessera::device {

inline constexpr int kLossThreads = 256;

/// 1, or 1 / the number of rows that count.
template <class C>
TESSERA_FN C loss_scale(const LossCall& c) {
  if (!c.mean) return C(1);
  long counted = 0;
#pragma unroll 8
  for (unsigned r = threadIdx.x; r < c.rows; r += kLossThreads)
    counted += c.targets[r] != c.ignored ? 1 : 0;
  return C(1) / C(block_join<Sum, kLossThreads>(counted));
}

/// loss = scale times the sum of terms. Where no gradient needed the scale, nobody has counted.
template <class T>
TESSERA_FN void loss_sum(const LossCall& c) {
  using C = Compute<T>;
  C total = C(0);
#pragma unroll 8
  for (unsigned r = threadIdx.x; r < c.rows; r += kLossThreads)
    total += static_cast<const C*>(c.terms)[r];
  total = block_join<Sum, kLossThreads>(total);
  C scale = C(0);  // of thread 0 alone where the gradient needed it
  if (!c.grad)
    scale = loss_scale<C>(c);
  else if (threadIdx.x == 0)
    scale = *static_cast<const C*>(c.scale);
  // Where no row counts, 0 times infinity: the mean of nothing.
  if (threadIdx.x == 0) *static_cast<C*>(c.loss) = total * scale;
}

// ---- rows that registers hold ----

/// term = log(sum(exp(x))) - x[target], grad = scale (softmax(x) - one_hot(target)).
template <class H>
TESSERA_FN void held_row(const LossCall& c, const typename H::Cols& cols, long row,
                         unsigned target) {
  using T = typename H::Element;
  using C = typename H::C;
  const T* in = static_cast<const T*>(c.in) + row * c.n;
  typename H::R x;
  H::fetch(x, cols, in);
  const Exponentials<H> e = exponentials<H>(cols, x);
  if (leads(cols)) static_cast<C*>(c.terms)[row] = e.top + fn::log(e.total) - widen(in[target]);
  if (!c.grad) return;
  const C scale = *static_cast<const C*>(c.scale), factor = scale / e.total;
  write(cols, static_cast<T*>(c.grad) + row * c.n, [&](int j, unsigned k) {
    const C share = at(e, j, k) * factor;
    return k == target ? share - scale : share;
  });
}

// ---- longer rows ----

inline constexpr int kBatch = 4;

/// Packs of a row that a thread reads before it uses the first of them.
template <class T, int kWidth>
using Batch = Row<T, kBatch * kWidth, kInWords<T, (kWidth > 1)>>;
template <class H, int kWidth>
TESSERA_FN unsigned batches_of(unsigned n) {
  constexpr unsigned kColumns = kBatch * H::kThreads * kWidth;
  return n / kColumns + (n % kColumns != 0);
}
/// Calls f(b, k) for packs b of a batch, of which the first element is column k of the row.
template <class H, int kWidth, class F>
TESSERA_FN void each_pack(unsigned batch, unsigned n, F f) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b)
    if (const unsigned k = ((batch * kBatch + b) * H::kThreads + threadIdx.x) * kWidth; k < n)
      f(b, k);
}
template <class H, int kWidth>
TESSERA_FN void read_batch(Batch<typename H::Element, kWidth>& x, const typename H::Element* in,
                           unsigned batch, unsigned n) {
  each_pack<H, kWidth>(batch, n,
                       [&](int b, unsigned k) { read_pack<kWidth>(x, b * kWidth, in + k); });
}

/// The maximum of some numbers, NaN left out, and the sum of their exp(x - top).
template <class C>
struct TopAndTotal {
  C top, total;
};
/// What exponentials subtract: 0 where all is -inf so far, since -inf - (-inf) is no number.
template <class C>
TESSERA_FN C base_of(C top) {
  return top == C(-fn::inf()) ? C(0) : top;
}
template <class H, int kWidth>
TESSERA_FN void add_batch(TopAndTotal<typename H::C>& t,
                          const Batch<typename H::Element, kWidth>& x, unsigned batch, unsigned n) {
  using C = typename H::C;
  C top = t.top;
  each_pack<H, kWidth>(batch, n, [&](int b, unsigned) {
#pragma unroll
    for (int l = 0; l < kWidth; ++l) top = Top::join(top, at(x, b * kWidth + l, 0));
  });
  const C base = base_of(top);
  t.total *= exp_in_row<typename H::Element>(t.top - base), t.top = top;
  each_pack<H, kWidth>(batch, n, [&](int b, unsigned) {
#pragma unroll
    for (int l = 0; l < kWidth; ++l)
      t.total += exp_in_row<typename H::Element>(at(x, b * kWidth + l, 0) - base);
  });
}
/// Finds both for a whole row, which the threads of a block read once.
template <class H, int kWidth>
TESSERA_FN TopAndTotal<typename H::C> top_and_total(const typename H::Element* in, unsigned n) {
  using C = typename H::C;
  TopAndTotal<C> own = {Top::start<C>(), C(0)};
  for (unsigned i = 0; i < batches_of<H, kWidth>(n); ++i) {
    Batch<typename H::Element, kWidth> x;
    read_batch<H, kWidth>(x, in, i, n);
    add_batch<H, kWidth>(own, x, i, n);
  }
  const C top = join<Top, H>(own.top);
  const C total =
      own.total == C(0) ? C(0) : own.total * exp_in_row<typename H::Element>(own.top - top);
  return {top, join<Sum, H>(total)};
}

/// Does what held_row does. The gradient reads the row from its end, which the level-2 cache still
/// has.
template <class H, int kWidth>
TESSERA_FN void long_row(const LossCall& c, long row, unsigned target) {
  using T = typename H::Element;
  using C = typename H::C;
  const T* in = static_cast<const T*>(c.in) + row * c.n;
  const auto [top, total] = top_and_total<H, kWidth>(in, c.n);
  if (threadIdx.x == 0) static_cast<C*>(c.terms)[row] = top + fn::log(total) - widen(in[target]);
  if (!c.grad) return;
  T* grad = static_cast<T*>(c.grad) + row * c.n;
  const C scale = *static_cast<const C*>(c.scale), factor = scale / total, base = top;
  auto share = [&](C x) { return exp_in_row<T>(x - base) * factor; };
  for (unsigned i = batches_of<H, kWidth>(c.n); i-- > 0;) {
    Batch<T, kWidth> x;
    read_batch<H, kWidth>(x, in, i, c.n);
    each_pack<H, kWidth>(i, c.n, [&](int b, unsigned k) {
      store_pack<kWidth>(grad + k, [&](int l) { return share(at(x, b * kWidth + l, 0)); });
    });
  }
  if (target / kWidth % H::kThreads == threadIdx.x)  // the thread that wrote this column
    grad[target] = Narrow<T>::from(share(widen(in[target])) - scale);
}

// ---- rows ----

template <class H>
TESSERA_FN void cross_entropy(const LossCall& c) {
  using T = typename H::Element;
  using C = typename H::C;
  static_assert(H::kThreads >= int(kWarp), "rows that share a warp would part at what they count");
  own_row<H>(c.rows, c.n, [&](long row, unsigned n) {
    const auto cols = H::columns(n);
    const long target = c.targets[row];
    const bool counts = target != c.ignored, valid = target >= 0 && target < long(c.n);
    if (counts && !valid && cols.thread == 0) report(c.report, row, target);
    if (!counts || !valid) {
      if (cols.thread == 0) static_cast<C*>(c.terms)[row] = C(0);
      if (c.grad)
        write(cols, static_cast<T*>(c.grad) + row * c.n, [&](int, unsigned) { return C(0); });
    } else if constexpr (H::kItems != 0) {
      held_row<H>(c, cols, row, unsigned(target));
    } else {
      if (c.packs)
        long_row<H, kPack<T>>(c, row, unsigned(target));
      else
        long_row<H, 1>(c, row, unsigned(target));
    }
  });
}

// ---- rows in packs or not: code for each, so that packs stay packs in registers ----

template <class T, int kThreads, int kItems>
TESSERA_FN void cross_entropy(const LossCall& c) {
  if (kItems != 0 && c.packs)
    cross_entropy<Held<T, kThreads, kItems, kItems != 0>>(c);
  else
    cross_entropy<Held<T, kThreads, kItems, false>>(c);
}

}  // namespace tessera::device

// instances: T, THREADS of a row, ITEMS of a thread, BOUNDS of a launch
KERNEL(count, LossCall, 256, 2) {
  const auto scale = loss_scale<Compute<T>>(c);
  if (threadIdx.x == 0) *static_cast<Compute<T>*>(c.scale) = scale;
}
KERNEL(rows, LossCall, BOUNDS) { cross_entropy<T, THREADS, ITEMS>(c); }
KERNEL(finish, LossCall, 256, 2) { loss_sum<T>(c); }
