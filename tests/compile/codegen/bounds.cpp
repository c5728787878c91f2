#include "tests/compile/codegen/bounds.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "core/core.h"
#include "core/dispatch/copy.h"
#include "core/tensor/element.h"

namespace tessera::test {

using namespace compiler;
namespace {

Tensor wide(const Tensor& x) { return cast(x, kF64); }
Tensor number(double v) { return scalar_tensor(v, kF64); }
const Tensor& infinite() {
  static const Tensor t = number(HUGE_VAL);
  return t;
}

// The error of one operation, relative to its result: on each side one rounding to the dtype, and a
// few units in the last place of the functions that are evaluated in f64 for the bound.
double roundings(DType t) {
  return t == kF64 ? 0x1p-49 : t == kF32 ? 0x1p-20 : t == kF16 ? 0x1p-9 : 0x1p-6;
}
// Sums of f32 move on to double after 128 elements of a lane or 64 rows, others count whole.
double sum_error(int64_t n, DType t) {
  return t == kF64 ? double(n + 8) * 0x1p-52 : double(std::min<int64_t>(n, 256) + 16) * 0x1p-23;
}

class Bounds {
 public:
  Bounds(const Body& body, std::span<const Tensor> in) : b_(body), in_(in) {}

  std::vector<Bounded> run() {
    for (const Instr& i : b_.instrs) values_.push_back(value(i));
    std::vector<Bounded> result;
    for (const Store& s : b_.stores) result.push_back(values_[size_t(s.value)]);
    return result;
  }

 private:
  Shape shape_of(LoopMask loops) const {
    Shape s;
    for (size_t l = 0; l < b_.extents.size(); ++l)
      s.push_back(loops >> l & 1 ? b_.extents[l] : int64_t(1));
    return s;
  }
  const Bounded& operand(const Instr& i, size_t k = 0) const { return values_[size_t(i.in[k])]; }

  Bounded value(const Instr& i) const {
    switch (i.kind) {
      case InstrKind::kLoad: {
        const Access& a = b_.operands[size_t(i.operand)];
        const Tensor& t = in_[size_t(i.operand)];
        Tensor seen({shape_of(i.loops), Strides(std::span(a.strides.begin(), a.strides.size())),
                     a.dtype, t.device()},
                    t.storage(), t.offset());
        return {dense_copy(seen), {}};
      }
      case InstrKind::kConstant: return {reshape(scalar_tensor(i.value, i.dtype), shape_of(0)), {}};
      case InstrKind::kIndex:
        return {reshape(arange(0, b_.extents[size_t(i.loop)]), shape_of(1u << i.loop)), {}};
      case InstrKind::kReduce: return reduce(i);
      default: return pointwise(i);
    }
  }

  static Tensor apply(const Instr& i, Tensors in, DType to) {
    if (i.kind == InstrKind::kCast) return cast(in[0], to);
    if (i.op == "where") return where(in[0], in[1], in[2]);
    return std::move(eager_backend().run(pointwise_primitive(i.op), in)[0]);
  }
  bool is_exp_below_max(const Instr& i) const {
    if (i.op != "exp" || i.dtype != kF32) return false;
    const Instr& d = b_.instrs[size_t(i.in[0])];
    if (d.op != "sub") return false;
    const Instr& m = b_.instrs[size_t(d.in[1])];
    return m.kind == InstrKind::kReduce && m.reduce == ReduceKind::kMax && m.in[0] == d.in[0];
  }

