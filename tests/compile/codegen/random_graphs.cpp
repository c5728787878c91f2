#include "tests/compile/codegen/random_graphs.h"

#include "core/dispatch/context.h"

namespace tessera::test {
namespace {

int bits_of(int64_t n) { return int(std::bit_width(uint64_t(std::max<int64_t>(n, 1)))); }

}  // namespace

RandomProgram::RandomProgram(uint64_t seed, int64_t size) : generator(seed), seed_(seed) {
  random_.seed(seed);
  constexpr int64_t extents[] = {1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 61, 64, 96, 100};
  constexpr int64_t large[] = {127, 256, 257, 1000, 4096, 4097, 5000, 8191, 12289};
  const int64_t most = one_in(8) ? 200000 : 20000;
  const int long_axis = one_in(3) ? int(pick(kAxes)) : -1;
  int64_t all = 1;
  for (int a = 0; a < kAxes; ++a) {
    const int64_t small = extents[pick(std::size(extents))], big = large[pick(std::size(large))];
    extents_[a] = a == long_axis ? big : one_in(150) ? 0 : small;
  }
  for (int a = 0; a < kAxes; ++a) all *= std::max<int64_t>(extents_[a], 1);
  for (int a = 0; a < kAxes && all > most; ++a) {
    if (a == long_axis) continue;
    const int64_t less = std::clamp<int64_t>(extents_[a] * most / all, 1, extents_[a]);
    all = all / std::max<int64_t>(extents_[a], 1) * less, extents_[a] = less;
  }
  const int which = int(pick(kAxes));
  special_ = one_in(6);
  if (size > 0)
    for (int64_t& e : extents_) e = std::min<int64_t>(e, 9);
  std::copy_n(extents_, kAxes, counted_);
  if (size > 0) extents_[which] = size, counted_[which] = 8192;
  for (int i = 1 + int(pick(4)); i > 0; --i) make_input();
  for (int i = int(pick(3)); i > 0; --i) {
    constexpr DType dtypes[] = {kF32, kF32, kBF16, kF64};
    Tensor s = values(shape_of(one_in(2) ? 7 : pick(8)), dtypes[pick(4)]);
    state.push_back(one_in(3) ? clone(permute(s, {2, 0, 1})) : s);
    if (state.back().shape() != s.shape()) state.back() = permute(state.back(), {1, 2, 0});
  }
}

Shape RandomProgram::shape_of(uint64_t axes) const {
  Shape s;
  for (int a = 0; a < kAxes; ++a) s.push_back(axes >> a & 1 ? extents_[a] : 1);
  return s;
}

// Quarters, or any numbers, below 2.
Tensor RandomProgram::values(const Shape& shape, DType dtype) {
  std::mt19937_64 random(random_());
  const bool grid = one_in(2), special = special_ && one_in(2);
  constexpr double specials[] = {-0.0, 0.0, HUGE_VAL, -HUGE_VAL, NAN, 1e-40, -3e-8, 60.0};
  std::vector<double> v(static_cast<size_t>(numel(shape)));
  for (double& x : v) {
    const auto r = double(random() >> 11) * 0x1p-53;
    x = is_floating(dtype) ? (grid ? std::floor(r * 15) / 4 - 1.75 : r * 4 - 2)
        : dtype == kU8     ? std::floor(r * 12)
        : dtype == kBool   ? double(r > 0.4)
                           : std::floor(r * 17) - 8;
    if (special && is_floating(dtype) && random() % 64 == 0) x = specials[random() % 8];
  }
  grids_.push_back(!special && (grid || !is_floating(dtype)));
  return cast(from_values<double>(std::span<const double>(v), shape), dtype).detach();
}

// The same numbers, or some of them, in another layout.
Tensor RandomProgram::laid_out(const Tensor& x) {
  const int64_t d = axis();
  Tensor twice[] = {x, x};
  switch (pick(10)) {
    case 0: return permute(contiguous(permute(x, {2, 0, 1})), {1, 2, 0});
    case 1: return permute(contiguous(permute(x, {1, 0, 2})), {1, 0, 2});
    case 2: return slice(cat(twice, d), d, 0, 2 * x.size(d), 2);
    case 3: return narrow(cat(twice, d), d, std::min<int64_t>(1, x.size(d)), x.size(d));
    case 4: return x.numel() ? expand(narrow(x, d, 0, 1), x.shape()) : x;
    case 5: {  // windows that overlap
      if (x.numel() == 0) return x;
      Strides along{1, 1, 1};
      return Tensor({x.shape(), along, x.dtype(), x.device()},
                    contiguous(reshape(x, {-1})).storage(), 0);
    }
    default: return x;
  }
}

void RandomProgram::make_input() {
  constexpr DType dtypes[] = {kF32, kF32, kF32, kF32, kF32, kBF16, kBF16,
                              kF16, kF64, kI64, kI32, kU8,  kBool};
  const DType dtype = inputs.empty() ? kF32 : dtypes[pick(std::size(dtypes))];
  const uint64_t axes = inputs.empty() || one_in(2) ? 7 : pick(8);
  const bool window = axes == 7;
  inputs.push_back(values(shape_of(axes), dtype));
  if (window && !one_in(2)) {
    Tensor laid = laid_out(inputs.back());
    // A window reaches no further than its memory.
    int64_t last = laid.offset() + 1;
    for (int a = 0; a < kAxes; ++a) last += (laid.size(a) - 1) * laid.strides()[a];
    if (laid.numel() == 0 || size_t(last) * size_of(dtype) <= laid.storage()->bytes())
      inputs.back() = laid;
  }
}

RandomProgram::Entry RandomProgram::of(Kind kind) {
  for (int k = 0; k < 40; ++k)
    if (Entry e = newer(); kind_of(e) == kind) return e;
  const Entry& first = pool_[0];  // real, of all axes
  switch (kind) {
    case Kind::kTruth: return {first.t > 0.25, true};
    case Kind::kWhole: return {cast(first.t * 4.0, kI64), true, true, 0, 4};
    default: return first;
  }
}

Tensors RandomProgram::run() {
  random_.seed(seed_ + 1);
  pool_.clear(), more_.clear(), exact.clear();
  state_exact_ = true;
  differentiate_ = one_in(4);
  Tensors leaves;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensor t = inputs[i];
    if (differentiate_ && is_floating(t.dtype())) leaves.push_back(t = t.detach().requires_grad_());
    pool_.push_back({t, true, grids_[i], 2, is_floating(t.dtype()) ? 1 : 4});
    if (!is_floating(t.dtype())) pool_.back().fraction = 0;
  }
  const int steps = 4 + int(pick(16));
  for (int i = 0; i < steps; ++i) step();
  std::optional<Scoped<Phase>> backward;
  if (one_in(3)) {
    backward.emplace(context().phase, Phase::kBackward);
    for (int i = int(pick(8)); i > 0; --i) step();
  }
  Tensors out;
  if (!leaves.empty())
    if (Tensor l = loss(); l.requires_grad())
      for (const Tensor& g : grad({{l}}, leaves))
        if (g.defined()) out.push_back(g), exact.push_back(false);
  for (int i = 1 + int(pick(4)); i > 0; --i) {
    Entry e = newer();
    out.push_back(e.t.detach()), exact.push_back(e.exact);
  }
  for (size_t i = 0; i < more_.size(); ++i) out.push_back(more_[i].detach()), exact.push_back(true);
  pool_.clear(), more_.clear();
  return out;
}

