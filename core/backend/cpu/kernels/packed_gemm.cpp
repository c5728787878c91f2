// A matrix product whose order of summation is a property of k and the number of leaves alone.
// Goto, van de Geijn 2008, "Anatomy of high-performance matrix multiplication": panels of B and,
// where its rows are not dense, groups of A's rows are packed into the second cache. Tiles fetch
// what later ones will read while they multiply, so operands from beyond that cache cost little.
// Elements of bf16 are multiplied in pairs of neighbours in k and summed in f32, into rows of C
// that are rounded when they are complete. Invariant: an element of C goes through the same
// multiply-adds and additions whatever m and n are, wherever it lies in its tile, and also where
// another rank holds a part of k that is a subtree.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/microgemm.h"
#include "core/backend/cpu/kernels/tables.h"

namespace tessera::cpu {
namespace {

// What is multiplied at once, of elements that are `In` in memory.
template <class In>
using UnitOf = std::conditional_t<std::is_same_v<In, uint16_t>, Bf16Pair, In>;
template <class In>
constexpr bool kNarrow = !std::is_same_v<In, SumOf<UnitOf<In>>>;  // C is rounded
template <class In>
constexpr int64_t kTogether = int64_t(sizeof(UnitOf<In>) / sizeof(In));  // elements of a unit

template <class T>
constexpr int64_t kPanel = kTileVectors* kWidth<T>;         // columns of B that are packed together
constexpr int64_t kGroupRows = 64 / kTileRows * kTileRows;  // of A that are packed together
constexpr int64_t kRowsAhead = 8;                           // while packing
template <class T>
constexpr int64_t kLine = 64 / int64_t(sizeof(T));
constexpr int64_t kPackedBytes = 768 * 1024;  // three quarters of a server core's second cache
// The rows of A that tiles share fill most of the first cache: the deeper, the less often C is read
// and written. A narrow C, whose sums take twice the room, is worth reading rows from the second.
template <class In>
constexpr int64_t kRowsBytes = (kNarrow<In> ? 48 : 24) * 1024;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// `spare` partial sums wait while the tree descends, one for each level.
int64_t levels(int64_t leaves) { return leaves > 1 ? 1 + levels(leaves / 2) : 0; }

// B is read where it lies if its rows are whole panels and follow each other, so that a block of
// them spreads evenly over the caches. Not beside dense rows of A: those products read all of B
// more often.
template <class T>
bool b_in_place(const PackedTile& t) {
  return !std::is_same_v<T, Bf16Pair> && t.a_k != 1 && t.b_n == 1 && t.b_k == t.n &&
         t.n % kPanel<T> == 0;
}

// C as a block of k leaves it: its sums, and where `result` is not null they are complete and
// rounded to there. Of a narrow C that needs one block, only a row of tiles is held: step is 0.
template <class In>
struct Sums {
  SumOf<UnitOf<In>>* at;
  int64_t row, step;  // elements from a row to the next; from a row of tiles, by row
  In* result = nullptr;
};

template <class In>
struct Product {
  using T = UnitOf<In>;
  using Sum = SumOf<T>;
  const PackedTile& t;
  int64_t depth;  // at most so many units of k are packed at a time
  T* packed_b;    // [n / kPanel, depth, kPanel], where b_in_place() does not hold
  T* packed_a;    // [kGroupRows / kSide, depth, kSide], each with room behind it
  bool rows_of_a() const { return t.a_k == 1; }  // are dense and need no packing
  bool rows_of_b() const { return t.b_n == 1 || t.n == 1; }
  // Columns that are computed: sums of a narrow C have room for whole panels.
  int64_t columns() const { return kNarrow<In> ? pieces(t.n, kPanel<T>) * kPanel<T> : t.n; }

