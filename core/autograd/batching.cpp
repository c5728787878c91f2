// The ways of batching.h that follow from axis maps. Rules for single ops are in
// batching_rules.cpp.
#include "core/autograd/batching.h"

#include <mutex>
#include <set>

#include "core/autograd/batching_rules.h"
#include "core/base/log.h"
#include "core/dispatch/call.h"
#include "core/dispatch/context.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

using namespace batching;

struct OneByOne {
  std::mutex mutex;
  std::set<std::string, std::less<>> names;
};
OneByOne& one_by_one_ops() {
  static auto* ops = new OneByOne;
  return *ops;
}

// Checks an axis map: the op on the batch must have the loops of the op on a sample and one kPass
// loop, `lead`, in dim 0 of every operand that carries the batch and of every result.
class LoopCheck {
 public:
  LoopCheck(const AxisMap& sample, const AxisMap& batch, int64_t size)
      : sample_(sample),
        batch_(batch),
        size_(size),
        to_(sample.factors.size(), -1),
        from_(batch.factors.size(), -1) {}

  // True where `b` has the batch in dim 0, then `padding` dims of extent 1, then the dims of `a`.
  bool led(const OperandLoops& a, const OperandLoops& b, size_t padding) {
    if (b.size() != a.size() + 1 + padding || !is_lead(b[0], size_)) return false;
    for (size_t d = 1; d <= padding; ++d)
      for (int f : b[d])
        if (batch_.factors[size_t(f)].extent != 1) return false;
    return same(a, 0, b, 1 + padding);
  }
  // True where dim 0 of `b` holds all samples one behind the other, `rows` in all.
  bool lengthened(const OperandLoops& a, const OperandLoops& b, int64_t rows) {
    if (a.empty() || b.size() != a.size() || !is_lead(b[0], rows)) return false;
    if (a[0].size() > 1) return false;
    if (a[0].size() == 1) {  // within a sample, dim 0 passes too, and it is in no other dim
      const int f = a[0][0];
      if (sample_.factors[size_t(f)].kind != Factor::kPass) return false;
      if (to_[size_t(f)] != -1 && to_[size_t(f)] != lead_) return false;
      to_[size_t(f)] = lead_;
    }
    return same(a, 1, b, 1);
  }
  bool alike(const OperandLoops& a, const OperandLoops& b) { return same(a, 0, b, 0); }

 private:
  bool is_lead(const DimLoops& dim, int64_t extent) {
    if (dim.size() != 1) return false;
    const Factor& f = batch_.factors[size_t(dim[0])];
    if (f.kind != Factor::kPass || f.extent != extent) return false;
    if (lead_ < 0) {
      if (from_[size_t(dim[0])] != -1) return false;
      lead_ = dim[0], from_[size_t(lead_)] = kReserved;
    }
    return dim[0] == lead_;
  }
  bool same(const OperandLoops& a, size_t i, const OperandLoops& b, size_t j) {
    if (a.size() - i != b.size() - j) return false;
    for (; i < a.size(); ++i, ++j) {
      if (a[i].size() != b[j].size()) return false;
      for (size_t k = 0; k < a[i].size(); ++k)
        if (!same(a[i][k], b[j][k])) return false;
    }
    return true;
  }
  bool same(int f, int g) {
    const Factor &x = sample_.factors[size_t(f)], &y = batch_.factors[size_t(g)];
    if (x.kind != y.kind || x.extent != y.extent) return false;
    if (to_[size_t(f)] == -1 && from_[size_t(g)] == -1) to_[size_t(f)] = g, from_[size_t(g)] = f;
    return to_[size_t(f)] == g && from_[size_t(g)] == f;
  }

  static constexpr int kReserved = -2;
  const AxisMap &sample_, &batch_;
  const int64_t size_;
  std::vector<int> to_, from_;
  int lead_ = -1;
};

// What the op does with one sample, by types alone.
struct SampleOp {
  SmallVector<Meta, 8> in;
  Metas out;
  AxisMap map;
  explicit SampleOp(const Call& c) {
    MetaPointers p;
    for (size_t i = 0; i < c.in.size(); ++i) {
      Meta m = c.in[i].meta();
      if (c.batched[i]) m.shape.erase(0), m.strides.erase(0);
      in.push_back(m);
    }
    for (const Meta& m : in) p.push_back(&m);
    out = c.prim->infer(p);
    map = c.prim->axes(p);
  }
  int ndim(size_t i) const { return in[i].shape.size(); }
};