Tensor RandomProgram::loss() {
  Tensor l = scalar_tensor(0.0, kF32);
  for (int i = 0; i < 3; ++i) l = l + sum(tanh(cast(newer().t, kF32)));
  return l;
}

void RandomProgram::step() {
  switch (pick(25)) {
    case 0:
    case 1:
    case 2:
    case 3: return unary();
    case 4:
    case 5:
    case 6:
    case 7: return binary();
    case 8: return whole();
    case 9:
    case 10: return mask();
    case 11:
    case 12:
    case 13: return reduction();
    case 14:
    case 15: return softmax_like();
    case 16: return norm_like();
    case 17: return convert();
    case 18:
    case 19: return view();
    case 20: return shifted();
    case 21:
    case 22: return state.empty() ? unary() : write();
    case 23: return draw();
    default: return other();
  }
}

void RandomProgram::unary() {
  Entry e = real();
  if (e.grid && one_in(2)) {
    switch (pick(7)) {
      case 0: return add_grid(neg(e.t), e, e.fraction, e.magnitude);
      case 1: return add_grid(abs(e.t), e, e.fraction, e.magnitude);
      case 2: return add_grid(relu(e.t), e, e.fraction, e.magnitude);
      case 3: return add_grid(floor(e.t), e, 0, e.magnitude + 1);
      case 4: return add_grid(sign(e.t), e, 0, 1);
      case 5: return add_grid(e.t * 0.5, e, e.fraction + 1, e.magnitude);
      default: return add_grid(square(e.t), e, 2 * e.fraction, 2 * e.magnitude);
    }
  }
  const uint64_t which = pick(e.exact ? 24 : 7);
  switch (which) {
    case 0: return add(tanh(e.t), e);
    case 1: return add(sigmoid(e.t), e);
    case 2: return add(neg(e.t), e);
    case 3: return add(gelu(e.t), e);
    case 4: return add(silu(e.t), e);
    case 5: return add(e.t * 0.75, e);
    case 6: return add(sin(e.t), e);
    case 7: return add(exp(tame(e).t), e);
    case 8: return add(erf(e.t), e);
    case 9: return add(sqrt(abs(e.t) + 0.25), e);
    case 10: return add(rsqrt(square(tame(e).t) + 0.5), e);
    case 11: return add(log1p(abs(e.t)), e);
    case 12: return add(reciprocal(square(e.t) + 1.0), e);
    case 13: return add(softplus(e.t), e);
    case 14: return add(pow(abs(tame(e).t) + 0.5, 1.5), e);
    case 15: return add(leaky_relu(e.t), e);
    case 16: return add(elu(e.t), e);
    case 17: return add(gelu_tanh(e.t), e);
    case 18: return add(round(e.t * 3.0), e);
    case 19: return add(cos(e.t), e);
    case 20: return add(relu(e.t), e);
    case 21: return add(clamp(e.t, -0.5, 0.75), e);
    case 22: return add(log(abs(e.t) + 0.125), e);
    default: return add(expm1(tame(e).t), e);
  }
}

