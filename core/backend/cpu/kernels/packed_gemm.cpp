// A matrix product whose order of summation is a property of k and the number of leaves alone.
// Goto, van de Geijn 2008, "Anatomy of high-performance matrix multiplication": panels of B and,
// where its rows are not dense, groups of A's rows are packed into the second cache. Tiles fetch
// what later ones will read while they multiply, so operands from beyond that cache cost little.
// Invariant: an element of C goes through the same multiply-adds and additions whatever m and n
// are, wherever it lies in its tile, and also where another rank holds a part of k that is a
// subtree.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/microgemm.h"
#include "core/backend/cpu/kernels/tables.h"

namespace tessera::cpu {
namespace {

template <class T>
constexpr int64_t kPanel = kTileVectors* kWidth<T>;  // columns of B that are packed together
constexpr int64_t kPair = 2 * kTileRows;             // rows of A that lie packed side by side
constexpr int64_t kGroupRows = 64 / kPair * kPair;   // of A that are packed together
constexpr int64_t kRowsAhead = 8;                    // while packing
template <class T>
constexpr int64_t kLine = 64 / int64_t(sizeof(T));
constexpr int64_t kPackedBytes = 768 * 1024;  // three quarters of a server core's second cache
// The rows of A that tiles share fill most of the first cache: the deeper, the less often C is read
// and written.
constexpr int64_t kRowsBytes = 24 * 1024;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// `spare` partial sums wait while the tree descends, one for each level.
int64_t levels(int64_t leaves) { return leaves > 1 ? 1 + levels(leaves / 2) : 0; }

// B is read where it lies if its rows are whole panels and follow each other, so that a block of
// them spreads evenly over the caches. Not beside dense rows of A: those products read all of B
// more often.
template <class T>
bool b_in_place(const PackedTile& t) {
  return t.a_k != 1 && t.b_n == 1 && t.b_k == t.n && t.n % kPanel<T> == 0;
}

template <class T>
struct Product {
  const PackedTile& t;
  int64_t depth;  // at most so many of k are packed at a time
  T* packed_b;    // [n / kPanel, depth, kPanel], where b_in_place() does not hold
  T* packed_a;    // [kGroupRows / kPair, depth, kPair], each with room behind it
  bool rows_of_a() const { return t.a_k == 1; }  // are dense and need no packing
  bool rows_of_b() const { return t.b_n == 1 || t.n == 1; }

  // B in panels, with zeros beyond its last column.
  void pack_b(const T* b, int64_t k) const {
    using Vec = typename Vector<T>::type;
    const int64_t whole = t.n / kPanel<T> * kPanel<T>, rest = t.n - whole;
    T* last = packed_b + whole * k;
    for (int64_t i = 0; rest && i < k * kPanel<T>; ++i) last[i] = T(0);
    if (!rows_of_b()) {
      for (int64_t j = 0; j < t.n; j += kPanel<T>)
        transpose(b + j * t.b_n, t.b_n, least(kPanel<T>, t.n - j), k, packed_b + j * k, kPanel<T>);
      return;
    }
    for (int64_t p = 0; p < k; ++p, b += t.b_k) {
      T* to = packed_b + p * kPanel<T>;
      for (int64_t j = 0; j < whole; j += kPanel<T>, to += k * kPanel<T>)
        for (int v = 0; v < kTileVectors; ++v) {
          const int64_t x = j + v * kWidth<T>;
          __builtin_prefetch(b + kRowsAhead * t.b_k + x, 0, 2);
          *reinterpret_cast<Vec*>(to + v * kWidth<T>) = *reinterpret_cast<const Vec*>(b + x);
        }
      for (int64_t j = 0; j < rest; ++j) to[j] = b[whole + j];
    }
  }

  // Rows of A, two tiles together: their columns fill whole cache lines. Pairs begin a line apart
  // beyond a power of two, so that one column of all of them fits the first cache.
  static int64_t pair_of_a(int64_t k) { return k * kPair + kLine<T>; }
  void pack_a(const T* a, int64_t rows, int64_t k) const {
    for (int64_t p = 0; p < k; ++p, a += t.a_k) {
      T* to = packed_a + p * kPair;
      int64_t i = 0;
      for (; t.a_m == 1 && i + kPair <= rows; i += kPair, to += pair_of_a(k)) {
        __builtin_prefetch(a + kRowsAhead * t.a_k + i, 0, 2);
        __builtin_memcpy(to, a + i, kPair * sizeof(T));
      }
      for (; i < rows; i += kPair, to += pair_of_a(k))
        for (int64_t r = 0; r < least(kPair, rows - i); ++r) to[r] = a[(i + r) * t.a_m];
    }
  }

