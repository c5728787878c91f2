// Factorisations and triangular systems. Their derivatives are matrix products, triangles and
// triangular systems, so they can be differentiated again. Invariant: a matrix is never cut; loops
// of the batch may be.
#include "core/ops/linalg.h"

#include <cmath>
#include <limits>

#include "core/dispatch/dispatch.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/linalg_attributes.h"
#include "core/ops/pointwise.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

using linalg::MatrixNorm;

Tensor transposed(const Tensor& x) { return transpose(x, -2, -1); }
// x [.., N] as rows (or columns) to multiply a matrix with.
Tensor along_columns(const Tensor& x) { return unsqueeze(x, -2); }
Tensor along_rows(const Tensor& x) { return unsqueeze(x, -1); }

// The lower triangle with half of the diagonal: its own adjoint.
Tensor half_lower(const Tensor& x) { return (tril(x) + tril(x, -1)) * 0.5; }

Tensor identity(int64_t n, const Tensor& like) {
  return eye(n, n, {.dtype = like.dtype(), .device = like.device()});
}

void check_matrix(std::string_view op, const Meta& m, bool square) {
  const Shape& s = m.shape;
  TESSERA_CHECK_AS(
      ShapeError,
      s.size() >= 2 && (!square || s[s.size() - 1] == s[s.size() - 2]) && is_floating(m.dtype),
      "{}: takes {}matrices of floats [.., {}], got {}{}", op, square ? "square " : "",
      square ? "N, N" : "M, N", name_of(m.dtype), to_string(s));
}

Shape with_matrix(const Shape& batch_of, std::initializer_list<int64_t> last) {
  Shape s;
  for (int d = 0; d + 2 < batch_of.size(); ++d) s.push_back(batch_of[d]);
  for (int64_t n : last) s.push_back(n);
  return s;
}

// Loops of an op on batches of matrices: leading dims are shared, what follows is given dim by dim.
class BatchLoops {
 public:
  BatchLoops(const Shape& shape, int batch) : batch_(batch) {
    for (int d = 0; d < batch; ++d) map.add(Factor::kPass, shape[d]);
  }
  int loop(Factor::Kind kind, int64_t extent) { return map.add(kind, extent); }
  OperandLoops dims(std::initializer_list<int> matrix) const {
    OperandLoops l;
    for (int d = 0; d < batch_; ++d) l.push_back({d});
    for (int f : matrix) l.push_back({f});
    return l;
  }
  AxisMap map;

 private:
  int batch_;
};

class Cholesky final : public Primitive {
 public:
  static inline const OpInfo kOp{"cholesky", {OpKind::kOther, Precision::kWide, 1}};
  Cholesky() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    check_matrix("cholesky", *in[0], true);
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape& s = in[0]->shape;
    BatchLoops b(s, s.size() - 2);
    int rows = b.loop(Factor::kWhole, s.back()), columns = b.loop(Factor::kWhole, s.back());
    b.map.in.push_back(b.dims({rows, columns}));
    b.map.out.push_back(b.dims({rows, columns}));
    return b.map;
  }
  SaveMask saved() const override { return {0, 1}; }
  // S = L'^-1 phi(L' Lbar) L^-1, made symmetric.
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor& l = v.out[0];
    Tensor phi = half_lower(matmul(transposed(l), v.cot[0]));
    Tensor s = linalg::solve_triangular(transposed(l), phi, {.upper = true});
    s = linalg::solve_triangular(l, s, {.upper = false, .left = false});
    return {(s + transposed(s)) * 0.5};
  }
};