void RandomProgram::binary() {
  Entry a = real(), b = real();
  const Entry both{{}, a.exact && b.exact, a.grid && b.grid, 0, 0};
  const int fraction = std::max(a.fraction, b.fraction),
            magnitude = std::max(a.magnitude, b.magnitude);
  switch (pick(both.exact ? 11 : 6)) {
    case 0: return add_grid(a.t + b.t, both, fraction, magnitude + 1);
    case 1: return add_grid(a.t - b.t, both, fraction, magnitude + 1);
    case 2:
    case 3:
      a = tame(a);
      return add_grid(a.t * b.t, {{}, both.exact, a.grid && b.grid, 0, 0}, a.fraction + b.fraction,
                      a.magnitude + b.magnitude);
    case 4: return add(lerp(a.t, tame(b).t, scalar_tensor(0.3, a.t.dtype())), both);
    case 5: return add(tame(a).t / (square(tame(b).t) + 1.0), both);
    case 6: return add_grid(maximum(a.t, b.t), both, fraction, magnitude);
    case 7: return add_grid(minimum(a.t, b.t), both, fraction, magnitude);
    case 8: return add(atan2(a.t + 4.0, square(b.t)), both);
    case 9: return add(remainder(a.t, abs(b.t) + 0.5), both);
    default: return add(pow(abs(tame(a).t) + 0.5, tame(b).t), both);
  }
}

void RandomProgram::whole() {
  Entry a = of(Kind::kWhole), b = of(Kind::kWhole);
  const Entry both{{}, a.exact && b.exact};
  switch (pick(7)) {
    case 0: return add(a.t + b.t, both);
    case 1: return add(a.t * b.t, both);
    case 2: return add(bitwise_xor(a.t, b.t), both);
    case 3: return add(maximum(a.t, b.t), both);
    case 4: return add(a.t < b.t, both);
    case 5: return add(remainder(a.t, scalar_tensor(int64_t(5), a.t.dtype())), both);
    default: return add(bitwise_right_shift(a.t, scalar_tensor(int64_t(1), a.t.dtype())), both);
  }
}

