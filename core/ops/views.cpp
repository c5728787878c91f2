// Views as primitives. A view of a tensor that no layer watches skips the dispatch path: its
// strides are computed in place, and no primitive is made.
#include "core/ops/views.h"

#include <algorithm>
#include <optional>

#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/pointwise.h"
#include "core/ops/reshape_axes.h"
#include "core/ops/samples.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/extents.h"

namespace tessera {
namespace {

// The hot path of every view: the handle is filled in place, nothing is copied or counted twice.
Tensor view_of(const Tensor& x, const Shape& shape, const Strides& strides, int64_t elements,
               int64_t extra_offset = 0) {
  const TensorImpl& from = *x.impl();
  Ref<TensorImpl> impl(new TensorImpl);
  impl->meta.shape = shape;
  impl->meta.strides = strides;
  impl->meta.dtype = from.meta.dtype;
  impl->meta.device = from.meta.device;
  impl->storage = from.storage;
  impl->offset = from.offset + extra_offset;
  impl->numel = elements;
  impl->become_view_of(from);
  return Tensor(std::move(impl));
}

// A view of a part of dim `dim` of `x`.
Tensor part_of(const Tensor& x, int dim, const Shape& shape, const Strides& strides,
               int64_t extra_offset) {
  Tensor part = view_of(x, shape, strides, numel(shape), extra_offset);
  if (x.strides()[dim] == 0 && x.shape()[dim] > 1) [[unlikely]]
    part.impl()->repeated = true;
  return part;
}

// Whether `shape` says every extent, for so many elements.
bool is_whole(const Shape& shape, int64_t elements) {
  int64_t n = 1;
  for (int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(n, extent, &n)) return false;
  }
  return n == elements;
}

// Runs `V`, a value type describing one view, directly or as the primitive ViewPrimitive<V>.
template <class V>
class ViewPrimitive;
template <class V>
Tensor view(const Tensor& x, const V& v) {
  if (bypasses_layers(x)) return v.apply(x);
  return dispatch1(PrimRef(new ViewPrimitive<V>(v)), operands(Tensor(x)));
}

template <class V>
class ViewPrimitive final : public PrimitiveOf<ViewPrimitive<V>, V> {
 public:
  using PrimitiveOf<ViewPrimitive<V>, V>::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous(V::shape(in[0]->shape), in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = V::axes(in[0]->shape);
    m.jointly_linear = true;
    return m;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    return V::localize(map, loops);
  }
  Tensors vjp(const VjpArgs& a) const override { return {V::vjp(a.cot[0], a.in[0].shape())}; }
  Tensors view(std::span<const Tensor> in) const override {
    V::shape(in[0].shape());
    return {V::apply(in[0])};
  }
  bool viewable(std::span<const Tensor> in) const override {
    if constexpr (requires { V::viewable(in[0]); })
      return V::viewable(in[0]);
    else
      return true;
  }
};

// Loops of an op that changes one dim as a whole: that dim is a loop of its own in operand and
// result.
AxisMap whole_dim_axes(const Shape& in, const Shape& out, int dim) {
  AxisMap m;
  for (int d = 0; d < in.size(); ++d) m.add(d == dim ? Factor::kWhole : Factor::kPass, in[d]);
  m.in.push_back(broadcast_loops(in, in));
  m.out.push_back(m.in[0]);
  m.out[0][size_t(dim)] = {m.add(Factor::kWhole, out[dim])};
  return m;
}

constexpr OpTraits kShowsAll{
    .kind = OpKind::kView, .precision = Precision::kAsGiven, .operands = 1, .shows_all = true};

struct PermuteView {
  static inline const OpInfo kOp{"permute", kShowsAll};
  Dims order;
  Shape shape(const Shape& s) const {
    TESSERA_CHECK_AS(ShapeError, s.size() == order.size(), "permute: order {} for shape {}",
                     to_string(order), to_string(s));
    Shape r;
    for (int64_t d : order) r.push_back(s[int(d)]);
    return r;
  }
  Tensor apply(const Tensor& x) const {
    return view_of(x, shape(x.shape()), shape(x.strides()), x.numel());
  }
  AxisMap axes(const Shape& s) const {
    AxisMap m;
    for (int64_t e : s) m.add(Factor::kPass, e);
    m.in.push_back(broadcast_loops(s, s));
    OperandLoops out;
    for (int64_t d : order) out.push_back(m.in[0][size_t(d)]);
    m.out.push_back(out);
    return m;
  }
  PrimRef localize(const AxisMap&, std::span<const Range>) const { return nullptr; }
  Tensor vjp(const Tensor& g, const Shape&) const {
    Dims back = order;
    for (int i = 0; i < order.size(); ++i) back[int(order[i])] = i;
    return permute(g, back);
  }
  static void fields(auto& a, auto& f) { f("order", a.order); }
  static void check_attributes(const PermuteView& v) {
    for (int64_t d = 0; d < v.order.size(); ++d)
      TESSERA_CHECK(std::ranges::count(v.order, d) == 1, "permute: {} is no order of {} dims",
                    to_string(v.order), v.order.size());
  }
};

struct ReshapeView {
  static inline const OpInfo kOp{"reshape", kShowsAll};
  Shape to;
  Shape shape(const Shape& s) const {
    TESSERA_CHECK_AS(ShapeError, numel(s) == numel(to), "reshape: {} elements of {} do not fit {}",
                     numel(s), to_string(s), to_string(to));
    return to;
  }
  Tensor apply(const Tensor& x) const {
    std::optional<Strides> st = reshape_strides(x.shape(), x.strides(), to);
    TESSERA_ASSERT(st, "reshape: {} with strides {} has no view of shape {}", describe(x),
                   to_string(x.strides()), to_string(to));
    return view_of(x, to, *st, x.numel());
  }
  bool viewable(const Tensor& x) const {
    return reshape_strides(x.shape(), x.strides(), to).has_value();
  }
  AxisMap axes(const Shape& s) const { return reshape_axes(s, to); }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const {
    return PrimRef(new ViewPrimitive<ReshapeView>({local_shape(map.out[0], loops)}));
  }
  Tensor vjp(const Tensor& g, const Shape& s) const { return reshape(g, s); }
  static void fields(auto& a, auto& f) { f("to", a.to); }
};

struct ExpandView {
  static inline const OpInfo kOp{"expand", kShowsAll};
  Shape to;
  Shape shape(const Shape& s) const {
    TESSERA_CHECK_AS(ShapeError, s.size() <= to.size() && broadcast(s, to, "expand") == to,
                     "expand: {} does not expand to {}", to_string(s), to_string(to));
    return to;
  }
  Tensor apply(const Tensor& x) const {
    return view_of(x, to, broadcast_strides(x.shape(), x.strides(), to), numel(to));
  }
  AxisMap axes(const Shape& s) const {
    AxisMap m;
    for (int64_t e : to) m.add(Factor::kPass, e);
    m.in.push_back(broadcast_loops(s, to));
    m.out.push_back(broadcast_loops(to, to));
    return m;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const {
    return PrimRef(new ViewPrimitive<ExpandView>({local_shape(map.out[0], loops)}));
  }
  Tensor vjp(const Tensor& g, const Shape& s) const { return sum_to(g, s); }
  static void fields(auto& a, auto& f) { f("to", a.to); }
};

struct SliceView {
  static inline const OpInfo kOp{"slice", {OpKind::kView, Precision::kAsGiven, 1}};
  int dim;
  int64_t begin, size, step;
  Shape shape(const Shape& s) const {
    TESSERA_CHECK_AS(ShapeError, dim < s.size() && steps_fit(begin, size, step, s[dim]),
                     "slice: {} elements from {} in steps of {} of dim {} of {}", size, begin, step,
                     dim, to_string(s));
    Shape r = s;
    r[dim] = size;
    return r;
  }
  Tensor apply(const Tensor& x) const {
    Strides st = x.strides();
    Shape s = x.shape();
    s[dim] = size;
    int64_t offset = begin * st[dim];
    st[dim] *= step;
    return part_of(x, dim, s, st, offset);
  }
  AxisMap axes(const Shape& s) const { return whole_dim_axes(s, shape(s), dim); }
  PrimRef localize(const AxisMap&, std::span<const Range>) const { return nullptr; }
  Tensor vjp(const Tensor& g, const Shape& s) const { return unslice(g, dim, begin, step, s[dim]); }
  static void fields(auto& a, auto& f) {
    f.dim("dim", a.dim), f("begin", a.begin), f("size", a.size), f("step", a.step);
  }
};

struct SelectView {
  static inline const OpInfo kOp{"select", {OpKind::kView, Precision::kAsGiven, 1}};
  int dim;
  int64_t index;
  Shape shape(const Shape& s) const {
    TESSERA_CHECK_AS(ShapeError, dim < s.size() && index < s[dim],
                     "select: index {} of dim {} of {}", index, dim, to_string(s));
    Shape r = s;
    r.erase(dim);
    return r;
  }
  Tensor apply(const Tensor& x) const {
    Strides st = x.strides();
    int64_t offset = index * st[dim];
    st.erase(dim);
    return part_of(x, dim, shape(x.shape()), st, offset);
  }
  AxisMap axes(const Shape& s) const {
    AxisMap m;
    for (int d = 0; d < s.size(); ++d) m.add(d == dim ? Factor::kWhole : Factor::kPass, s[d]);
    m.in.push_back(broadcast_loops(s, s));
    m.out.push_back(m.in[0]);
    m.out[0].erase(size_t(dim));
    return m;
  }
  PrimRef localize(const AxisMap&, std::span<const Range>) const { return nullptr; }
  Tensor vjp(const Tensor& g, const Shape& s) const {
    return unslice(unsqueeze(g, dim), dim, index, 1, s[dim]);
  }
  static void fields(auto& a, auto& f) { f.dim("dim", a.dim), f("index", a.index); }
};

int64_t wrap_index(int64_t i, int64_t extent, const char* op) {
  TESSERA_CHECK_AS(ShapeError, i >= -extent && i < extent, "{}: index {} of a dim of extent {}", op,
                   i, extent);
  return i < 0 ? i + extent : i;
}

}  // namespace

Tensor permute(const Tensor& x, const Dims& order) {
  Dims o = order;
  uint32_t seen = 0;
  for (int64_t& d : o) {
    d = wrap_dim(d, x.ndim(), "permute");
    seen |= 1u << d;
  }
  TESSERA_CHECK_AS(ShapeError, o.size() == x.ndim() && seen == (1u << x.ndim()) - 1,
                   "permute: order {} for shape {}; name every dim once", to_string(order),
                   to_string(x.shape()));
  return view(x, PermuteView{o});
}

Tensor transpose(const Tensor& x, int64_t a, int64_t b) {
  int i = wrap_dim(a, x.ndim(), "transpose"), j = wrap_dim(b, x.ndim(), "transpose");
  if (x.ndim() == 0) return x;
  if (bypasses_layers(x)) {
    Shape shape = x.shape();
    Strides strides = x.strides();
    std::swap(shape[i], shape[j]), std::swap(strides[i], strides[j]);
    return view_of(x, shape, strides, x.numel());
  }
  Dims order;
  for (int d = 0; d < x.ndim(); ++d) order.push_back(d == i ? j : d == j ? i : d);
  return view(x, PermuteView{order});
}

Tensor reshape(const Tensor& x, const Shape& shape) {
  const bool whole = is_whole(shape, x.numel());
  if (whole && shape == x.shape()) return x;
  if (whole && x.is_contiguous() && bypasses_layers(x))
    return view_of(x, shape, contiguous_strides(shape), x.numel());
  const Shape to = reshaped(x.shape(), shape);
  if (to == x.shape()) return x;
  if (!reshape_strides(x.shape(), x.strides(), to)) return reshape(clone(x), to);
  if (bypasses_layers(x)) return ReshapeView{to}.apply(x);
  return view(x, ReshapeView{to});
}

Tensor flatten(const Tensor& x, int64_t first, int64_t last) {
  int a = wrap_dim(first, x.ndim(), "flatten"), b = wrap_dim(last, x.ndim(), "flatten");
  Shape to;
  for (int d = 0; d < a; ++d) to.push_back(x.shape()[d]);
  Shape merged;
  for (int d = a; d <= b && d < x.ndim(); ++d) merged.push_back(x.shape()[d]);
  to.push_back(numel(merged));
  for (int d = b + 1; d < x.ndim(); ++d) to.push_back(x.shape()[d]);
  return reshape(x, to);
}

Tensor unflatten(const Tensor& x, int64_t dim, const Shape& extents) {
  int at = wrap_dim(dim, x.ndim(), "unflatten");
  Shape to;
  for (int d = 0; d < x.ndim(); ++d) {
    if (d != at)
      to.push_back(x.shape()[d]);
    else
      for (int64_t e : extents) to.push_back(e);
  }
  return reshape(x, to);
}

Tensor squeeze(const Tensor& x, int64_t dim) {
  int d = wrap_dim(dim, x.ndim(), "squeeze");
  if (x.ndim() == 0 || x.shape()[d] != 1) return x;
  Shape to = x.shape();
  to.erase(d);
  return reshape(x, to);
}

Tensor unsqueeze(const Tensor& x, int64_t dim) {
  int d = wrap_dim(dim, x.ndim() + 1, "unsqueeze");
  Shape to = x.shape();
  to.insert(d, 1);
  return reshape(x, to);
}

Tensor expand(const Tensor& x, const Shape& shape) {
  Shape to = shape;
  int lead = to.size() - x.ndim();
  for (int d = 0; d < to.size(); ++d)
    if (to[d] == -1) {
      TESSERA_CHECK_AS(ShapeError, d >= lead, "expand: -1 in the new leading dim {} of {}", d,
                       to_string(shape));
      to[d] = x.shape()[d - lead];
    }
  if (to == x.shape()) return x;
  ExpandView v{to};
  v.shape(x.shape());
  return view(x, v);
}

Tensor slice(const Tensor& x, int64_t dim, int64_t begin, int64_t end, int64_t step) {
  int d = wrap_dim(dim, x.ndim(), "slice");
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 0 && step >= 1,
                   "slice: step {} of {}; steps are at least 1", step, to_string(x.shape()));
  int64_t e = x.shape()[d];
  auto clip = [&](int64_t i) { return std::clamp<int64_t>(i < 0 ? i + e : i, 0, e); };
  begin = clip(begin), end = clip(end);
  int64_t size = end > begin ? (end - begin - 1) / step + 1 : 0;
  if (size == e && step == 1) return x;
  return view(x, SliceView{d, begin, size, step});
}