  // If the bits of all operands are known, so are the result's. Else the result is somewhere
  // between the values that the ends of the operands' intervals give.
  Bounded pointwise(const Instr& i) const {
    Tensors in;
    bool rounded = false;
    for (size_t k = 0; k < i.in.size(); ++k)
      in.push_back(operand(i, k).value), rounded = rounded || operand(i, k).rounded();
    Bounded r{apply(i, in, i.dtype), {}};
    const Tensor v = wide(r.value);
    const Tensor least =
        is_exp_below_max(i) ? where(isnan(v), number(0), abs(v) * 0x1p-22 + 0x1p-126) : number(0);
    if (!rounded) {
      if (is_exp_below_max(i)) r.error = least;
      return r;
    }
    Tensor open = full(v.shape(), false, {kBool}), moves = open;
    for (size_t k = 0; k < in.size(); ++k) {
      if (!operand(i, k).rounded()) continue;
      const Tensor& error = operand(i, k).error;
      moves = logical_or(moves, error > 0.0);
      open = logical_or(open, isinf(error));
      if (asks_for_sign(i.op, k)) open = logical_or(open, abs(wide(in[k])) <= error);
    }
    const bool wave = i.op == "sin" || i.op == "cos";
    const Tensor most = wave ? wave_moved(i, in[0]) : ends_moved(i, in, v);
    if (is_floating(i.dtype)) {
      const double within = wave || ends_are_furthest(i) ? 1 : 2;
      Tensor moved = most * within + (abs(v) + most) * roundings(i.dtype) + 0x1p-140;
      moved = where(isnan(moved), infinite(), moved);
      moved = where(isfinite(v), moved, most);
      r.error = where(open, infinite(), where(moves, moved, least));
    } else {
      r.error = where(logical_or(open, most > 0.0), infinite(), zeros_like(v));
    }
    return r;
  }
  // The largest distance from `v` that the ends of the operands' intervals give.
  Tensor ends_moved(const Instr& i, const Tensors& in, const Tensor& v) const {
    Tensor most = zeros_like(v);
    for (uint32_t corner = 0; corner < 1u << in.size(); ++corner) {
      Tensors at;
      for (size_t k = 0; k < in.size(); ++k) {
        const bool real = is_floating(in[k].dtype());
        if (corner >> k & 1 && !(operand(i, k).rounded() && real)) break;
        Tensor x = real ? wide(in[k]) : in[k];
        if (operand(i, k).rounded() && real)
          x = corner >> k & 1 ? x + operand(i, k).error : x - operand(i, k).error;
        at.push_back(x);
      }
      if (at.size() < in.size()) continue;
      Tensor end = wide(apply(i, at, is_floating(i.dtype) ? kF64 : i.dtype));
      Tensor same = logical_or(end == v, logical_and(isnan(end), isnan(v)));
      Tensor apart = abs(end - v);
      most = maximum(most, where(same, zeros_like(v), where(isnan(apart), infinite(), apart)));
    }
    return most;
  }
  // For sines and cosines the ends tell nothing: the distance is |f'(x)| e + e^2 / 2, and never
  // more than 2.
  Tensor wave_moved(const Instr& i, const Tensor& in) const {
    const Tensor x = wide(in), &e = operand(i).error;
    const Tensor slope = abs(i.op == "sin" ? cos(x) : sin(x));
    return minimum(slope * e + square(e) * 0.5, number(2));
  }
  // True for functions that are monotonic in each operand, or a parabola: no point between the ends
  // is further away.
  static bool ends_are_furthest(const Instr& i) {
    static const char* ops[] = {
        "add",        "sub",   "mul",  "div",   "neg",   "abs",  "square",  "sqrt",    "rsqrt",
        "exp",        "expm1", "log",  "log1p", "tanh",  "erf",  "sigmoid", "maximum", "minimum",
        "reciprocal", "relu",  "lerp", "where", "floor", "ceil", "round",   "sign",    "tanh_grad"};
    return i.kind == InstrKind::kCast || std::ranges::count(ops, i.op) > 0;
  }
  // Whether the sign of a zero operand k matters. Which of the two zeros a sum is depends on its
  // order.
  static bool asks_for_sign(const std::string& op, size_t k) {
    static const char* ops[] = {"reciprocal", "rsqrt", "atan2", "log", "lgamma"};
    return (op == "div" && k == 1) || (op == "pow" && k == 0) || std::ranges::count(ops, op) > 0;
  }

