// Autocast: in which dtype each op computes, what gradients are, how scopes nest, and when a weight
// is cast again.
#include "core/autograd/autocast.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "core/autograd/autograd.h"
#include "core/ops/batch_norm.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/conv.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/losses.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/scan.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/primitive/registry.h"
#include "core/tensor/random.h"
#include "tests/support/counted_ops.h"

namespace tessera {
namespace {

Tensor drawn(const Shape& shape, uint64_t seed) {
  manual_seed(seed);
  return randn(shape);
}
Tensor weight(const Shape& shape, uint64_t seed) { return drawn(shape, seed).requires_grad_(); }

void expect_same(const Tensor& a, const Tensor& b, const char* what) {
  ASSERT_EQ(a.dtype(), b.dtype()) << what;
  ASSERT_EQ(a.shape(), b.shape()) << what;
  Tensor x = contiguous(a.detach()), y = contiguous(b.detach());
  EXPECT_EQ(std::memcmp(x.raw_values(), y.raw_values(), x.nbytes()), 0) << what;
}
double largest_difference(const Tensor& a, const Tensor& b) {
  return amax(abs(a.detach().to(kF64) - b.detach().to(kF64))).item<double>();
}

// PyTorch's lists, by the names of our primitives.
TEST(Autocast, OpsStateTheirPrecision) {
  const std::set<std::string_view> low = {"contract", "contract_bias",   "attention",
                                          "conv",     "conv_grad_input", "conv_stats"},
                                   wide = {"softmax",
                                           "log_softmax",
                                           "layer_norm",
                                           "rms_norm",
                                           "cross_entropy",
                                           "exp",
                                           "exp2",
                                           "expm1",
                                           "log",
                                           "log2",
                                           "log10",
                                           "log1p",
                                           "logsigmoid",
                                           "softplus",
                                           "pow",
                                           "reciprocal",
                                           "rsqrt",
                                           "sinh",
                                           "cosh",
                                           "tan",
                                           "asin",
                                           "acos",
                                           "erfinv",
                                           "lgamma",
                                           "digamma",
                                           "trigamma",
                                           "cholesky",
                                           "solve_triangular",
                                           "qr",
                                           "svd",
                                           "sum",
                                           "prod",
                                           "logcumsumexp",
                                           "cumsum",
                                           "cumprod",
                                           "segment_sum",
                                           "segment_prod",
                                           "spmm",
                                           "spmm_amax",
                                           "spmm_amin",
                                           "sddmm"};
  size_t listed = 0;
  for (const OpEntry& e : op_registry().entries()) {
    const bool is_low = low.contains(e.name), is_wide = wide.contains(e.name);
    listed += is_low || is_wide;
    for (const Sample& s : e.samples())
      EXPECT_EQ(s.prim->traits().precision, is_low    ? Precision::kLow
                                            : is_wide ? Precision::kWide
                                                      : Precision::kAsGiven)
          << e.name;
  }
  EXPECT_EQ(listed, low.size() + wide.size());
}

TEST(Autocast, OpsComputeInTheirPrecision) {
  for (DType low : {kBF16, kF16}) {
    Tensor x = drawn({4, 8}, 1), w = weight({6, 8}, 2), b = weight({6}, 3);
    Autocast scope(low);
    Tensor y = linear(x, w, b);
    EXPECT_EQ(y.dtype(), low);
    EXPECT_EQ(matmul(x, transpose(w, 0, 1)).dtype(), low);
    EXPECT_EQ(gelu(y).dtype(), low) << "as given";
    EXPECT_EQ((y + x[0][0]).dtype(), low) << "numbers do not widen";
    EXPECT_EQ((y + linear(x, w).to(kF32)).dtype(), kF32) << "the wider of two";
    Tensor parts[] = {y, drawn({4, 6}, 4)};
    EXPECT_EQ(cat(parts, 0).dtype(), kF32);
    for (const Tensor& wide : {softmax(y),
                               log_softmax(y),
                               layer_norm(y, drawn({6}, 5), b),
                               rms_norm(y),
                               exp(y),
                               pow(abs(y), 2.5),
                               sum(y),
                               mean(y),
                               cumsum(y, 0),
                               mse_loss(y, y),
                               l1_loss(y, y),
                               huber_loss(y, y),
                               binary_cross_entropy_with_logits(y, sigmoid(y)),
                               kl_div(log_softmax(y), softmax(y)),
                               norm(y),
                               cross_entropy(y, from_values<int64_t>({0, 1, 2, 3}, {4})),
                               nll_loss(y, from_values<int64_t>({0, 1, 2, 3}, {4})),
                               softplus(y),
                               softplus(y, 2.0),
                               group_norm(y, 2, b),
                               instance_norm(unsqueeze(y, 0))})
      EXPECT_EQ(wide.dtype(), kF32);
    const Tensor rows = from_values<int64_t>({3, 0, 1, 2}, {4}), f32 = drawn({4, 6}, 4);
    const Tensor at = expand(unsqueeze(rows, 1), {4, 6});
    for (auto& [a, b] : {std::pair{f32, y}, std::pair{y, f32}}) {
      expect_same(index_add(a, 0, rows, b), index_add(a.to(kF32), 0, rows, b.to(kF32)),
                  "index_add");
      expect_same(index_put(a, {&rows, 1}, b), index_put(a.to(kF32), {&rows, 1}, b.to(kF32)),
                  "index_put");
      expect_same(scatter_add(a, 0, at, b), scatter_add(a.to(kF32), 0, at, b.to(kF32)),
                  "scatter_add");
      expect_same(scatter_reduce(a, 0, at, b, ScatterReduce::kAmax),
                  scatter_reduce(a.to(kF32), 0, at, b.to(kF32), ScatterReduce::kAmax), "amax");
    }
    Tensor image = drawn({2, 3, 5, 5}, 7), kernel = weight({4, 3, 3, 3}, 8), c = weight({4}, 9);
    EXPECT_EQ(conv2d(image, kernel, c).dtype(), low);
    EXPECT_EQ(conv_transpose2d(conv2d(image, kernel, c), kernel).dtype(), low);
    Tensor q = drawn({1, 2, 5, 4}, 6);
    EXPECT_EQ(scaled_dot_product_attention(q, q.to(low), q, {.causal = true}).dtype(), low);
    EXPECT_EQ(scaled_dot_product_attention(q, q.to(low), q,
                                           {.causal = true, .kernel = AttentionKernel::kPlain})
                  .dtype(),
              low);
    // What is f64 by choice, and what is no float, stays as it is.
    EXPECT_EQ(matmul(x.to(kF64), transpose(w, 0, 1).to(kF64)).dtype(), kF64);
    EXPECT_EQ(matmul(x.to(kI64), transpose(w, 0, 1).to(kI64)).dtype(), kI64);
  }
}

// The casts that a program would write itself.
TEST(Autocast, EqualsCastsWrittenByHand) {
  Tensor x = drawn({5, 8}, 1), t = from_values<int64_t>({0, 1, 2, 3, 0}, {5});
  auto gradients = [&](bool by_hand) {
    Tensor w1 = weight({16, 8}, 2), b1 = weight({16}, 3), w2 = weight({4, 16}, 4);
    Tensor loss;
    if (by_hand) {
      Tensor h = add(linear(x.to(kBF16), w1.to(kBF16)), b1.to(kBF16));
      h = layer_norm(gelu(h).to(kF32));
      loss = cross_entropy(linear(h.to(kBF16), w2.to(kBF16)).to(kF32), t);
    } else {
      Autocast scope(kBF16);
      Tensor h = layer_norm(gelu(linear(x, w1, b1)));
      loss = cross_entropy(linear(h, w2), t);
    }
    EXPECT_EQ(loss.dtype(), kF32);
    loss.backward();
    return std::vector<Tensor>{loss, w1.grad(), b1.grad(), w2.grad()};
  };
  std::vector<Tensor> got = gradients(false), want = gradients(true);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].dtype(), kF32);
    expect_same(got[i], want[i], "loss and gradients");
  }
}