// Masks: compared values, positions, and values chosen by them.
void RandomProgram::mask() {
  const int64_t d = axis(), e = (d + 1) % kAxes;
  auto along = [&](int64_t a) {
    return reshape(arange(0, extents_[a]), shape_of(uint64_t(1) << a));
  };
  Entry a = real(), b = real(), m = truth();
  switch (pick(9)) {
    case 0:
      if (!a.exact || !b.exact) return unary();
      return add(a.t > b.t, true);
    case 1: return add(along(d) <= along(e), true);
    case 2: {
      Entry target = of(Kind::kWhole);
      return add(along(d) == target.t, target);
    }
    case 3: return add(logical_and(m.t, truth().t), m.exact);
    case 4: return add(logical_not(m.t), m);
    case 5:
      return add(masked_fill(expand(a.t, broadcast(a.t.shape(), m.t.shape(), "")), m.t, 0.5),
                 a.exact && m.exact);
    case 6: return add(where(along(d) == along(e), a.t, full({}, 0.0, {a.t.dtype()})), a);
    case 7: return add(a.t * m.t, a.exact && m.exact);
    default:
      return add_grid(where(m.t, a.t, b.t),
                      {{}, a.exact && b.exact && m.exact, a.grid && b.grid, 0, 0},
                      std::max(a.fraction, b.fraction), std::max(a.magnitude, b.magnitude));
  }
}

void RandomProgram::reduction() {
  Dims dims;
  const uint64_t over = 1 + pick(7);
  int64_t n = 1;
  for (int a = 0; a < kAxes; ++a)
    if (over >> a & 1) dims.push_back(a), n *= counted_[a];
  const bool empty = n == 0;
  Entry e = one_in(6) ? of(Kind::kWhole) : one_in(6) ? truth() : real();
  const uint64_t which = pick(8);
  if (kind_of(e) == Kind::kTruth)
    return which < 3   ? add(any(e.t, dims, true), e)
           : which < 6 ? add(all(e.t, dims, true), e)
                       : add(sum(e.t, dims, true), e);
  if (kind_of(e) == Kind::kWhole)
    return which < 3 || empty ? add(sum(e.t, dims, true), e)
           : which < 6        ? add(amax(e.t, dims, true), e)
                              : add(prod(e.t, dims, true), e);
  const int more = bits_of(n);
  if (which < 3 || empty) {
    const bool fits = e.grid && e.fraction + e.magnitude + more <= digits(e.t.dtype());
    if (!e.exact && !empty) return add(mean(e.t, dims, true), false);  // sums would part
    pool_.push_back({sum(e.t, dims, true), e.exact && fits, fits, e.fraction, e.magnitude + more});
    return;
  }
  const bool jumps = !e.exact && differentiate_;
  switch (which) {
    case 3:
      if (jumps) return unary();
      return add_grid(amax(e.t, dims, true), e, e.fraction, e.magnitude);
    case 4:
      if (jumps) return unary();
      return add_grid(amin(e.t, dims, true), e, e.fraction, e.magnitude);
    case 5: return add(mean(e.t, dims, true), false);
    case 6:
      if (!e.exact || differentiate_) return add(mean(e.t, dims, true), false);
      return add(prod(sign(e.t), dims, true), true);
    default: return add(sum(square(tame(e).t), dims, true), false);
  }
}

void RandomProgram::softmax_like() {
  Entry e = tame(real()), m = truth();
  const int64_t d = axis();
  Tensor x = one_in(3) ? e.t * 8.0 : e.t;
  const Shape whole = broadcast(x.shape(), m.t.shape(), "");
  if (x.numel() == 0 || numel(whole) == 0) return unary();
  if (m.exact && one_in(3)) x = masked_fill(expand(x, whole), m.t, one_in(2) ? -20.0 : -1e4);
  switch (pick(7)) {
    case 0:
    case 1: return add(softmax(x, d), false);
    case 2: return add(log_softmax(x, d), false);
    case 3: return add(logsumexp(x, {d}, true), false);
    case 4: {
      const Tensor g = tame(real()).t, y = softmax(x, d);
      return add(y * (g - sum(y * g, {d}, true)), false);
    }
    case 5: {
      const Dims more = {d, (d + 1) % kAxes};
      Tensor p = exp(x * 0.25 - amax(x * 0.25, more, true));
      return add(p / (sum(p, {d}, true) + 0.25), false);
    }
    default: {
      Tensor shifted = x - amax(x, {d}, true);
      Tensor p = exp(shifted), total = sum(p, {d}, true);
      if (one_in(2)) return add(shifted - log(total), false);
      return add(p / total, false);
    }
  }
}

