// Cross-entropy of rows of logits and its gradient in one sweep over memory. A row is read once:
// its exponentials are taken against a reference near its maximum and wait in a buffer that the
// second-level cache holds, until the sweep over the next row writes them out, scaled, beside the
// arithmetic of that row. Invariant: a row's results depend on its values alone, not on its
// neighbours, its place in memory or the kind of store.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/tables.h"
#include "core/backend/cpu/kernels/vector.h"
#include "core/base/boundaries.h"
// Each text needs the one before it.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/math.h"
// clang-format on

namespace tessera::cpu {
namespace {

constexpr int64_t kBlock =
    limit("cross_entropy.block");  // floats between two tests of the reference
constexpr int64_t kAhead = 4096;   // floats between a read and its prefetch
constexpr float kHeadroom = 40;    // exp(40) times a row's length is far from overflow
constexpr float kLowest = -3.40282347e38f;
constexpr int kLine = 64 / sizeof(float);

// The largest of n values that is not NaN, at least kLowest: -inf as a reference would turn other
// -inf into NaN.
float highest(const float* x, int64_t n) {
  Group high(kLowest);
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) high = larger(load_group(x + i), high);
  float top = highest_of(high);
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// Exponentials in the buffer that are still to be written as a row's gradient.
struct Waiting {
  float* grad = nullptr;  // null: none
  float scale = 0;
  int64_t lead = 0;  // elements before the first cache line that begins in the row
};

// Whole groups of a row; one that begins up to a line later still ends within it.
int64_t body_of(int64_t n) {
  return n < kGroup + kLine - 1 ? 0 : (n - (kLine - 1)) / kGroup * kGroup;
}

// What the sweep leaves out: the elements before the first group of the gradient and behind the
// last.
void write_edges(const Waiting& w, const float* buffer, int64_t n) {
  const int64_t body = body_of(n);
  for (int64_t i = 0; i < (body ? w.lead : 0); ++i) w.grad[i] = buffer[i] * w.scale;
  for (int64_t i = body ? body + w.lead : 0; i < n; ++i) w.grad[i] = buffer[i] * w.scale;
}

// buffer[i] = exp(x[i] - top) for whole groups; adds them to sum and returns the highest x - top. A
// row that waits is written from `w.lead` further on, places that this row has not reached.
template <bool kWrite, bool kStream>
float sweep(const float* x, float* buffer, int64_t n, float top, Group& sum, float* grad,
            const Waiting& w) {
  const Group reference(top), scale(w.scale);
  const float* from = buffer + w.lead;
  Group high(kLowest), part(0.0f);
  for (int64_t i = 0; i < n; i += kGroup) {
    if constexpr (kStream)
      for (int l = 0; l < kGroup; l += kLine) __builtin_prefetch(x + i + l + kAhead, 0, 2);
    const Group d = load_group(x + i) - reference, e = fn::exp_by_table(d);
    high = larger(d, high);
    part = part + e;
    if constexpr (kWrite && kStream) stream(grad + i, load_group(from + i) * scale);
    if constexpr (kWrite && !kStream) store(grad + i, load_group(from + i) * scale);
    store(buffer + i, e);
  }
  sum = sum + part;
  return highest_of(high);
}

// Moves the reference to the highest of x[0, n): rescales the `done` exponentials before it.
float raise(const float* x, int64_t n, float* buffer, int64_t done, float top, Group& sum) {
  const float next = highest(x, n), keep = fn::exp_by_table(top - next);
  for (int64_t i = 0; i < done; ++i) buffer[i] *= keep;
  sum = sum * Group(keep);
  return next;
}

// Exponentials of a row into the buffer; returns the reference.
template <bool kStream>
float exponentials(const float* row, int64_t n, float* buffer, Group& sum, const Waiting& w) {
  const int64_t body = body_of(n), first = n < kBlock ? n : kBlock;
  float top = highest(row, first);
  for (int64_t k = 0; k < body; k += kBlock) {
    const int64_t len = body - k < kBlock ? body - k : kBlock;
    const Group before = sum;
    float* grad = w.grad + w.lead + k;
    const float high = w.grad ? sweep<true, kStream>(row + k, buffer + k, len, top, sum, grad, w)
                              : sweep<false, kStream>(row + k, buffer + k, len, top, sum, grad, w);
    if (high > kHeadroom) {
      sum = before;
      top = raise(row + k, len, buffer, k, top, sum);
      sweep<false, false>(row + k, buffer + k, len, top, sum, nullptr, {});
    }
  }
  float rest[2 * kGroup];  // behind the body; exp(-inf) adds nothing
  for (int i = 0; i < 2 * kGroup; ++i) rest[i] = body + i < n ? row[body + i] : -fn::inf();
  if (highest(rest, 2 * kGroup) - top > kHeadroom)
    top = raise(rest, 2 * kGroup, buffer, body, top, sum);
  sweep<false, false>(rest, buffer + body, 2 * kGroup, top, sum, nullptr, {});
  return top;
}

template <bool kStream>
void rows_of(const float* x, const int64_t* targets, int64_t ignored, float scale, float* terms,
             float* grad, int64_t n, int64_t rows, float* buffer) {
  Waiting waiting;
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = x + r * n;
    const int64_t target = targets[r];
    if (target == ignored) {
      terms[r] = 0;
      for (int64_t i = 0; grad && i < n; ++i) grad[r * n + i] = 0;
      continue;
    }
    if (waiting.grad) write_edges(waiting, buffer, n);
    Group sum(0.0f);
    const float top = exponentials<kStream>(row, n, buffer, sum, waiting);
    const float total = sum_of(sum);
    terms[r] = top + fn::log(total) - row[target];
    if (!grad) continue;
    buffer[target] -= total;  // the gradient is scale (e / total - 1) there
    waiting = {grad + r * n, scale / total, 0};
    if (kStream)
      waiting.lead = -int64_t(reinterpret_cast<uintptr_t>(waiting.grad) / 4) & (kLine - 1);
  }
  if (waiting.grad) {
    write_edges(waiting, buffer, n);
    for (int64_t i = 0; i < body_of(n); ++i)
      waiting.grad[waiting.lead + i] = buffer[waiting.lead + i] * waiting.scale;
  }
  if (kStream) streams_done();
}

void cross_entropy(const float* x, const int64_t* targets, int64_t ignored, float scale,
                   float* terms, float* grad, int64_t n, int64_t rows, float* buffer,
                   bool bypass_caches) {
  auto run = bypass_caches ? rows_of<true> : rows_of<false>;
  run(x, targets, ignored, scale, terms, grad, n, rows, buffer);
}

}  // namespace

template <>
const CrossEntropyTable& isa_table<CrossEntropyTable, isa::TESSERA_ISA>() {
  static const CrossEntropyTable table{cross_entropy};
  return table;
}

}  // namespace tessera::cpu