TEST(Autocast, BackwardComputesInWhatForwardChose) {
  auto gradient = [](bool inside) {
    Tensor x = drawn({5, 8}, 1), w = weight({4, 8}, 2), loss;
    {
      Autocast scope(kBF16);
      loss = sum(square(gelu(linear(x, w))));
      if (inside) loss.backward();
    }
    if (!inside) loss.backward();
    return w.grad();
  };
  expect_same(gradient(true), gradient(false), "gradient");
}

TEST(Autocast, GradientsAreCloseToThoseOfF32) {
  auto gradient = [](DType dtype) {
    Tensor x = drawn({32, 64}, 1), w = weight({48, 64}, 2), v = weight({8, 48}, 3);
    Autocast scope(dtype);
    mean(square(linear(gelu(linear(x, w)), v))).backward();
    return std::vector<Tensor>{w.grad(), v.grad()};
  };
  std::vector<Tensor> f32 = gradient(kF32), bf16 = gradient(kBF16), f16 = gradient(kF16);
  for (size_t i = 0; i < f32.size(); ++i) {
    double size = amax(abs(f32[i])).item<double>();
    double coarse = largest_difference(bf16[i], f32[i]) / size,
           fine = largest_difference(f16[i], f32[i]) / size;
    EXPECT_GT(coarse, 0) << "nothing was rounded";
    EXPECT_LT(coarse, 0.02);
    EXPECT_LT(fine, 0.0025);
  }
}

