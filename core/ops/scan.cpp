// Scans and their gradients. The gradient of a running product, and of a running logsumexp, is a
// linear recurrence, whose own gradient is the recurrence run backwards: linear in time and exact
// at zeros.
#include "core/ops/scan.h"

#include "core/dispatch/context.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/dim_attributes.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

// Element i of the result is element i - 1 of `x` (i + 1 when `reverse`), zero at the border.
Tensor shifted(const Tensor& x, int dim, bool reverse) {
  int64_t n = x.shape()[dim];
  if (n == 0) return x;
  return reverse ? unslice(narrow(x, dim, 1, n - 1), dim, 0, 1, n)
                 : unslice(narrow(x, dim, 0, n - 1), dim, 1, 1, n);
}

void check_float(std::string_view op, MetaSpan in) {
  for (const Meta* m : in)
    TESSERA_CHECK_AS(ShapeError,
                     m->shape == in[0]->shape && m->dtype == in[0]->dtype && is_floating(m->dtype),
                     "{}: takes floats of one shape and dtype, got {}", op, describe(in));
}

class CumSum final : public PrimitiveOf<CumSum, ScanAttributes> {
 public:
  static inline const OpInfo kOp{"cumsum", {OpKind::kOther, Precision::kWide, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = along_dim_axes(in, infer(in), dim);
    m.jointly_linear = true;
    return m;
  }
  Tensors vjp(const VjpArgs& v) const override {
    return {dispatch1(PrimRef(new CumSum({dim, !reverse})), operands(Tensor(v.cot[0])))};
  }
};

class LinearScan final : public PrimitiveOf<LinearScan, ScanAttributes> {
 public:
  static inline const OpInfo kOp{"linear_scan", {OpKind::kOther, Precision::kAsGiven, 2}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    check_float(name(), in);
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = along_dim_axes(in, infer(in), dim);
    m.linear_in = 2;
    return m;
  }
  SaveMask saved() const override { return {1, 1}; }
  Tensors vjp(const VjpArgs& v) const override {
    Tensor db = linear_scan(shifted(v.in[0], dim, !reverse), v.cot[0], dim, !reverse);
    return {v.wants(0) ? db * shifted(v.out[0], dim, reverse) : Tensor(), db};
  }
};

class CumProd final : public PrimitiveOf<CumProd, DimAttributes> {
 public:
  static inline const OpInfo kOp{"cumprod", {OpKind::kOther, Precision::kWide, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return along_dim_axes(in, infer(in), dim); }
  SaveMask saved() const override { return {1, 1}; }
  // dx[i] = (x[0] .. x[i-1]) s[i] with s[i] = g[i] + x[i+1] s[i+1].
  Tensors vjp(const VjpArgs& v) const override {
    int64_t n = v.in[0].shape()[dim];
    if (n == 0) return {v.cot[0]};
    Tensor s = linear_scan(shifted(v.in[0], dim, true), v.cot[0], dim, true);
    Shape one = v.in[0].shape();
    one[dim] = 1;
    Tensor before[] = {expand(scalar_tensor(1.0, s.dtype(), s.device()), one),
                       narrow(v.out[0], dim, 0, n - 1)};
    return {cat(before, dim) * s};
  }
};

class CumExtreme final : public PrimitiveOf<CumExtreme, DimAttributes> {
 public:
  static inline const OpInfo kMax{"cummax", {OpKind::kOther, Precision::kAsGiven, 1}},
      kMin{"cummin", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device),
            Meta::contiguous(in[0]->shape, kI64, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return along_dim_axes(in, infer(in), dim); }
  SaveMask saved() const override { return {0, 2}; }
  Tensors vjp(const VjpArgs& v) const override {
    return {v.cot[0].defined() ? scatter_sum(v.in[0], dim, v.out[1], v.cot[0]) : Tensor()};
  }
};

class LogCumSumExp final : public PrimitiveOf<LogCumSumExp, DimAttributes> {
 public:
  static inline const OpInfo kOp{"logcumsumexp", {OpKind::kOther, Precision::kWide, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    check_float(name(), in);
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return along_dim_axes(in, infer(in), dim); }
  SaveMask saved() const override { return {1, 1}; }
  // dx[i] = exp(x[i] - y[i]) t[i] with t[i] = g[i] + exp(y[i] - y[i+1]) t[i+1]; no exponent is
  // positive.
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor &x = v.in[0], &y = v.out[0];
    int64_t n = x.shape()[dim];
    if (n == 0) return {v.cot[0]};
    Tensor step = exp(narrow(y, dim, 0, n - 1) - narrow(y, dim, 1, n - 1));
    Tensor t = linear_scan(unslice(step, dim, 0, 1, n), v.cot[0], dim, true);
    return {exp(x - y) * t};
  }
};

// Integers are summed in i64; a tensor without dims is its own scan.
Tensor accumulated(const Tensor& x) { return is_integral(x.dtype()) ? cast(x, kI64) : x; }

template <class P, class... A>
Tensor run(const char* op, const Tensor& x, int64_t dim, A... attributes) {
  int d = wrap_dim(dim, x.ndim(), op);
  if (x.ndim() == 0) return x;
  return dispatch1(PrimRef(new P({d, attributes...})), operands(Tensor(x)));
}

ValuesAndIndices running_extreme(bool largest, const char* op, const Tensor& x, int64_t dim) {
  int d = wrap_dim(dim, x.ndim(), op);
  Tensors out =
      dispatch(PrimRef(new CumExtreme(largest ? CumExtreme::kMax : CumExtreme::kMin, {d})),
               operands(x.ndim() ? Tensor(x) : reshape(x, {1})));
  if (x.ndim() == 0) return {reshape(out[0], {}), reshape(out[1], {})};
  return {out[0], out[1]};
}

}  // namespace

Tensor cumsum(const Tensor& x, int64_t dim) {
  return run<CumSum>("cumsum", accumulated(x), dim, false);
}
Tensor cumprod(const Tensor& x, int64_t dim) {
  return run<CumProd>("cumprod", accumulated(x), dim);
}
ValuesAndIndices cummax(const Tensor& x, int64_t dim) {
  return running_extreme(true, "cummax", x, dim);
}
ValuesAndIndices cummin(const Tensor& x, int64_t dim) {
  return running_extreme(false, "cummin", x, dim);
}
Tensor logcumsumexp(const Tensor& x, int64_t dim) {
  return run<LogCumSumExp>("logcumsumexp",
                           is_floating(x.dtype()) ? x : cast(x, context().default_dtype), dim);
}

Tensor linear_scan(const Tensor& a, const Tensor& b, int64_t dim, bool reverse) {
  int d = wrap_dim(dim, a.ndim(), "linear_scan");
  return dispatch1(PrimRef(new LinearScan({d, reverse})), operands(Tensor(a), Tensor(b)));
}

Tensor diff(const Tensor& x, int64_t order, int64_t dim) {
  int d = wrap_dim(dim, x.ndim(), "diff");
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 0 && order >= 0, "diff: order {} of {}", order,
                   describe(x));
  Tensor y = x;
  for (int64_t i = 0; i < order && y.shape()[d] > 0; ++i) {
    int64_t n = y.shape()[d];
    Tensor next = narrow(y, d, 1, n - 1), last = narrow(y, d, 0, n - 1);
    y = y.dtype() == kBool ? ne(next, last) : next - last;
  }
  return y;
}

