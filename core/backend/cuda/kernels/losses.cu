// Cross-entropy of rows of logits and its gradient, a row by a block or a warp that reads it once.
// Three launches: `count` finds what the mean divides by, `rows` makes a term and the gradient of
// each row, `finish` adds the terms. After math.h and held_rows.h. Invariant: the sums are of fixed
// order, so the loss has the same bits every time.
namespace tessera::device {

inline constexpr int kLossThreads = 256;

/// scale = 1, or 1 / the number of rows that count.
template <class C>
TESSERA_FN void loss_scale(const LossCall& c) {
  long counted = 0;
  for (unsigned r = threadIdx.x; r < c.rows; r += kLossThreads)
    counted += c.targets[r] != c.ignored ? 1 : 0;
  counted = block_join<Sum, kLossThreads>(counted);
  if (threadIdx.x == 0) *static_cast<C*>(c.scale) = c.mean ? C(1) / C(counted) : C(1);
}

/// loss = scale times the sum of terms.
template <class T>
TESSERA_FN void loss_sum(const LossCall& c) {
  using C = Compute<T>;
  C total = C(0);
  for (unsigned r = threadIdx.x; r < c.rows; r += kLossThreads)
    total += static_cast<const C*>(c.terms)[r];
  total = block_join<Sum, kLossThreads>(total);
  // Where no row counts, 0 times infinity: the mean of nothing.
  if (threadIdx.x == 0) *static_cast<C*>(c.loss) = total * *static_cast<const C*>(c.scale);
}

/// term = log(sum(exp(x))) - x[target], grad = scale (softmax(x) - one_hot(target)).
template <class H>
TESSERA_FN void cross_entropy(const LossCall& c) {
  using T = typename H::Element;
  using C = typename H::C;
  own_row<H>(c.rows, [&](long row) {
    const auto cols = H::columns(c.n, c.packs);
    const long target = c.targets[row];
    const bool counts = target != c.ignored, valid = target >= 0 && target < long(c.n);
    if (counts && !valid && cols.thread == 0) report(c.report, row, target);
    C* term = static_cast<C*>(c.terms) + row;
    T* grad = c.grad ? static_cast<T*>(c.grad) + row * c.n : nullptr;
    if (!counts || !valid) {
      if (cols.thread == 0) *term = C(0);
      if (grad) write(cols, grad, [&](int, unsigned) { return C(0); });
      return;
    }
    const T* in = static_cast<const T*>(c.in) + row * c.n;
    typename H::R x;
    H::fetch(x, cols, in);
    C top = Max::start<C>();
    each(cols, [&](int j, unsigned k) { top = Max::join(top, at(x, j, k)); });
    top = join<Max, H>(top);
    const C total = sum<H>(cols, [&](int j, unsigned k) { return fn::exp(at(x, j, k) - top); });
    if (cols.thread == 0) *term = top + fn::log(total) - widen(in[target]);
    if (!grad) return;
    const C scale = *static_cast<const C*>(c.scale), factor = scale / total;
    write(cols, grad, [&](int j, unsigned k) {
      const C share = fn::exp(at(x, j, k) - top) * factor;
      return long(k) == target ? share - scale : share;
    });
  });
}

}  // namespace tessera::device

// Two blocks: registers for eight of them are too few, and spilling costs more than waiting.

// instances: T, THREADS of a row, ITEMS of a thread
KERNEL(count, LossCall, 256, 2) { loss_scale<Compute<T>>(c); }
KERNEL(rows, LossCall, 256, 2) { cross_entropy<Held<T, THREADS, ITEMS>>(c); }
KERNEL(finish, LossCall, 256, 2) { loss_sum<T>(c); }