Tensor narrow(const Tensor& x, int64_t dim, int64_t begin, int64_t size) {
  int d = wrap_dim(dim, x.ndim(), "narrow");
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 0 && steps_fit(begin, size, 1, x.shape()[d]),
                   "narrow: {} elements from {} of dim {} of {}", size, begin, d,
                   to_string(x.shape()));
  return view(x, SliceView{d, begin, size, 1});
}

Tensor select(const Tensor& x, int64_t dim, int64_t index) {
  int d = wrap_dim(dim, x.ndim(), "select");
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 0, "select: a 0-d tensor has no dim to select from");
  return view(x, SelectView{d, wrap_index(index, x.shape()[d], "select")});
}

Tensor slice(Tensor&& x, int64_t dim, int64_t begin, int64_t end, int64_t step) {
  return std::move(x).slice(dim, begin, end, step);
}
Tensor narrow(Tensor&& x, int64_t dim, int64_t begin, int64_t size) {
  return std::move(x).narrow(dim, begin, size);
}
Tensor select(Tensor&& x, int64_t dim, int64_t index) { return std::move(x).select(dim, index); }

void register_view_ops(OpRegistry& registry) {
  auto add = [&](const char* name, auto samples) { registry.add(name, samples); };
  add("permute", [] {
    return std::vector<Sample>{{PrimRef(new ViewPrimitive<PermuteView>({{2, 0, 1}})),
                                {sample_values({2, 3, 4}, -1, 1, 1)}}};
  });
  add("reshape", [] {
    using Reshape = ViewPrimitive<ReshapeView>;
    return std::vector<Sample>{
        {PrimRef(new Reshape({{6, 4}})), {sample_values({2, 3, 4}, -1, 1, 1)}},
        {PrimRef(new Reshape({{4, 3}})), {sample_values({3, 4}, -1, 1, 1)}},
        {PrimRef(new Reshape({{2, 3, 1, 4}})), {sample_values({6, 4}, -1, 1, 1)}}};
  });
  add("expand", [] {
    return std::vector<Sample>{
        {PrimRef(new ViewPrimitive<ExpandView>({{2, 3, 4}})), {sample_values({3, 1}, -1, 1, 1)}},
        {PrimRef(new ViewPrimitive<ExpandView>({{2, 1, 3}})), {sample_values({1, 3}, -1, 1, 1)}}};
  });
  add("slice", [] {
    return std::vector<Sample>{
        {PrimRef(new ViewPrimitive<SliceView>({1, 1, 2, 1})), {sample_values({2, 5}, -1, 1, 1)}},
        {PrimRef(new ViewPrimitive<SliceView>({1, 0, 3, 2})), {sample_values({2, 5}, -1, 1, 1)}}};
  });
  add("select", [] {
    return std::vector<Sample>{
        {PrimRef(new ViewPrimitive<SelectView>({1, 2})), {sample_values({2, 5, 3}, -1, 1, 1)}}};
  });
}

}  // namespace tessera
