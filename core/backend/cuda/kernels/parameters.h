// What the host passes to every kernel family: plain structs by value, one definition for both
// sides, because the composer prints this text in front of kernels. Includes nothing. Invariant:
// members have the same size and place under g++ and NVRTC (no long double, no bit fields).
#pragma once

namespace tessera::cuda {

inline constexpr int kWalkDims = 8;      // as kMaxDims of core/tensor
inline constexpr int kWalkOperands = 4;  // result and up to three operands

/// Division by a number that the host knows: n / divisor for every n below 2^31, by one product
/// (Granlund, Montgomery 1994, "Division by invariant integers using multiplication").
struct Divisor {
  unsigned divisor, multiplier, shift;
};

/// An operand that is one number lies in `value` (bits of the compute type: f32, f64 or i64) where
/// `data` is null, and at `data` with strides of 0 where a kernel has to read it.
struct Operand {
  const void* data;
  unsigned long long value;
};

/// `count` positions of a nest of `ndim` loops, the innermost first; operand 0 is the result.
/// Strides are in elements. `count` is below 2^31, and so is every offset.
struct Walk {
  unsigned count;
  int ndim;
  Divisor extent[kWalkDims];
  int stride[kWalkOperands][kWalkDims];
};

/// Where kernels report an operand that they refuse, in pinned memory of the host: zero, or the
/// complement of the first bad position (in 32 bits) above its value (held to 32 bits), which is
/// the largest of what threads wrote.
using Report = unsigned long long;

// ---- pointwise.cu ----

/// Operands are those of the op, in order; the walk's operand 0 is the result. `report` is read by
/// ops that refuse operands only (integer division by zero).
struct PointwiseCall {
  void* out;
  Operand in[3];
  Report* report;
  Walk walk;
};

// ---- transpose.cu ----

/// out[r out_row + c] = in[c in_column + r] for every row r and column c, at every position of
/// `batch`, whose operands are `out` and `in`. in_words, out_words: lines begin at multiples of 4
/// bytes (of an element, where that is wider).
struct TransposeCall {
  const void* in;
  void* out;
  long in_column, out_row;
  unsigned rows, columns;
  Divisor row_tiles, column_tiles;
  int in_words, out_words;
  Walk batch;
};

// ---- arange.cu ----

/// begin + step i where `real`, else first + each i.
struct ArangeCall {
  void* out;
  double begin, step;
  long first, each;
  unsigned count;
  int real;
};

// ---- reduce.cu, extreme.cu ----

/// x [outer, n, inner], dense, in pieces of `piece` along n: out [outer, pieces, inner]. `packs`:
/// rows and pieces begin at multiples of 16 bytes.
struct ReduceCall {
  const void* in;
  void* out;
  unsigned outer, n, inner, pieces, piece;
  int packs;
};

// ---- rows.cu, norm_grad.cu ----

/// Rows of n elements, dense. For softmax_grad and log_softmax_grad `in` is y and `other` is g; for
/// norm_grad they are x and g, for the others `other` is unused. `weight` and `bias` [n] may be
/// null. mean and rstd [rows] are of the type that rows are computed in where norms write them, and
/// are read by norm_grad; mean is null for rms-norms. norm_grad, or norm_sums where registers do
/// not hold a row, writes sums over `piece` rows each to dw and db [pieces, n], of which either may
/// be null.
struct RowsCall {
  const void *in, *other, *weight, *bias;
  void *out, *mean, *rstd, *dw, *db;
  double eps;
  unsigned rows, n, pieces, piece;
  int packs;
};

// ---- losses.cu ----

/// Rows of n logits `in`, dense, and a class each. terms [rows] and scale (one element, which
/// gradients alone need) are of the compute type; `grad` [rows, n] may be null; loss is one
/// element. Rows whose target is `ignored` count as 0; other targets outside of [0, n) are
/// reported.
struct LossCall {
  const void* in;
  const long* targets;
  void *terms, *scale, *grad, *loss;
  Report* report;
  long ignored;
  unsigned rows, n;
  int packs, mean;
};

// ---- indexing.cu, segments.cu, sort.cu ----

/// `count` elements of [outer, n, inner], which the index spans; x is [outer, rows, inner]. An
/// index that is a `vector` has n values `index_stride` apart. Values lie in [0, extent), those in
/// [begin, begin + rows) here. `wrap` reads count values and writes them to `out`.
struct IndexCall {
  const void *in, *index;
  void *out, *winner;
  Report* report;
  long index_stride, begin, rows, extent;
  Divisor inner, n;
  unsigned count;
  int vector;
};

/// `segments`: count is outer * n * inner, keys and order [n] are the sorted index, and keys equal
/// to `ignored` count for nothing; `fresh` says that out is zero where a key is, and `apart` that
/// sources are summed apart from what is there, and rounded, before they are added to it.
/// `segment_packs`: the same, where inner and count are packs of 16 bytes. `sorted`: the same
/// count, keys and order [outer, inner, n] are the index, each line sorted. `lines`: count is outer
/// * inner, keys [outer, n, inner] the index as it is.
struct SegmentCall {
  const void* in;
  void* out;
  const long* keys;
  const int* order;
  Report* report;
  long begin, rows, extent, ignored;
  Divisor inner, n;
  unsigned count;
  int fresh, apart;
};

/// Lines of n elements, [outer, n, inner]; n is below 2^31 - 1,024. keys are of the compute type.
struct SortCall {
  const void* in;
  void* keys;
  int* places;
  void* to_keys;
  int* to_places;
  void* values;
  long* positions;
  unsigned outer, n, inner, runs, run, kept, count;
  int right;
};

// ---- sparse.cu ----

/// crow [rows + 1] cuts `edges` elements into rows; col [edges] are columns. values and dense are
/// an op's operands, whose rows have n elements; inner is n, or 1 where that is 0. `check`: count
/// is rows + 1, and `edges` more where there is a col; `transpose`: the larger of columns + 1 and
/// edges; sddmm: 32 an edge; others: the elements of `out`.
struct SparseCall {
  const long *crow, *col, *keys;
  const int* order;
  const void *values, *dense;
  void* out;
  long *row, *positions;
  Report *report, *column_report;
  long columns;
  Divisor inner;
  unsigned rows, edges, n, count;
};

// ---- random.cu, dropout.cu ----

/// Packs of 16 bytes that a thread draws one after the other, where elements come in packs.
inline constexpr int kRandomSteps = 4;

/// `place` walks over the elements that are here with the strides of the whole tensor; `first` is
/// the whole tensor's index of the first. `key` [2] and `samples` lie on the device; without `key`,
/// `seed` and `number` are the key.
struct RandomCall {
  const long* key;
  long seed, number;
  const long* samples;
  const void* in;
  void* out;
  long first, low;
  unsigned long long range;
  double scale;
  unsigned threshold, total;
  Walk place;
};

// ---- update.cu ----

/// A piece of one parameter: `count` elements from `begin`. Tables of pieces and of pointers lie on
/// the device; parameter i of list l is lists[l * tensors + i].
struct UpdatePiece {
  int tensor;
  unsigned count;
  long begin;
};
/// lr, step and scale are f64 numbers on the device. Lists: adam: p, g, m, v, p2, m2, v2; sgd: p,
/// g, b, p2, b2, where b and b2 are left out without momentum. Magnitudes: x only, and a number of
/// each piece to `out`.
struct UpdateCall {
  double* out;
  const UpdatePiece* pieces;
  void* const* lists;
  const double *lr, *step, *scale;
  double beta1, beta2, eps, weight_decay, momentum, dampening;
  int tensors, decoupled, if_finite, nesterov, first;
};
/// row_squares: rows of `each` elements of x to squares [rows]. tree_sums: out[i] = the sum of
/// values[begin[i], begin[i + 1]) in a balanced tree; norm: out[0] = sqrt of the tree sum of
/// values[0, n).
struct NormCall {
  const void* in;
  double *values, *out;
  const long* begin;
  long rows, each;
  int n;
};

// ---- matmul.cu ----

/// Strides in elements of a matrix of the batch.
struct MatmulOperand {
  long row, column;
};
/// C [m, n] = A [m, k] B [k, n] for every position of `batch`, whose operands are C, A and B. The
/// sum is cut into `parts` of `part` elements, and part p of C lies p * part_stride behind it; with
/// `leaves` it is one part and the sum of so many equal leaves. Bit 0 is of A, bit 1 of B: in
/// `packs`, lines along k (along m or n where the bit in `turned` is set) are dense, their extents
/// multiples of 8, and they begin at multiples of 16 bytes; bit 2 of `packs`: C can be written by
/// pairs. `wide`: C is f32 where A and B are 16-bit floats.
struct MatmulCall {
  const void *a, *b;
  void* c;
  MatmulOperand result, left, right;
  long part_stride;
  int m, n, k, parts, part, leaves, packs, wide;
  unsigned first;  // position of the batch and part, counted together, that block 0 along z has
  Walk batch;
};
/// Levels of the tree that joins leaves: at most 2^levels of them.
inline constexpr int kMatmulLevels = 3;

// ---- attention.cu ----

/// Numbers of a mask below this mean that a query does not attend to a key.
inline constexpr float kLeastMask = -60000;

/// [batch, heads, positions, width] by strides in elements; elements of a row are neighbours.
struct AttentionOperand {
  void* data;
  long batch, head, row;
};
/// Forward reads q, k and v and writes out and lse; `delta` reads g and out; `queries` and `keys`
/// read q, k, v, g, lse and delta. lse and delta are [batch, heads, queries], dense, of the compute
/// type. A query whose mask lets it attend to no key has zeros in out and +inf in lse.
struct AttentionCall {
  AttentionOperand q, k, v, out, g, dq, dk, dv;
  void *lse, *delta;
  double scale;
  int heads, queries, keys, width, value_width, causal;
  unsigned packs;  // which operands the matrix units' kernels read and write in packs
  // Points to bools, or to numbers of the compute type that are added to scaled scores; only where
  // instances are masked.
  const void* mask;
  long mask_batch, mask_head, mask_query, mask_key;  // in elements
  int mask_is_bool;
  // Instances with dropout read the rest. Weights whose words are below the threshold count as
  // zeros, the others times `kept`. Words of batch b lie from draw_begin + b draw_batch on and so
  // on, keys as neighbours. With `samples`, batch b is row b % draw_rows of sample b / draw_rows,
  // whose number is the upper half of the counter. `key`, `seed` and `number` as in RandomCall.
  const long* key;
  long seed, number;
  const long* samples;
  long draw_begin, draw_batch, draw_head, draw_query;
  double kept;
  int draw_rows;
  unsigned threshold;
};
/// Bits of AttentionCall::packs: rows begin at multiples of 16 bytes and are some packs long.
inline constexpr unsigned kPacksQ = 1, kPacksK = 2, kPacksV = 4, kPacksG = 8, kPacksOut = 16,
                          kPacksDq = 32, kPacksDk = 64, kPacksDv = 128;

// ---- attention_mask.cu ----

/// What is added to scores that do not count: the lowest number.
inline constexpr float kMaskedBias = -0x1.fffffep127f;
/// mask [batch, heads, queries, keys], of any of these 1, by strides in elements: bools or f32.
/// bias [lines, keys] and first [lines] are dense.
struct AttentionBiasCall {
  const void* mask;
  float* bias;
  int* first;
  long steps[4];
  unsigned lines, extents[3];
  int keys, is_bool;
};
/// `first` of a query lies where steps by batch, head and query say. lse is dense.
struct AttentionBlankCall {
  const int* first;
  AttentionOperand out;
  float* lse;
  long steps[3], rows;
  int heads, queries, keys, width, causal;
};

// ---- scan.cu ----

/// Elements that a thread has of a tile of a line.
inline constexpr unsigned kScanItems = 4;
/// Lines [outer, n, inner], dense. `other` holds the terms of a linear recurrence, `in` its
/// factors; `positions` is written by cummax and cummin only. `warps` asks for inner = 1; with
/// `packs` it moves kScanItems elements at once: n is a multiple of that, and lines are aligned.
struct ScanCall {
  const void *in, *other;
  void* out;
  long* positions;
  unsigned outer, n, inner;
  int reverse, packs;
};

// ---- bits_hash.cu ----

/// blocks: `words` words of 8 bytes, the last of which may have less, of `bytes` bytes at `in`;
/// out [blocks, 2]. join: in [parts, 2], of the same words; out [2].
struct BitsHashCall {
  const void* in;
  unsigned long* out;
  unsigned long words, bytes;
  unsigned parts;
};

// ---- pool.cu ----

/// One spatial dim: extents of x and y, and the windows; dims that are missing have 1 of everything
/// and no padding.
/// Places and, where pooling is adaptive, in * out are below 2^31.
struct PoolDim {
  int in, out, kernel, stride, padding, dilation;
};
struct PoolStrides {
  long image, channel, dim[3];
};
/// Forward: `in` is x and `out` is y; gradients: `in` is y's cotangent and `out` x's. `places`,
/// with y's strides, are places in the image; null where nobody asks for them. `count` are the
/// elements of `out`.
struct PoolCall {
  const void* in;
  void* out;
  int* places;
  PoolDim dim[3];
  PoolStrides x, y;
  long divisor;
  unsigned channels, count;
  int adaptive, count_padding;
};

// ---- batch_norm.cu ----

/// Operands and results [rows, channels], dense; weight, bias, mean, var, sums and their gradients
/// [channels] and partial results [pieces, channels] are of the compute type. What an op does not
/// have is null: y where there is no relu in backward, and so on. join_sums multiplies both sums by
/// `share` (1, or 1 / rows for grad, which reads means). moments_of_sums reads first and second
/// [channels], and `share` is 1 / rows. dresidual of masked_sums may be its g.
struct BatchNormCall {
  const void *x, *g, *y, *weight, *bias, *residual;
  void *out, *dresidual, *mean, *var, *first, *second, *sum_g, *sum_product, *dw, *db;
  double eps, share;
  unsigned rows, channels, piece, pieces;
  int relu;
};

// ---- conv.cu ----

/// Rows are places of the output, (image, spatial), columns (place of the kernel, channel of a
/// group). gather: count is groups x rows x columns, rows from `first` on; gather_packs moves 16
/// bytes of channels, which are dense and whose number and strides allow it; collect: count are the
/// elements of x, rows are all.
struct ConvCall {
  const void* in;
  void* out;
  PoolDim dim[3];
  PoolStrides x;
  unsigned groups, channels, rows, columns, first, count;
};

}  // namespace tessera::cuda
