// Includes only code that is inlined: a function shared with other files would be AVX2 code in all.
#include "tests/core/ops/hot_loops.h"

// These include nothing, so their order matters.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/group.h"
#include "core/ops/functors/math.h"
#include "core/ops/functors/math_trig.h"
#include "core/ops/functors/pieces.h"
#include "core/ops/functors/activations.h"
// clang-format on

namespace tessera::test {
namespace {

template <float (*kFunction)(float)>
void loop(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = kFunction(x[i]);
}

template <class F>
void in_groups(F f, const float* x, float* y, int n) {
  constexpr int kGroup = 32;
  for (int i = 0; i + kGroup <= n; i += kGroup) fn::store(y + i, f(fn::load<kGroup>(x + i)));
}

template <float (*kFunction)(float)>
void one_by_one(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) {
    float v = x[i];
    asm volatile("" : "+m"(v));
    y[i] = kFunction(v);
  }
}

}  // namespace

#define HOT(name) \
  { #name, loop < fn::name>, one_by_one < fn::name> }
#define HOT_IN_GROUPS(name)                                                                      \
  {                                                                                              \
#name, [](const float* x, float* y,                                                          \
              int n) { in_groups([](auto v) { return fn::name(v); }, x, y, n); }, one_by_one <   \
                                                                                      fn::name < \
                                                                                      float>>    \
  }

const HotLoop hot_loops[kHotLoops] = {HOT(exp),
                                      HOT(log),
                                      HOT(tanh),
                                      HOT(erf),
                                      HOT_IN_GROUPS(sigmoid),
                                      HOT_IN_GROUPS(silu),
                                      HOT(softplus),
                                      HOT_IN_GROUPS(gelu),
                                      HOT_IN_GROUPS(gelu_grad),
                                      HOT_IN_GROUPS(gelu_tanh),
                                      HOT_IN_GROUPS(gelu_tanh_grad),
                                      HOT(rsqrt),
                                      HOT(log1p),
                                      HOT(expm1)};

}  // namespace tessera::test
