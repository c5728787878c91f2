#include "core/ops/random.h"

#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/sharding.h"
#include "core/ops/compose.h"
#include "core/ops/create_attributes.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/scan.h"
#include "core/ops/sort.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

class Random final : public PrimitiveOf<Random, RandomAttributes> {
 public:
  static inline const OpInfo kOps[] = {
      {"rand", {OpKind::kDraw, Precision::kAsGiven, 1}},
      {"randn", {OpKind::kDraw, Precision::kAsGiven, 1}},
      {"randint", {OpKind::kDraw, Precision::kAsGiven, 1}}};  // by RandomKind
  explicit Random(const RandomAttributes& a) : PrimitiveOf(kOps[int(a.kind)], a) {}
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK_AS(ShapeError, in[0]->shape == Shape{2} && in[0]->dtype == kI64,
                     "{}: the key must be i64[2], got {}", name(), describe(in));
    TESSERA_CHECK(
        in[0]->device == device || in[0]->device.is_meta(),
        "{}: the key is on {} and the result is to be on {}; move the key there with to()", name(),
        to_string(in[0]->device), to_string(device));
    TESSERA_CHECK(!is_storage_only(dtype),
                  "{}: asked for {}, a storage format; draw in f32 and convert it by .to()", name(),
                  name_of(dtype));
    return {Meta::contiguous(shape, dtype, device)};
  }
  AxisMap axes(MetaSpan) const override {
    AxisMap m;
    for (int64_t e : shape) m.add(Factor::kPass, e);
    m.out.push_back(broadcast_loops(shape, shape));
    m.in.push_back({DimLoops{m.add(Factor::kWhole, 2)}});
    return m;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    Dims b = begin;
    for (int d = 0; d < shape.size(); ++d) b[d] += range_of(map.out[0][size_t(d)], loops).begin;
    return PrimRef(
        new Random({kind, local_shape(map.out[0], loops), b, global, low, high, dtype, device}));
  }
  bool differentiable() const override { return false; }
};

// Integers of magnitude up to which `t` holds every one.
int64_t exact_integers(DType t) {
  switch (t) {
    case kBF16: return int64_t(1) << 8;
    case kF16: return int64_t(1) << 11;
    case kF32: return int64_t(1) << 24;
    case kF64: return int64_t(1) << 53;
    case kBool: return 1;
    case kU8: return UINT8_MAX;
    case kI32: return INT32_MAX;
    default: return INT64_MAX;
  }
}

Tensor draw(RandomKind kind, const Shape& shape, int64_t low, int64_t high, DType dtype,
            const TensorOptions& o, Tensor key) {
  TESSERA_CHECK(kind == RandomKind::kInteger || is_floating(dtype),
                "{}: draws real numbers, asked for {}; use randint for integers",
                Random::kOps[int(kind)].name, name_of(dtype));
  if (!key.defined()) key = default_generator().next_key();
  if (key.device() != o.device) key = key.to(o.device);  // the op runs where it is
  PrimRef prim(
      new Random({kind, shape, Dims::filled(shape.size(), 0), shape, low, high, dtype, o.device}));
  if (o.placed_like.defined())
    if (const ShardingLayer* sharding = placing(o.placed_like))
      return sharding->create(prim, operands(std::move(key)));
  return dispatch1(prim, operands(std::move(key)));
}

// Draws of the exponential distribution of rate 1, one for each element of `t` and in its dtype.
// None is 0, whose logarithm or reciprocal would be infinite.
Tensor exponential_like(const Tensor& t, Tensor key) {
  TensorOptions o = options_of(t);
  o.dtype = t.dtype() == kF64 ? kF64 : kF32;
  const Tensor uniform = draw(RandomKind::kUniform, t.shape(), 0, 0, *o.dtype, o, std::move(key));
  return cast(clamp_min(-log1p(-uniform), t.dtype() == kF64 ? 0x1p-54 : 0x1p-25), t.dtype());
}

