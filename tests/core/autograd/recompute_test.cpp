// Activation recomputation: the same bits with and without, less memory, the same draws; what is
// refused.
#include "core/autograd/recompute.h"

#include <gtest/gtest.h>

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/autograd/transforms.h"
#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/random.h"
#include "core/ops/sort.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/tensor/allocator.h"
#include "examples/models/gpt.h"
#include "examples/models/resnet.h"

namespace tessera {
namespace {

using List = std::vector<Tensor>;
using Block = std::function<Tensor(const Tensor& x)>;

void expect_same(const Tensor& got, const Tensor& want, const std::string& what) {
  ASSERT_EQ(describe(got), describe(want)) << what;
  EXPECT_TRUE(equal(got.detach(), want.detach())) << what;
}

std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const UserError& e) {
    return e.what();
  }
  return "nothing was thrown";
}

// Result and gradients of x and w through two blocks, each by `wrap`.
template <class Wrap>
List through(const Block& block, const Tensor& w, Wrap wrap) {
  manual_seed(7);
  Tensor x = randn({4, 6}).requires_grad_();
  w.set_grad({});
  Tensor y = wrap(block, wrap(block, x));
  Tensor loss = sum(y * y);
  loss.backward();
  return {y, x.grad(), w.grad(), rand({2})};
}

TEST(Recompute, GivesTheSameBitsAndDraws) {
  manual_seed(1);
  Tensor w = randn({6, 6}).requires_grad_();
  Block block = [&](const Tensor& x) {
    Tensor h = dropout(gelu(matmul(x, w)), 0.3);
    Tensor rows = transpose(reshape(h, {2, 2, 6}), 0, 1);
    return softmax(reshape(rows, {4, 6})) + rms_norm(x, {}, 1e-5);
  };
  List want = through(block, w, [](const Block& f, const Tensor& x) { return f(x); });
  List got = through(block, w, [](const Block& f, const Tensor& x) { return recompute(f, x); });
  List kept = through(block, w, [](const Block& f, const Tensor& x) {
    return recompute(keeping_products(), f, x);
  });
  for (size_t i = 0; i < want.size(); ++i) {
    expect_same(got[i], want[i], fmt::format("result {}", i));
    expect_same(kept[i], want[i], fmt::format("result {}, products kept", i));
  }
}

TEST(Recompute, RunsAgainOnceAndOnlyWhatIsNeeded) {
  int runs = 0;
  Tensor w = ones({3}).requires_grad_();
  auto f = [&](const Tensor& x) {
    ++runs;
    return exp(x * w) * x;
  };
  Tensor x = ones({3}).requires_grad_();
  Tensor y = recompute(f, x);
  EXPECT_EQ(runs, 1);
  Tensor total = sum(y);
  backward(total, {}, {.retain_graph = true});
  EXPECT_EQ(runs, 2);
  Tensor once = w.grad();
  w.set_grad({});
  total.backward();
  EXPECT_EQ(runs, 2);
  expect_same(w.grad(), once, "second backward");
  NoGrad off;
  recompute(f, x);
  EXPECT_EQ(runs, 3);
}

TEST(Recompute, SecondDerivatives) {
  auto f = [](const Tensor& x) { return exp(x * x); };
  auto second = [&](bool again) {
    Tensor x = full({}, 0.7).requires_grad_();
    Tensor y = again ? recompute(f, x) : f(x);
    Tensor g = grad({&y, 1}, {&x, 1}, {}, {.create_graph = true})[0];
    return grad({&g, 1}, {&x, 1})[0];
  };
  expect_same(second(true), second(false), "second derivative");
}

TEST(Recompute, WithinTransformsAndWithinItself) {
  auto f = [](const Tensor& x) { return exp(x * x); };
  auto g = [&](const Tensor& x) { return sum(recompute(f, x)); };
  auto plain = [&](const Tensor& x) { return sum(f(x)); };
  Tensor x = rand({3, 2});
  expect_same(vmap(grad(g))(x), vmap(grad(plain))(x), "vmap of grad");
  auto nested = [&](const Tensor& x) {
    return recompute([&](const Tensor& x) { return recompute(f, x) * x; }, x);
  };
  Tensor a = rand({3}).requires_grad_(), b = a.detach().requires_grad_();
  sum(nested(a)).backward();
  sum(f(b) * b).backward();
  expect_same(a.grad(), b.grad(), "nested");
}

