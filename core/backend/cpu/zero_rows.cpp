// The rows that are left are copied together, and an ordinary product multiplies them. A look at a
// few rows decides whether all are looked at, so that other products pay next to nothing.
#include "core/backend/cpu/zero_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/base/boundary.h"
#include "core/ops/create.h"

namespace tessera::cpu {
namespace {

constexpr double kLeastProduct = limit("zero_rows.product");  // multiply-adds
constexpr int64_t kLooks = limit("zero_rows.looks"), kLookBytes = 64;
constexpr int64_t kGrainBytes = 1 << 16;

bool all_zero(const char* p, int64_t bytes) {
  constexpr int64_t kStep = limit("zero_rows.bytes");
  for (; bytes >= kStep; p += kStep, bytes -= kStep) {
    uint64_t any = 0, word;
    for (int64_t i = 0; i < kStep; i += 8) std::memcpy(&word, p + i, 8), any |= word;
    if (any) return false;
  }
  return std::all_of(p, p + bytes, [](char x) { return x == 0; });
}

// Rows of dense elements that lie `step` bytes apart.
struct Rows {
  const char* at;
  int64_t count, step, bytes;
  const char* row(int64_t i) const { return at + i * step; }
};

bool few_are_zero(const Rows& rows) {
  int64_t zeros = 0;
  for (int64_t i = 0; i < kLooks; ++i)
    zeros += all_zero(rows.row(rows.count * i / kLooks), std::min(kLookBytes, rows.bytes));
  return zeros < kLooks / 4;
}

std::vector<int64_t> rows_left(const Rows& rows) {
  std::vector<char> zero(size_t(rows.count));
  parallel_for("zero_rows.threads", rows.count, std::max<int64_t>(1, kGrainBytes / rows.bytes),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i)
                   zero[size_t(i)] = all_zero(rows.row(i), rows.bytes);
               });
  std::vector<int64_t> left;
  for (int64_t i = 0; i < rows.count; ++i)
    if (!zero[size_t(i)]) left.push_back(i);
  return left;
}

// True where no exponent is all ones.
template <class Bits>
bool finite(const char* p, int64_t n, Bits exponent) {
  Bits worst = 0;
  for (int64_t i = 0; i < n; ++i) {
    Bits x;
    std::memcpy(&x, p + i * int64_t(sizeof(Bits)), sizeof(Bits));
    worst = std::max<Bits>(worst, x & exponent);
  }
  return worst != exponent;
}

bool all_finite(const Rows& rows, DType t) {
  std::vector<char> bad(size_t(rows.count));
  parallel_for("zero_rows.finite_threads", rows.count,
               std::max<int64_t>(1, kGrainBytes / rows.bytes), [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i)
                   bad[size_t(i)] =
                       t == kBF16 ? !finite<uint16_t>(rows.row(i), rows.bytes / 2, 0x7f80)
                                  : !finite<uint32_t>(rows.row(i), rows.bytes / 4, 0x7f800000);
               });
  return std::find(bad.begin(), bad.end(), 1) == bad.end();
}

// The rows of these numbers, and zeros after them up to `count`.
Tensor gathered(const Rows& rows, const std::vector<int64_t>& numbers, int64_t count) {
  Tensor to = empty({count * rows.bytes}, kU8);
  char* out = static_cast<char*>(to.raw());
  parallel_for("zero_rows.gather_threads", count, std::max<int64_t>(1, kGrainBytes / rows.bytes),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i)
                   if (size_t(i) < numbers.size())
                     std::memcpy(out + i * rows.bytes, rows.row(numbers[size_t(i)]),
                                 size_t(rows.bytes));
                   else
                     std::memset(out + i * rows.bytes, 0, size_t(rows.bytes));
               });
  return to;
}

void run_with_own_scratch(const PlannedGemm& product, const void* a, const void* b, void* c) {
  Tensor work = empty({int64_t(product.workspace_bytes())}, kU8);
  product.run(a, b, c, work.raw());
}

// C's rows were computed one after the other from its beginning; each goes to where it belongs.
void spread_rows(const Gemm& g, const std::vector<int64_t>& numbers, void* c) {
  const size_t element = size_of(g.dtype), step = element * size_t(g.c_m),
               bytes = element * size_t(g.n);
  char* to = static_cast<char*>(c);
  size_t left = numbers.size();
  for (int64_t i = g.m - 1; i >= 0; --i) {
    char* row = to + size_t(i) * step;
    if (left == 0 || numbers[left - 1] != i)
      std::memset(row, 0, bytes);
    else if (--left != size_t(i))
      std::memcpy(row, to + left * step, bytes);
  }
}

}  // namespace

GemmWithoutZeroRows::GemmWithoutZeroRows(const Gemm& g) : g_(g), by_rows_(g.a_k == 1) {
  meet("zero_rows.product", g.m * g.n * g.k);
  const bool dense = g.batch == 0 && (by_rows_ || (g.a_m == 1 && g.b_n == 1));
  suits_ = dense && (g.dtype == kF32 || g.dtype == kBF16) &&
           double(g.m) * double(g.n) * double(g.k) >= kLeastProduct;
}

// The product in which `left` rows of A take part: rows of C, or terms of the sums.
const PlannedGemm& GemmWithoutZeroRows::product_of(int64_t left) const {
  if (left == planned_for_) return product_;
  Gemm rest = g_;
  if (by_rows_)
    rest.m = left, rest.a_m = g_.k;
  else
    rest.k = left, rest.a_k = g_.m, rest.b_k = g_.n;
  product_ = PlannedGemm(rest);
  planned_for_ = left;
  return product_;
}

bool GemmWithoutZeroRows::run(const void* a, const void* b, void* c) const {
  if (!suits_) return false;
  const Gemm& g = g_;
  const int64_t element = int64_t(size_of(g.dtype));
  const Rows of_a{static_cast<const char*>(a), by_rows_ ? g.m : g.k,
                  element * (by_rows_ ? g.a_m : g.a_k), element * (by_rows_ ? g.k : g.m)};
  meet("zero_rows.looks", of_a.count);
  meet("zero_rows.bytes", of_a.bytes / 4, limit("zero_rows.bytes") / 4);
  if (of_a.count < kLooks || few_are_zero(of_a)) return false;
  const std::vector<int64_t> left = rows_left(of_a);
  if (int64_t(left.size()) * 4 > of_a.count * 3) return false;
  const bool b_rows = g.b_n == 1;
  const Rows of_b{static_cast<const char*>(b), b_rows ? g.k : g.n,
                  element * (b_rows ? g.b_k : g.b_n), element * (b_rows ? g.n : g.k)};
  if (!all_finite(of_b, g.dtype)) return false;

  if (by_rows_) {
    const int64_t count = int64_t(left.size());
    if (count > 0) run_with_own_scratch(product_of(count), gathered(of_a, left, count).raw(), b, c);
    spread_rows(g, left, c);
  } else if (left.empty()) {
    spread_rows(g, {}, c);
  } else {
    const int64_t count = (int64_t(left.size()) + 1) / 2 * 2;  // pairs of bf16
    run_with_own_scratch(product_of(count), gathered(of_a, left, count).raw(),
                         gathered(of_b, left, count).raw(), c);
  }
  return true;
}

}  // namespace tessera::cpu