// Its own derivative: the same mask on the cotangent.
class Dropout final : public PrimitiveOf<Dropout, DropoutAttributes> {
 public:
  static inline const OpInfo kOp{"dropout", {OpKind::kDraw, Precision::kAsGiven, 2}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK(is_floating(in[0]->dtype), "dropout: takes floats, got {}; cast it first",
                  describe(in));
    TESSERA_CHECK_AS(
        ShapeError,
        !by_sample || (in[0]->shape.size() > 0 && in[2]->shape.size() == 1 &&
                       (in[2]->shape[0] == 0 ? in[0]->shape[0] == 0
                                             : in[0]->shape[0] % in[2]->shape[0] == 0)),
        "dropout: sample numbers must be i64 [B] with B dividing dim 0 of x, got {}", describe(in));
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m;
    const Shape& s = in[0]->shape;
    for (int64_t e : s) m.add(Factor::kPass, e);
    OperandLoops x = broadcast_loops(s, s);
    m.in.push_back(x), m.out.push_back(x);
    m.in.push_back({DimLoops{m.add(Factor::kWhole, 2)}});
    if (by_sample) {
      if (in[2]->shape[0] == s[0]) {
        m.in.push_back({x[0]});
      } else {  // rows of a sample lie behind each other in dim 0: not split along it
        m.factors[0].kind = Factor::kWhole;
        m.in.push_back({DimLoops{m.add(Factor::kWhole, in[2]->shape[0])}});
      }
    }
    m.linear_in = 1;
    return m;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    Dims b;
    Shape g;
    for (const DimLoops& dim : map.in[0]) {
      Range r = range_of(dim, loops);
      b.push_back(r.begin), g.push_back(r.extent);
    }
    return PrimRef(new Dropout({p, by_sample, b, g}));
  }
  int64_t operand_count() const override { return 2 + by_sample; }
  SaveMask saved() const override { return {6, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    Tensors in{v.cot[0], v.in[1]};
    if (by_sample) in.push_back(v.in[2]);
    Tensors g(v.in.size());
    g[0] = dispatch1(PrimRef(new Dropout({p, by_sample, begin, global})), in);
    return g;
  }
};

}  // namespace

Generator::Generator(uint64_t seed) : state_(empty({2}, kI64)) { this->seed(seed); }
void Generator::seed(uint64_t seed) {
  int64_t values[] = {int64_t(seed), 0};
  assign_(state_, from_values<int64_t>(values, {2}).to(state_.device()));
}
void Generator::seek(uint64_t next) {
  if (!state_.device().is_cpu()) return seek(scalar_tensor(int64_t(next), kI64, state_.device()));
  int64_t values[] = {state_.values<int64_t>()[0], int64_t(next)};
  assign_(state_, from_values<int64_t>(values, {2}));
}
void Generator::seek(const Tensor& next) { assign_(state_[1], next.to(state_.device())); }
void Generator::to(Device device) {
  if (device != state_.device()) state_ = transferred(state_, device);
}
Tensor Generator::next_key() {
  Tensor key = clone(state_);
  Tensor number = state_[1];
  if (state_.device().is_cpu())
    assign_(number, number + 1);
  else
    add_(number, 1);  // one kernel
  return key;
}

Generator& default_generator() {
  if (Generator* g = context().generator) return *g;
  thread_local Generator own;
  return own;
}
void manual_seed(uint64_t seed) { default_generator().seed(seed); }