class SolveTriangular final : public PrimitiveOf<SolveTriangular, SolveTriangularAttributes> {
 public:
  static inline const OpInfo kOp{"solve_triangular", {OpKind::kOther, Precision::kWide, 2}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    const Meta &a = *in[0], &b = *in[1];
    check_matrix("solve_triangular", a, true);
    check_matrix("solve_triangular", b, false);
    int n = b.shape.size();
    bool fits = a.shape.size() == n && a.dtype == b.dtype &&
                a.shape[n - 1] == b.shape[left ? n - 2 : n - 1];
    for (int d = 0; d < n - 2 && fits; ++d) fits = a.shape[d] == b.shape[d];
    TESSERA_CHECK_AS(ShapeError, fits, "solve_triangular: {} do not fit; a is [.., N, N], b {}",
                     describe(in), left ? "[.., N, K]" : "[.., K, N] (left = false)");
    return {Meta::contiguous(b.shape, b.dtype, b.device)};
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape &a = in[0]->shape, &b = in[1]->shape;
    int n = b.size();
    BatchLoops l(b, n - 2);
    int rows = l.loop(Factor::kWhole, a.back()), columns = l.loop(Factor::kWhole, a.back()),
        sides = l.loop(Factor::kPass, b[left ? n - 1 : n - 2]);
    l.map.in.push_back(l.dims({rows, columns}));
    OperandLoops of_b = left ? l.dims({rows, sides}) : l.dims({sides, columns});
    l.map.in.push_back(of_b), l.map.out.push_back(of_b);
    l.map.linear_in = 2;
    return l.map;
  }
  SaveMask saved() const override { return {1, 1}; }
  // With a x = b: bbar solves a' bbar = xbar, and abar is -bbar x' where a is read.
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor &a = v.in[0], &x = v.out[0];
    Tensor b = linalg::solve_triangular(
        transposed(a), v.cot[0], {.upper = !upper, .left = left, .unitriangular = unitriangular});
    if (!v.wants(0)) return {Tensor(), b};
    Tensor g = left ? matmul(b, transposed(x)) : matmul(transposed(x), b);
    int64_t skip = unitriangular ? 1 : 0;
    return {neg(upper ? triu(g, skip) : tril(g, -skip)), b};
  }
};

class QrOp final : public Primitive {
 public:
  static inline const OpInfo kOp{"qr", {OpKind::kOther, Precision::kWide, 1}};
  QrOp() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    check_matrix("qr", *in[0], false);
    const Shape& s = in[0]->shape;
    int64_t m = s[s.size() - 2], n = s.back(), k = std::min(m, n);
    return {Meta::contiguous(with_matrix(s, {m, k}), in[0]->dtype, in[0]->device),
            Meta::contiguous(with_matrix(s, {k, n}), in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape& s = in[0]->shape;
    int64_t m = s[s.size() - 2], n = s.back();
    BatchLoops b(s, s.size() - 2);
    int rows = b.loop(Factor::kWhole, m), columns = b.loop(Factor::kWhole, n),
        inner = b.loop(Factor::kWhole, std::min(m, n));
    b.map.in.push_back(b.dims({rows, columns}));
    b.map.out.push_back(b.dims({rows, inner}));
    b.map.out.push_back(b.dims({inner, columns}));
    return b.map;
  }
  SaveMask saved() const override { return {0, 3}; }
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor &q = v.out[0], &r = v.out[1], &gq = v.cot[0], &gr = v.cot[1];
    const int64_t k = r.size(-2), n = r.size(-1);
    if (k == n) return {tall(q, r, gq, gr)};
    // a = [x y] with x = q u square and y = q w, where r = [u w]: w adds to the cotangents of q.
    auto columns = [&](const Tensor& t, int64_t begin, int64_t size) {
      return t.defined() ? narrow(t, -1, begin, size) : t;
    };
    Tensor u = columns(r, 0, k), w = columns(r, k, n - k), gu = columns(gr, 0, k), gy, whole = gq;
    if (gr.defined()) {
      Tensor gw = columns(gr, k, n - k);
      gy = matmul(q, gw);
      Tensor more = matmul(matmul(q, w), transposed(gw));
      whole = gq.defined() ? gq + more : more;
    }
    Tensor gx = tall(q, u, whole, gu);
    if (!gy.defined()) return {unslice(gx, gx.ndim() - 1, 0, 1, n)};
    Tensor parts[] = {gx, gy};
    return {cat(parts, -1)};
  }

 private:
  // (qbar + q copyltu(r rbar' - qbar' q)) r'^-1, where copyltu mirrors the lower triangle.
  static Tensor tall(const Tensor& q, const Tensor& r, const Tensor& gq, const Tensor& gr) {
    Tensor m;
    if (gr.defined()) m = matmul(r, transposed(gr));
    if (gq.defined()) {
      Tensor t = matmul(transposed(gq), q);
      m = m.defined() ? m - t : neg(t);
    }
    Tensor g = matmul(q, tril(m) + transposed(tril(m, -1)));
    if (gq.defined()) g = g + gq;
    return linalg::solve_triangular(transposed(r), g, {.upper = false, .left = false});
  }
};