// How operands are laid out in one attempt.
struct Layout {
  bool pad = false;     // insert dims behind the batch, so that operands broadcast from the right
  bool expand = false;  // give the batch to operands that do not have it
};

Tensor laid_out(const Call& c, const SampleOp& op, size_t i, const Layout& l, size_t& padding) {
  Tensor t = c.in[i];
  padding = 0;
  if (!c.batched[i]) {
    if (!l.expand) return t;
    t = with_batch(t, c.size);
  }
  if (l.pad && !op.out.empty() && op.ndim(i) < op.out[0].shape.size()) {
    padding = size_t(op.out[0].shape.size() - op.ndim(i));
    Shape s = t.shape();
    for (size_t k = 0; k < padding; ++k) s.insert(1, 1);
    t = is_shape_only(t) ? Tensor(Meta::contiguous(s, t.dtype(), t.device()), nullptr)
                         : reshape(t, s);
  }
  return t;
}

bool same_results(const Metas& got, const Metas& sample, int64_t size) {
  if (got.size() != sample.size()) return false;
  for (size_t i = 0; i < got.size(); ++i) {
    Shape want = sample[i].shape;
    if (want.size() == kMaxDims) return false;
    want.insert(0, size);
    if (!(got[i].shape == want) || got[i].dtype != sample[i].dtype) return false;
  }
  return true;
}

// Finds the axis map of `prim` on `in`; false where the op does not take such operands.
bool map_of(const Primitive& prim, const Tensors& in, Metas& out, AxisMap& map) {
  MetaPointers p;
  for (const Tensor& t : in) p.push_back(&t.meta());
  try {
    out = prim.infer(p);
    map = prim.axes(p);
    if (map.empty()) return false;
    verify_axes(prim.name(), map, p, out);
    return true;
  } catch (const Error&) {  // verify_axes too: the op may not be made for these operands
    return false;
  }
}

bool leads(const Call& c, const SampleOp& op, const Primitive& prim, const Layout& l,
           const Tensors& in, const SmallVector<size_t, 8>& padding) {
  Metas out;
  AxisMap map;
  if (!map_of(prim, in, out, map) || !same_results(out, op.out, c.size)) return false;
  LoopCheck check(op.map, map, c.size);
  for (size_t i = 0; i < in.size(); ++i)
    if (!(c.batched[i] || l.expand ? check.led(op.map.in[i], map.in[i], padding[i])
                                   : check.alike(op.map.in[i], map.in[i])))
      return false;
  for (size_t i = 0; i < out.size(); ++i)
    if (!check.led(op.map.out[i], map.out[i], 0)) return false;
  return true;
}

std::optional<Tensors> with_leading_dim(const Call& c, const SampleOp& op) {
  PrimRef prim = leading_dim_primitive(*c.prim, c.size);
  bool ranks_differ = false, all = true;
  for (size_t i = 0; i < c.in.size(); ++i) {
    ranks_differ |= op.ndim(i) < op.out[0].shape.size();
    all = all && c.batched[i];
  }
  for (bool expand : {false, true})
    for (bool pad : {true, false}) {
      if ((pad && !ranks_differ) || (expand && all)) continue;
      Layout l{pad, expand};
      Tensors in;
      SmallVector<size_t, 8> padding;
      for (size_t i = 0; i < c.in.size(); ++i) {
        size_t p;
        if (c.in[i].ndim() + 1 > kMaxDims && !c.batched[i]) return std::nullopt;
        in.push_back(laid_out(c, op, i, l, p)), padding.push_back(p);
      }
      if (leads(c, op, *prim, l, in, padding)) return dispatch(prim, in);
    }
  return std::nullopt;
}

std::optional<Tensors> with_longer_rows(const Call& c, const SampleOp& op, bool expand) {
  Tensors in;
  auto carries = [&](size_t i) { return c.batched[i] || expand; };
  for (size_t i = 0; i < c.in.size(); ++i) {
    if (carries(i) && (op.ndim(i) == 0 || op.ndim(i) == kMaxDims)) return std::nullopt;
    in.push_back(carries(i) ? flatten(c.batched[i] ? c.in[i] : with_batch(c.in[i], c.size), 0, 1)
                            : c.in[i]);
  }
  for (const Meta& m : op.out)
    if (m.shape.empty()) return std::nullopt;
  Metas out;
  AxisMap map;
  if (!map_of(*c.prim, in, out, map) || out.size() != op.out.size()) return std::nullopt;
  LoopCheck check(op.map, map, c.size);
  for (size_t i = 0; i < in.size(); ++i)
    if (!(carries(i) ? check.lengthened(op.map.in[i], map.in[i], in[i].size(0))
                     : check.alike(op.map.in[i], map.in[i])))
      return std::nullopt;
  for (size_t i = 0; i < out.size(); ++i) {
    Shape want = op.out[i].shape;
    want[0] *= c.size;
    if (!(out[i].shape == want) || !check.lengthened(op.map.out[i], map.out[i], want[0]))
      return std::nullopt;
  }
  Tensors results = dispatch(c.prim, in);
  for (size_t i = 0; i < results.size(); ++i)
    results[i] = unflatten(results[i], 0, {c.size, op.out[i].shape[0]});
  return results;
}