void RandomProgram::norm_like() {
  Entry e = tame(real());
  if (e.t.numel() == 0) return unary();
  const DType dtype = e.t.dtype();
  auto weight = [&] {
    return one_in(2) ? Tensor() : cast(arange(0, e.t.size(-1), 1, {kF32}) * 0.125 + 0.5, dtype);
  };
  switch (pick(4)) {
    case 0: return add(layer_norm(e.t, weight(), weight(), 0.1), false);
    case 1: return add(rms_norm(e.t, weight(), 0.1), false);
    default: {
      Dims dims;
      const uint64_t over = 1 + pick(7);
      for (int a = 0; a < kAxes; ++a)
        if (over >> a & 1) dims.push_back(a);
      Tensor centred = e.t - mean(e.t, dims, true);
      return add(centred * rsqrt(mean(square(centred), dims, true) + 0.1), false);
    }
  }
}

void RandomProgram::convert() {
  Entry e = newer();
  constexpr DType dtypes[] = {kF32, kF64, kBF16, kF16, kI64, kI32, kU8, kBool};
  DType to = dtypes[pick(e.exact ? 8 : 4)];
  if (to == kU8 && kind_of(e) == Kind::kReal) to = kI64;  // negative floats have no u8
  if (is_integral(to) && kind_of(e) == Kind::kReal) {
    if (special_ && to != kBool) return unary();  // what NaN becomes is unspecified
    return add(cast(tame(e).t * 5.0, to), true);
  }
  if (kind_of(e) != Kind::kReal) return add(cast(e.t, to), e);
  add_grid(cast(e.t, to), e, e.fraction, e.magnitude);
}

// Puts a value into another shape, applies something there, and reverts the shape.
void RandomProgram::view() {
  Entry e = real();
  const Shape s = e.t.shape();
  const int64_t d = axis();
  auto something = [&](const Tensor& x) { return one_in(2) ? gelu(x) : x * 0.5 + 0.25; };
  auto total = [&](const Tensor& x, int64_t dim) {
    return e.exact ? sum(x, {dim}, true) : mean(x, {dim}, true);
  };
  auto sum_is_exact = [&](int a) {
    return e.exact && e.grid &&
           e.fraction + e.magnitude + bits_of(counted_[a]) <= digits(e.t.dtype());
  };
  switch (pick(8)) {
    case 0: {
      Tensor y = something(permute(e.t, {2, 0, 1}));
      if (one_in(2)) return add(permute(y + permute(e.t, {2, 0, 1}), {1, 2, 0}), e);
      return add(permute(y, {1, 2, 0}), e);
    }
    case 1: return add(reshape(something(reshape(e.t, {-1})), s), e);
    case 2: {
      Tensor rows = reshape(e.t, {s[0] * s[1], s[2]});
      if (one_in(2)) return add(reshape(softmax(tanh(rows), 1), s), false);
      return add(reshape(total(rows, 1), {s[0], s[1], 1}), sum_is_exact(2));
    }
    case 3: {
      Tensor columns = reshape(e.t, {s[0], s[1] * s[2]});
      return add(reshape(total(columns, 0), {1, s[1], s[2]}), sum_is_exact(0));
    }
    case 4: return add(something(expand(e.t, shape_of(7))), e);
    case 5:
      if (s[d] == 0) return unary();
      return add(something(unsqueeze(select(e.t, d, one_in(2) ? 0 : s[d] - 1), d)), e);
    case 6: return add(something(contiguous(transpose(e.t, 0, 2))).transpose(0, 2), e);
    default: return add(contiguous(expand(e.t, shape_of(7))), e);
  }
}

