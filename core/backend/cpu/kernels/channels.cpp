// Rows of channels: the steps of pooling.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/tables.h"

namespace tessera::cpu {
namespace {

template <class T>
void take_larger(const T* x, int32_t place, T* best, int32_t* at, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    const T v = x[c], b = best[c];
    const bool take = v > b || v != v;
    best[c] = take ? v : b;
    at[c] = take ? place : at[c];
  }
}

template <class T>
void add(const T* x, T* sum, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) sum[c] += x[c];
}

template <class T>
void add_part(const T* x, T count, T* sum, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) sum[c] += x[c] / count;
}

template <class T>
constexpr ChannelFns<T> fns() {
  return {take_larger<T>, add<T>, add_part<T>};
}

}  // namespace

template <>
const ChannelTable& isa_table<ChannelTable, isa::TESSERA_ISA>() {
  static const ChannelTable table{fns<float>(), fns<double>()};
  return table;
}

}  // namespace tessera::cpu
