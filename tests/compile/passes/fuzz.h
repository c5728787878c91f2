// Random training steps: a program that is a function of a seed, over inputs and state of small
// random shapes: pointwise ops with broadcasting, views, reductions, softmax and norms, products,
// joins, writes to state through views, and gradients.
#pragma once
#include <optional>
#include <random>

#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/scan.h"
#include "core/ops/update.h"
#include "core/ops/views.h"

namespace tessera::test {

class RandomStep {
 public:
  explicit RandomStep(uint64_t seed) : seed_(seed), random_(seed) {
    for (int i = 0, n = pick(1, 3); i < n; ++i) inputs.push_back(draw(shape()));
    for (int i = 0, n = pick(0, 2); i < n; ++i) state.push_back(draw(shape()));
  }

  /// The same ops at each call.
  Tensors run() {
    random_.seed(seed_ + 1);
    pool_.clear();
    leaves_.clear();
    for (const Tensor& t : inputs) add(t);
    differentiate_ = pick(0, 2) == 0;
    if (differentiate_)
      for (Entry& e : pool_) leaves_.push_back(e.t = e.t.detach().requires_grad_());
    for (int i = 0, n = pick(4, 18); i < n; ++i) op();
    std::optional<Scoped<Phase>> backward;
    if (pick(0, 1)) {
      backward.emplace(context().phase, Phase::kBackward);
      for (int i = 0, n = pick(1, 8); i < n; ++i) op();
    }
    Tensors out;
    if (differentiate_) {
      Tensor loss = scalar_tensor(0.0, kF64);
      for (int i = 0; i < 4; ++i) loss = loss + sum(tanh(cast(any().t, kF64)));
      if (loss.requires_grad())
        for (const Tensor& g : grad({{loss}}, leaves_))
          if (g.defined()) out.push_back(g);
    }
    for (int i = 0, n = pick(1, 4); i < n; ++i) out.push_back(any().t.detach());
    pool_.clear(), leaves_.clear();  // nothing but results outlives a run
    return out;
  }

  std::vector<Tensor> inputs, state;
  // What only a whole program may do: read values on the host, write inputs, and make views that
  // begin anywhere or have no elements.
  bool whole_program = false;

 private:
  struct Entry {
    Tensor t;
    bool exact;  // no sum went into it: every order of sums gives its bits
  };

  int pick(int low, int high) { return low + int(random_() % uint64_t(high - low + 1)); }
  Shape shape() {
    Shape s;
    constexpr int64_t extents[] = {1, 2, 3, 4, 6, 3};
    for (int d = 0, n = pick(0, 3); d < n; ++d) s.push_back(extents[pick(0, 5)]);
    return s;
  }
  Tensor draw(const Shape& s) {
    std::uniform_real_distribution<double> uniform(-2, 2);
    std::vector<double> v(size_t(numel(s)));
    for (double& x : v) x = uniform(random_);
    return from_values<double>(std::span<const double>(v), s);
  }
  void add(Tensor t, bool exact = true) { pool_.push_back({std::move(t), exact}); }
  // Newer values more often.
  Entry any() {
    size_t n = pool_.size(), i = std::max(random_() % n, random_() % n);
    return pool_[i];
  }
  Entry number() {
    for (;;)
      if (Entry e = any(); is_floating(e.t.dtype())) return e;
  }
  Entry fits(const Entry& e) {
    for (int i = 0; i < 12; ++i) {
      Entry o = number();
      try {
        broadcast(e.t.shape(), o.t.shape(), "fuzz");
        if (broadcast(e.t.shape(), o.t.shape(), "").size() <= 4) return o;
      } catch (const ShapeError&) {
      }
    }
    return e;
  }

  void op() {
    if (whole_program && pick(0, 5) == 0) return pick(0, 11) ? part() : look();
    switch (pick(0, 15)) {
      case 0:
      case 1: return unary();
      case 2:
      case 3:
      case 4: return binary();
      case 5: return compare();
      case 6:
      case 7:
      case 8: return view();
      case 9:
      case 10: return reduction();
      case 11: return convert();
      case 12: return rows();
      case 13: return library();
      case 14: return state.empty() ? unary() : write();
      default: return constant();
    }
  }

