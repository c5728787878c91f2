#include "tests/compile/codegen/compare.h"

#include <cmath>
#include <cstring>
#include <random>

#include "core/core.h"
#include "core/tensor/element.h"
#include "tests/support/temp_folder.h"

namespace tessera::test {
namespace {

int64_t reach(const Body& body, const Access& a) {
  int64_t last = 0;
  for (size_t l = 0; l < a.strides.size(); ++l) last += (body.extents[l] - 1) * a.strides[l];
  return last + 1;
}

std::vector<bool> fed_by_float_reduction(const Body& body) {
  std::vector<bool> fed(body.instrs.size());
  for (size_t k = 0; k < body.instrs.size(); ++k) {
    const Instr& i = body.instrs[k];
    fed[k] = i.kind == InstrKind::kReduce && is_floating(i.dtype) && i.reduce <= ReduceKind::kProd;
    fed[k] = fed[k] || (i.op == "exp" && body.instrs[size_t(i.in[0])].op == "sub");  // softmax's
    for (InstrId x : i.in) fed[k] = fed[k] || fed[size_t(x)];
  }
  return fed;
}

// Largest difference over the largest magnitude; NaN and infinities must be in the same places.
// `exact`: bits that differ are infinitely far, but for those of two NaN.
double difference(const Tensor& a, const Tensor& b, bool exact) {
  double most = 0, scale = 1e-30;
  for (int64_t i = 0; i < a.numel(); ++i) {
    size_t at = size_t(i) * size_of(a.dtype());
    double x = read_real(static_cast<char*>(a.raw()) + at, a.dtype());
    double y = read_real(static_cast<char*>(b.raw()) + at, b.dtype());
    if (std::isnan(x) && std::isnan(y)) continue;
    if (exact && std::memcmp(static_cast<char*>(a.raw()) + at, static_cast<char*>(b.raw()) + at,
                             size_of(a.dtype())) != 0)
      return HUGE_VAL;
    if (std::isinf(x) && x == y) continue;
    if (!std::isfinite(x) || !std::isfinite(y)) return HUGE_VAL;
    most = std::max(most, std::abs(x - y)), scale = std::max(scale, std::abs(y));
  }
  return most / scale;
}

}  // namespace

const std::string& kernel_cache() {
  static TempFolder folder;
  static const std::string path = folder.str();
  return path;
}

Tensor operand_of(const Body& body, size_t k, uint64_t seed) {
  const Access& a = body.operands[k];
  Tensor t = empty({reach(body, a)}, a.dtype);
  std::mt19937_64 random(seed * 1000003 + k);
  for (int64_t i = 0; i < t.numel(); ++i) {
    void* p = static_cast<char*>(t.raw()) + size_t(i) * size_of(a.dtype);
    if (is_floating(a.dtype))
      write_real(p, a.dtype, std::normal_distribution<double>(0, 1.5)(random));
    else
      write_integer(p, a.dtype, a.dtype == kBool ? int64_t(random() & 1) : int64_t(random() % 12));
  }
  return t;
}

Tensor result_of(const Body& body, size_t k) {
  const Access& a = body.stores[k].to;
  Tensor t = empty({reach(body, a)}, a.dtype);
  std::memset(t.raw(), a.dtype == kBool ? 1 : 0x5a, t.nbytes());
  return t;
}

void compare_with_interpreter(const std::vector<Body>& bodies, double tolerance) {
  std::vector<Ref<const compile::Fused>> fused;
  std::vector<const compile::Fused*> kernels;
  for (const Body& b : bodies) {
    check(b);
    fused.push_back(make_ref<const compile::Fused>("test", b, results_of(b)));
    kernels.push_back(fused.back().get());
  }
  auto loaded = compile::generate(kernels, {.cache_dir = kernel_cache()});
  for (size_t n = 0; n < bodies.size(); ++n) {
    const Body& body = bodies[n];
    Tensors in, expected, got;
    for (size_t k = 0; k < body.operands.size(); ++k) in.push_back(operand_of(body, k, n + 1));
    for (size_t k = 0; k < body.stores.size(); ++k) {
      expected.push_back(result_of(body, k));
      got.push_back(result_of(body, k));
    }
    interpret(body, in, expected);
    std::vector<char*> p;
    for (const Tensor& t : in) p.push_back(static_cast<char*>(t.raw()));
    for (const Tensor& t : got) p.push_back(static_cast<char*>(t.raw()));
    const compile::KernelCode& code = loaded[n]->code;
    Tensor scratch = empty({int64_t(code.scratch_bytes) + 64}, kU8);
    compile::run_code(code, p.data(), static_cast<char*>(scratch.raw()));
    std::vector<bool> inexact = fed_by_float_reduction(body);
    for (size_t k = 0; k < got.size(); ++k) {
      double off = difference(got[k], expected[k], !inexact[size_t(body.stores[k].value)]);
      double bound = !inexact[size_t(body.stores[k].value)] ? 0
                     : size_of(got[k].dtype()) == 2         ? 1.0 / 100
                                                            : tolerance;
      EXPECT_LE(off, bound) << "body " << n << ", result " << k << "\n"
                            << to_string(got[k]) << "\n"
                            << to_string(expected[k]) << "\n"
                            << to_string(body) << print_cpp(body, "kernel");
    }
  }
}

}  // namespace tessera::test