  // B in panels of k units, with zeros beyond its last column.
  void pack_b(const In* b, int64_t k) const {
    const int64_t whole = t.n / kPanel<T> * kPanel<T>, rest = t.n - whole;
    T* last = packed_b + whole * k;
    for (int64_t i = 0; rest && i < k * kPanel<T>; ++i) last[i] = T{};
    if (!rows_of_b()) {
      for (int64_t j = 0; j < t.n; j += kPanel<T>)
        transpose(reinterpret_cast<const T*>(b + j * t.b_n), t.b_n / kTogether<In>,
                  least(kPanel<T>, t.n - j), k, packed_b + j * k, kPanel<T>);
      return;
    }
    for (int64_t p = 0; p < k; ++p, b += kTogether<In> * t.b_k) {
      T* to = packed_b + p * kPanel<T>;
      for (int64_t j = 0; j < whole; j += kPanel<T>, to += k * kPanel<T>)
        for (int v = 0; v < kTileVectors; ++v) {
          const int64_t x = j + v * kWidth<T>;
          for (int64_t i = 0; i < (v == 0 ? 1 : 2) * kTogether<In>; ++i)
            __builtin_prefetch(b + (kRowsAhead + i) * t.b_k + x, 0, 2);
          *reinterpret_cast<typename Vector<T>::type*>(to + v * kWidth<T>) =
              vector_of_units(b + x, t.b_k);
        }
      for (int64_t j = 0; j < rest; ++j) to[j] = unit(b + whole + j, t.b_k);
    }
  }

  // One unit: elements that lie `step` apart.
  static T unit(const In* from, int64_t step) {
    if constexpr (kTogether<In> == 2)
      return {from[0], from[step]};
    else
      return *from;
  }
  // Those of neighbouring rows or columns.
  static auto vector_of_units(const In* from, [[maybe_unused]] int64_t step) {
    using Vec = typename Vector<T>::type;
    if constexpr (kTogether<In> == 2)
      return interleave(from, from + step);
    else
      return *reinterpret_cast<const Vec*>(from);
  }

  // Rows of A in sides, one for each row of tiles. They begin a line apart beyond a power of two,
  // so that one column of all of them fits the first cache.
  static int64_t side_of_a(int64_t k) { return k * kTileRows + kLine<T>; }
  // Dense columns are packed a vector at a time, where whole sides make one.
  static constexpr int64_t kAtOnce = kWidth<T> % kTileRows == 0 ? kWidth<T> : kTileRows;
  void pack_a(const In* a, int64_t rows, int64_t k) const {
    const int64_t side = side_of_a(k), row = t.a_m, column = t.a_k;
    for (int64_t p = 0; p < k; ++p, a += kTogether<In> * column) {
      T* to = packed_a + p * kTileRows;
      int64_t i = 0;
      for (; row == 1 && i + kAtOnce <= rows; i += kAtOnce, to += kAtOnce / kTileRows * side) {
        for (int64_t e = 0; e < kTogether<In>; ++e)
          __builtin_prefetch(a + (kRowsAhead + e) * column + i, 0, 2);
        if constexpr (kAtOnce == 2 * kTileRows)
          store_halves(to, to + side, vector_of_units(a + i, column));
        else
          __builtin_memcpy(to, a + i, kTileRows * sizeof(T));
      }
      for (; i < rows; i += kTileRows, to += side)
        for (int64_t r = 0; r < least(kTileRows, rows - i); ++r)
          to[r] = unit(a + (i + r) * row, column);
    }
  }

  // Tile number `at` of `tiles` fetches its share of `rows` rows: one of their columns of lines.
  static void share(Ahead<In>& walk, int which, const In* from, int64_t row, int64_t rows,
                    int64_t width, int64_t at, int64_t tiles) {
    const int64_t lines = pieces(width, kLine<In>) + (row % kLine<In> != 0);
    walk.at[which] = from + at % lines * kLine<In> + at / lines * lines * rows / tiles * row;
    walk.step[which] = row;
  }