TEST(Autocast, ScopesNestAndEnd) {
  Tensor x = drawn({2, 4}, 1), w = weight({3, 4}, 2);
  auto dtype = [&] { return linear(x, w).dtype(); };
  EXPECT_EQ(dtype(), kF32);
  {
    Autocast outer(kBF16);
    EXPECT_EQ(dtype(), kBF16);
    {
      Autocast off(kBF16, {.enabled = false});
      EXPECT_EQ(dtype(), kF32);
      EXPECT_EQ(linear(x.to(kBF16), w).dtype(), kF32) << "operands meet as without autocast";
      Autocast again(kF16);
      EXPECT_EQ(dtype(), kF16);
    }
    {
      Autocast off(kF32);
      EXPECT_EQ(dtype(), kF32);
    }
    EXPECT_EQ(dtype(), kBF16);
    EXPECT_THROW(
        {
          Autocast inner(kF16);
          matmul(x, x);
        },
        ShapeError);
    EXPECT_EQ(dtype(), kBF16);
  }
  EXPECT_EQ(dtype(), kF32);
  try {
    Autocast scope(kF64);
    FAIL() << "f64 was taken";
  } catch (const UserError& e) {
    EXPECT_NE(std::string(e.what()).find("f64"), std::string::npos) << e.what();
  }
  EXPECT_EQ(dtype(), kF32);
}

TEST(Autocast, WeightsAreCastOnceForEachOfTheirValues) {
  Tensor x = drawn({4, 8}, 1).to(kBF16), w = weight({8, 8}, 2);
  test::CountedOps ops;
  {
    Autocast scope(kBF16);
    Tensor y = linear(linear(x, w), w);
    EXPECT_EQ(ops.take("cast"), 1);
    sum(y).backward();
    expect_same(linear(x, w), linear(x, w.detach().to(kBF16)), "from the cache");
    ops.take("cast");
    linear(x, w);
    EXPECT_EQ(ops.take("cast"), 0);
    assign_(w.detach(), drawn({8, 8}, 3));
    Tensor after = linear(x, w);
    EXPECT_EQ(ops.take("cast"), 1) << "it was written";
    expect_same(after, linear(x, w.detach().to(kBF16)), "the values as they are now");
    ops.take("cast");
    {
      Autocast inner(kF16);
      linear(x, w), linear(x, w);
      EXPECT_EQ(ops.take("cast"), 1 + 2) << "another dtype: the weight once, x each time";
    }
    linear(x, w);
    EXPECT_EQ(ops.take("cast"), 0) << "that of the outer scope is still there";
  }
  Autocast scope(kBF16);
  linear(x, w);
  EXPECT_EQ(ops.take("cast"), 1) << "a new scope";
}

TEST(Autocast, WithoutCacheEachUseIsCast) {
  Tensor x = drawn({4, 8}, 1).to(kBF16), w = weight({8, 8}, 2);
  test::CountedOps ops;
  Autocast scope(kBF16, {.cache_weights = false});
  linear(linear(x, w), w);
  EXPECT_EQ(ops.take("cast"), 2);
}

TEST(Autocast, UsesOfOneCastHaveGradientsOfTheirOwn) {
  Tensor x = drawn({4, 8}, 1);
  auto gradient = [&](bool cache, bool first_without) {
    Tensor w = weight({8, 8}, 2);
    Autocast scope(kBF16, {.cache_weights = cache});
    if (first_without) {
      NoGrad off;
      linear(x, w);
    }
    sum(square(linear(linear(x, w), w))).backward();
    sum(square(linear(x, w))).backward();  // a second backward through the same cast
    return w.grad();
  };
  expect_same(gradient(true, false), gradient(false, false), "two uses, two backwards");
  expect_same(gradient(true, true), gradient(false, false), "cast first while nothing is recorded");
}

// What evaluation has cast may be recorded by training in the same scope.
TEST(Autocast, CastsOfInferenceMayBeRecordedLater) {
  Tensor x = drawn({4, 8}, 1), w = weight({8, 8}, 2);
  Autocast scope(kBF16);
  {
    InferenceMode evaluation;
    linear(x, w);
  }
  sum(linear(x, w)).backward();
  EXPECT_TRUE(w.grad().defined());
}

TEST(Autocast, SecondDerivativesGoThroughCasts) {
  Tensor x = drawn({3, 4}, 1), w = weight({4, 4}, 2);
  Autocast scope(kBF16);
  Tensor loss = sum(exp(linear(x, w)));
  Tensors first = grad({&loss, 1}, {&w, 1}, {}, {.create_graph = true});
  Tensor again = sum(square(first[0]));
  again.backward();
  ASSERT_TRUE(w.grad().defined());
  EXPECT_EQ(w.grad().dtype(), kF32);
  EXPECT_GT(amax(abs(w.grad())).item<double>(), 0);
}

}  // namespace
}  // namespace tessera
