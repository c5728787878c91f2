// The arithmetic of reductions, for every instruction set of this machine: each kernel must have
// the bits of the balanced tree, computed one element at a time.
#include "collectives/reduction.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "collectives/kernels/trees.h"
#include "core/base/boundary.h"
#include "core/base/isa.h"
#include "core/tensor/element.h"
#include "tests/support/boundaries.h"

namespace tessera::detail {
namespace {

template <class T>
T tree(ReduceOp op, const std::vector<T>& x, size_t low, size_t high) {
  if (high - low == 1) return x[low];
  size_t left = std::bit_ceil(high - low) / 2;
  T a = tree(op, x, low, low + left), b = tree(op, x, low + left, high);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: return a + b;
    case ReduceOp::kProduct: return a * b;
    case ReduceOp::kMin: return a != a || a < b ? a : b;
    case ReduceOp::kMax: return a != a || a > b ? a : b;
    default: break;
  }
  if constexpr (std::is_integral_v<T>)
    return op == ReduceOp::kBitAnd ? a & b : op == ReduceOp::kBitOr ? a | b : a ^ b;
  return a;
}

/// Values of all sizes, with both zeros, denormals, infinities and NaN among them.
double value(std::mt19937_64& random) {
  constexpr double special[] = {0.0,
                                -0.0,
                                1e-40,
                                -3e-6,
                                1e300,
                                -7e-46,
                                std::numeric_limits<double>::infinity(),
                                std::numeric_limits<double>::quiet_NaN()};
  uint64_t r = random();
  if (r % 16 == 0) return special[r / 16 % 8];
  return std::ldexp(double(int64_t(random()) >> 11) * 0x1p-52, int(r / 16 % 40) - 20);
}

std::vector<std::byte> fill(DType dtype, int64_t count, std::mt19937_64& random) {
  std::vector<std::byte> bytes(size_t(count) * size_of(dtype));
  for (int64_t i = 0; i < count; ++i) {
    std::byte* at = bytes.data() + size_t(i) * size_of(dtype);
    if (is_floating(dtype))
      write_real(at, dtype, value(random));
    else if (dtype == kI32 || dtype == kI64)
      write_integer(at, dtype, int64_t(random()) >> 40);  // products of five wrap around in i64
    else
      write_integer(at, dtype, dtype == kBool ? random() & 1 : random() & 255);
  }
  return bytes;
}

/// Element i of the result, as bits.
uint64_t expected(ReduceOp op, DType dtype, const std::vector<std::vector<std::byte>>& sources,
                  int64_t i) {
  auto at = [&](size_t s) { return sources[s].data() + size_t(i) * size_of(dtype); };
  size_t n = sources.size();
  uint64_t bits = 0;
  if (dtype == kF64) {
    std::vector<double> x;
    for (size_t s = 0; s < n; ++s) x.push_back(read_real(at(s), dtype));
    double y = tree(op, x, 0, n);
    write_real(&bits, dtype, op == ReduceOp::kAvg ? y / double(n) : y);
  } else if (is_floating(dtype)) {
    std::vector<float> x;
    for (size_t s = 0; s < n; ++s) x.push_back(float(read_real(at(s), dtype)));
    float y = tree(op, x, 0, n);
    if (op == ReduceOp::kAvg) y /= float(n);
    if (dtype == kF32) std::memcpy(&bits, &y, 4);
    if (dtype == kF16) bits = to_half(y).bits;
    if (dtype == kBF16) bits = to_bfloat16(y).bits;
  } else {
    std::vector<uint64_t> x;
    for (size_t s = 0; s < n; ++s) x.push_back(uint64_t(read_integer(at(s), dtype)));
    bool any = dtype == kBool && (op == ReduceOp::kSum || op == ReduceOp::kMax);
    bool all = dtype == kBool && (op == ReduceOp::kProduct || op == ReduceOp::kMin);
    if (any) op = ReduceOp::kBitOr;
    if (all) op = ReduceOp::kBitAnd;
    if (op == ReduceOp::kMin || op == ReduceOp::kMax)  // signed
      bits = uint64_t(tree(op, std::vector<int64_t>(x.begin(), x.end()), 0, n));
    else
      bits = tree(op, x, 0, n);
    if (size_of(dtype) < 8) bits &= (uint64_t{1} << 8 * size_of(dtype)) - 1;
  }
  return bits;
}

bool is_nan(DType dtype, const std::byte* at) {
  return is_floating(dtype) && read_real(at, dtype) != read_real(at, dtype);
}

/// Expects that `result` is the tree over `sources`, element by element.
void expect_tree(ReduceOp op, DType dtype, const std::vector<std::vector<std::byte>>& sources,
                 const std::byte* result, int64_t count, const std::string& where) {
  for (int64_t i = 0; i < count; ++i) {
    const std::byte* at = result + size_t(i) * size_of(dtype);
    uint64_t want = expected(op, dtype, sources, i), got = 0;
    std::memcpy(&got, at, size_of(dtype));
    if (is_nan(dtype, reinterpret_cast<std::byte*>(&want)) && is_nan(dtype, at)) continue;
    ASSERT_EQ(got, want) << name_of(op) << " of " << sources.size() << " x " << name_of(dtype)
                         << ", element " << i << ", " << where;
  }
}

void compare(ReduceOp op, DType dtype, int n, int64_t count) {
  std::mt19937_64 random(uint64_t(n) * 64 + uint64_t(dtype) * 8 + uint64_t(op));
  std::vector<std::vector<std::byte>> sources;
  std::vector<const void*> pointers;
  for (int s = 0; s < n; ++s) sources.push_back(fill(dtype, count, random));
  for (auto& s : sources) pointers.push_back(s.data());
  std::vector<const TreeTable*> tables = {&tree_table<isa::base>()};
#ifdef __x86_64__
  if (cpu::current_isa() >= cpu::Isa::kV3) tables.push_back(&tree_table<isa::v3>());
  if (cpu::current_isa() >= cpu::Isa::kV4) tables.push_back(&tree_table<isa::v4>());
#endif
  // In the last round reduce_tree chooses the table, and the results go where sources lie.
  for (size_t t = 0; t <= tables.size(); ++t)
    for (int places : n == 2 || n == 3 ? std::vector{1, n} : std::vector{1}) {
      const std::vector<std::vector<std::byte>> before = sources;
      std::vector<std::vector<std::byte>> own(before.begin(), before.begin() + places);
      std::vector<void*> to;
      for (int p = 0; p < places; ++p)
        to.push_back(t < tables.size() ? own[size_t(p)].data() : sources[size_t(p)].data());
      if (t < tables.size() && dtype != kBool)
        tables[t]->kernels[int(op)][int(dtype) - 1](to.data(), places, pointers.data(), n, count,
                                                    n);
      else
        reduce_tree(op, dtype, std::span<void* const>(to), pointers, count);
      for (int p = 0; p < places; ++p)
        expect_tree(op, dtype, before, static_cast<const std::byte*>(to[size_t(p)]), count,
                    fmt::format("table {}, place {} of {}", t, p, places));
      for (int s = 0; s < n; ++s) std::ranges::copy(before[size_t(s)], sources[size_t(s)].begin());
    }
}

TEST(Reduction, IsTheBalancedTreeOnEveryInstructionSet) {
  for (int n : {1, 2, 3, 4, 5, 8})
    for (DType dtype : kAllDTypes)
      for (int op = 0; op < kNumReduceOps; ++op)
        if (reducible(ReduceOp(op), dtype))
          compare(ReduceOp(op), dtype, n, 2500);  // two blocks and a rest
}

TEST(Reduction, BlocksAtTheirLimit) {
  CountBoundaries counting;
  for (int64_t count : {1023, 1024, 1025})
    for (DType dtype : {kI64, kBF16, kF32, kF64})
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg})
        if (reducible(op, dtype)) compare(op, dtype, 3, count);
  EXPECT_EQ(test::not_met({"trees"}), "");
}

// If sources are themselves sums over ranks, an average divides by the number of ranks.
TEST(Reduction, AnAverageOfSumsDividesOnce) {
  const float a[] = {1, 2, 1e-45f}, b[] = {4, 6, 1e-45f}, c[] = {3, -1, 0};
  const void* sources[] = {a, b, c};
  float got[3];
  reduce_tree(ReduceOp::kAvg, kF32, got, {sources, 2}, 3, 4);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(got[i], (a[i] + b[i]) / 4.0f);
  reduce_tree(ReduceOp::kAvg, kF32, got, sources, 3, 6);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(got[i], (a[i] + b[i] + c[i]) / 6.0f);
  reduce_tree(ReduceOp::kSum, kF32, got, sources, 3, 6);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(got[i], a[i] + b[i] + c[i]);
}

}  // namespace
}  // namespace tessera::detail
