// Products by plain loops. Sums are taken in the compute type, those of a way with splits in as
// many parts, which meet in the workspace.
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>
#include <vector>

#include "tests/vgpu/cublaslt/problem.h"

namespace vgpu::blas {

namespace {

float of_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Eight bits as a sign, `exponent` bits around `bias`, and the rest of a mantissa. E4M3 has no
// infinity and one NaN; E5M2 has both as the larger formats do.
float of_f8(uint8_t bits, int exponent, int bias) {
  const int digits = 7 - exponent, power = (bits & 0x7f) >> digits;
  const int mantissa = bits & ((1 << digits) - 1);
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  if (exponent == 4 && (bits & 0x7f) == 0x7f) return std::nanf("");
  if (exponent == 5 && power == 31) return mantissa ? std::nanf("") : sign * INFINITY;
  const int whole = power ? mantissa + (1 << digits) : mantissa;
  return sign * std::ldexp(static_cast<float>(whole), (power ? power : 1) - bias - digits);
}

template <class S>
S load(int type, const void* base, int64_t i) {
  switch (type) {
    case kR64F: return static_cast<S>(static_cast<const double*>(base)[i]);
    case kR32F: return static_cast<S>(static_cast<const float*>(base)[i]);
    case kR16F: return static_cast<S>(static_cast<const _Float16*>(base)[i]);
    case kR8E4M3: return static_cast<S>(of_f8(static_cast<const uint8_t*>(base)[i], 4, 7));
    case kR8E5M2: return static_cast<S>(of_f8(static_cast<const uint8_t*>(base)[i], 5, 15));
    default: return static_cast<S>(of_bf16(static_cast<const uint16_t*>(base)[i]));
  }
}
template <class S>
void store(int type, void* base, int64_t i, S x) {
  switch (type) {
    case kR64F: static_cast<double*>(base)[i] = static_cast<double>(x); break;
    case kR32F: static_cast<float*>(base)[i] = static_cast<float>(x); break;
    case kR16F: static_cast<_Float16*>(base)[i] = static_cast<_Float16>(x); break;
    default: static_cast<uint16_t*>(base)[i] = to_bf16(static_cast<float>(x));
  }
}

// Ten bits of mantissa, to nearest and ties away from zero, as cvt.rna.tf32 rounds.
float to_tf32(float x) {
  if (!std::isfinite(x)) return x;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + 0x1000u) & ~0x1fffu);
}

// The tanh form. What the library computes on a card is for its conformance test to say.
double gelu(double x) {
  const double root = std::sqrt(2 / std::numbers::pi);
  return 0.5 * x * (1 + std::tanh(root * (x + 0.044715 * x * x * x)));
}
double gelu_gradient(double x) {
  const double root = std::sqrt(2 / std::numbers::pi);
  const double t = std::tanh(root * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
}

/// op(x), dense by rows.
template <class S>
std::vector<S> read(const Matrices& x, const void* base, int64_t rows, int64_t columns, bool tf32) {
  std::vector<S> values(static_cast<size_t>(rows * columns));
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      S v = load<S>(x.type, base, x.transposed ? x.at(j, i) : x.at(i, j));
      if (tf32) v = static_cast<S>(to_tf32(static_cast<float>(v)));
      values[static_cast<size_t>(i * columns + j)] = v;
    }
  return values;
}

template <class S>
void add_product(const S* a, const S* b, S* sum, const Problem& p, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < p.m; ++i)
    for (int64_t l = begin; l < end; ++l) {
      const S x = a[i * p.k + l];
      for (int64_t j = 0; j < p.n; ++j) sum[i * p.n + j] += x * b[l * p.n + j];
    }
}

template <class S>
std::vector<S> multiply(const Problem& p, const Way& way, const std::vector<S>& a,
                        const std::vector<S>& b, void* workspace) {
  const auto size = static_cast<size_t>(p.m * p.n);
  std::vector<S> sum(size);
  if (way.splits == 1) {
    add_product(a.data(), b.data(), sum.data(), p, 0, p.k);
    return sum;
  }
  auto* parts = static_cast<char*>(workspace);
  for (int s = 0; s < way.splits; ++s) {
    std::vector<S> part(size);
    add_product(a.data(), b.data(), part.data(), p, p.k * s / way.splits,
                p.k * (s + 1) / way.splits);
    std::memcpy(parts + static_cast<size_t>(s) * size * sizeof(S), part.data(), size * sizeof(S));
  }
  for (int s = 0; s < way.splits; ++s) {
    std::vector<S> part(size);
    std::memcpy(part.data(), parts + static_cast<size_t>(s) * size * sizeof(S), size * sizeof(S));
    for (size_t i = 0; i < size; ++i) sum[i] += part[i];
  }
  return sum;
}

