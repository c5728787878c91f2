// Bodies written by hand for tests and measurements, and the small builder that makes them: loads,
// ops and stores are added in order, and their loop masks follow from the operands.
#pragma once
#include <string>
#include <vector>

#include "compile/codegen/fused.h"
#include "core/tensor/shape.h"

namespace tessera::compiler {

class BodyBuilder {
 public:
  explicit BodyBuilder(std::initializer_list<int64_t> extents) {
    for (int64_t e : extents) body.extents.push_back(e);
  }

  /// Dense strides over the loops of `mask`, in order.
  Access dense(LoopMask mask, DType dtype) const {
    Access a{dtype, {}};
    a.strides.resize(body.extents.size());
    int64_t stride = 1;
    for (size_t l = body.extents.size(); l-- > 0;)
      if (mask >> l & 1) a.strides[l] = stride, stride *= body.extents[l];
    return a;
  }
  InstrId load(const Access& a) {
    body.operands.push_back(a);
    Instr i{.kind = InstrKind::kLoad, .dtype = a.dtype, .operand = int(body.operands.size()) - 1};
    for (size_t l = 0; l < a.strides.size(); ++l)
      if (a.strides[l]) i.loops |= 1u << l;
    return add(i);
  }
  InstrId load(LoopMask mask, DType dtype = kF32) { return load(dense(mask, dtype)); }
  InstrId constant(Scalar value, DType dtype = kF32) {
    Instr i{.kind = InstrKind::kConstant, .dtype = dtype};
    i.value = value;
    return add(i);
  }
  InstrId index(int loop) {
    return add({.kind = InstrKind::kIndex, .dtype = kI64, .loops = 1u << loop, .loop = loop});
  }
  InstrId op(const std::string& name, std::initializer_list<InstrId> in, bool to_bool = false) {
    Instr i{.kind = InstrKind::kPointwise, .op = name};
    for (InstrId id : in) i.in.push_back(id), i.loops |= at(id).loops;
    i.dtype = to_bool ? kBool : at(i.in.back()).dtype;
    return add(i);
  }
  InstrId cast(InstrId x, DType dtype) {
    Instr i{.kind = InstrKind::kCast, .dtype = dtype, .loops = at(x).loops};
    i.in.push_back(x);
    return add(i);
  }
  InstrId reduce(ReduceKind kind, InstrId x, LoopMask over) {
    Instr i{.kind = InstrKind::kReduce, .dtype = at(x).dtype};
    i.in.push_back(x);
    i.loops = at(x).loops & ~over, i.reduce = kind, i.reduced = over;
    if (kind <= ReduceKind::kProd && is_integral(i.dtype)) i.dtype = kI64;
    if (kind >= ReduceKind::kAny) i.dtype = i.dtype == kU8 ? kU8 : kBool;
    return add(i);
  }
  InstrId sum(InstrId x, LoopMask over) { return reduce(ReduceKind::kSum, x, over); }
  void store(InstrId value, const Access& to) { body.stores.push_back({value, to}); }
  void store(InstrId value) { store(value, dense(at(value).loops, at(value).dtype)); }

  const Instr& at(InstrId id) const { return body.instrs[size_t(id)]; }

  Body body;

 private:
  InstrId add(Instr i) {
    body.instrs.push_back(std::move(i));
    return InstrId(body.instrs.size()) - 1;
  }
};

/// y = softmax(x) over the last of two loops.
inline Body softmax_body(int64_t rows, int64_t n, DType dtype = kF32) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3, dtype), m = b.reduce(ReduceKind::kMax, x, 2);
  InstrId e = b.op("exp", {b.op("sub", {x, m})});
  b.store(b.op("div", {e, b.sum(e, 2)}));
  return b.body;
}

/// y = (x - mean) rstd w + b; stores y, mean, rstd.
inline Body layer_norm_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), w = b.load(2), bias = b.load(2), inv = b.constant(1.0 / double(n));
  InstrId mean = b.op("mul", {b.sum(x, 2), inv}), d = b.op("sub", {x, mean});
  InstrId var = b.op("mul", {b.sum(b.op("square", {d}), 2), inv});
  InstrId rstd = b.op("rsqrt", {b.op("add", {var, b.constant(1e-5)})});
  b.store(b.op("add", {b.op("mul", {b.op("mul", {d, rstd}), w}), bias}));
  b.store(mean), b.store(rstd);
  return b.body;
}

