#include "core/backend/cuda/cudnn/graphs.h"

#include <algorithm>
#include <limits>

namespace tessera::cuda::dnn {
namespace {

using Value = Graph::Value;

constexpr float kLowest = std::numeric_limits<float>::lowest();

// The mask's tensor, behind all others that have memory.
Value mask_of(Graph& g, const AttentionProblem& p) {
  const Extents extents(p.mask, p.mask + 4);
  return p.mask[0] ? g.tensor(extents, dense_strides(extents), kFloat) : Graph::kNone;
}
// The scores that softmax takes, with positions that a query does not see at the lowest number.
Value scores(Graph& g, const AttentionProblem& p, Value q, Value k, Value scale, Value mask) {
  const Extents all{p.batch, p.heads, p.queries, p.keys};
  const Value product = g.inner(all, kFloat), scaled = g.inner(all, kFloat);
  g.matmul(q, k, product);
  g.pointwise(kMul, product, scale, scaled);
  if (mask == Graph::kNone) return scaled;
  const Value sum = g.inner(all, kFloat);
  g.pointwise(kAdd, scaled, mask, sum);
  return sum;
}
Value seen(Graph& g, const AttentionProblem& p, Value x, Value lowest) {
  if (!p.causal) return x;
  const Extents all{p.batch, p.heads, p.queries, p.keys};
  const Value row = g.inner(all, kInt32), column = g.inner(all, kInt32),
              sees = g.inner(all, kBoolean), masked = g.inner(all, kFloat);
  g.index(x, 2, row);
  g.index(x, 3, column);
  g.pointwise(kCompareGreaterEqual, row, column, sees);
  g.select(sees, x, lowest, masked);
  return masked;
}

Extents strides(const HeadStrides& s) { return {s.batch, s.head, s.place, 1}; }
// The extents or strides of the same memory seen as its transpose: the last two dims change places.
Extents turned(const Extents& e) { return {e[0], e[1], e[3], e[2]}; }

struct Operands {
  Value q, k, v, out, lse;  // k is transposed, as products of scores take it
};
// Values are numbered in the order in which they are made: AttentionValues says which.
Operands operands(Graph& g, const AttentionProblem& p, bool transposed_v) {
  const Extents q{p.batch, p.heads, p.queries, p.width}, k{p.batch, p.heads, p.width, p.keys},
      v{p.batch, p.heads, p.keys, p.value_width}, out{p.batch, p.heads, p.queries, p.value_width},
      rows{p.batch, p.heads, p.queries, 1};
  Operands o{};
  o.q = g.tensor(q, strides(p.q), p.type);
  o.k = g.tensor(k, turned(strides(p.k)), p.type);
  o.v = transposed_v ? g.tensor(turned(v), turned(strides(p.v)), p.type)
                     : g.tensor(v, strides(p.v), p.type);
  o.out = g.tensor(out, strides(p.out), p.type);
  o.lse = g.tensor(rows, dense_strides(rows), kFloat);
  return o;
}

Graph forward(const CudnnFunctions& f, const AttentionProblem& p) {
  Graph g(f);
  const Operands o = operands(g, p, false);
  const Extents all{p.batch, p.heads, p.queries, p.keys}, rows{p.batch, p.heads, p.queries, 1};
  const Value mask = mask_of(g, p), scale = g.scalar(float(p.scale)),
              lowest = p.causal ? g.scalar(kLowest) : Graph::kNone;
  const Value x = seen(g, p, scores(g, p, o.q, o.k, scale, mask), lowest);
  const Value most = g.inner(rows, kFloat), below = g.inner(all, kFloat), e = g.inner(all, kFloat),
              sum = g.inner(rows, kFloat), log = g.inner(rows, kFloat),
              weights = g.inner(all, p.type);
  g.reduce(kReduceMax, x, most);
  g.pointwise(kSub, x, most, below);
  g.pointwise(kExp, below, Graph::kNone, e);
  g.reduce(kReduceAdd, e, sum);
  g.pointwise(kLog, sum, Graph::kNone, log);
  g.pointwise(kAdd, most, log, o.lse);
  g.pointwise(kDiv, e, sum, weights);
  g.matmul(weights, o.v, o.out);
  return g;
}

// With weights w = exp(x - lse): dv = w' g, ds = w (g v' - rows) scale with rows = sum(g out),
// dk = ds' q, dq = ds k. That is the form whose engines cuDNN has.
Graph gradient(const CudnnFunctions& f, const AttentionProblem& p) {
  Graph g(f);
  const Operands o = operands(g, p, true);
  const int64_t B = p.batch, H = p.heads, T = p.queries, S = p.keys, D = p.width, E = p.value_width;
  const Extents all{B, H, T, S}, turned_all = turned(all), rows{B, H, T, 1}, wide{B, H, T, D},
                                 of_out{B, H, T, E}, of_k{B, H, S, D}, of_v{B, H, S, E};
  const Extents turned_strides = turned(dense_strides(all));
  const Value cotangent = g.tensor(of_out, strides(p.g), p.type),
              dq = g.tensor(wide, strides(p.dq), p.type),
              dk = g.tensor(of_k, strides(p.dk), p.type),
              dv = g.tensor(of_v, strides(p.dv), p.type),
              sums = g.tensor(rows, dense_strides(rows), kFloat),
              wide_dq = p.one_sum ? Graph::kNone : g.tensor(wide, dense_strides(wide), kFloat);
  const Value mask = mask_of(g, p), scale = g.scalar(float(p.scale)), one = g.scalar(1),
              lowest = p.causal ? g.scalar(kLowest) : Graph::kNone;

  const Value terms = g.inner(of_out, kFloat), plain_sums = g.inner(rows, kFloat);
  g.pointwise(kMul, cotangent, o.out, terms);
  g.reduce(kReduceAdd, terms, plain_sums);
  g.pointwise(kMul, plain_sums, one, sums);

  const Value below = g.inner(all, kFloat), weights = g.inner(all, kFloat),
              turned_weights = g.inner(turned_all, turned_strides, p.type);
  const Value x = scores(g, p, o.q, o.k, scale, mask);
  g.pointwise(kSub, x, o.lse, below);
  g.pointwise(kExp, seen(g, p, below, lowest), Graph::kNone, weights);
  g.reshape(weights, turned_weights);
  g.matmul(turned_weights, cotangent, dv);

  const Value dw = g.inner(all, kFloat), less = g.inner(all, kFloat),
              product = g.inner(all, kFloat), ds = g.inner(all, p.one_sum ? p.type : kFloat),
              turned_ds = g.inner(turned_all, turned_strides, p.type),
              k = g.inner(of_k, strides(p.k), p.type);
  g.matmul(cotangent, o.v, dw);
  g.pointwise(kSub, dw, sums, less);
  g.pointwise(kMul, less, weights, product);
  g.pointwise(kMul, product, scale, ds);
  g.reshape(ds, turned_ds);
  g.matmul(turned_ds, o.q, dk);
  g.reshape(o.k, k);
  g.matmul(ds, k, p.one_sum ? dq : wide_dq);
  if (!p.one_sum) g.pointwise(kIdentity, wide_dq, Graph::kNone, dq);
  return g;
}

Extents channels_of(const Extents& e) {
  Extents channels(e.size(), 1);
  channels[1] = e[1];
  return channels;
}

// What normalises a convolution to extents `e`; ConvValues numbers it.
struct Norm {
  Norm(Graph& g, const ConvProblem& p, const Extents& e) {
    const Extents channels = channels_of(e);
    const auto number = [&] { return g.tensor(channels, last_strides(channels), kFloat); };
    mean = number(), var = number();
    if (p.weight) weight = number();
    if (p.bias) bias = number();
    if (p.residual) residual = g.tensor(e, last_strides(e), p.type, p.aligned_beside);
  }
  Value mean, var, weight = Graph::kNone, bias = Graph::kNone, residual = Graph::kNone;
};

// What it makes of `y`, in f32 to the last; a NaN stays one behind the relu.
void normalise(Graph& g, const ConvProblem& p, const Norm& norm, Value y, const Extents& e,
               Value result) {
  const Extents channels = channels_of(e);
  const Value eps = g.scalar(float(p.eps), e.size());
  const auto inner = [&](const Extents& of, int type) {
    return g.inner(of, last_strides(of), type);
  };
  const Value above = inner(channels, kFloat), rstd = inner(channels, kFloat);
  g.pointwise(kAdd, norm.var, eps, above);
  g.pointwise(kReciprocalRoot, above, Graph::kNone, rstd);
  struct Step {
    int mode;
    Value by;
  };
  std::vector<Step> steps{{kSub, norm.mean}, {kMul, rstd}};
  if (p.weight) steps.push_back({kMul, norm.weight});
  if (p.bias) steps.push_back({kAdd, norm.bias});
  if (p.residual) steps.push_back({kAdd, norm.residual});
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool last = i + 1 == steps.size() && !p.relu;
    const Value next = last ? result : inner(e, kFloat);
    g.pointwise(steps[i].mode, y, steps[i].by, next);
    y = next;
  }
  if (!p.relu) return;
  const Value zero = g.scalar(0, e.size()), below = inner(e, kBoolean);
  g.pointwise(kCompareLess, y, zero, below);
  g.select(below, zero, y, result);
}

// What batch-norm's derivative takes of the gradient `made` of its result, which is stored as `h`
// where that is another value; ConvValues numbers the operands.
class GradSums {
 public:
  GradSums(Graph& g, const ConvProblem& p, const Extents& e) : g_(g), extents_(e) {
    const Extents channels = channels_of(e);
    const auto number = [&] { return g.tensor(channels, last_strides(channels), kFloat); };
    const auto like = [&] { return g.tensor(e, last_strides(e), p.type, p.aligned_beside); };
    sum_ = number(), products_ = number(), mean_ = number(), of_ = like();
    if (p.relu) y_ = like();
    if (p.residual) residual_ = like();
  }
  // What the convolution makes: h where nothing comes between.
  Value made(Value h) { return y_ || residual_ ? inner(kFloat) : h; }
  void add(Value made, Value h) {
    if (residual_) {
      const Value sum = y_ ? inner(kFloat) : h;
      g_.pointwise(kAdd, made, residual_, sum);
      made = sum;
    }
    if (y_) {
      const Value zero = g_.scalar(0, extents_.size()), seen = inner(kBoolean);
      g_.pointwise(kCompareLess, zero, y_, seen);
      g_.select(seen, made, zero, h);
    }
    const Value centred = inner(kFloat), product = inner(kFloat);
    g_.pointwise(kSub, of_, mean_, centred);
    g_.pointwise(kMul, h, centred, product);
    g_.reduce(kReduceAdd, h, sum_);
    g_.reduce(kReduceAdd, product, products_);
  }

