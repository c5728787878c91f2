// Rows of channels: the steps of pooling.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/tables.h"
#include "core/backend/cpu/kernels/vector.h"

namespace tessera::cpu {
namespace {

// Elements that are compared together, with their places beside them: E are those in memory.
template <class E>
struct Several {
  using T = std::conditional_t<std::is_same_v<E, uint16_t>, float, E>;
  static constexpr int kLanes = kWidth<T>;
  using Values = typename Vector<T>::type;
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Places
      __attribute__((vector_size(kVectorBytes)));
  typedef E Memory __attribute__((vector_size(kLanes * sizeof(E)), aligned(2), may_alias));
  typedef int32_t Places32 __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

  static Values load(const E* p) {
    const Memory m = *reinterpret_cast<const Memory*>(p);
    if constexpr (std::is_same_v<E, uint16_t>)
      return Values(__builtin_convertvector(m, Places) << 16);
    else
      return Values(m);
  }
  static void store(E* p, Values v) {
    if constexpr (std::is_same_v<E, uint16_t>)
      *reinterpret_cast<Memory*>(p) = __builtin_convertvector(Places(v) >> 16, Memory);
    else
      *reinterpret_cast<Memory*>(p) = Memory(v);
  }
};

template <class T>
bool takes(T v, T best) {
  return v > best || v != v;
}
float value_of(uint16_t bits) {
  const uint32_t word = uint32_t(bits) << 16;
  float v;
  __builtin_memcpy(&v, &word, sizeof(v));
  return v;
}
float value_of(float v) { return v; }
double value_of(double v) { return v; }

template <class E>
void largest(const E* x, const int32_t* places, int64_t count, E* best, int32_t* at,
             int64_t channels) {
  using S = Several<E>;
  int64_t c = 0;
  for (; c + S::kLanes <= channels; c += S::kLanes) {
    typename S::Values most = S::load(x + places[0] * channels + c);
    typename S::Places where = places[0] - typename S::Places{};
    for (int64_t p = 1; p < count; ++p) {
      const typename S::Values v = S::load(x + places[p] * channels + c);
      const typename S::Places take = (v > most) | (v != v);
      most = take ? v : most, where = take ? places[p] - typename S::Places{} : where;
    }
    S::store(best + c, most);
    *reinterpret_cast<typename S::Places32*>(at + c) =
        __builtin_convertvector(where, typename S::Places32);
  }
  for (; c < channels; ++c) {
    best[c] = x[places[0] * channels + c], at[c] = places[0];
    for (int64_t p = 1; p < count; ++p)
      if (const E v = x[places[p] * channels + c]; takes(value_of(v), value_of(best[c])))
        best[c] = v, at[c] = places[p];
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
  return {largest<T>, add<T>, add_part<T>};
}

}  // namespace

template <>
const ChannelTable& isa_table<ChannelTable, isa::TESSERA_ISA>() {
  static const ChannelTable table{fns<float>(), fns<double>(), largest<uint16_t>};
  return table;
}

}  // namespace tessera::cpu
