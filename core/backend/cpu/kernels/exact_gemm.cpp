// A matrix product whose order of summation is a property of k and the number of leaves alone: what
// exact contraction promises. Invariant: an element of C goes through the same multiply-adds and
// additions whatever m and n are, wherever it lies in its tile, and also where another rank holds a
// part of k that is a subtree.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/microgemm.h"
#include "core/backend/cpu/kernels/tables.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kDepth = 128;  // rows of B that are packed at a time: they stay in the cache

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// `spare` partial sums wait while the tree descends, one for each level.
int64_t levels(int64_t leaves) { return leaves > 1 ? 1 + levels(leaves / 2) : 0; }

template <class T>
struct Product {
  const ExactTile& t;
  T* packed_a;  // [m, kDepth]
  T* packed_b;  // [kDepth, row]
  int64_t row;  // n in whole cache lines: of packed_b and of partial sums [m, row]

  // packed_b = rows [0, depth) of b, zeros beyond n.
  void pack_b(const T* b, int64_t depth) const {
    if (t.b_n != 1 && t.n > 1) {
      transpose(b, t.b_n, t.n, depth, packed_b, row);
    } else {
      for (int64_t p = 0; p < depth; ++p)
        for (int64_t j = 0; j < t.n; ++j) packed_b[p * row + j] = b[p * t.b_k + j];
    }
    for (int64_t p = 0; p < depth; ++p)
      for (int64_t j = t.n; j < row; ++j) packed_b[p * row + j] = T(0);
  }

  // c = a b over k elements, in order.
  void leaf(const T* a, const T* b, T* c, int64_t k) const {
    for (int64_t p = 0; p < k; p += kDepth) {
      const int64_t depth = least(kDepth, k - p);
      pack_b(b + p * t.b_k, depth);
      const T* left = a + p * t.a_k;
      int64_t left_row = t.a_m;
      if (t.a_k != 1) {  // a is read once for each panel of b: make its rows dense
        transpose(left, t.a_k, depth, t.m, packed_a, kDepth);
        left = packed_a, left_row = kDepth;
      }
      if (p == 0)
        microgemm<false>(left, left_row, 1, packed_b, row, c, row, t.m, row, depth);
      else
        microgemm<true>(left, left_row, 1, packed_b, row, c, row, t.m, row, depth);
    }
  }

  // c = the sum over `leaves` leaves of `each` elements.
  void tree(const T* a, const T* b, T* c, int64_t leaves, int64_t each, T* spare) const {
    if (leaves == 1) return leaf(a, b, c, each);
    const int64_t half = leaves / 2;
    tree(a, b, c, half, each, spare);
    tree(a + half * each * t.a_k, b + half * each * t.b_k, spare, half, each, spare + t.m * row);
    for (int64_t i = 0; i < t.m * row; ++i) c[i] += spare[i];
  }
};

template <class T>
int64_t workspace(const ExactTile& t) {
  const int64_t row = padded<T>(t.n);
  return kDepth * (t.m + row) + (1 + levels(t.leaves)) * t.m * row;
}

template <class T>
void run(const ExactTile& t, const T* a, const T* b, T* c, T* work) {
  const int64_t row = padded<T>(t.n);
  T* packed_b = work;
  T* sum = packed_b + kDepth * row;
  T* spare = sum + t.m * row;
  T* packed_a = spare + levels(t.leaves) * t.m * row;
  Product<T>{t, packed_a, packed_b, row}.tree(a, b, sum, t.leaves, t.k / t.leaves, spare);
  // -0 becomes +0: a rank without any part of k adds +0 to what the others have.
  for (int64_t i = 0; i < t.m; ++i)
    for (int64_t j = 0; j < t.n; ++j) c[i * t.c_m + j] = sum[i * row + j] + T(0);
}

}  // namespace

template <>
const ExactGemmTable& isa_table<ExactGemmTable, isa::TESSERA_ISA>() {
  static const ExactGemmTable table{{workspace<float>, run<float>},
                                    {workspace<double>, run<double>}};
  return table;
}

}  // namespace tessera::cpu