  // What tile (i, j) fetches: the next row of tiles of A, or where A is packed the next group, B's
  // next block, and the next tile of C. `a` is where the tile's row or group of A begins; k and
  // next_k count elements.
  Ahead<In> ahead(const In* a, const In* next_b, const In* next_c, int64_t c_row, int64_t i,
                  int64_t j, int64_t k, int64_t next_k) const {
    const int64_t panels = pieces(t.n, kPanel<T>), panel = j / kPanel<T>;
    Ahead<In> walk{{a, a}, {0, 0}, next_c, c_row};
    if (rows_of_a()) {
      for (int s = 0; s < 2 && (s == 0 || panels < kTileRows); ++s)
        walk.at[s] = a + (kTileRows + (panel + s * panels) % kTileRows) * t.a_m,
        walk.step[s] = 4 * kTogether<In>;
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

  // What tile (i, j) fetches of C: where the next tile's sums are, or where this row of tiles will
  // be rounded to.
  const In* next_of_c(const Sums<In>& c, int64_t i, int64_t j) const {
    if constexpr (kNarrow<In>) {
      return c.result ? c.result + i * t.c_m + j : nullptr;
    } else {
      const In* at = c.at + i * c.row;
      return j + kPanel<T> < t.n   ? at + j + kPanel<T>
             : i + kTileRows < t.m ? at + kTileRows * c.row
                                   : c.at;  // for the next block
    }
  }

  // A row of tiles, of at most kTileRows rows: k units. `next_a` as in ahead().
  template <bool kAdd>
  void row_of_tiles(const T* a, const In* b, const Sums<In>& sums, int64_t i, int64_t k,
                    const In* next_a, const In* next_b, int64_t next_k) const {
    const int64_t rows = least(kTileRows, t.m - i), c_row = sums.row, width = columns();
    const bool in_place = b_in_place<T>(t);
    const int64_t next_panel = in_place ? kPanel<T> : k * kPanel<T>;
    const T* panel = in_place ? reinterpret_cast<const T*>(b) : packed_b;
    Sum* c = sums.at + i * sums.step;
    auto tiles = [&]<int V>(Sum* to, int64_t to_row, int64_t j) {
      const Ahead<In> next = ahead(next_a, next_b, next_of_c(sums, i, j),
                                   kNarrow<In> ? t.c_m : c_row, i, j, k * kTogether<In>, next_k);
      if (rows_of_a())
        rows_of_tiles<V, kAdd>(a, t.a_m / kTogether<In>, 1, panel, kPanel<T>, to, to_row, rows, k,
                               next);
      else if (in_place)
        rows_of_tiles<V, kAdd>(a, 1, kTileRows, panel, t.b_k, to, to_row, rows, k, next);
      else
        rows_of_tiles<V, kAdd>(a, 1, kTileRows, panel, kPanel<T>, to, to_row, rows, k, next);
    };
    int64_t j = 0;
    for (; j + kPanel<T> <= width; j += kPanel<T>, panel += next_panel)
      tiles.template operator()<kTileVectors>(c + j, c_row, j);
    if (j == width) return;
    Sum edge[kTileRows * kPanel<T>];  // C has too few columns for the last
    for (int64_t r = 0; kAdd && r < rows; ++r)
      for (int64_t x = 0; x < kPanel<T>; ++x)
        edge[r * kPanel<T> + x] = j + x < t.n ? c[r * c_row + j + x] : Sum(0);
    if (t.n - j <= kWidth<T>)
      tiles.template operator()<1>(edge, kPanel<T>, j);
    else
      tiles.template operator()<kTileVectors>(edge, kPanel<T>, j);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t x = 0; j + x < t.n; ++x) c[r * c_row + j + x] = edge[r * kPanel<T> + x];
  }

  // Rounds rows [i, i + kTileRows).
  void round_row_of_tiles(const Sums<In>& c, int64_t i) const {
    for (int64_t r = 0; r < least(kTileRows, t.m - i); ++r) {
      const Sum* from = c.at + i * c.step + r * c.row;
      In* to = c.result + (i + r) * t.c_m;
      int64_t j = 0;
      for (; j + kWidth<Sum> <= t.n; j += kWidth<Sum>)
        store_narrow(to + j, *reinterpret_cast<const Floats*>(from + j));
      In rest[kWidth<Sum>];
      if (j < t.n) store_narrow(rest, *reinterpret_cast<const Floats*>(from + j));
      for (int64_t x = 0; j + x < t.n; ++x) to[j + x] = rest[x];
    }
  }

  // c = a b (+ c) over the k units that are packed at a time. `next_k` elements follow.
  template <bool kAdd>
  void block(const In* a, const In* b, const Sums<In>& c, int64_t k, int64_t next_k) const {
    if (!b_in_place<T>(t)) pack_b(b, k);
    const In* next_b = b + k * kTogether<In> * t.b_k;
    for (int64_t i = 0; i < t.m; i += kTileRows) {
      const int64_t in_group = rows_of_a() ? 0 : i % kGroupRows;
      const In *left = a + i * t.a_m, *next_a = left - in_group * t.a_m;
      const T* units = reinterpret_cast<const T*>(left);
      if (!rows_of_a()) {
        if (in_group == 0) pack_a(left, least(kGroupRows, t.m - i), k);
        units = packed_a + in_group / kTileRows * side_of_a(k) + in_group % kTileRows;
      }
      row_of_tiles<kAdd>(units, b, c, i, k, next_a, next_b, next_k);
      if constexpr (kNarrow<In>)
        if (c.result) round_row_of_tiles(c, i);
    }
  }

  // c = a b over k elements, in order.
  void chain(const In* a, const In* b, Sums<In> c, int64_t k) const {
    const int64_t units = k / kTogether<In>, blocks = pieces(units, depth);
    In* const result = c.result;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t p = units * i / blocks, end = units * (i + 1) / blocks,
                    more = i + 1 < blocks ? units * (i + 2) / blocks - end : 0;
      const In *left = a + kTogether<In> * p * t.a_k, *right = b + kTogether<In> * p * t.b_k;
      c.result = more ? nullptr : result;
      if (i == 0)
        block<false>(left, right, c, end - p, kTogether<In> * more);
      else
        block<true>(left, right, c, end - p, kTogether<In> * more);
    }
  }