 private:
  Value inner(int type) { return g_.inner(extents_, last_strides(extents_), type); }
  Graph& g_;
  const Extents& extents_;
  Value sum_, products_, mean_, of_, y_ = Graph::kNone, residual_ = Graph::kNone;
};

}  // namespace

Graph graph_of(const CudnnFunctions& f, const ConvProblem& p) {
  Graph g(f);
  const auto n = size_t(p.spatial);
  const auto list = [](const int64_t* from, size_t count) { return Extents(from, from + count); };
  for (size_t d = 0; d < n; ++d)
    if (p.begin[d] < 0 || p.end[d] < 0) g.refuse("cuDNN takes no negative padding");
  const Extents x = list(p.x, n + 2), w = list(p.w, n + 2), y = list(p.y, n + 2);
  const Value of_x = g.tensor(x, last_strides(x), p.type, p.aligned_x),
              of_w = g.tensor(w, last_strides(w), p.type, p.aligned_w),
              of_y = g.tensor(y, last_strides(y), p.type, p.aligned_y);
  const Graph::Window window{list(p.begin, n), list(p.end, n), list(p.stride, n),
                             list(p.dilation, n)};
  if (p.statistics && p.kind == ConvKind::kGradInput) {
    GradSums sums(g, p, x);
    const Value made = sums.made(of_x);
    g.convolution(p.kind, made, of_w, of_y, window);
    sums.add(made, of_x);
    return g;
  }
  std::optional<Norm> norm;
  if (p.normalises) norm.emplace(g, p, y);
  const Value made = norm ? g.inner(y, last_strides(y), kFloat) : of_y;
  g.convolution(p.kind, of_x, of_w, made, window);
  if (norm) normalise(g, p, *norm, made, y, of_y);
  if (p.statistics) {
    const Extents channels = channels_of(y);
    const Value sum = g.tensor(channels, last_strides(channels), kFloat),
                squares = g.tensor(channels, last_strides(channels), kFloat);
    g.statistics(of_y, sum, squares);
  }
  return g;
}

