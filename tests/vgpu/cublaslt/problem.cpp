#include "tests/vgpu/cublaslt/problem.h"

#include <array>

namespace vgpu::blas {

namespace {

struct Named {
  int value;
  const char* name;
};
constexpr std::array kEpilogues{
    Named{kEpilogueDefault, "DEFAULT"},    Named{kEpilogueRelu, "RELU"},
    Named{kEpilogueReluAux, "RELU_AUX"},   Named{kEpilogueBias, "BIAS"},
    Named{kEpilogueReluBias, "RELU_BIAS"}, Named{kEpilogueReluAuxBias, "RELU_AUX_BIAS"},
    Named{kEpilogueGelu, "GELU"},          Named{kEpilogueGeluAux, "GELU_AUX"},
    Named{kEpilogueGeluBias, "GELU_BIAS"}, Named{kEpilogueGeluAuxBias, "GELU_AUX_BIAS"},
    Named{kEpilogueDGelu, "DGELU"},        Named{kEpilogueDGeluBGrad, "DGELU_BGRAD"},
    Named{kEpilogueBGradA, "BGRADA"},      Named{kEpilogueBGradB, "BGRADB"}};

std::string text(int64_t n) { return std::to_string(n); }

Refusal invalid(const std::string& why) { return {Status::kInvalidValue, why}; }
Refusal unsupported(const std::string& why) { return {Status::kNotSupported, why}; }

// The rows of the documentation's table that are emulated.
bool is_in_table(int compute, int scale, int a, int b, int cd) {
  if (is_f8(a) && is_f8(b))
    return compute == kCompute32F && scale == kR32F && !(a == kR8E5M2 && b == kR8E5M2) &&
           (cd == kR32F || cd == kR16F || cd == kR16BF);
  if (a != b) return false;
  const int ab = a;
  if (compute == kCompute64F) return scale == kR64F && ab == kR64F && cd == kR64F;
  if (scale != kR32F) return false;
  if (compute == kCompute32FFastTF32 || compute == kCompute32FEmulated16BFX9)
    return ab == kR32F && cd == kR32F;
  if (compute != kCompute32F) return false;
  if (ab == kR32F) return cd == kR32F;
  return (ab == kR16F || ab == kR16BF) && (cd == ab || cd == kR32F);
}

Refusal read_layout(Matrices& to, const char* name, Layout layout, int transpose) {
  if (!layout) return invalid(std::string("no layout of ") + name);
  const auto& l = static_cast<const LayoutState&>(*layout);
  if (l.order != kOrderColumn && l.order != kOrderRow)
    return unsupported(std::string("order ") + text(l.order) + " of " + name + " is not emulated");
  if (transpose != kAsIs && transpose != kTransposed && transpose != kConjugateTransposed)
    return invalid(std::string("no such transpose of ") + name + ": " + text(transpose));
  to.type = l.type, to.leading = l.leading, to.stride = l.batch_stride;
  to.rows = static_cast<int64_t>(l.rows), to.columns = static_cast<int64_t>(l.columns);
  to.by_rows = l.order == kOrderRow, to.transposed = transpose != kAsIs;
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (to.rows < 1 || to.columns < 1 || to.rows > kMost || to.columns > kMost)
    return invalid(std::string(name) + " has " + text(to.rows) + " rows and " + text(to.columns) +
                   " columns");
  if (l.leading < to.run())
    return invalid(std::string("the leading dimension of ") + name + " is " + text(l.leading) +
                   ", less than " + text(to.run()));
  if (l.batch_count < 1)
    return invalid(std::string(name) + " has a batch of " + text(l.batch_count));
  return {};
}

// The rules for factors of eight bits on cards of 8.9 and 9.0. A card may take more: columns of D
// that are multiples of 16 bytes rather than elements, or a batch.
std::string wrong_f8(const Problem& p) {
  if (!p.a.transposed || p.b.transposed) return "factors of eight bits that are not TN";
  if (p.a.by_rows || p.b.by_rows || p.c.by_rows || p.d.by_rows)
    return "factors of eight bits in the order of rows";
  if (p.k % 16 || p.m % 16)
    return "factors of eight bits with m " + text(p.m) + " and k " + text(p.k) +
           ", which are no multiples of 16";
  for (const Matrices* x : {&p.a, &p.b, &p.c, &p.d})
    if (x->leading * bytes_of(x->type) % 16)
      return "factors of eight bits with a leading dimension of " + text(x->leading) +
             ", which is no multiple of 16 bytes";
  const int epilogue = p.product.epilogue;
  if (epilogue != kEpilogueDefault && epilogue != kEpilogueBias)
    return "epilogue " + epilogue_name(epilogue) + " with factors of eight bits is not emulated";
  return p.batch > 1 ? "batches of factors of eight bits are not emulated" : "";
}

Refusal check_epilogue(const Problem& p) {
  const ProductState& s = p.product;
  const std::string name = epilogue_name(s.epilogue);
  if (name.empty()) return unsupported("epilogue " + text(s.epilogue) + " is not emulated");
  if (s.epilogue == kEpilogueDefault) return {};
  if (p.d.type == kR64F) return unsupported("epilogue " + name + " in f64");
  if (p.d.by_rows || p.c.by_rows)
    return unsupported("epilogue " + name + " with a result in the order of rows");
  const bool has_bias = p.adds_bias() || p.sums_result() || p.sums_operand();
  if (has_bias && !s.bias) return invalid("epilogue " + name + " without a bias pointer");
  if (has_bias && (s.bias_type < 0 ? p.d.type : s.bias_type) != p.bias_type())
    return unsupported("a bias of another type than the result");
  if (has_bias && p.batch > 1 && s.bias_batch_stride != 0 &&
      s.bias_batch_stride < p.bias_elements())
    return invalid("the batch stride of the bias is " + text(s.bias_batch_stride));
  if (!p.has_aux()) return {};
  const int64_t unit = p.is_relu() ? 128 : 8;
  if (!s.aux) return invalid("epilogue " + name + " without an aux pointer");
  if (s.aux_leading < p.m || s.aux_leading % unit)
    return invalid("the leading dimension of aux is " + text(s.aux_leading) + ", not " + text(p.m) +
                   " or more and a multiple of " + text(unit));
  if (p.batch > 1 && (s.aux_batch_stride < s.aux_leading * p.n || s.aux_batch_stride % unit))
    return invalid("the batch stride of aux is " + text(s.aux_batch_stride));
  if (!p.is_relu() && s.aux_type >= 0 && s.aux_type != p.d.type)
    return unsupported("aux of another type than the result");
  if (reinterpret_cast<uintptr_t>(s.aux) % 16) return invalid("aux is not aligned to 16 bytes");
  return {};
}

}  // namespace

bool is_f8(int type) { return type == kR8E4M3 || type == kR8E5M2; }
int bytes_of(int type) { return type == kR64F ? 8 : type == kR32F ? 4 : is_f8(type) ? 1 : 2; }
bool Problem::is_f8() const { return blas::is_f8(a.type); }
// Beside factors of eight bits and a result in single, a bias has 16.
int Problem::bias_type() const { return is_f8() && d.type == kR32F ? kR16BF : d.type; }
int Way::alignment_of(const Problem& p, int type) const {
  return p.is_f8() ? 16 : alignment ? alignment : bytes_of(type);
}

std::string epilogue_name(int epilogue) {
  for (const Named& e : kEpilogues)
    if (e.value == epilogue) return e.name;
  return "";
}

Refusal state_problem(Problem& p, Product product, Layout a, Layout b, Layout c, Layout d) {
  if (!product) return invalid("no descriptor of the product");
  p.product = static_cast<const ProductState&>(*product);
  const ProductState& s = p.product;
  for (const Refusal& r :
       {read_layout(p.a, "A", a, s.transpose_a), read_layout(p.b, "B", b, s.transpose_b),
        read_layout(p.c, "C", c, s.transpose_c), read_layout(p.d, "D", d, kAsIs)})
    if (r.status != Status::kSuccess) return r;
  if (p.c.transposed) return unsupported("a transposed C");
  if (s.fill != kFillFull) return unsupported("fill mode " + text(s.fill) + " is not emulated");
  if (s.pointer_mode != kPointerModeHost)
    return unsupported("pointer mode " + text(s.pointer_mode) + " is not emulated");
  if (p.c.type != p.d.type || !is_in_table(s.compute, s.scale_type, p.a.type, p.b.type, p.d.type))
    return unsupported("compute type " + text(s.compute) + ", scale type " + text(s.scale_type) +
                       ", types " + text(p.a.type) + ", " + text(p.b.type) + ", " + text(p.c.type) +
                       ", " + text(p.d.type) + " of A, B, C, D");
  p.m = p.a.transposed ? p.a.columns : p.a.rows, p.k = p.a.transposed ? p.a.rows : p.a.columns;
  const int64_t k = p.b.transposed ? p.b.columns : p.b.rows;
  p.n = p.b.transposed ? p.b.rows : p.b.columns;
  if (k != p.k) return invalid("A has " + text(p.k) + " summed elements and B has " + text(k));
  for (const auto& [x, name] : {std::pair(&p.c, "C"), std::pair(&p.d, "D")})
    if (x->rows != p.m || x->columns != p.n)
      return invalid(std::string(name) + " is " + text(x->rows) + " x " + text(x->columns) +
                     ", the product " + text(p.m) + " x " + text(p.n));
  p.batch = static_cast<const LayoutState&>(*d).batch_count;
  for (Layout l : {a, b, c})
    if (static_cast<const LayoutState&>(*l).batch_count != p.batch)
      return invalid("layouts with different batches");
  if (p.batch > 1 && p.d.stride == 0) return invalid("the batch stride of D is 0");
  if (!p.is_f8() && (s.scale_a || s.scale_b)) return invalid("scales of factors that have none");
  if (p.is_f8())
    if (const std::string why = wrong_f8(p); !why.empty()) return unsupported(why);
  return check_epilogue(p);
}

// What splits its sums comes first, as it may on a card: who needs one order of sums has to say so.
// The numbers of bytes are odd, since a card's are whatever they are.
const Way kWays[4] = {{21, 3, kReductionComputeType, 16},
                      {24, 2, kReductionInPlace, 0},
                      {7, 1, kReductionNone, 16},
                      {3, 1, kReductionNone, 0}};

uint64_t workspace_of(const Way& way, const Problem& p) {
  const uint64_t sums =
      static_cast<uint64_t>(p.m * p.n * (p.product.compute == kCompute64F ? 8 : 4));
  if (way.splits > 1) return sums * static_cast<uint64_t>(way.splits) + 37;
  return way.id == 7 ? 1021 : 0;
}

uint64_t fingerprint(const Problem& p) {
  uint64_t h = 1469598103934665603u;
  const auto add = [&h](int64_t x) { h = (h ^ static_cast<uint64_t>(x)) * 1099511628211u; };
  for (const Matrices* x : {&p.a, &p.b, &p.c, &p.d})
    for (int64_t v : {int64_t{x->type}, x->rows, x->columns, x->leading, x->stride,
                      int64_t{x->by_rows}, int64_t{x->transposed}})
      add(v);
  for (int64_t v : {p.batch, int64_t{p.product.compute}, int64_t{p.product.epilogue}}) add(v);
  return h;
}

}  // namespace vgpu::blas