  void unary() {
    Entry e = number();
    switch (pick(0, 7)) {
      case 0: return add(exp(tanh(e.t)), e.exact);
      case 1: return add(gelu(e.t), e.exact);
      case 2: return add(sigmoid(e.t), e.exact);
      case 3: return add(neg(e.t), e.exact);
      case 4: return add(log(softplus(e.t) + 1.0), e.exact);
      case 5: return add(rsqrt(square(tanh(e.t)) + 0.5), e.exact);
      case 6: return add(silu(e.t), e.exact);
      default: return add(e.t * (0.25 * pick(1, 5)), e.exact);
    }
  }
  void binary() {
    Entry a = number(), b = fits(a);
    bool exact = a.exact && b.exact;
    switch (pick(0, 4)) {
      case 0: return add(a.t + b.t, exact);
      case 1: return add(a.t - b.t, exact);
      case 2: return add(a.t / (square(b.t) + 1.0), exact);
      case 3: return add(lerp(a.t, b.t, scalar_tensor(0.3, a.t.dtype())), exact);
      default: return add(tanh(a.t) * b.t, exact);
    }
  }
  // Discontinuous functions only get exact values: a jump makes any difference of the last digit of
  // a sum.
  void compare() {
    Entry a = number(), b = fits(a);
    if (!a.exact || !b.exact) return binary();
    switch (pick(0, 3)) {
      case 0: return add(where(gt(a.t, b.t), a.t, b.t));
      case 1: return add(gt(a.t, 0.1));
      case 2: return add(maximum(a.t, b.t));
      default: return add(relu(a.t));
    }
  }
  void view() {
    Entry e = any();
    int n = e.t.ndim();
    if (n == 0) return add(expand(e.t, {2, 3}), e.exact);
    int d = pick(0, n - 1);
    switch (pick(0, 6)) {
      case 0: return add(transpose(e.t, d, pick(0, n - 1)), e.exact);
      case 1: return add(unsqueeze(e.t, d), e.exact);
      case 2: return add(reshape(e.t, {-1}), e.exact);
      case 3: return add(narrow(e.t, d, 0, (e.t.size(d) + 1) / 2), e.exact);
      case 4: return add(select(e.t, d, e.t.size(d) - 1), e.exact);
      case 5: {
        Shape to = e.t.shape();
        if (n < 4) to.insert(0, 2);
        return add(expand(e.t, to), e.exact);
      }
      default: {
        Shape to = e.t.shape();
        if (n >= 4 || to[d] % 2) return add(unbind(e.t, d)[0], e.exact);
        to[d] /= 2, to.insert(d + pick(0, 1), 2);
        return add(reshape(e.t, to), e.exact);
      }
    }
  }
  void reduction() {
    Entry e = any();
    Dims dims;
    for (int d = 0; d < e.t.ndim(); ++d)
      if (pick(0, 1)) dims.push_back(d);
    if (dims.empty() && e.t.ndim()) dims.push_back(0);
    bool keep = pick(0, 1), real = is_floating(e.t.dtype());
    switch (pick(0, 4)) {
      case 0: return add(amax(e.t, dims, keep), e.exact);
      case 1: return real ? add(mean(e.t, dims, keep), false) : add(sum(e.t, dims, keep));
      case 2: return real ? add(logsumexp(e.t, dims, keep), false) : add(all(e.t, dims, keep));
      default: return add(sum(e.t, dims, keep), e.exact && !real);
    }
  }
  void convert() {
    Entry e = any();
    constexpr DType narrow[] = {kF32, kF64, kBF16, kI64, kF16};
    DType to = narrow[pick(0, 4)];
    if (!e.exact && to != kF32 && to != kF64) to = kF64;
    add(cast(e.t, to), e.exact);
  }
  void rows() {
    Entry e = number();
    if (e.t.ndim() == 0) return unary();
    switch (pick(0, 2)) {
      case 0: return add(softmax(e.t, pick(0, e.t.ndim() - 1)), false);
      case 1: return add(log_softmax(e.t), false);
      default:
        return add(layer_norm(e.t, pick(0, 1) ? Tensor() : full({e.t.size(-1)}, 1.5, {e.t.dtype()}),
                              {}, 0.1),
                   false);
    }
  }
  void library() {
    Entry e = number();
    if (e.t.ndim() == 0) return unary();
    switch (pick(0, 2)) {
      case 0: return add(cumsum(e.t, pick(0, e.t.ndim() - 1)), false);
      case 1: {
        Tensor parts[] = {e.t, tanh(e.t)};
        return add(cat(parts, pick(0, e.t.ndim() - 1)), e.exact);
      }
      default: return add(clone(e.t), e.exact);
    }
  }
  void part() {
    Entry e = any();
    if (e.t.ndim() == 0) return unary();
    int d = pick(0, e.t.ndim() - 1), begin = pick(0, int(e.t.size(d)));
    Tensor t = slice(e.t, d, begin, pick(begin, int(e.t.size(d))), pick(1, 2));
    add(t.numel() ? t : sum(t, {d}, true), e.exact);
  }
  void look() {
    Entry e = number();
    add(e.t * (sum(e.t.detach()).to(kF64).item<double>() > 0 ? 2.0 : 3.0), e.exact);
  }
  void write() {
    NoGrad off;
    std::vector<Tensor> targets = state;
    if (whole_program && !differentiate_)
      targets.insert(targets.end(), inputs.begin(), inputs.end());
    Tensor s = targets[size_t(pick(0, int(targets.size()) - 1))];
    if (s.ndim() && pick(0, 1)) s = select(s, pick(0, s.ndim() - 1), 0);
    add(pick(0, 1) ? clone(s) : neg(s), exact_state_);
    Entry e = number();
    Tensor value = e.t.detach();
    while (value.ndim() > s.ndim()) value = select(value, 0, 0);
    try {
      if (!(broadcast(value.shape(), s.shape(), "") == s.shape())) return;
    } catch (const ShapeError&) {
      return;
    }
    exact_state_ = exact_state_ && e.exact;
    value = tanh(cast(value, kF64));
    pick(0, 1) ? add_(s, value) : assign_(s, value);
    add(neg(s), exact_state_);
  }
  void constant() {
    Entry e = any();
    switch (pick(0, 2)) {
      case 0: return add(full(e.t.shape(), 0.75, {kF64}));
      case 1: return add(cast(arange(0, pick(1, 6)), kF64));
      default: return add(full({}, 1.0, {kF64}));
    }
  }

  uint64_t seed_;
  std::mt19937_64 random_;
  std::vector<Entry> pool_;
  Tensors leaves_;
  bool differentiate_ = false, exact_state_ = true;
};

}  // namespace tessera::test
