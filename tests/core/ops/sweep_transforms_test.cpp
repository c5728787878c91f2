// Every op under function transforms: on a batch it gives what it gives sample by sample, whichever
// operands have the batch; its forward derivative is that of finite differences; per-sample
// gradients are those of a loop.
#include <algorithm>
#include <cmath>

#include "core/autograd/batching.h"
#include "core/autograd/transforms.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "tests/core/ops/sweep.h"

namespace tessera::sweep {
namespace {

constexpr int64_t kSamples = 3;

// Derivatives that are given what the op computed: statistics that fit no x mean nothing, so
// samples differ in the cotangent only. Offsets of pieces are none in another order.
bool tied(const Sample& s, size_t operand) {
  const std::string_view name = s.prim->name();
  if (name.starts_with("segment_")) return operand == 1;
  if (name.starts_with("spmm") || name == "sddmm" || name == "csr_transpose") return operand == 0;
  return operand > 0 && (name == "layer_norm_grad" || name == "rms_norm_grad" ||
                         name == "batch_norm_grad" || name == "attention_grad");
}

// In a dtype that ops compute with.
Tensor computed(const Tensor& t) { return is_storage_only(t.dtype()) ? cast(t, kF32) : t; }

// Values of sample `k`: floats a little smaller each time, which keeps domains and order; others in
// another order, which keeps them legal.
Tensor sample_of(const Sample& s, size_t operand, int64_t k) {
  const Tensor& t = s.in[operand];
  if (tied(s, operand)) return t;
  if (is_float(t)) return t * (1.0 - 0.01 * double(k));
  return cast(reshape(roll(reshape(computed(t), {-1}), {k}, {0}), t.shape()), t.dtype());
}

// `in` with a batch in dim `dim` of the operands that `batched` names.
List with_batch(const Sample& s, uint32_t batched, int64_t dim) {
  List out = s.in;
  for (size_t i = 0; i < out.size(); ++i) {
    if (!(batched >> i & 1)) continue;
    std::vector<Tensor> parts;
    for (int64_t k = 0; k < kSamples; ++k) parts.push_back(computed(sample_of(s, i, k)));
    out[i] = cast(stack(parts, dim), s.in[i].dtype());
  }
  return out;
}

List sample_operands(const Sample& s, uint32_t batched, int64_t k) {
  List out = s.in;
  for (size_t i = 0; i < out.size(); ++i)
    if (batched >> i & 1) out[i] = sample_of(s, i, k);
  return out;
}

// Each operand alone, all together, all but one.
std::vector<uint32_t> subsets(size_t operands) {
  std::vector<uint32_t> masks;
  const uint32_t all = (1u << operands) - 1;
  for (size_t i = 0; i < operands; ++i) masks.push_back(1u << i), masks.push_back(all & ~(1u << i));
  masks.push_back(all);
  std::ranges::sort(masks);
  masks.erase(std::ranges::unique(masks).begin(), masks.end());
  std::erase(masks, 0u);
  return masks;
}

List vmapped(const Sample& s, const List& in, uint32_t batched, int64_t dim,
             Randomness randomness) {
  auto f = [&](const List& operands) {
    std::vector<Tensor> copy(operands.begin(), operands.end());
    return run(s.prim, copy);
  };
  auto body = [&](std::span<const Tensor> t) { return f(List(t.begin(), t.end())); };
  std::vector<std::optional<int64_t>> dims;
  for (size_t i = 0; i < in.size(); ++i)
    dims.push_back(batched >> i & 1 ? std::optional<int64_t>(dim) : std::nullopt);
  return transforms::vmap_of(body, in, {dims, std::vector<size_t>(in.size(), 1), {}, randomness});
}

double tolerance(const Tensor& t) {
  return t.dtype() == kF64 ? 1e-12 : t.dtype() == kF32 ? 1e-6 : is_float(t) ? 0.01 : 0;
}

TEST(Sweep, ABatchEqualsItsSamples) {
  int batches = 0;
  for_each_sample([&](const Sample& s) {
    if (s.in.empty()) return;
    for (uint32_t batched : subsets(s.in.size()))
      for (int64_t dim : {0, -1}) {
        SCOPED_TRACE(fmt::format("operands {:#b} batched in dim {}", batched, dim));
        List got = vmapped(s, with_batch(s, batched, dim), batched, dim, Randomness::kSame);
        for (int64_t k = 0; k < kSamples; ++k) {
          List want = run(s.prim, sample_operands(s, batched, k));
          ASSERT_EQ(got.size(), want.size());
          for (size_t i = 0; i < want.size(); ++i)
            expect_close(clone(select(got[i], 0, k)), want[i], tolerance(want[i]),
                         fmt::format("sample {}, result {}", k, i));
        }
        ++batches;
      }
  });
  EXPECT_GT(batches, 800);
  // What cannot run on a batch at once, and says so: draws with keys of their own, lists of any
  // shapes without a decomposition, one list of edges or offsets for each sample, sparse products.
  EXPECT_EQ(ops_batched_one_by_one(),
            (std::vector<std::string>{
                "bits_hash", "csr_transpose", "dropout", "global_norm", "norm_of_rows", "rand",
                "randint", "randn", "sddmm", "searchsorted", "segment_amax", "segment_amin",
                "segment_prod", "segment_sum", "spmm", "spmm_amax", "spmm_amin"}));
}

TEST(Sweep, ABatchOfOneSample) {
  for_each_sample([](const Sample& s) {
    if (s.in.empty()) return;
    List in;
    for (const Tensor& t : s.in) in.push_back(unsqueeze(t, 0));
    List got = vmapped(s, in, (1u << in.size()) - 1, 0, Randomness::kSame),
         want = run(s.prim, s.in);
    for (size_t i = 0; i < want.size(); ++i)
      expect_close(clone(select(got[i], 0, 0)), want[i], tolerance(want[i]), "one sample");
  });
}

TEST(Sweep, ABatchOfNoSamples) {
  for_each_sample([](const Sample& s) {
    if (s.in.empty()) return;
    for (uint32_t batched : subsets(s.in.size())) {
      SCOPED_TRACE(fmt::format("operands {:#b} batched", batched));
      List in = s.in;
      for (size_t i = 0; i < in.size(); ++i)
        if (batched >> i & 1) in[i] = narrow(unsqueeze(in[i], 0), 0, 0, 0);
      List got = vmapped(s, in, batched, 0, Randomness::kDifferent), want = run(s.prim, s.in);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < want.size(); ++i) {
        Shape none = want[i].shape();
        none.insert(0, 0);
        EXPECT_EQ(got[i].shape(), none);
        EXPECT_EQ(got[i].dtype(), want[i].dtype());
      }
    }
  });
}

bool tested(const Sample& s) {
  bool floats = false;
  for (const Tensor& t : s.in) floats = floats || t.dtype() == kF64;
  return s.smooth && s.prim->differentiable() && floats && infer(*s.prim, s.in)[0].dtype == kF64;
}

// Sum of the first result with fixed weights: log-sum-exps and statistics have no derivative.
Tensor loss(const Sample& s, const List& in) {
  Tensor y = run(s.prim, in)[0];
  return sum(y * weights_like(y, 0));
}

TEST(Sweep, ForwardDerivativesEqualFiniteDifferences) {
  constexpr double kStep = 1e-5;
  int samples = 0;
  for_each_sample([&](const Sample& s) {
    if (!tested(s)) return;
    List t, up, down;
    for (size_t i = 0; i < s.in.size(); ++i) {
      const Tensor& x = s.in[i];
      const bool moves = x.dtype() == kF64;
      t.push_back(moves ? weights_like(x, i) : x);
      up.push_back(moves ? x + t[i] * kStep : x), down.push_back(moves ? x - t[i] * kStep : x);
    }
    auto first = [&](const List& in) { return run(s.prim, in)[0]; };
    auto [y, dy] = jvp(first, s.in, t);
    expect_close(y, first(s.in), 0, "value");
    expect_close(dy, (first(up) - first(down)) / (2 * kStep), 1e-6, "derivative");
    ++samples;
  });
  EXPECT_GT(samples, 100);
}

TEST(Sweep, PerSampleGradientsEqualThoseOfALoop) {
  int samples = 0;
  for_each_sample([&](const Sample& s) {
    if (!tested(s)) return;
    const std::vector<bool> wanted(s.in.size(), true);
    auto f = [&](std::span<const Tensor> in) { return List{loss(s, List(in.begin(), in.end()))}; };
    auto g = [&](std::span<const Tensor> in) {
      return transforms::value_and_grad_of(f, in, wanted).gradients;
    };
    const uint32_t all = (1u << s.in.size()) - 1;
    for (uint32_t batched : {all, 1u}) {
      List in = with_batch(s, batched, 0);
      std::vector<std::optional<int64_t>> dims;
      for (size_t i = 0; i < in.size(); ++i)
        dims.push_back(batched >> i & 1 ? std::optional<int64_t>(0) : std::nullopt);
      List got = transforms::vmap_of(
          g, in, {dims, std::vector<size_t>(in.size(), 1), {}, Randomness::kSame});
      for (int64_t k = 0; k < kSamples; ++k) {
        List want = g(sample_operands(s, batched, k));
        for (size_t i = 0; i < want.size(); ++i)
          expect_close(clone(select(got[i], 0, k)), want[i], 1e-11,
                       fmt::format("operands {:#b}, sample {}, gradient {}", batched, k, i));
      }
    }
    ++samples;
  });
  EXPECT_GT(samples, 100);
}

}  // namespace
}  // namespace tessera::sweep