Tensor rand(const Shape& shape, TensorOptions o, Tensor key) {
  return draw(RandomKind::kUniform, shape, 0, 0, o.dtype.value_or(context().default_dtype), o,
              std::move(key));
}
Tensor randn(const Shape& shape, TensorOptions o, Tensor key) {
  return draw(RandomKind::kNormal, shape, 0, 0, o.dtype.value_or(context().default_dtype), o,
              std::move(key));
}
Tensor rand_like(const Tensor& x, Tensor key) {
  return rand(x.shape(), options_of(x), std::move(key));
}
Tensor randn_like(const Tensor& x, Tensor key) {
  return randn(x.shape(), options_of(x), std::move(key));
}
Tensor normal(const Tensor& mean, const Tensor& deviation, Tensor key) {
  const Tensor centre = expand(mean, broadcast(mean.shape(), deviation.shape(), "normal"));
  return centre + deviation * randn_like(centre, std::move(key));
}
void exponential_(const Tensor& t, double rate, Tensor key) {
  TESSERA_CHECK(rate > 0 && is_floating(t.dtype()),
                "exponential_: rate {} for {}; takes a positive one and floats", rate, describe(t));
  assign_(t, exponential_like(t, std::move(key)) / rate);
}

Tensor randint(int64_t low, int64_t high, const Shape& shape, TensorOptions o, Tensor key) {
  TESSERA_CHECK(low < high, "randint: the range [{}, {}) is empty", low, high);
  const DType t = o.dtype.value_or(kI64);
  const int64_t most = exact_integers(t), least = t == kBool || t == kU8 ? 0
                                                  : is_integral(t)       ? -most - 1
                                                                         : -most;
  TESSERA_CHECK(low >= least && high - 1 <= most,
                "randint: {} does not hold all of [{}, {}); its integers are {} to {}", name_of(t),
                low, high, least, most);
  return draw(RandomKind::kInteger, shape, low, high, t, o, std::move(key));
}

// Equal draws, once in 2^53 pairs, keep their order.
Tensor randperm(int64_t n, Tensor key) {
  TESSERA_CHECK(n >= 0, "randperm: {} numbers; expected 0 or more", n);
  return argsort(rand({n}, {.dtype = kF64}, std::move(key)));
}

Tensor multinomial(const Tensor& weights, int64_t count, bool replacement, Tensor key) {
  TESSERA_CHECK_AS(ShapeError,
                   (weights.ndim() == 1 || weights.ndim() == 2) && weights.size(-1) > 0 &&
                       is_floating(weights.dtype()),
                   "multinomial: weights are {}; takes floats [N] or [rows, N]", describe(weights));
  TESSERA_CHECK(count > 0, "multinomial: {} draws", count);
  const Tensor w = cast(weights.detach(), kF64);
  const int64_t needed = replacement ? 1 : count;
  TESSERA_CHECK(all(ge(w, 0) & isfinite(w)).item<bool>(),
                "multinomial: a weight of {} is negative or not finite", describe(weights));
  TESSERA_CHECK(all(ge(sum(gt(w, 0), -1), needed)).item<bool>(),
                "multinomial: a row of {} has fewer than {} positive weights", describe(weights),
                needed);
  // The k smallest of exponential draws over their weights are k draws without replacement
  // (Efraimidis, Spirakis 2006).
  if (!replacement) return topk(w / exponential_like(w, std::move(key)), count, -1).indices;
  Shape drawn = w.shape();
  drawn[drawn.size() - 1] = count;
  const Tensor edges = cumsum(w, -1), total = narrow(edges, -1, w.size(-1) - 1, 1);
  const Tensor at = rand(drawn, {.dtype = kF64, .device = w.device()}, std::move(key)) * total;
  // Rounded up to the total, a draw would lie behind the last positive weight.
  const Tensor last =
      amax(where(gt(w, 0), arange(w.size(-1), {.device = w.device()}), 0), -1, true);
  return minimum(searchsorted(edges, at, true), last);
}

Tensor gumbel_softmax(const Tensor& logits, double tau, bool hard, int64_t dim, Tensor key) {
  TESSERA_CHECK(tau > 0, "gumbel_softmax: tau {}; expected a positive one", tau);
  const Tensor noise = -log(exponential_like(logits, std::move(key)));
  const Tensor soft = softmax((logits + noise) / tau, dim);
  if (!hard) return soft;
  const Tensor most = argmax(soft, dim, true);
  return scatter(zeros_like(soft), dim, most, 1) - soft.detach() + soft;
}

