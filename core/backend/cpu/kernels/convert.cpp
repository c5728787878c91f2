// Conversions between every two dtypes: dense rows vectorise, others take the strided loop.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/tables.h"
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/convert.h"
// clang-format on

namespace tessera::cpu {
namespace {

using fn::BF16, fn::F16, fn::F8E4M3, fn::F8E5M2, fn::widen;

template <class T>
inline T widen(T x) {
  return x;
}
template <class To>
struct Narrow {
  template <class F>
  static To from(F x) {
    return To(x);
  }
};
template <>
struct Narrow<bool> {
  template <class F>
  static bool from(F x) {
    return x != F(0);
  }
};
template <>
struct Narrow<uint8_t> {
  template <class F>
  static uint8_t from(F x) {
    return uint8_t(int64_t(x));
  }
};
template <>
struct Narrow<BF16> {
  template <class F>
  static BF16 from(F x) {
    return fn::to_bf16(float(x));
  }
};
template <>
struct Narrow<F16> {
  template <class F>
  static F16 from(F x) {
    return fn::to_f16(float(x));
  }
};
template <>
struct Narrow<F8E4M3> {
  template <class F>
  static F8E4M3 from(F x) {
    return fn::to_f8e4m3(float(x));
  }
};
template <>
struct Narrow<F8E5M2> {
  template <class F>
  static F8E5M2 from(F x) {
    return fn::to_f8e5m2(float(x));
  }
};

template <class From, class To>
void convert(char* dst, int64_t ds, const char* src, int64_t ss, int64_t n) {
  if (ds == int64_t(sizeof(To)) && ss == int64_t(sizeof(From))) {
    To* d = reinterpret_cast<To*>(dst);
    const From* s = reinterpret_cast<const From*>(src);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) d[i] = Narrow<To>::from(widen(s[i]));
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    *reinterpret_cast<To*>(dst + i * ds) =
        Narrow<To>::from(widen(*reinterpret_cast<const From*>(src + i * ss)));
}

template <class From>
struct Row {
  static constexpr ConvertTable::Fn to[10] = {
      convert<From, bool>,   convert<From, uint8_t>, convert<From, int32_t>, convert<From, int64_t>,
      convert<From, F16>,    convert<From, BF16>,    convert<From, float>,   convert<From, double>,
      convert<From, F8E4M3>, convert<From, F8E5M2>};
};

}  // namespace

template <>
const ConvertTable& isa_table<ConvertTable, isa::TESSERA_ISA>() {
  static const ConvertTable table{{Row<bool>::to, Row<uint8_t>::to, Row<int32_t>::to,
                                   Row<int64_t>::to, Row<F16>::to, Row<BF16>::to, Row<float>::to,
                                   Row<double>::to, Row<F8E4M3>::to, Row<F8E5M2>::to}};
  return table;
}

}  // namespace tessera::cpu