  // c = the sum over `leaves` leaves of `each` elements.
  void tree(const In* a, const In* b, Sum* c, int64_t c_row, int64_t leaves, int64_t each,
            Sum* spare) const {
    if (leaves == 1) return chain(a, b, {c, c_row, c_row}, each);
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

// How the workspace is cut, in units: packed A, packed B, partial sums. Tiles at the border of a
// product, with smaller m and n, need no more.
template <class In>
struct Workspace {
  using T = UnitOf<In>;
  int64_t most, depth, a, b, spare, sums_row;
  explicit Workspace(const PackedTile& t) {
    constexpr int64_t kPacked = kPackedBytes / int64_t(sizeof(T));
    const int64_t k = chain_of(t) / kTogether<In>, row = pieces(t.n, kPanel<T>) * kPanel<T>,
                  sides = t.a_k == 1 ? 0 : pieces(least(t.m, kGroupRows), kTileRows),
                  column = sides * kTileRows;
    most = least(kRowsBytes<In> / (kTileRows * int64_t(sizeof(T))), kPacked / (row + column));
    depth = least(k, most);
    a = least(k * column, kPacked) + sides * kLine<T>;
    b = least(k * row, kPacked);
    sums_row = row;
    spare = kNarrow<In> ? (blocks(t) > 1 ? t.m : kTileRows) * row : levels(t.leaves) * t.m * t.n;
  }
  int64_t blocks(const PackedTile& t) const { return pieces(chain_of(t) / kTogether<In>, depth); }
};

template <class In>
int64_t depth(const PackedTile& t) {
  return Workspace<In>(t).most * kTogether<In>;
}

template <class In>
int64_t workspace(const PackedTile& t) {
  const Workspace<In> w(t);
  return w.a + w.b + w.spare;
}

template <class In>
void run(const PackedTile& t, const In* a, const In* b, In* c, SumOf<UnitOf<In>>* work) {
  using T = UnitOf<In>;
  const Workspace<In> w(t);
  const Product<In> product{t, w.depth, reinterpret_cast<T*>(work) + w.a,
                            reinterpret_cast<T*>(work)};
  auto* spare = work + w.a + w.b;
  if constexpr (kNarrow<In>) {
    product.chain(a, b, {spare, w.sums_row, w.blocks(t) > 1 ? w.sums_row : 0, c}, t.k);
  } else {
    if (!t.leaves) return product.chain(a, b, {c, t.c_m, t.c_m}, t.k);
    product.tree(a, b, c, t.c_m, t.leaves, chain_of(t), spare);
    // -0 becomes +0: a rank without any part of k adds +0 to what the others have.
    for (int64_t i = 0; i < t.m; ++i)
      for (int64_t j = 0; j < t.n; ++j) c[i * t.c_m + j] += In(0);
  }
}

template <class In>
constexpr PackedGemmFns<In, SumOf<UnitOf<In>>> kFns{kTileRows, kPanel<UnitOf<In>>, depth<In>,
                                                    workspace<In>, run<In>};

}  // namespace

template <>
const PackedGemmTable& isa_table<PackedGemmTable, isa::TESSERA_ISA>() {
  static const PackedGemmTable table {
    kFns<float>, kFns<double>,
#if defined(__AVX512F__)
        kFns<uint16_t>
#else
    {
    }
#endif
  };
  return table;
}

}  // namespace tessera::cpu