void register_scan_ops(OpRegistry& registry) {
  auto x = [](uint64_t key) { return sample_values({3, 4, 2}, -1, 1, key); };
  registry.add("cumsum", [=] {
    return std::vector<Sample>{
        {PrimRef(new CumSum({1, false})), {x(1)}},
        {PrimRef(new CumSum({2, true})), {x(2)}},
        {PrimRef(new CumSum({0, false})), {sample_integers({5}, 0, 9, 3)}, false}};
  });
  registry.add("cumprod", [=] {
    return std::vector<Sample>{{PrimRef(new CumProd({1})), {x(1)}},
                               {PrimRef(new CumProd({2})), {x(2)}}};
  });
  registry.add("linear_scan", [=] {
    return std::vector<Sample>{{PrimRef(new LinearScan({1, false})), {x(1), x(2)}},
                               {PrimRef(new LinearScan({2, true})), {x(1), x(2)}}};
  });
  for (bool largest : {true, false})
    registry.add(largest ? "cummax" : "cummin", [=] {
      const OpInfo& op = largest ? CumExtreme::kMax : CumExtreme::kMin;
      return std::vector<Sample>{
          {PrimRef(new CumExtreme(op, {1})), {x(1)}},
          {PrimRef(new CumExtreme(op, {0})), {sample_integers({5, 2}, 0, 3, 3)}, false}};
    });
  registry.add("logcumsumexp", [=] {
    return std::vector<Sample>{{PrimRef(new LogCumSumExp({1})), {x(1)}},
                               {PrimRef(new LogCumSumExp({2})), {x(2)}}};
  });
}

}  // namespace tessera