/// The epilogues of one product of the batch.
class Epilogue {
 public:
  Epilogue(const Problem& p, int64_t batch) : p_(p) {
    const ProductState& s = p.product;
    const int64_t bytes = bytes_of(p.d.type);
    bias_ = static_cast<char*>(s.bias) + batch * s.bias_batch_stride * bytes;
    aux_ =
        static_cast<char*>(s.aux) + batch * s.aux_batch_stride * (p.is_relu() ? 1 : 8 * bytes) / 8;
  }
  double operator()(double x, int64_t row, int64_t column) const {
    const ProductState& s = p_.product;
    if (p_.adds_bias()) x += load<double>(p_.bias_type(), bias_, row);
    const int64_t at = row + column * s.aux_leading;
    if (p_.is_gelu_gradient()) return x * gelu_gradient(load<double>(p_.d.type, aux_, at));
    if (p_.is_gelu()) {
      if (p_.has_aux()) store(p_.d.type, aux_, at, x);
      return gelu(x);
    }
    if (p_.is_relu()) {
      if (p_.has_aux()) {
        auto& byte = reinterpret_cast<unsigned char&>(aux_[at / 8]);
        const auto bit = static_cast<unsigned char>(1 << at % 8);
        byte = static_cast<unsigned char>(x > 0 ? byte | bit : byte & ~bit);
      }
      return x > 0 ? x : 0;
    }
    return x;
  }
  void store_bias(int64_t i, double x) const { store(p_.d.type, bias_, i, x); }

 private:
  const Problem& p_;
  char *bias_, *aux_;
};

template <class S>
void sum_operand(const Problem& p, const std::vector<S>& a, const std::vector<S>& b,
                 const Epilogue& epilogue) {
  const bool of_a = p.product.epilogue == kEpilogueBGradA;
  for (int64_t i = 0; i < p.bias_elements(); ++i) {
    S sum = 0;
    for (int64_t l = 0; l < p.k; ++l)
      sum += of_a ? a[static_cast<size_t>(i * p.k + l)] : b[static_cast<size_t>(l * p.n + i)];
    epilogue.store_bias(i, static_cast<double>(sum));
  }
}

template <class S>
void compute_in(const Problem& p, const Way& way, const Operands& o) {
  const bool tf32 = p.product.compute == kCompute32FFastTF32;
  if (way.id == 7) std::memset(o.workspace, 0xa5, workspace_of(way, p));
  const auto at = [](const void* base, const Matrices& x, int64_t batch) {
    return static_cast<const char*>(base) + batch * x.stride * bytes_of(x.type);
  };
  double alpha = o.alpha;
  for (const void* scale : {p.product.scale_a, p.product.scale_b})
    if (scale) alpha *= static_cast<double>(*static_cast<const float*>(scale));
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const std::vector<S> a = read<S>(p.a, at(o.a, p.a, batch), p.m, p.k, tf32);
    const std::vector<S> b = read<S>(p.b, at(o.b, p.b, batch), p.k, p.n, tf32);
    const std::vector<S> sum = multiply(p, way, a, b, o.workspace);
    const char* c = at(o.c, p.c, batch);
    char* d = const_cast<char*>(at(o.d, p.d, batch));
    const Epilogue epilogue(p, batch);
    for (int64_t i = 0; i < p.m; ++i) {
      double row_sum = 0;
      for (int64_t j = 0; j < p.n; ++j) {
        S x = static_cast<S>(alpha) * sum[static_cast<size_t>(i * p.n + j)];
        if (o.beta != 0) x += static_cast<S>(o.beta) * load<S>(p.c.type, c, p.c.at(i, j));
        if (p.product.epilogue != kEpilogueDefault)
          x = static_cast<S>(epilogue(static_cast<double>(x), i, j));
        row_sum += static_cast<double>(x);
        store(p.d.type, d, p.d.at(i, j), x);
      }
      if (p.sums_result()) epilogue.store_bias(i, row_sum);
    }
    if (p.sums_operand()) sum_operand(p, a, b, epilogue);
  }
}

}  // namespace

void compute(const Problem& p, const Way& way, const Operands& o) {
  p.product.compute == kCompute64F ? compute_in<double>(p, way, o) : compute_in<float>(p, way, o);
}

}  // namespace vgpu::blas