TEST(Recompute, MixedPrecision) {
  Tensor w = randn({8, 8}).requires_grad_(), x = randn({4, 8});
  auto run = [&](bool again) {
    w.set_grad({});
    Tensor loss;
    {
      Autocast scope(kBF16);
      auto f = [&](const Tensor& x) { return softmax(matmul(gelu(matmul(x, w)), w)); };
      loss = sum(square(again ? recompute(f, x) : f(x)));
    }
    loss.backward();
    return w.grad();
  };
  expect_same(run(true), run(false), "gradient");
}

TEST(Recompute, StatisticsAreWrittenOnce) {
  auto run = [&](bool again) {
    manual_seed(2);
    auto block = nn::sequential(nn::conv2d({.in = 2, .out = 4, .kernel = 3}),
                                nn::batch_norm2d({.channels = 4}), nn::relu(),
                                nn::conv2d({.in = 4, .out = 2, .kernel = 1}));
    if (again) block->recompute();
    Tensor x = randn({3, 2, 6, 6}).requires_grad_();
    sum(square((*block)(x))).backward();
    List all{x.grad()};
    for (auto& p : block->parameters()) all.push_back(p.grad());
    for (auto& b : block->named_buffers()) all.push_back(clone(b.tensor));
    return all;
  };
  List want = run(false), got = run(true);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) expect_same(got[i], want[i], fmt::format("tensor {}", i));
}

// What backward does not need decides how the function goes on.
TEST(Recompute, ValuesThatTheFunctionReads) {
  manual_seed(1);
  Tensor w = randn({6, 6}).requires_grad_();
  const std::pair<const char*, Block> blocks[] = {
      {"item",
       [&](const Tensor& x) {
         Tensor h = matmul(x, w);
         return exp(sin(h * (1.0 / amax(abs(h)).item<double>())));
       }},
      {"a branch on item",
       [&](const Tensor& x) {
         Tensor h = matmul(x, w);
         return amax(h).item<float>() > 0 ? exp(sin(h)) : cos(h);
       }},
      {"nonzero",
       [&](const Tensor& x) {
         Tensor h = sin(matmul(x, w));
         Tensor rows = reshape(nonzero(gt(select(h, 1, 0), 0)), {-1});
         return index_add(h, 0, rows, exp(sin(index_select(h, 0, rows))));
       }},
      {"masked_select",
       [&](const Tensor& x) {
         Tensor h = sin(matmul(x, w));
         return h * sum(exp(sin(masked_select(h, gt(h, 0)))));
       }},
      {"unique",
       [&](const Tensor& x) {
         Tensor h = sin(matmul(x, w));
         return h * sum(exp(sin(index_select(h, 1, unique(argmax(h, 1)).values))));
       }},
      {"a result's memory",
       [&](const Tensor& x) {
         Tensor h = matmul(x, w), top = amax(abs(h));
         return exp(sin(h * double(*top.detach().values<float>())));
       }},
  };
  for (auto& [what, block] : blocks) {
    List want = through(block, w, [](const Block& f, const Tensor& x) { return f(x); });
    List got = through(block, w, [](const Block& f, const Tensor& x) { return recompute(f, x); });
    List kept = through(block, w, [](const Block& f, const Tensor& x) {
      return recompute(keeping_products(), f, x);
    });
    for (size_t i = 0; i < want.size(); ++i) {
      expect_same(got[i], want[i], fmt::format("{}, result {}", what, i));
      expect_same(kept[i], want[i], fmt::format("{}, result {}, products kept", what, i));
    }
  }
}