  Bounded reduce(const Instr& i) const {
    const Bounded& x = operand(i);
    const LoopMask loops = b_.instrs[size_t(i.in[0])].loops | i.reduced;
    Tensor whole = expand(x.value, shape_of(loops));
    Tensor error = x.rounded() ? expand(x.error, shape_of(loops)) : zeros_like(wide(whole));
    Dims dims;
    int64_t n = 1;
    for (size_t l = 0; l < b_.extents.size(); ++l)
      if (i.reduced >> l & 1) dims.push_back(int64_t(l)), n *= b_.extents[l];
    Tensor open = any(logical_not(isfinite(error)), dims, true);
    auto result = [&](Tensor value, Tensor bound) {
      return Bounded{value, where(open, infinite(), bound)};
    };
    const bool real = is_floating(i.dtype);
    switch (i.reduce) {
      case ReduceKind::kMax:
      case ReduceKind::kMin: {
        Tensor v = i.reduce == ReduceKind::kMax ? amax(whole, dims, true) : amin(whole, dims, true);
        if (!real && !x.rounded()) return {v, {}};
        return result(v, amax(error, dims, true));
      }
      case ReduceKind::kAny:
      case ReduceKind::kAll: {
        Tensor v = i.reduce == ReduceKind::kAny ? any(whole, dims, true) : all(whole, dims, true);
        if (!x.rounded()) return {v, {}};
        return result(v, where(any(error > 0.0, dims, true), infinite(), number(0)));
      }
      case ReduceKind::kProd: {
        Tensor v = prod(whole, dims, true);
        if (!real) return x.rounded() ? result(v, zeros_like(wide(v))) : Bounded{v, {}};
        // Products of signs only; anything else rounds in each factor.
        Tensor unit = all(logical_or(abs(whole) == 1.0, whole == 0.0), dims, true);
        Tensor bound = where(unit, number(0), abs(wide(v)) * (double(n) * 0x1p-20) + 0x1p-140);
        return result(v, where(any(error > 0.0, dims, true), infinite(), bound));
      }
      default: return sum_of(i, x, whole, error, dims, n, result);
    }
  }
  template <class F>
  Bounded sum_of(const Instr& i, const Bounded& x, const Tensor& whole, const Tensor& error,
                 const Dims& dims, int64_t n, F result) const {
    Tensor v = sum(whole, dims, true);
    if (!is_floating(i.dtype)) {
      if (!x.rounded()) return {v, {}};
      return result(v, zeros_like(wide(v)));
    }
    Tensor terms = wide(whole), magnitudes = sum(abs(terms), dims, true);
    Tensor bound = sum(error, dims, true) + magnitudes * sum_error(n, i.dtype) +
                   abs(wide(v)) * roundings(i.dtype);
    // 64ths whose sum has all its digits, whatever the order.
    Tensor on_grid = all(terms * 64.0 == round(terms * 64.0), dims, true);
    Tensor exact = logical_and(on_grid, logical_and(magnitudes < 0x1p17, bound == bound));
    exact = logical_and(exact, logical_not(any(error > 0.0, dims, true)));
    bound = where(exact, number(0), bound + 0x1p-140);
    // Partial sums beyond the largest number come in one order and not in another.
    Tensor finite = all(isfinite(terms), dims, true);
    bound = where(logical_and(finite, magnitudes > (i.dtype == kF64 ? 0x1p1000 : 0x1p126)),
                  infinite(), bound);
    return result(v, where(finite, bound, number(0)));
  }

  const Body& b_;
  std::span<const Tensor> in_;
  std::vector<Bounded> values_;
};

std::string text_of(const void* p, DType t) {
  uint64_t bits = 0;
  std::memcpy(&bits, p, size_of(t));
  return fmt::format("{} (0x{:x})", read_real(p, t), bits);
}

}  // namespace

std::vector<Bounded> bounds_of(const Body& body, std::span<const Tensor> in) {
  return Bounds(body, in).run();
}

std::string outside(const Body& body, size_t k, const Bounded& bounds, const Tensor& memory,
                    int64_t& unknown, int64_t& all) {
  const Access& to = body.stores[k].to;
  Shape shape;
  for (size_t l = 0; l < body.extents.size(); ++l)
    shape.push_back(to.strides[l] != 0 ? body.extents[l] : int64_t(1));
  Tensor got = dense_copy(Tensor(
      {shape, Strides(std::span(to.strides.begin(), to.strides.size())), to.dtype, memory.device()},
      memory.storage(), memory.offset()));
  Tensor want = dense_copy(expand(bounds.value, shape)), error;
  if (bounds.rounded()) error = dense_copy(expand(bounds.error, shape));
  const size_t size = size_of(to.dtype);
  all += got.numel();
  for (int64_t i = 0; i < got.numel(); ++i) {
    const char *p = static_cast<const char*>(got.raw()) + size_t(i) * size,
               *q = static_cast<const char*>(want.raw()) + size_t(i) * size;
    const double bound = error.defined() ? error.data<double>()[i] : 0;
    if (std::isinf(bound)) ++unknown;
    if (std::isinf(bound) || std::memcmp(p, q, size) == 0) continue;
    const double x = read_real(p, to.dtype), y = read_real(q, to.dtype);
    if ((std::isnan(x) && std::isnan(y)) || (error.defined() && std::abs(x - y) <= bound)) continue;
    return fmt::format("result {}, element {}: {}, expected {} within {}", k, i,
                       text_of(p, to.dtype), text_of(q, to.dtype), bound);
  }
  return "";
}

}  // namespace tessera::test