Tensor bernoulli(const Tensor& p, Tensor key) {
  return lt(rand(p.shape(), options_of(p), std::move(key)), p);
}

SampleScope::SampleScope(Tensor numbers) : Scoped(context().samples, std::move(numbers)) {}

DropoutDraw dropout_draw(const Tensor& x, Tensor key, Tensor samples) {
  if (!key.defined()) key = default_generator().next_key();
  if (!samples.defined()) {
    const Tensor& s = context().samples;
    if (s.defined() && x.ndim() > 0 && s.numel() > 0 && x.size(0) % s.numel() == 0) samples = s;
  }
  if (!key.device().is_cpu()) key = key.to(x.device());  // one of the host may stay there
  if (samples.defined()) samples = samples.to(x.device());
  return {std::move(key), std::move(samples)};
}
Tensor apply_dropout(const DropoutAttributes& a, const Tensor& x, const DropoutDraw& draw) {
  Tensors in{x, draw.key};
  if (a.by_sample) in.push_back(draw.samples);
  return dispatch1(PrimRef(new Dropout(a)), in);
}

Tensor dropout(const Tensor& x, double p, Tensor key, Tensor samples) {
  TESSERA_CHECK(p >= 0 && p <= 1, "dropout: probability {}; expected 0 <= p <= 1", p);
  if (p == 0) return x;
  if (p == 1) return x * 0.0;
  const DropoutDraw draw = dropout_draw(x, std::move(key), std::move(samples));
  Scoped<bool> same(context().replicate_plain, true);  // the key and the numbers are
  return apply_dropout({p, draw.samples.defined()}, x, draw);
}

Tensor dropout2d(const Tensor& x, double p, Tensor key, Tensor samples) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() == 4, "dropout2d: {}; takes [N, C, H, W]", describe(x));
  if (p == 0) return x;
  const Tensor kept = ones_like(narrow(narrow(x.detach(), 2, 0, 1), 3, 0, 1));
  return x * dropout(kept, p, std::move(key), std::move(samples));
}

void register_random_ops(OpRegistry& registry) {
  auto key = [] { return from_values<int64_t>({7, 3}, {2}); };
  for (auto kind : {RandomKind::kUniform, RandomKind::kNormal, RandomKind::kInteger})
    registry.add(Random::kOps[int(kind)].name, [=] {
      DType t = kind == RandomKind::kInteger ? kI64 : kF64;
      return std::vector<Sample>{
          {PrimRef(new Random({kind, {3, 5}, {0, 0}, {3, 5}, 0, 9, t, kCPU})), {key()}, false},
          {PrimRef(new Random({kind, {2, 1, 2}, {0, 0, 0}, {2, 1, 2}, 0, 9, t, kCPU})),
           {key()},
           false}};
    });
  registry.add("dropout", [=] {
    return std::vector<Sample>{
        {PrimRef(new Dropout({0.4, false})), {sample_values({4, 6}, -1, 1, 1), key()}},
        {PrimRef(new Dropout({0.4, true})),
         {sample_values({4, 6}, -1, 1, 1), key(), sample_integers({4}, 0, 100, 2)}},
        // Extents of 2, like the key's; samples of several rows and of one.
        {PrimRef(new Dropout({0.4, false})), {sample_values({3, 2}, -1, 1, 1), key()}},
        {PrimRef(new Dropout({0.4, false})), {sample_values({2, 1, 2}, -1, 1, 1), key()}},
        {PrimRef(new Dropout({0.4, true})),
         {sample_values({4, 6}, -1, 1, 1), key(), sample_integers({2}, 0, 100, 2)}},
        {PrimRef(new Dropout({0.4, true})),
         {sample_values({2, 2}, -1, 1, 1), key(), sample_integers({2}, 0, 100, 2)}},
        {PrimRef(new Dropout({0.4, true})),
         {sample_values({4, 2, 1}, -1, 1, 1), key(), sample_integers({1}, 0, 100, 2)}}};
  });
}

}  // namespace tessera
