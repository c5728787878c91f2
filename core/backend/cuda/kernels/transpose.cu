// Copies between layouts whose innermost dims differ: the result's is its columns, the operand's
// its rows, and tiles go through shared memory, so that whole words of neighbours are read and
// written. Words have 4 bytes, or one element of 8. After device.h.
namespace tessera::device {

inline constexpr unsigned kTransposeThreads = 256;

/// A tile of elements of T: kColumns lines of the operand, of kWarp words each. A word is of kLanes
/// elements, and kLanes words of neighbouring columns give as many words of the result.
template <class T>
struct Tile {
  static constexpr unsigned kLanes = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
  static constexpr unsigned kRows = kWarp * kLanes;
  static constexpr unsigned kColumns = sizeof(T) == 4 ? 2 * kWarp : kRows;
  static constexpr unsigned kWarps = kTransposeThreads / kWarp;
  using Word = Pack<T, int(kLanes)>;
};

/// Elements `first` .. of a line that has `extent` of them; those behind it are left as they are.
template <class Word, class T>
TESSERA_FN void read_word(Word& w, const T* line, unsigned first, unsigned extent, bool whole) {
  constexpr unsigned N = sizeof(Word) / sizeof(T);
  if (whole && first + N <= extent) {
    w = load<int(N)>(line + first);
    return;
  }
#pragma unroll
  for (unsigned l = 0; l < N; ++l)
    if (first + l < extent) w.of[l] = line[first + l];
}
template <class Word, class T>
TESSERA_FN void write_word(const Word& w, T* line, unsigned first, unsigned extent, bool whole) {
  constexpr unsigned N = sizeof(Word) / sizeof(T);
  if (whole && first + N <= extent) return store<T, int(N)>(line + first, w);
#pragma unroll
  for (unsigned l = 0; l < N; ++l)
    if (first + l < extent) line[first + l] = w.of[l];
}

/// Column `c` of a tile lies where the columns that are read together, and the lanes of a warp, are
/// in different banks.
template <class T>
TESSERA_FN unsigned place_of_column(unsigned c) {
  constexpr unsigned N = Tile<T>::kLanes;
  return c / N + c % N * (Tile<T>::kColumns / N);
}

template <class T>
TESSERA_FN void transpose(const TransposeCall& c) {
  using Of = Tile<T>;
  using Word = typename Of::Word;
  constexpr unsigned N = Of::kLanes, kGroups = Of::kColumns / N;
  __shared__ Word tile[Of::kColumns][kWarp + 1];
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned line = quotient(blockIdx.x, c.row_tiles), batch = quotient(line, c.column_tiles);
  const unsigned row = (blockIdx.x - line * c.row_tiles.divisor) * Of::kRows,
                 column = (line - batch * c.column_tiles.divisor) * Of::kColumns;
  const Offsets<2> begin = offsets<2>(c.batch, batch);
  const T* in = static_cast<const T*>(c.in) + begin.of[1];
  T* out = static_cast<T*>(c.out) + begin.of[0];

  Word read[Of::kColumns / Of::kWarps] = {};
#pragma unroll
  for (unsigned k = 0; k < Of::kColumns / Of::kWarps; ++k)
    if (const unsigned at = column + k * Of::kWarps + warp; at < c.columns)
      read_word(read[k], in + at * c.in_column, row + lane * N, c.rows, c.in_words);
#pragma unroll
  for (unsigned k = 0; k < Of::kColumns / Of::kWarps; ++k)
    tile[place_of_column<T>(k * Of::kWarps + warp)][lane] = read[k];
  __syncthreads();

#pragma unroll
  for (unsigned k = 0; k < kWarp / Of::kWarps; ++k)
#pragma unroll
    for (unsigned j = 0; j < kGroups / kWarp; ++j) {
      const unsigned g = j * kWarp + lane, q = k * Of::kWarps + warp;
      Word of_column[N];
#pragma unroll
      for (unsigned l = 0; l < N; ++l) of_column[l] = tile[l * kGroups + g][q];
#pragma unroll
      for (unsigned m = 0; m < N; ++m) {
        Word w;
#pragma unroll
        for (unsigned l = 0; l < N; ++l) w.of[l] = of_column[l].of[m];
        if (const unsigned at = row + q * N + m; at < c.rows)
          write_word(w, out + at * c.out_row, column + g * N, c.columns, c.out_words);
      }
    }
}

}  // namespace tessera::device

// instances: T, an element of 1 to 8 bytes
KERNEL(tiles, TransposeCall, 256) { transpose<T>(c); }