class SvdOp final : public Primitive {
 public:
  static inline const OpInfo kOp{"svd", {OpKind::kOther, Precision::kWide, 1}};
  SvdOp() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    check_matrix("svd", *in[0], false);
    const Shape& s = in[0]->shape;
    int64_t m = s[s.size() - 2], n = s.back(), k = std::min(m, n);
    auto meta = [&](std::initializer_list<int64_t> last) {
      return Meta::contiguous(with_matrix(s, last), in[0]->dtype, in[0]->device);
    };
    return {meta({m, k}), meta({k}), meta({k, n})};
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape& s = in[0]->shape;
    int64_t m = s[s.size() - 2], n = s.back();
    BatchLoops b(s, s.size() - 2);
    int rows = b.loop(Factor::kWhole, m), columns = b.loop(Factor::kWhole, n),
        inner = b.loop(Factor::kWhole, std::min(m, n));
    b.map.in.push_back(b.dims({rows, columns}));
    b.map.out.push_back(b.dims({rows, inner}));
    b.map.out.push_back(b.dims({inner}));
    b.map.out.push_back(b.dims({inner, columns}));
    return b.map;
  }
  SaveMask saved() const override { return {0, 7}; }
  // u [ (skew(u' ubar) / e) s + s (skew(v' vbar) / e) + diag(sbar) ] v', e_jk = s_k^2 - s_j^2, and
  // what ubar and vbar have outside the spaces of u and v.
  Tensors vjp(const VjpArgs& c) const override {
    const Tensor &u = c.out[0], &s = c.out[1], &vh = c.out[2];
    const Tensor &gu = c.cot[0], &gs = c.cot[1], &gvh = c.cot[2];
    const int64_t k = s.size(-1);
    Tensor eye = identity(k, s), core, gap, result;
    if (gu.defined() || gvh.defined()) gap = square(along_columns(s)) - square(along_rows(s)) + eye;
    auto add_to = [](Tensor& sum, Tensor term) {
      sum = sum.defined() ? sum + term : std::move(term);
    };
    auto skew = [](const Tensor& x) { return x - transposed(x); };
    if (gs.defined()) add_to(core, eye * along_rows(gs));
    if (gu.defined()) add_to(core, skew(matmul(transposed(u), gu)) / gap * along_columns(s));
    if (gvh.defined()) add_to(core, along_rows(s) * (skew(matmul(vh, transposed(gvh))) / gap));
    result = matmul(matmul(u, core), vh);
    if (gu.defined() && u.size(-2) > k) {
      Tensor t = gu / along_columns(s);
      add_to(result, matmul(t - matmul(u, matmul(transposed(u), t)), vh));
    }
    if (gvh.defined() && vh.size(-1) > k) {
      Tensor t = gvh / along_rows(s);
      add_to(result, matmul(u, t - matmul(matmul(t, transposed(vh)), vh)));
    }
    return {result};
  }
};

// a with the two dims last.
Tensor matrices_last(const Tensor& a, const Dims& dims) {
  TESSERA_CHECK_AS(ShapeError, dims.size() == 2, "matrix_norm: {} dims named, a matrix has 2",
                   dims.size());
  int rows = wrap_dim(dims[0], a.ndim(), "matrix_norm"),
      columns = wrap_dim(dims[1], a.ndim(), "matrix_norm");
  TESSERA_CHECK_AS(ShapeError, rows != columns && a.ndim() >= 2,
                   "matrix_norm: dims {} of {} are no matrix", to_string(dims), describe(a));
  return movedim(a, {rows, columns}, {-2, -1});
}

// [..] with extents of 1 where the matrix was.
Tensor with_kept_dims(Tensor y, const Tensor& a, const Dims& dims, bool keepdim) {
  if (!keepdim) return y;
  Shape s = a.shape();
  for (int64_t d : dims) s[wrap_dim(d, a.ndim(), "matrix_norm")] = 1;
  return reshape(y, s);
}

}  // namespace

