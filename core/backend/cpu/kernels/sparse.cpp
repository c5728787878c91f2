// Rows of a sparse matrix times a dense one. A chunk of columns stays in registers while the edges
// go by. Invariant: an element is a chain over the edges of its row in order, whatever the width of
// vectors; products are rounded before they are added, so all instruction sets agree.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/lanes.h"
#include "core/backend/cpu/kernels/sparse_table.h"
#include "core/backend/cpu/kernels/vector.h"
#include "core/base/boundaries.h"

namespace tessera::cpu {
namespace {

template <class T>
struct Integer;
template <>
struct Integer<float> {
  using type = int32_t;
};
template <>
struct Integer<double> {
  using type = int64_t;
};

// K vectors of columns, or one column, and as many integers: the type of a vector must not be a
// template argument, or it loses that it may lie at any address.
template <class T, int K>
struct Vectors {
  using V = typename Vector<T>::type;
  typedef typename Integer<T>::type I __attribute__((vector_size(kVectorBytes)));
  static constexpr int kCount = K;
};
template <class T>
struct Single {
  using V = T;
  using I = typename Integer<T>::type;
  static constexpr int kCount = 1;
};

template <class T>
constexpr int64_t kOne = kWidth<T>;
template <class T>
constexpr int64_t kFour = 4 * kOne<T>;

// Calls f(chunk, first column) for all columns: four vectors at a time, one, and single ones.
template <class T, class F>
inline __attribute__((always_inline)) void for_chunks(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kFour<T> <= n; i += kFour<T>) f(Vectors<T, 4>(), i);
  for (; i + kOne<T> <= n; i += kOne<T>) f(Vectors<T, 1>(), i);
  for (; i < n; ++i) f(Single<T>(), i);
}

template <class Chunk, class T>
void sum_chunk(const T* values, const int64_t* col, int64_t edges, const T* dense, int64_t n,
               T* out) {
  using V = typename Chunk::V;
  V sum[Chunk::kCount] = {};
  for (int64_t e = 0; e < edges; ++e) {
    const V* row = reinterpret_cast<const V*>(dense + col[e] * n);
    const T w = values[e];
    for (int i = 0; i < Chunk::kCount; ++i) sum[i] += row[i] * w;
  }
  for (int i = 0; i < Chunk::kCount; ++i) reinterpret_cast<V*>(out)[i] = sum[i];
}

template <class T>
void sum(const T* values, const int64_t* col, int64_t edges, const T* dense, int64_t n, T* out) {
  for_chunks<T>(n, [&](auto chunk, int64_t i) {
    sum_chunk<decltype(chunk)>(values, col, edges, dense + i, n, out + i);
  });
}

// Edges of a row are counted in integers as wide as the values, so that one mask serves both.
template <bool kLargest, class Chunk, class T>
void extreme_chunk(const T* values, const int64_t* col, int64_t edges, const T* dense, int64_t n,
                   int64_t first, T* out, int64_t* at) {
  using V = typename Chunk::V;
  using I = typename Chunk::I;
  constexpr int kCount = Chunk::kCount, kEach = int(sizeof(V) / sizeof(T));
  V best[kCount];
  I edge[kCount] = {};
  for (int i = 0; i < kCount; ++i)
    best[i] = reinterpret_cast<const V*>(dense + col[0] * n)[i] * values[0];
  for (int64_t e = 1; e < edges; ++e) {
    const V* row = reinterpret_cast<const V*>(dense + col[e] * n);
    const T w = values[e];
    const I here = I{} + typename Integer<T>::type(e);
    for (int i = 0; i < kCount; ++i) {
      const V v = row[i] * w;
      // Larger or NaN, unless the best is NaN already.
      const auto better = ((kLargest ? v <= best[i] : v >= best[i]) == 0) & (best[i] == best[i]);
      best[i] = better ? v : best[i];
      edge[i] = better ? here : edge[i];
    }
  }
  for (int i = 0; i < kCount; ++i) {
    reinterpret_cast<V*>(out)[i] = best[i];
    const auto* lanes = reinterpret_cast<const typename Integer<T>::type*>(&edge[i]);
    for (int l = 0; l < kEach; ++l) at[i * kEach + l] = first + lanes[l];
  }
}

template <bool kLargest, class T>
void extreme(const T* values, const int64_t* col, int64_t edges, const T* dense, int64_t n,
             int64_t first, T* out, int64_t* at) {
  for_chunks<T>(n, [&](auto chunk, int64_t i) {
    extreme_chunk<kLargest, decltype(chunk)>(values, col, edges, dense + i, n, first, out + i,
                                             at + i);
  });
}

template <class T>
void dots(const T* a, const T* b, const int64_t* col, int64_t edges, int64_t n, T* out) {
  constexpr int kLanes = limit("sparse.lanes");
  for (int64_t e = 0; e < edges; ++e) {
    const T* row = b + col[e] * n;
    T lane[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
      for (int l = 0; l < kLanes; ++l) lane[l] += a[i + l] * row[i + l];
    for (int l = 0; i + l < n; ++l) lane[l] += a[i + l] * row[i + l];
    out[e] = fold<LaneSum, kLanes>(lane);
  }
}

template <class T>
constexpr SparseFns<T> kFns{kFour<T>, sum<T>, extreme<true, T>, extreme<false, T>, dots<T>};

}  // namespace

template <>
const SparseTable& isa_table<SparseTable, isa::TESSERA_ISA>() {
  static const SparseTable table{kFns<float>, kFns<double>};
  return table;
}

}  // namespace tessera::cpu