/// dx, dw, db of layer norm, of g, x, w, mean and rstd.
inline Body layer_norm_grad_body(int64_t rows, int64_t n) {
  BodyBuilder b({rows, n});
  InstrId g = b.load(3), x = b.load(3), w = b.load(2), mean = b.load(1), rstd = b.load(1);
  InstrId inv = b.constant(1.0 / double(n));
  InstrId h = b.op("mul", {b.op("sub", {x, mean}), rstd}), gw = b.op("mul", {g, w});
  InstrId a = b.op("mul", {b.sum(gw, 2), inv});
  InstrId c = b.op("mul", {b.sum(b.op("mul", {gw, h}), 2), inv});
  InstrId inner = b.op("sub", {b.op("sub", {gw, a}), b.op("mul", {h, c})});
  b.store(b.op("mul", {inner, rstd}));
  b.store(b.sum(b.op("mul", {g, h}), 1)), b.store(b.sum(g, 1));
  return b.body;
}

/// Mean over rows of log(sum(exp(x))) - x[target], and (softmax(x) - one_hot(target)) / rows.
inline Body cross_entropy_body(int64_t rows, int64_t n, bool with_grad = true) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3), target = b.load(1, kI64), inv = b.constant(1.0 / double(rows));
  InstrId m = b.reduce(ReduceKind::kMax, x, 2), e = b.op("exp", {b.op("sub", {x, m})});
  InstrId s = b.sum(e, 2), hit = b.op("eq", {b.index(1), target}, true);
  InstrId zero = b.constant(0.0), picked = b.sum(b.op("where", {hit, x, zero}), 2);
  InstrId lse = b.op("add", {b.op("log", {s}), m});
  b.store(b.op("mul", {b.sum(b.op("sub", {lse, picked}), 1), inv}));
  if (with_grad) {
    InstrId one_hot = b.op("where", {hit, b.constant(1.0), zero});
    b.store(b.op("mul", {b.op("sub", {b.op("div", {e, s}), one_hot}), inv}));
  }
  return b.body;
}

/// One AdamW step of `n` elements: p, g, m, v and 0-d lr, c1, c2 to p, m, v.
inline Body adamw_body(int64_t n) {
  BodyBuilder b({n});
  InstrId p = b.load(1), g = b.load(1), m = b.load(1), v = b.load(1);
  InstrId lr = b.load(0), c1 = b.load(0), c2 = b.load(0);
  auto c = [&](double x) { return b.constant(x); };
  auto mul = [&](InstrId x, InstrId y) { return b.op("mul", {x, y}); };
  auto add = [&](InstrId x, InstrId y) { return b.op("add", {x, y}); };
  InstrId m2 = add(mul(m, c(0.9)), mul(g, c(0.1)));
  InstrId v2 = add(mul(v, c(0.999)), mul(b.op("square", {g}), c(0.001)));
  InstrId decay = b.op("sub", {c(1.0), mul(lr, c(0.01))});
  InstrId denominator = add(b.op("div", {b.op("sqrt", {v2}), b.op("sqrt", {c2})}), c(1e-8));
  InstrId step = b.op("div", {mul(b.op("div", {lr, c1}), m2), denominator});
  b.store(b.op("sub", {mul(p, decay), step}));
  b.store(m2), b.store(v2);
  return b.body;
}

/// y = gelu(x + bias) over [rows, n].
inline Body bias_gelu_body(int64_t rows, int64_t n, DType dtype = kF32) {
  BodyBuilder b({rows, n});
  InstrId x = b.load(3, dtype), bias = b.load(2, dtype);
  b.store(b.op("gelu", {b.op("add", {x, bias})}));
  return b.body;
}

/// Shape and strides of what `a` reaches: dims in the order of the loops it varies with.
inline Meta meta_of(const Body& body, const Access& a) {
  Meta m;
  m.dtype = a.dtype;
  for (size_t l = 0; l < body.extents.size(); ++l)
    if (a.strides[l]) m.shape.push_back(body.extents[l]), m.strides.push_back(a.strides[l]);
  return m;
}
inline Metas results_of(const Body& body) {
  Metas m;
  for (const Store& s : body.stores) m.push_back(meta_of(body, s.to));
  return m;
}

}  // namespace tessera::compiler