  // Tile number `at` of `tiles` fetches its share of `rows` rows: one of their columns of lines.
  static void share(Ahead<T>& walk, int which, const T* from, int64_t row, int64_t rows,
                    int64_t width, int64_t at, int64_t tiles) {
    const int64_t lines = pieces(width, kLine<T>);
    walk.at[which] = from + at % lines * kLine<T> + at / lines * lines * rows / tiles * row;
    walk.step[which] = row;
  }

  // What tile (i, j) fetches: the next row of tiles of A, or where A is packed the next group, B's
  // next block, and the next tile of C. `a` is where the tile's row or group of A begins.
  Ahead<T> ahead(const T* a, const T* next_b, const T* next_c, int64_t c_row, int64_t i, int64_t j,
                 int64_t k, int64_t next_k) const {
    const int64_t panels = pieces(t.n, kPanel<T>), panel = j / kPanel<T>;
    Ahead<T> walk{{a, a}, {0, 0}, next_c, c_row};
    if (rows_of_a()) {
      for (int s = 0; s < 2 && (s == 0 || panels < kTileRows); ++s)
        walk.at[s] = a + (kTileRows + (panel + s * panels) % kTileRows) * t.a_m, walk.step[s] = 4;
    } else {
      const int64_t first = i / kGroupRows * kGroupRows, rows = least(kGroupRows, t.m - first);
      const bool last = first + rows == t.m;
      share(walk, 0, last ? a - first * t.a_m + k * t.a_k : a + rows * t.a_m, t.a_k,
            last ? next_k : k,
            last ? least(kGroupRows, t.m) : least(kGroupRows, t.m - first - rows),
            (i - first) / kTileRows * panels + panel, pieces(rows, kTileRows) * panels);
    }
    if (next_k > 0 && walk.step[1] == 0)
      share(walk, 1, next_b, rows_of_b() ? t.b_k : t.b_n, rows_of_b() ? next_k : t.n,
            rows_of_b() ? t.n : next_k, i / kTileRows * panels + panel,
            pieces(t.m, kTileRows) * panels);
    return walk;
  }

  // A row of tiles, of at most kTileRows rows. `next_a` as in ahead().
  template <bool kAdd>
  void row_of_tiles(const T* a, const T* b, T* c, int64_t c_row, int64_t i, int64_t k,
                    const T* next_a, const T* next_b, int64_t next_k) const {
    const int64_t rows = least(kTileRows, t.m - i);
    const bool in_place = b_in_place<T>(t);
    const int64_t next_panel = in_place ? kPanel<T> : k * kPanel<T>;
    const T* panel = in_place ? b : packed_b;
    auto tiles = [&]<int V>(T* to, int64_t to_row, int64_t j) {
      const T* next_c = j + kPanel<T> < t.n   ? c + j + kPanel<T>
                        : i + kTileRows < t.m ? c + kTileRows * c_row
                                              : c - i * c_row;  // for the next block
      const Ahead<T> next = ahead(next_a, next_b, next_c, c_row, i, j, k, next_k);
      if (rows_of_a())
        rows_of_tiles<V, kAdd>(a, t.a_m, 1, panel, kPanel<T>, to, to_row, rows, k, next);
      else if (in_place)
        rows_of_tiles<V, kAdd>(a, 1, kPair, panel, t.b_k, to, to_row, rows, k, next);
      else
        rows_of_tiles<V, kAdd>(a, 1, kPair, panel, kPanel<T>, to, to_row, rows, k, next);
    };
    int64_t j = 0;
    for (; j + kPanel<T> <= t.n; j += kPanel<T>, panel += next_panel)
      tiles.template operator()<kTileVectors>(c + j, c_row, j);
    if (j == t.n) return;
    T edge[kTileRows * kPanel<T>];  // C has too few columns for the last
    for (int64_t r = 0; kAdd && r < rows; ++r)
      for (int64_t x = 0; x < kPanel<T>; ++x)
        edge[r * kPanel<T> + x] = j + x < t.n ? c[r * c_row + j + x] : T(0);
    if (t.n - j <= kWidth<T>)
      tiles.template operator()<1>(edge, kPanel<T>, j);
    else
      tiles.template operator()<kTileVectors>(edge, kPanel<T>, j);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t x = 0; j + x < t.n; ++x) c[r * c_row + j + x] = edge[r * kPanel<T> + x];
  }

