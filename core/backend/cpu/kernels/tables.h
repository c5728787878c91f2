// The tables of functions that the files of kernels/ fill, one struct for each family. They take
// pointers, numbers and plain structs only.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tessera::cpu {

/// One row of a strided loop: p[0] is the result, then the operands; strides in bytes; n elements.
using Loop = void (*)(char* const* p, const int64_t* stride, int64_t n);

/// Loops of one pointwise functor by compute type; null where the functor has none for it.
/// `to_bool`: results are bool. `bf16`: of dense rows, computed in f32.
struct PointwiseLoops {
  const char* name;
  int arity;
  bool to_bool;
  Loop f32, f64, i64, bf16 = nullptr;
};
struct PointwiseTable {
  const PointwiseLoops* rows;
  size_t count;
};

/// dst[i] = src[i] converted, n elements with byte strides; rows[from][to] in DType order.
struct ConvertTable {
  using Fn = void (*)(char* dst, int64_t dst_stride, const char* src, int64_t src_stride,
                      int64_t n);
  const Fn* rows[10];
};

/// Reduces x [outer, n, inner] to out [outer, inner], for outer index in [begin, end).
struct ReduceTable {
  using F32 = void (*)(const float* x, float* out, int64_t n, int64_t inner, int64_t begin,
                       int64_t end);
  using F64 = void (*)(const double* x, double* out, int64_t n, int64_t inner, int64_t begin,
                       int64_t end);
  using I64 = void (*)(const int64_t* x, int64_t* out, int64_t n, int64_t inner, int64_t begin,
                       int64_t end);
  F32 f32[6];  // by ReduceKind
  F64 f64[6];
  I64 i64[6];
  /// bf16 as its bits; the sums are those of the same values in f32.
  void (*sum_bf16)(const uint16_t* x, float* out, int64_t n, int64_t inner, int64_t begin,
                   int64_t end);
};

/// Rows of n dense elements; each call covers rows [0, rows).
template <class T>
struct RowFns {
  void (*softmax)(const T* x, T* y, int64_t n, int64_t rows);
  void (*log_softmax)(const T* x, T* y, int64_t n, int64_t rows);
  /// dx = y (g - sum(g y))
  void (*softmax_grad)(const T* y, const T* g, T* dx, int64_t n, int64_t rows);
  /// dx = g - exp(y) sum(g)
  void (*log_softmax_grad)(const T* y, const T* g, T* dx, int64_t n, int64_t rows);
  /// lse[r] = log(sum(exp(x)))
  void (*logsumexp)(const T* x, T* lse, int64_t n, int64_t rows);
  /// e = scale exp(x - max) / sum(exp(x - max)) of one row; returns log(sum(exp(x))).
  T (*softmax_scaled)(const T* x, T* e, int64_t n, T scale);
  /// y = (x - mean) rstd w + b; w, b may be null. `centred` false: rms-norm, mean is 0.
  void (*norm)(const T* x, const T* w, const T* b, T* y, T* mean, T* rstd, int64_t n, int64_t rows,
               T eps, bool centred);
  /// Adds the rows' parts to dw [n] and db [n] where not null; dx may be null.
  void (*norm_grad)(const T* g, const T* x, const T* w, const T* mean, const T* rstd, T* dx, T* dw,
                    T* db, int64_t n, int64_t rows, bool centred);
};
struct RowTable {
  RowFns<float> f32;
  RowFns<double> f64;
};

/// Rows of n logits: terms[r] = log(sum(exp(x[r]))) - x[r, targets[r]], and where grad is not null
/// grad[r] = scale (softmax(x[r]) - one_hot(targets[r])); zeros where targets[r] is `ignored`.
/// `buffer` holds n + 64 floats. `bypass_caches`: for results far larger than the caches.
struct CrossEntropyTable {
  void (*f32)(const float* x, const int64_t* targets, int64_t ignored, float scale, float* terms,
              float* grad, int64_t n, int64_t rows, float* buffer, bool bypass_caches);
};

/// One Adam or SGD step over n elements of one tensor.
struct AdamStep {
  double lr, beta1, beta2, eps, weight_decay, correction1, correction2,
      grad_scale;  // correction: 1 - beta^step
  bool decoupled;
};
struct SgdStep {
  double lr, momentum, dampening, weight_decay, grad_scale;
  bool nesterov, first;
};
template <class T>
struct UpdateFns {
  void (*adam)(const T* p, const T* g, const T* m, const T* v, T* p2, T* m2, T* v2, int64_t n,
               const AdamStep& s);
  double (*sum_squares)(const T* x, int64_t n);
  void (*sgd)(const T* p, const T* g, const T* b, T* p2, T* b2, int64_t n,
              const SgdStep& s);  // b, b2 null: no momentum
};
struct UpdateTable {
  UpdateFns<float> f32;
  UpdateFns<double> f64;
};

