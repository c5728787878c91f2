// The function table of kernels/sparse.cpp: one row of a matrix in compressed rows (CSR) at a time.
#pragma once
#include <cstdint>

namespace tessera::cpu {

/// `edges` elements of one row: values[e] in column col[e]. Rows of the dense operand have n
/// elements. Edges are joined from the first to the last.
template <class T>
struct SparseFns {
  int64_t columns;  // of dense rows that go through registers together
  /// out[i] = sum over e of values[e] dense[col[e], i]
  void (*sum)(const T* values, const int64_t* col, int64_t edges, const T* dense, int64_t n,
              T* out);
  /// The largest (smallest) of values[e] dense[col[e], i], the first of equal ones, and its edge
  /// plus `first`; NaN wins. At least one edge.
  void (*largest)(const T* values, const int64_t* col, int64_t edges, const T* dense, int64_t n,
                  int64_t first, T* out, int64_t* at);
  void (*smallest)(const T* values, const int64_t* col, int64_t edges, const T* dense, int64_t n,
                   int64_t first, T* out, int64_t* at);
  /// out[e] = sum over i of a[i] b[col[e], i], in lanes
  void (*dots)(const T* a, const T* b, const int64_t* col, int64_t edges, int64_t n, T* out);
};
struct SparseTable {
  SparseFns<float> f32;
  SparseFns<double> f64;
};

}  // namespace tessera::cpu
