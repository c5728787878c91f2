// For tests of what tiled attention does to the weights: calls and their gradients beside those of
// the plain form, which holds all scores.
#pragma once
#include <gtest/gtest.h>

#include "core/autograd/autograd.h"
#include "core/base/parallel.h"
#include "core/ops/compose.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/tensor/allocator.h"
#include "tests/core/ops/sweep.h"
#include "tests/support/counted_ops.h"

namespace tessera::attention {

using List = std::vector<Tensor>;

inline constexpr int64_t kBatch = 2, kHeads = 3;

/// q, k, v and a cotangent of the result.
inline List operands_of(int64_t queries, int64_t keys, int64_t width, int64_t value_width,
                        DType t = kF64) {
  List in;
  for (auto [rows, columns] :
       {std::pair{queries, width}, {keys, width}, {keys, value_width}, {queries, value_width}})
    in.push_back(
        cast(sample_values({kBatch, kHeads, rows, columns}, -1, 1, uint64_t(in.size() + 1)), t));
  return in;
}

/// q, k and v, by which to differentiate.
inline List leaves_of(const List& in) {
  List leaves;
  for (int i = 0; i < 3; ++i) leaves.push_back(in[size_t(i)].detach().requires_grad_());
  return leaves;
}

/// The result and the gradients of q, k and v, and of the mask where it requires one. The weights
/// that are dropped are the same in every call.
inline List attend(const List& in, const AttentionOptions& o) {
  manual_seed(5);
  List leaves = leaves_of(in);
  if (o.mask.requires_grad()) leaves.push_back(o.mask);
  const Tensor y = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], o);
  List all{y.detach()};
  for (Tensor& g : grad({&y, 1}, leaves, {&in[3], 1})) all.push_back(g);
  return all;
}
inline void expect_plain(const List& in, AttentionOptions o, double tolerance) {
  o.kernel = AttentionKernel::kFlash;
  List got;
  {
    test::CountedOps ops;
    got = attend(in, o);
    EXPECT_EQ(ops.of("attention"), 1);
    EXPECT_EQ(ops.of("dropout"), o.dropout != 0 && o.mask.requires_grad() ? 2 : 0);
  }
  o.kernel = AttentionKernel::kPlain;
  const List want = attend(in, o);
  const char* names[] = {"out", "dq", "dk", "dv", "dmask"};
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) sweep::expect_close(got[i], want[i], tolerance, names[i]);
}

/// A call on operands of 16-bit floats beside the one on the same values in f32.
inline void expect_wide(const List& low, const AttentionOptions& o, double tolerance) {
  List wide;
  for (const Tensor& x : low) wide.push_back(cast(x, kF32));
  const List got = attend(low, o), want = attend(wide, o);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].dtype(), low[0].dtype());
    sweep::expect_close(cast(got[i], kF32), want[i], tolerance, fmt::format("result {}", i));
  }
}

/// The derivatives by all leaves of the squared gradient of the squared results of a call.
inline List second_derivatives(const List& in, const AttentionOptions& o) {
  manual_seed(5);
  List leaves = leaves_of(in);
  if (o.mask.requires_grad()) leaves.push_back(o.mask);
  const Tensor y = sum(square(scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], o)));
  Tensor norm;
  for (const Tensor& g : grad({&y, 1}, leaves, {}, {.create_graph = true}))
    norm = norm.defined() ? norm + sum(square(g)) : sum(square(g));
  const Tensors all = grad({&norm, 1}, leaves);
  return List(all.begin(), all.end());
}
inline void expect_plain_second(const List& in, AttentionOptions o, const std::string& what) {
  o.kernel = AttentionKernel::kFlash;
  const List got = second_derivatives(in, o);
  o.kernel = AttentionKernel::kPlain;
  sweep::expect_close(got, second_derivatives(in, o), 1e-11, what);
}

/// The calls of options `all` hold little beside one without any, and their plain forms the scores.
inline void expect_no_scores(const std::vector<AttentionOptions>& all) {
  const List in = operands_of(512, 512, 8, 8, kF32);
  const int threads = num_threads();
  set_num_threads(1);  // each has room for tiles, while it works
  // Bytes that a call and its gradient hold at most beside their operands.
  const auto held = [&](const AttentionOptions& o) {
    attend(in, o);  // what is made once
    reset_peak_cpu_memory();
    const int64_t before = cpu_memory_stats().live_bytes;
    attend(in, o);
    return cpu_memory_stats().peak_bytes - before;
  };
  const int64_t without = held({}), scores = kBatch * kHeads * 512 * 512 * 4;
  for (size_t i = 0; i < all.size(); ++i) {
    AttentionOptions o = all[i];
    EXPECT_LT(held(o), without + scores / 100) << i;
    o.kernel = AttentionKernel::kPlain;
    EXPECT_GT(held(o), scores) << i;
  }
  set_num_threads(threads);
}

}  // namespace tessera::attention