// Temporaries that are gone leave their places to others, numbers among them.
TEST(Recompute, NumbersAreNotTakenForWhatIsGone) {
  Tensor most = zeros({1});
  auto f = [&](const Tensor& x) {
    Tensor y = x;
    for (int k = 0; k < 8; ++k) {
      const Tensor own = amax(abs(y.detach()), {0}, true);
      {
        NoGrad off;
        assign_(most, maximum(most, own));  // the maximum is gone
      }
      y = tanh(y * (1.0 + 0.1 * k));  // the number comes
    }
    return sum(exp(y));
  };
  Tensor a = rand({5}).requires_grad_(), b = a.detach().requires_grad_();
  recompute(f, a).backward();
  const Tensor once = clone(most);
  f(b).backward();
  expect_same(a.grad(), b.grad(), "gradient");
  expect_same(most, once, "written once");
}

TEST(Recompute, Refusals) {
  Tensor w = ones({3}).requires_grad_(), x = ones({3}).requires_grad_();
  Tensor y = recompute([&](const Tensor& x) { return exp(x * w); }, x);
  {
    NoGrad off;
    add_(w, ones({3}));
  }
  EXPECT_NE(message([&] { sum(y).backward(); }).find("overwritten"), std::string::npos);
  int runs = 0;
  Tensor z = recompute([&](const Tensor& x) { return runs++ ? sin(x) * x : exp(x) * x; }, x);
  EXPECT_NE(message([&] { sum(z).backward(); }).find("ran sin where it had run exp"),
            std::string::npos);
  Tensor state = ones({3});
  Tensor s = recompute(
      [&](const Tensor& x) {
        Tensor old = state * 2.0;
        assign_(state, x.detach());
        return x * exp(old);
      },
      x);
  EXPECT_NE(message([&] { sum(s).backward(); }).find("then overwrote"), std::string::npos);
  Tensor r = recompute(
      [&](const Tensor& x) {
        const double old = sum(state * 2.0).item<double>();
        assign_(state, x.detach() * 3.0);
        return exp(x * old);
      },
      x);
  EXPECT_NE(message([&] { sum(r).backward(); }).find("then overwrote"), std::string::npos)
      << "read, and not needed otherwise";
}

// A step of a small GPT: loss, gradients, bytes at the peak above where it began.
struct Step {
  List results;
  int64_t peak;
};
Step step_of(int mode) {
  manual_seed(3);
  models::Gpt model(
      {.vocab = 33, .context = 32, .layers = 6, .heads = 2, .dim = 32, .dropout = 0.1});
  model.init(5);
  for (auto& [path, block] : nn::numbered_modules(model)) {
    if (mode == 1) block->recompute(keeping_products());
    if (mode == 2) block->recompute();
  }
  Tensor ids = randint(0, 33, {8, 32}), targets = randint(0, 33, {8, 32});
  reset_peak_cpu_memory();
  const int64_t before = cpu_memory_stats().live_bytes;
  Tensor loss = model.loss(ids, targets);
  loss.backward();
  Step s{{loss}, cpu_memory_stats().peak_bytes - before};
  for (const Tensor& p : model.parameters()) s.results.push_back(p.grad());
  return s;
}

TEST(Recompute, BlocksOfAGptTakeLessMemoryForTheSameBits) {
  Step none = step_of(0), selective = step_of(1), block = step_of(2);
  ASSERT_EQ(none.results.size(), block.results.size());
  for (size_t i = 0; i < none.results.size(); ++i) {
    expect_same(block.results[i], none.results[i], fmt::format("block, result {}", i));
    expect_same(selective.results[i], none.results[i], fmt::format("selective, result {}", i));
  }
  RecordProperty("peak_none", int(none.peak)),
      RecordProperty("peak_selective", int(selective.peak));
  RecordProperty("peak_block", int(block.peak));
  EXPECT_LT(double(block.peak), 0.5 * double(none.peak));
  EXPECT_LT(double(selective.peak), 0.85 * double(none.peak));
  EXPECT_LT(block.peak, selective.peak);
}

}  // namespace
}  // namespace tessera