// Combines overlapping pieces of a value.
void RandomProgram::shifted() {
  Entry e = real();
  const int64_t d = axis(), n = extents_[d];
  if (n < 3) return unary();
  if (e.t.size(d) != n) e.t = expand(e.t, shape_of(7));
  Tensor a = slice(e.t, d, 0, n - 1), b = slice(e.t, d, 1, n);
  switch (pick(4)) {
    case 0:
      if (e.exact) more_.push_back(tanh(a) * b);
      return;
    case 1: {
      Tensor both[] = {a * 0.5 + b, narrow(e.t, d, 0, 1)};
      return add(cat(both, d), e);
    }
    case 2: return add(mean(tanh(a) - b, {d}, true), false);
    default: {
      Tensor every = slice(e.t, d, 0, n, 2);
      if (e.exact) more_.push_back(silu(every));
      if (!e.exact && differentiate_) return add(mean(every, {d}, true), false);
      return add(amax(every * 2.0, {d}, true), e);
    }
  }
}

// Writes into memory that outlives the program, all of it or a part, also from memory that it
// overlaps.
void RandomProgram::write() {
  NoGrad off;
  if (one_in(4)) return update();
  Tensor s = state[pick(state.size())], whole_state = s;
  Entry e = real();
  const int64_t d = axis();
  const uint64_t how = pick(5);
  if (how <= 1 && s.size(d) >= 2) {
    Tensor from = slice(s, d, 0, s.size(d) - 1), to = slice(s, d, 1, s.size(d));
    if (one_in(2)) std::swap(from, to);
    one_in(3) ? add_(to, from) : assign_(to, one_in(2) ? tanh(from) + to * 0.5 : from * 0.5);
    if (state_exact_ && one_in(2)) more_.push_back(tanh(from));
    return add(tanh(whole_state), state_exact_);
  }
  if (how == 2 && s.size(d) >= 1) s = narrow(s, d, 0, 1);
  if (how == 3 && s.size(d) >= 2) s = slice(s, d, 0, s.size(d), 2);
  Tensor v = tanh(e.t.detach());
  for (int a = 0; a < kAxes; ++a)
    if (v.size(a) != 1 && v.size(a) != s.size(a)) {
      if (v.size(a) == 0) return unary();
      v = narrow(v, a, 0, s.size(a) <= v.size(a) && s.size(a) > 0 ? s.size(a) : 1);
    }
  state_exact_ = state_exact_ && e.exact;
  switch (pick(4)) {
    case 0: assign_(s, cast(v, s.dtype())); break;
    case 1: mul_(s, 0.5); break;
    case 2: mul_(s, 0.5); [[fallthrough]];
    default: add_(s, cast(v, s.dtype()));
  }
  add(one_in(2) ? clone(whole_state) : neg(whole_state), state_exact_);
}

// A step of an optimizer on state that it reads and writes.
void RandomProgram::update() {
  Tensor p = state[0];
  Entry e = real();
  if (!e.exact || p.numel() == 0 || e.t.numel() == 0 || state.size() < 2) return unary();
  if (state[1].shape() != p.shape() || state[1].dtype() != p.dtype() || p.dtype() == kBF16)
    return unary();
  Tensor g = tanh(e.t.detach());
  for (int a = 0; a < kAxes; ++a)
    if (g.size(a) != p.size(a) && g.size(a) != 1) g = narrow(g, a, 0, 1);
  g = contiguous(expand(cast(g, p.dtype()), p.shape()));
  const Tensor rate = scalar_tensor(0.125, kF64), none;
  sgd_update_({{p}}, {{g}}, {{state[1]}}, rate, none, {.momentum = 0.5});
  add(neg(p), state_exact_);
}

void RandomProgram::draw() {
  Entry e = real();
  switch (pick(3)) {
    case 0: return add(dropout(e.t, 0.25, generator.next_key()), e);
    case 1: return add(bernoulli(full(shape_of(7), 0.5, {kF32}), generator.next_key()), true);
    default: return add(rand(shape_of(1 + pick(7)), {kF32}, generator.next_key()), true);
  }
}

void RandomProgram::other() {
  Entry e = real();
  switch (pick(4)) {
    case 0: return add(cumsum(tame(e).t, axis()), false);
    case 1: return add(clone(e.t), e);
    case 2: return add(full(e.t.shape(), 0.75, {e.t.dtype()}), true);
    default: {
      const int64_t a = axis();
      return add(reshape(arange(0, extents_[a], 1, {one_in(2) ? kF32 : kBF16}) * 0.125,
                         shape_of(uint64_t(1) << a)),
                 true);
    }
  }
}

}  // namespace tessera::test