bool takes(const ConvProblem& p) {
  if (!p.statistics || p.kind != ConvKind::kGradInput) return true;
  const bool grouped = p.x[1] != p.w[1];
  return !grouped && std::all_of(p.stride, p.stride + p.spatial, [](int64_t s) { return s == 1; });
}

Graph graph_of(const CudnnFunctions& f, const AttentionProblem& p) {
  return p.gradient ? gradient(f, p) : forward(f, p);
}

// Gradients of cuDNN up to 9.15 are wrong where the last tile of keys is not full.
bool takes(const AttentionProblem& p, int version) {
  constexpr int64_t kWidest = 128, kPack = 8, kTile = 128;
  constexpr int kLastWrong = 91500;
  const bool shape = p.width <= kWidest && p.value_width <= kWidest && p.width % kPack == 0 &&
                     p.value_width % kPack == 0;
  return (p.type == kBFloat16 || p.type == kHalf) && shape && (!p.mask[0] || p.mask[3] == p.keys) &&
         (!p.gradient || p.keys % kTile == 0 || version > kLastWrong);
}

// NVIDIA's cudnn-frontend refuses attention in 16 bits of these two, forward and backward.
bool has_faulty_attention(int version) { return version == 91000 || version == 91001; }

}  // namespace tessera::cuda::dnn