  // c = a b (+ c) over the k elements that are packed at a time. `next_k` elements follow.
  template <bool kAdd>
  void block(const T* a, const T* b, T* c, int64_t c_row, int64_t k, int64_t next_k) const {
    if (!b_in_place<T>(t)) pack_b(b, k);
    const T* next_b = b + k * t.b_k;
    for (int64_t i = 0; i < t.m; i += kTileRows) {
      const int64_t in_group = rows_of_a() ? 0 : i % kGroupRows;
      const T *left = a + i * t.a_m, *next_a = left - in_group * t.a_m;
      if (!rows_of_a()) {
        if (in_group == 0) pack_a(left, least(kGroupRows, t.m - i), k);
        left = packed_a + in_group / kPair * pair_of_a(k) + in_group % kPair;
      }
      row_of_tiles<kAdd>(left, b, c + i * c_row, c_row, i, k, next_a, next_b, next_k);
    }
  }

  // c = a b over k elements, in order.
  void chain(const T* a, const T* b, T* c, int64_t c_row, int64_t k) const {
    const int64_t blocks = pieces(k, depth);
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t p = k * i / blocks, end = k * (i + 1) / blocks,
                    more = i + 1 < blocks ? k * (i + 2) / blocks - end : 0;
      const T *left = a + p * t.a_k, *right = b + p * t.b_k;
      if (i == 0)
        block<false>(left, right, c, c_row, end - p, more);
      else
        block<true>(left, right, c, c_row, end - p, more);
    }
  }

  // c = the sum over `leaves` leaves of `each` elements.
  void tree(const T* a, const T* b, T* c, int64_t c_row, int64_t leaves, int64_t each,
            T* spare) const {
    if (leaves == 1) return chain(a, b, c, c_row, each);
    const int64_t half = leaves / 2;
    tree(a, b, c, c_row, half, each, spare);
    tree(a + half * each * t.a_k, b + half * each * t.b_k, spare, t.n, half, each,
         spare + t.m * t.n);
    for (int64_t i = 0; i < t.m; ++i)
      for (int64_t j = 0; j < t.n; ++j) c[i * c_row + j] += spare[i * t.n + j];
  }
};

// Elements of k that one chain runs over.
int64_t chain_of(const PackedTile& t) { return t.leaves ? t.k / t.leaves : t.k; }

// How the workspace is cut: packed A, packed B, partial sums. Tiles at the border of a product,
// with smaller m and n, need no more.
template <class T>
struct Workspace {
  int64_t depth, a, b, spare;
  explicit Workspace(const PackedTile& t) {
    constexpr int64_t kPacked = kPackedBytes / int64_t(sizeof(T));
    const int64_t k = chain_of(t), row = pieces(t.n, kPanel<T>) * kPanel<T>,
                  pairs = t.a_k == 1 ? 0 : pieces(least(t.m, kGroupRows), kPair),
                  column = pairs * kPair;
    const int64_t shared_rows = (t.a_k == 1 ? kTileRows : kPair) * int64_t(sizeof(T));
    depth = least(k, least(kRowsBytes / shared_rows, kPacked / (row + column)));
    a = least(k * column, kPacked) + pairs * kLine<T>;
    b = least(k * row, kPacked);
    spare = levels(t.leaves) * t.m * t.n;
  }
};

template <class T>
int64_t workspace(const PackedTile& t) {
  const Workspace<T> w(t);
  return w.a + w.b + w.spare;
}

template <class T>
void run(const PackedTile& t, const T* a, const T* b, T* c, T* work) {
  const Workspace<T> w(t);
  const Product<T> product{t, w.depth, work + w.a, work};
  if (!t.leaves) return product.chain(a, b, c, t.c_m, t.k);
  product.tree(a, b, c, t.c_m, t.leaves, chain_of(t), work + w.a + w.b);
  // -0 becomes +0: a rank without any part of k adds +0 to what the others have.
  for (int64_t i = 0; i < t.m; ++i)
    for (int64_t j = 0; j < t.n; ++j) c[i * t.c_m + j] += T(0);
}

}  // namespace

template <>
const PackedGemmTable& isa_table<PackedGemmTable, isa::TESSERA_ISA>() {
  static const PackedGemmTable table{{workspace<float>, run<float>},
                                     {workspace<double>, run<double>}};
  return table;
}

}  // namespace tessera::cpu