/// Random words (core/tensor/philox.h): out[4 b + i] is word i of block `first + b` under (key,
/// counter_hi).
struct RandomTable {
  void (*words)(uint64_t key, uint64_t counter_hi, uint64_t first, int64_t blocks, uint32_t* out);
  /// Pairs (u, w) of words to pairs of standard normals; n pairs.
  void (*normals)(const uint32_t* words, float* out, int64_t pairs);
};

/// A product that sums in a fixed order: C [m, n] = A [m, k] B [k, n]. `leaves` 0: an element of C
/// is one chain of multiply-adds. Otherwise k is cut into `leaves` equal parts (a power of two that
/// divides it); each is a chain, they meet in a balanced tree, and -0 becomes +0. n is at most 512.
/// Strides as in Gemm. bf16 (as its bits) is summed in f32, without leaves, and needs AVX512-BF16;
/// its k is even, and so are strides of dense rows.
struct PackedTile {
  int64_t m, n, k, leaves;
  int64_t a_m, a_k, b_k, b_n, c_m;
};
template <class T, class Work = T>
struct PackedGemmFns {
  int64_t rows, columns;                      // of C that stay in registers
  int64_t (*depth)(const PackedTile& t);      // elements of k that are packed at a time, at most
  int64_t (*workspace)(const PackedTile& t);  // elements of `work`
  void (*run)(const PackedTile& t, const T* a, const T* b, T* c, Work* work);
};
struct PackedGemmTable {
  PackedGemmFns<float> f32;
  PackedGemmFns<double> f64;
  PackedGemmFns<uint16_t, float> bf16;  // null without AVX-512
};

/// Rows of dense channels, one at a time: the steps of pooling.
template <class T>
struct ChannelFns {
  /// Finds the largest values of rows `places` [count] of x (the first of equal ones, the last NaN)
  /// and the rows that they were in; count > 0.
  void (*largest)(const T* x, const int32_t* places, int64_t count, T* best, int32_t* at,
                  int64_t channels);
  void (*add)(const T* x, T* sum, int64_t channels);
  /// sum += x / count
  void (*add_part)(const T* x, T count, T* sum, int64_t channels);
};
struct ChannelTable {
  ChannelFns<float> f32;
  ChannelFns<double> f64;
  decltype(ChannelFns<uint16_t>::largest) largest_bf16;
};

/// Numbers of a mask below this mean that a query does not attend to a key.
inline constexpr float kLeastMask = -60000;
/// One head of attention: t queries of width d, s keys, values of width e. Rows lie `*_row`
/// elements apart, elements of a row are neighbours.
struct AttentionHead {
  int64_t t, s, d, e;
  double scale;
  bool causal;  // query i attends to keys j <= i
  int64_t q_row, k_row, v_row, out_row, g_row, dq_row, dk_row, dv_row;
  int64_t mask_row = 0, mask_column = 0;  // elements between queries and between keys of a mask
  // Dropout: weights whose words of the stream `draw_key` are below the threshold become zeros, the
  // others are multiplied by `kept`. Words of queries lie draw_row apart.
  bool drops = false;
  uint32_t threshold = 0;
  double kept = 1;
  uint64_t draw_key = 0;
  int64_t draw_row = 0;
};
/// What a head reads; g, out and lse only in backward. One of sees and adds where there is a mask:
/// a query's weights are zeros where it sees no key, and its lse is +inf.
template <class T, class Sum = T>
struct AttentionIn {
  const T *q, *k, *v, *g = nullptr, *out = nullptr;
  const Sum* lse = nullptr;
  const bool* sees = nullptr;            // keys that queries attend to
  const Sum* adds = nullptr;             // what is added to scaled scores
  uint64_t draw_hi = 0, draw_first = 0;  // upper half of the counter; the first weight's word
  bool masked() const { return sees || adds; }
};
/// `next` is what the next call will read, fetched while this one computes; any head will do.
template <class T, class Sum = T>
struct AttentionFns {
  using In = AttentionIn<T, Sum>;
  int64_t (*workspace)(const AttentionHead& h);  // elements of `work`
  void (*forward)(const AttentionHead& h, const In& in, const In& next, T* out, Sum* lse,
                  Sum* work);
  void (*backward)(const AttentionHead& h, const In& in, const In& next, T* dq, T* dk, T* dv,
                   Sum* work);
};
struct AttentionTable {
  AttentionFns<float> f32;
  AttentionFns<double> f64;
};
/// bf16 as its bits, for CPUs with AVX512-BF16, null for others: d, e and the rows of q, k, v and g
/// are even.
using AttentionBf16In = AttentionIn<uint16_t, float>;
using AttentionBf16Fns = AttentionFns<uint16_t, float>;

}  // namespace tessera::cpu