namespace linalg {

Tensor cholesky(const Tensor& a, bool upper) {
  static const PrimRef prim(new Cholesky);
  Tensor l = dispatch1(prim, operands(Tensor(a)));
  return upper ? transposed(l) : l;
}

Tensor solve_triangular(const Tensor& a, const Tensor& b, TriangularOptions o) {
  PrimRef prim(new SolveTriangular({o.upper, o.left, o.unitriangular}));
  if (a.ndim() < 2 || b.ndim() < 2) return dispatch1(prim, operands(Tensor(a), Tensor(b)));
  Shape of_a, of_b;
  for (int d = 0; d + 2 < a.ndim(); ++d) of_a.push_back(a.shape()[d]);
  for (int d = 0; d + 2 < b.ndim(); ++d) of_b.push_back(b.shape()[d]);
  if (of_a == of_b) return dispatch1(prim, operands(Tensor(a), Tensor(b)));
  Shape batch = broadcast(of_a, of_b, "solve_triangular"), to_a = batch, to_b = batch;
  for (int64_t d : {-2, -1}) to_a.push_back(a.size(d)), to_b.push_back(b.size(d));
  return dispatch1(prim, operands(expand(a, to_a), expand(b, to_b)));
}

QR qr(const Tensor& a) {
  static const PrimRef prim(new QrOp);
  Tensors out = dispatch(prim, operands(Tensor(a)));
  return {out[0], out[1]};
}

SVD svd(const Tensor& a) {
  static const PrimRef prim(new SvdOp);
  Tensors out = dispatch(prim, operands(Tensor(a)));
  return {out[0], out[1], out[2]};
}
Tensor svdvals(const Tensor& a) { return svd(a).s; }

Tensor matrix_norm(const Tensor& a, MatrixNorm ord, const Dims& dims, bool keepdim) {
  Tensor m = matrices_last(a, dims);
  Tensor y = ord == MatrixNorm::kFrobenius ? norm(m, 2, {-2, -1}) : sum(svdvals(m), {-1});
  return with_kept_dims(y, a, dims, keepdim);
}

Tensor matrix_norm(const Tensor& a, double ord, const Dims& dims, bool keepdim) {
  Tensor m = matrices_last(a, dims), sums;
  double kind = std::abs(ord);
  if (kind == 1)
    sums = norm(m, 1, {-2});
  else if (std::isinf(kind))
    sums = norm(m, 1, {-1});
  else if (kind == 2)
    sums = svdvals(m);
  else
    throw UserError(
        fmt::format("matrix_norm: there is no order {}; 1, -1, 2, -2, infinity, -infinity, "
                    "kFrobenius, kNuclear",
                    ord));
  return with_kept_dims(ord > 0 ? amax(sums, {-1}) : amin(sums, {-1}), a, dims, keepdim);
}

}  // namespace linalg

void register_linalg_ops(OpRegistry& registry) {
  // Well-conditioned: a diagonal of 3 to 4 on values in [-1, 1].
  auto matrices = [](const Shape& s, uint64_t key) {
    Tensor x = sample_values(s, -1, 1, key);
    return s.back() == s[s.size() - 2] ? x + identity(s.back(), x) * 3.5 : x;
  };
  registry.add("cholesky", [=] {
    PrimRef prim(new Cholesky);
    return std::vector<Sample>{{prim, {matrices({4, 4}, 1)}},
                               {prim, {matrices({3, 2, 3, 3}, 2)}},
                               {prim, {matrices({2, 1, 1}, 3)}}};
  });
  registry.add("solve_triangular", [=] {
    auto sample = [&](bool upper, bool left, bool unit, const Shape& a, const Shape& b) {
      return Sample{PrimRef(new SolveTriangular({upper, left, unit})),
                    {matrices(a, 1), sample_values(b, -1, 1, 2)}};
    };
    std::vector<Sample> all;
    for (bool upper : {false, true})
      for (bool left : {false, true})
        for (bool unit : {false, true})
          all.push_back(
              sample(upper, left, unit, {3, 3, 3}, left ? Shape{3, 3, 4} : Shape{3, 4, 3}));
    all.push_back(sample(false, true, false, {4, 4}, {4, 1}));
    return all;
  });
  registry.add("qr", [=] {
    PrimRef prim(new QrOp);
    return std::vector<Sample>{{prim, {matrices({4, 4}, 1)}},
                               {prim, {matrices({3, 5, 2}, 2)}},
                               {prim, {matrices({3, 2, 4}, 3)}}};
  });
  registry.add("svd", [=] {
    PrimRef prim(new SvdOp);
    return std::vector<Sample>{{prim, {matrices({3, 3}, 1)}},
                               {prim, {matrices({3, 5, 2}, 2)}},
                               {prim, {matrices({3, 2, 4}, 3)}}};
  });
}

}  // namespace tessera