// Results for a batch of no samples, typed as those of one sample; gradients are zeros.
Tensors none(const Call& c) {
  Tensors results;
  for (Meta m : SampleOp(c).out) {
    m.shape.insert(0, 0);
    Tensor r = empty(m.shape, m.dtype, m.device);
    for (const Tensor& t : c.in)
      if (is_differentiable(m.dtype) && asks_at_any_level(t, bit(Layer::kAutograd)))
        r = r + cast(sum(t), m.dtype);
    results.push_back(std::move(r));
  }
  return results;
}

Tensor sample(const Tensor& t, int64_t number) {
  if (!is_shape_only(t)) return select(t, 0, number);
  Shape s = t.shape();
  s.erase(0);
  return Tensor(Meta::contiguous(s, t.dtype(), t.device()), nullptr);
}

// Runs the op on each sample and stacks the results.
Tensors one_by_one(const Call& c) {
  if (c.size == 0) return none(c);
  std::vector<Tensors> parts;
  for (int64_t b = 0; b < c.size; ++b) {
    Tensors in;
    for (size_t i = 0; i < c.in.size(); ++i)
      in.push_back(c.batched[i] ? sample(c.in[i], b) : c.in[i]);
    Tensors out = dispatch(c.prim, in);
    parts.resize(out.size());
    for (size_t i = 0; i < out.size(); ++i) parts[i].push_back(std::move(out[i]));
  }
  Tensors results;
  for (Tensors& p : parts) results.push_back(stack(p, 0));
  return results;
}

void say_one_by_one(const Primitive& prim) {
  OneByOne& ops = one_by_one_ops();
  std::lock_guard lock(ops.mutex);
  if (ops.names.emplace(prim.name()).second)
    logging::warn("vmap: {} cannot be run on a batch at once; it runs on each sample, one by one",
                  prim.name());
}

// The decomposition, run below this level's layers and above those outside.
Tensors decomposed(Level& level, const Call& c) {
  Level::Unrecorded below(level);
  Scoped<LayerMask> no_layers(context().enabled, 0);
  Tensors in;
  for (size_t i = 0; i < c.in.size(); ++i) in.push_back(level.wrap(c.in[i], c.batched[i]));
  Tensors out = c.prim->decompose(in);
  for (Tensor& t : out) t = level.adopt(t);
  return out;
}

// The results by one op on the batch; nullopt where the op must be decomposed or run one by one.
std::optional<Result> at_once(const Call& c) {
  if (c.prim->traits().kind == OpKind::kDraw) return random_draws(c);
  if (c.prim->draws()) return dropped_attention(c);
  if (c.size <= 1) return Result{one_by_one(c), true};
  if (auto r = by_rule(c)) return r;
  SampleOp op(c);
  if (op.map.empty() || op.out.empty()) return std::nullopt;
  if (auto out = with_leading_dim(c, op)) return Result{std::move(*out), true};
  for (bool expand : {false, true})
    if (auto out = with_longer_rows(c, op, expand)) return Result{std::move(*out), true};
  return std::nullopt;
}

}  // namespace

std::vector<std::string> ops_batched_one_by_one() {
  OneByOne& ops = one_by_one_ops();
  std::lock_guard lock(ops.mutex);
  return {ops.names.begin(), ops.names.end()};
}

Tensors run_batched(Level& level, const PrimRef& prim, std::span<Tensor> in,
                    std::span<const bool> batched) {
  Call c{prim, in, batched, level.batch(), level.randomness()};
  std::optional<Result> result;
  {
    Level::Outside scope(level);
    result = at_once(c);
  }
  if (!result && prim->decomposable()) return decomposed(level, c);
  if (!result) {
    say_one_by_one(*prim);
    Level::Outside scope(level);
    result = Result{one_by_one(c), true};
  }
  for (Tensor& t : result->out) t = level.wrap(std::move(t), result->batched);
  return std::move(result->out);
}

}  // namespace tessera
