// Compiled functions on a card, real or virtual: the graph, its executor and its generated kernels
// compute what the function computes there.
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "compile/compile.h"
#include "core/core.h"
#include "core/tensor/device_runtime.h"
#include "tests/compile/training.h"
#include "tests/support/on_card.h"
#include "tests/support/temp_folder.h"

namespace tessera::test {
namespace {

class CompiledOnCard : public OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (!IsSkipped()) scope_.emplace(card_);
  }
  Tensor drawn(const Shape& shape, int64_t key) {
    return randn(shape, {.device = kCPU}, from_values<int64_t>({key, 1}, {2})).to(card_);
  }
  // Until all has run; throws nothing.
  void let_run() {
    const Ref<Event> last = runtime_of(card_).record(stream_of(card_));
    while (last && !last->done()) std::this_thread::yield();
  }
  std::optional<DeviceScope> scope_;
};

void expect_close(const Tensor& a, const Tensor& b, double tolerance) {
  EXPECT_TRUE(allclose(a.cpu().to(kF64), b.cpu().to(kF64), tolerance, tolerance))
      << to_string(a) << "\n"
      << to_string(b);
}

// Products are not fused, so that there are several kernels, which a graph of the device has.
Tensor gram(const Tensor& x) { return matmul(x, transpose(x, 0, 1)); }

TEST_F(CompiledOnCard, AStepOfTraining) {
  Training eager(0.1), compiled(0.1);
  auto step = compile(
      [&](const Tensor& ids, const Tensor& targets) { return compiled.step(ids, targets); });
  int64_t memory = 0;
  for (int k = 0; k < 6; ++k) {
    if (k == 4) memory = memory_stats(card_).system_calls;
    const auto [ids, targets] = batch(k);
    const Tensors want = eager.step(ids.to(card_), targets.to(card_)),
                  got = step(ids.to(card_), targets.to(card_));
    for (size_t i = 0; i < want.size(); ++i) expect_close(got[i], want[i], 2e-5);
  }
  EXPECT_GE(step.report().replays, 3) << step.report().why_not;
  EXPECT_EQ(step.report().unoptimised, "");
  EXPECT_EQ(step.report().device_graphs, 1);
  EXPECT_EQ(memory_stats(card_).system_calls, memory) << "memory of the driver in a steady step";
  const auto want = eager.state(), got = compiled.state();
  for (size_t i = 0; i < want.size(); ++i) {
    SCOPED_TRACE(want[i].name);
    expect_close(got[i].tensor, want[i].tensor, 2e-3);
  }
}

// Calls `f` until it replays by graphs, on the same input.
template <class F>
void warm_up(F& f, const Tensor& x) {
  for (int k = 0; k < 5; ++k) f(x);
}

TEST_F(CompiledOnCard, InputsMayLieElsewhereAtEachCall) {
  const auto plain = [&](const Tensor& x) { return softmax(gram(exp(x) - x), 1).sum(0) * x[0][0]; };
  auto f = compile(plain);
  std::vector<Tensor> kept;
  for (int k = 0; k < 8; ++k) {
    kept.push_back(drawn({5, 33}, k));
    expect_close(f(kept.back()), plain(kept.back()), 1e-6);
  }
  EXPECT_EQ(f.report().device_graphs, 1);
  // A view, which begins within its memory.
  const Tensor whole = drawn({9, 33}, 9), part = whole.slice(0, 3, 8);
  for (int k = 0; k < 4; ++k) expect_close(f(part), plain(part), 1e-6);
}

TEST_F(CompiledOnCard, ResultsThatAreKeptStayWhatTheyWere) {
  auto f = compile([&](const Tensor& x) {
    const Tensor y = exp(x), z = gram(y).sum(1) + x.mean(1);
    return std::pair(z, y * 2.0);
  });
  std::vector<std::pair<Tensor, Tensor>> kept;
  for (int k = 0; k < 7; ++k) kept.push_back(f(drawn({6, 40}, k)));
  EXPECT_EQ(f.report().device_graphs, 1);
  for (int k = 0; k < 7; ++k) {
    const Tensor x = drawn({6, 40}, k), y = exp(x);
    expect_close(kept[size_t(k)].first, gram(y).sum(1) + x.mean(1), 1e-5);
    expect_close(kept[size_t(k)].second, y * 2.0, 1e-5);
  }
}

TEST_F(CompiledOnCard, AResultThatIsAnInputIsTheInput) {
  auto f = compile([&](const Tensor& x) {
    const Tensor y = exp(x) + x, z = gram(y).sum(1) * x.sum(1);
    return std::pair(z, x.reshape({8, 15}));
  });
  for (int k = 0; k < 6; ++k) {
    const Tensor x = drawn({4, 30}, k);
    const auto [z, same] = f(x);
    EXPECT_EQ(same.storage(), x.storage());
    expect_close(same, x.reshape({8, 15}), 0);
  }
  EXPECT_EQ(f.report().device_graphs, 1);
}

TEST_F(CompiledOnCard, StateThatIsWrittenMayMove) {
  Tensor total = zeros({3}, {.device = card_});
  int64_t before = 0;
  auto f = compile([&](const Tensor& x) {
    const Tensor y = gram(exp(x)).sum(0);
    total.add_(y);
    return softmax(y - total, 0);
  });
  Tensor want = zeros({3}, {.device = card_});
  for (int k = 0; k < 12; ++k) {
    if (k == 6) total = clone(total);  // another memory
    before = total.storage()->version();
    const Tensor x = drawn({3, 40}, k), y = gram(exp(x)).sum(0);
    want.add_(y);
    expect_close(f(x), softmax(y - want, 0), 1e-4);
    expect_close(total, want, 1e-4);
    EXPECT_GT(total.storage()->version(), before) << "a write is counted";
  }
  EXPECT_EQ(f.report().device_graphs, 1);
}

TEST_F(CompiledOnCard, EachReplayDrawsItsOwnNumbers) {
  const auto draw = [&](const Tensor& x) {
    const Tensor kept = dropout(x, 0.5);
    return (kept + dropout(x * 2.0, 0.25)).sum(1) + kept.mean(1);
  };
  const Tensor x = ones({6, 50}, {.device = card_});
  std::vector<Tensor> want;
  manual_seed(5);
  for (int k = 0; k < 7; ++k) want.push_back(draw(x));
  manual_seed(5);
  auto f = compile(draw);
  for (int k = 0; k < 7; ++k) expect_close(f(x), want[size_t(k)], 1e-5);
  EXPECT_FALSE(allclose(want[5].cpu(), want[6].cpu()));
  EXPECT_EQ(f.report().device_graphs, 1);
}

TEST_F(CompiledOnCard, OpsThatWaitAreBetweenGraphs) {
  const Tensor offsets = from_values<int64_t>({0, 2, 5}, {3}).to(card_);
  const auto plain = [&](const Tensor& x) {
    const Tensor y = matmul(gram(exp(x)), x) * softmax(x, 1);
    const Tensor sums = segment_reduce(y, offsets, ScatterReduce::kSum);
    return softmax(gram(tanh(sums)), 1) * sums.sum(1, true);
  };
  auto f = compile(plain);
  const Tensor x = drawn({5, 40}, 1);
  for (int k = 0; k < 5; ++k) expect_close(f(x), plain(x), 1e-5);
  EXPECT_EQ(f.report().device_graphs, 2);
}

TEST_F(CompiledOnCard, WhatAReplayRefusesIsThrown) {
  const Tensor table = drawn({10, 8}, 1);
  auto f = compile([&](const Tensor& ids) {
    const Tensor rows = embedding(ids, table);
    return gram(exp(rows) * rows).sum(1) + rows.mean(1);
  });
  Tensor ids = from_values<int64_t>({1, 2, 3}, {3}).to(card_);
  warm_up(f, ids);
  ASSERT_EQ(f.report().device_graphs, 1);
  const Tensor wrong = from_values<int64_t>({1, 12, 3}, {3}).to(card_);
  expect_contains(error_of([&] { f(wrong).sum().item<float>(); }), "12");
  EXPECT_NO_THROW(f(ids).sum().item<float>());
}

// Refusals are a thread's, and so are graphs.
TEST_F(CompiledOnCard, AnotherThreadHearsOfWhatItsReplaysRefuse) {
  const Tensor table = drawn({10, 8}, 1);
  auto f = compile([&](const Tensor& ids) {
    const Tensor rows = embedding(ids, table);
    return gram(exp(rows)).sum(1) + rows.mean(1);
  });
  const auto ids_of = [&](std::initializer_list<int64_t> ids) {
    return from_values<int64_t>(ids, {int64_t(ids.size())}).to(card_);
  };
  std::thread([&] {
    const Tensor ids = ids_of({1, 2, 3});
    warm_up(f, ids);
    EXPECT_EQ(f.report().device_graphs, 1);
    EXPECT_NO_THROW(f(ids).sum().item<float>());
  }).join();
  std::thread([&] {
    for (int k = 0; k < 3; ++k)
      expect_contains(error_of([&] { f(ids_of({1, 2, 12})).sum().item<float>(); }), "the id 12");
    const Tensor ids = ids_of({1, 2, 3});
    warm_up(f, ids);
    EXPECT_EQ(f.report().device_graphs, 1);
    expect_contains(error_of([&] { f(ids_of({1, 2, 13})).sum().item<float>(); }), "the id 13");
  }).join();
}

TEST_F(CompiledOnCard, AGraphKeepsItsWordsForRefusals) {
  const Tensor table = drawn({10, 8}, 1), ids = from_values<int64_t>({1, 2, 3}, {3}).to(card_),
               wrong = from_values<int64_t>({1, 12, 3}, {3}).to(card_);
  auto f = compile([&](const Tensor& i) {
    const Tensor rows = embedding(i, table);
    return gram(exp(rows)).sum(1) + rows.mean(1);
  });
  warm_up(f, ids);
  const Tensor zero = zeros({1, 1}, {kI64, card_});
  for (int64_t n = 1; n < 600; ++n) gather(zeros({n, 1}, {.device = card_}), 0, zero);
  expect_contains(error_of([&] { f(wrong).sum().item<float>(); }), "the id 12");
  // The next launch hears of it too, without a wait.
  f(wrong);
  let_run();
  expect_contains(error_of([&] { f(ids); }), "the id 12");
  EXPECT_NO_THROW(f(ids).sum().item<float>());
}

TEST_F(CompiledOnCard, WhatWasRefusedBeforeACaptureDoesNotEndIt) {
  const Tensor table = drawn({10, 8}, 1), ids = from_values<int64_t>({1, 2, 3}, {3}).to(card_),
               wrong = from_values<int64_t>({1, 12, 3}, {3}).to(card_);
  auto f = compile([&](const Tensor& i) {
    const Tensor rows = embedding(i, table);
    return gram(exp(rows)).sum(1) + rows.mean(1);
  });
  f(ids), f(ids);  // recorded
  f(wrong);        // step by step
  let_run();
  expect_contains(error_of([&] { f(ids); }), "the id 12");  // captured, and then thrown
  for (int k = 0; k < 3; ++k) EXPECT_NO_THROW(f(ids).sum().item<float>());
  EXPECT_EQ(f.report().device_graphs, 1);
}

// The gradients of q, k and v are written into that of the projection that they are parts of.
TEST_F(CompiledOnCard, AttentionReadsAndWritesAProjection) {
  const auto plain = [&](const Tensor& leaf) {
    Tensor x = leaf.detach().requires_grad_();
    Tensors parts = unbind(x, 2);
    for (Tensor& p : parts) p = permute(p, {0, 2, 1, 3});
    const Tensor y = scaled_dot_product_attention(parts[0], parts[1], parts[2], {.causal = true});
    sum(square(permute(y, {0, 2, 1, 3}))).backward();
    return x.grad();
  };
  auto f = compile(plain);
  for (int k = 0; k < 5; ++k) {
    const Tensor x = drawn({2, 9, 3, 4, 8}, k).to(kBF16);
    expect_close(f(x), plain(x), 3e-2);
  }
  EXPECT_EQ(f.report().compiled, 1) << f.report().unoptimised;
  const Tensor x = drawn({2, 9, 3, 4, 8}, 5).to(kBF16);
  Profiler profiler;
  f(x);
  for (const ProfileEvent& e : profiler.profile()->events())
    for (const char* copy : {"cat", "stack", "copy", "contiguous"}) EXPECT_NE(e.name, copy);
}

// A layer of heads whose keys are padded: masks are read by attention's kernels, in f32 by our own
// and in bf16 by the library where there is one.
TEST_F(CompiledOnCard, PaddingIsReadByAttention) {
  for (DType t : {kF32, kBF16}) {
    const Tensor real = lt(arange(0, 9, 1, {.device = card_}),
                           from_values<int64_t>({9, 4}, {2, 1, 1, 1}).to(card_));
    const auto layer = [&](AttentionKernel kernel) {
      return [=](const Tensor& leaf) {
        Tensor x = leaf.detach().requires_grad_();
        Tensors parts = unbind(x, 2);
        for (Tensor& p : parts) p = permute(p, {0, 2, 1, 3});
        const Tensor y = scaled_dot_product_attention(parts[0], parts[1], parts[2],
                                                      {.mask = real, .kernel = kernel});
        sum(square(permute(y, {0, 2, 1, 3}))).backward();
        return x.grad();
      };
    };
    auto tiled = compile(layer(AttentionKernel::kAuto)),
         plain = compile(layer(AttentionKernel::kPlain));
    const auto launches = [&](auto& f, const Tensor& x) {
      Profiler profiler;
      f(x);
      std::vector<std::string> names;
      for (const ProfileEvent& e : profiler.profile()->events()) names.push_back(e.name);
      return names;
    };
    for (int k = 0; k < 5; ++k) {
      const Tensor x = drawn({2, 9, 3, 4, 8}, k).to(t);
      expect_close(tiled(x), plain(x), t == kF32 ? 1e-5 : 3e-2);
    }
    EXPECT_EQ(tiled.report().compiled, 1) << tiled.report().unoptimised;
    const Tensor x = drawn({2, 9, 3, 4, 8}, 5).to(t);
    const std::vector<std::string> of_tiled = launches(tiled, x), of_plain = launches(plain, x);
    EXPECT_LT(of_tiled.size(), of_plain.size()) << fmt::format("{} {}", of_tiled, of_plain);
    for (const char* op : {"attention", "attention_grad"})
      EXPECT_NE(std::ranges::find(of_tiled, op), of_tiled.end()) << fmt::format("{}", of_tiled);
  }
}

// The key is a number of the host that every replay takes anew, and the weights that are dropped
// are those of an eager call and of the CPU.
TEST_F(CompiledOnCard, AttentionDropsWhatEagerCallsDrop) {
  for (DType t : {kF32, kBF16})
    for (int64_t places : {8, 9}) {
      const auto plain = [&](const Tensor& leaf) {
        Tensor x = leaf.detach().requires_grad_();
        Tensors parts = unbind(x, 2);
        for (Tensor& p : parts) p = permute(p, {0, 2, 1, 3});
        const Tensor y = scaled_dot_product_attention(parts[0], parts[1], parts[2],
                                                      {.causal = true, .dropout = 0.3});
        sum(square(permute(y, {0, 2, 1, 3}))).backward();
        return x.grad();
      };
      auto f = compile(plain);
      std::vector<Tensor> in, got;
      for (int k = 0; k < 5; ++k) in.push_back(drawn({2, places, 3, 4, 8}, k).to(t));
      manual_seed(5);
      for (const Tensor& x : in) got.push_back(f(x));
      EXPECT_EQ(f.report().compiled, 1) << f.report().unoptimised;
      manual_seed(5);
      for (size_t k = 0; k < in.size(); ++k) expect_close(got[k], plain(in[k]), 1e-5);
      manual_seed(5);
      for (size_t k = 0; k < in.size(); ++k)
        expect_close(got[k], plain(in[k].cpu()).to(card_), t == kF32 ? 1e-5 : 3e-2);
    }
}

TEST_F(CompiledOnCard, HeadsTooWideForTheKernelsAreBetweenGraphs) {
  const auto plain = [&](const Tensor& x) {
    const Tensor q = gram(exp(x)).reshape({1, 1, 4, 4}),
                 wide = cat({q, q, q, q}, 3).repeat({1, 1, 1, 12});
    const Tensor y = scaled_dot_product_attention(wide, wide, wide).reshape({4, 192});
    return softmax(gram(tanh(y)), 1);
  };
  auto f = compile(plain);
  const Tensor x = drawn({4, 30}, 1) * 0.1;
  for (int k = 0; k < 5; ++k) expect_close(f(x), plain(x), 1e-5);
  EXPECT_EQ(f.report().device_graphs, 2);
}

TEST_F(CompiledOnCard, StateThatMovesAtEachCallIsNotCaptured) {
  Tensor total = zeros({3}, {.device = card_}), want = zeros({3}, {.device = card_});
  auto f = compile([&](const Tensor& x) {
    const Tensor y = gram(exp(x)).sum(0);
    total.add_(y);
    return softmax(y - total, 0);
  });
  for (int k = 0; k < 30; ++k) {
    total = clone(total);
    const Tensor x = drawn({3, 40}, k), y = gram(exp(x)).sum(0);
    want.add_(y);
    expect_close(f(x), softmax(y - want, 0), 1e-3);
    expect_close(total, want, 1e-3);
  }
  EXPECT_EQ(f.report().device_graphs, 0);
}

TEST_F(CompiledOnCard, AnErrorBetweenTwoGraphsLeavesTheNextCallsSound) {
  const auto plain = [&](const Tensor& x, const Tensor& offsets) {
    const Tensor y = matmul(gram(exp(x)), x) * softmax(x, 1);
    const Tensor sums = segment_reduce(y, offsets, ScatterReduce::kSum);
    return softmax(gram(tanh(sums)), 1) * sums.sum(1, true);
  };
  auto f = compile(plain);
  const Tensor good = from_values<int64_t>({0, 2, 5}, {3}).to(card_),
               bad = from_values<int64_t>({0, 7, 5}, {3}).to(card_);
  for (int k = 0; k < 12; ++k) {
    const Tensor x = drawn({5, 40}, k);
    if (k == 6 || k == 7)
      expect_contains(error_of([&] { f(x, bad); }), "not in order");
    else
      expect_close(f(x, good), plain(x, good), 1e-5);
  }
  EXPECT_EQ(f.report().device_graphs, 2);
}

TEST_F(CompiledOnCard, ABatchOfNothing) {
  const auto plain = [&](const Tensor& x) {
    return matmul(exp(x), transpose(x, 0, 1)).sum() + 1.0;
  };
  auto f = compile(plain);
  for (int k = 0; k < 5; ++k) expect_close(f(drawn({0, 8}, k)), plain(drawn({0, 8}, k)), 0);
}

// What a graph reads and writes is also used on another stream, before and after, and nobody waits
// but the streams.
class GraphsOnCard : public CompiledOnCard {
 protected:
  void SetUp() override {
    CompiledOnCard::SetUp();
    if (!IsSkipped())
      for (int i = 0; i < 2; ++i) beside_[i] = runtime_of(card_).copy_stream(card_.index, i);
  }
  template <class F>
  auto beside(F f, int which = 0) {
    StreamScope scope(beside_[which]);
    return f();
  }
  static Tensor step(const Tensor& x) { return softmax(gram(sin(x)), 1).sum(0) + x.mean(1); }
  Stream beside_[2];
};

TEST_F(GraphsOnCard, InputsElsewhere) {
  auto f = compile(step);
  for (int k = 0; k < 7; ++k) {
    const Tensor x = beside([&] { return drawn({40, 60}, k) * 2.0; });
    const Tensor got = f(x);
    beside([&] { x.zero_(); });
    expect_close(got, step(drawn({40, 60}, k) * 2.0), 1e-5);
  }
  EXPECT_EQ(f.report().device_graphs, 1);
}

// Two inputs that are views of one tensor, as the words and the next words of a text are.
TEST_F(GraphsOnCard, InputsThatShareMemory) {
  auto f = compile([](const Tensor& a, const Tensor& b) { return matmul(step(a), gram(sin(b))); });
  std::vector<Tensor> kept;  // so that each call's are elsewhere
  for (int k = 0; k < 7; ++k) {
    const Tensor both = beside([&] { return drawn({41, 60}, k) * 2.0; });
    kept.push_back(both);
    const Tensor a = slice(both, 0, 0, 40), b = slice(both, 0, 1, 41);
    const Tensor got = f(a, b);
    expect_close(got, matmul(step(a), gram(sin(b))), 1e-5);
    if (k > 2) beside([&] { kept[size_t(k) - 2].zero_(); });
  }
  EXPECT_EQ(f.report().device_graphs, 1);
}

TEST_F(GraphsOnCard, AnInputThatStays) {
  auto f = compile(step);
  const Tensor x = beside([&] { return zeros({40, 60}, {.device = card_}); });
  for (int k = 0; k < 7; ++k) {
    beside([&] { x.copy_(drawn({40, 60}, k) * 2.0); });
    const Tensor got = f(x);
    beside([&] { x.zero_(); });
    expect_close(got, step(drawn({40, 60}, k) * 2.0), 1e-5);
  }
  EXPECT_EQ(f.report().device_graphs, 1);
}

TEST_F(GraphsOnCard, StateThatIsWritten) {
  const Tensor total = beside([&] { return zeros({40}, {.device = card_}); });
  auto f = compile([&](const Tensor& x) {
    const Tensor y = step(x);
    total.add_(y);
    return y * 2.0;
  });
  Tensor want = zeros({40}, {.device = card_});
  for (int k = 0; k < 7; ++k) {
    const Tensor x = drawn({40, 60}, k);
    const Tensor before = beside([&] { return total + 0.0; }, 1);  // not where it was made
    f(x);
    const Tensor after = beside([&] { return total + 0.0; });
    expect_close(before, want, 1e-4);
    want.add_(step(x));
    expect_close(after, want, 1e-4);
  }
  EXPECT_EQ(f.report().device_graphs, 1);
}

TEST_F(GraphsOnCard, ResultsThatAreReadAndDropped) {
  auto f = compile([](const Tensor& x) { return gram(sin(x)) * 2.0; });
  std::vector<Tensor> read;
  for (int k = 0; k < 8; ++k) {
    const bool kept = k == 2;  // from then on, results are copied out
    Tensor got = f(drawn({40, 60}, k));
    read.push_back(beside([&] { return got * 3.0; }));
    if (kept) read.push_back(got);
  }
  for (int k = 0, at = 0; k < 8; ++k) {
    const Tensor want = gram(sin(drawn({40, 60}, k))) * 2.0;
    expect_close(read[size_t(at++)], want * 3.0, 1e-4);
    if (k == 2) expect_close(read[size_t(at++)], want, 1e-4);
  }
  EXPECT_EQ(f.report().device_graphs, 1);
}

TEST_F(CompiledOnCard, AGraphOutlivesNothing) {
  const Tensor x = drawn({64, 100}, 1);
  const int64_t before = memory_stats(card_).live_bytes;
  {
    const Tensor w = drawn({100, 70}, 2);
    auto f = compile([&](const Tensor& y) { return matmul(exp(y), w).sum(0) * 2.0; });
    warm_up(f, x);
    EXPECT_EQ(f.report().device_graphs, 1);
  }
  EXPECT_EQ(memory_stats(card_).live_bytes, before);
}

TEST_F(CompiledOnCard, NumbersOfTheHostAreReadAtEachCall) {
  Tensor rate = scalar_tensor(0.5, kF32, kCPU);
  auto f = compile([&](const Tensor& x) { return gram(sin(x * rate)) + rate; });
  for (int k = 0; k < 7; ++k) {
    assign_(rate, scalar_tensor(0.5 + k / 2, kF32, kCPU));  // the same in two calls
    const Tensor x = drawn({3, 40}, k);
    expect_close(f(x), gram(sin(x * (0.5 + k / 2))) + (0.5 + k / 2), 1e-5);
  }
  EXPECT_EQ(f.report().device_graphs, 1) << f.report().why_not;
}

TEST_F(CompiledOnCard, TablesMadeOfNumbersAlone) {
  Tensor rate = scalar_tensor(0.5, kF32, kCPU), one = from_values<float>({2}, {1});
  auto f = compile([&](const Tensor& x) {
    const Tensor ramp = (arange(0, 40, 1, {kF32, card_}) * 2.0) * rate;
    return x * exp(ramp * 0.01) + exp(full({3, 40}, 0.25, {kF32, card_}) * rate) +
           x * one.reshape({});
  });
  for (int k = 0; k < 5; ++k) {
    assign_(rate, scalar_tensor(0.5 + k, kF32, kCPU));
    const Tensor x = drawn({3, 40}, k), ramp = arange(0, 40, 1, {kF32, card_}) * 2.0 * (0.5 + k);
    expect_close(f(x), x * exp(ramp * 0.01) + std::exp(0.25 * (0.5 + k)) + x * 2.0, 1e-5);
  }
  EXPECT_GE(f.report().replays, 2) << f.report().why_not;
}

TEST_F(CompiledOnCard, StreamsByTurns) {
  Tensor rate = scalar_tensor(0.5, kF32, kCPU);
  const auto plain = [&](const Tensor& x) {
    const Tensor a = exp(x), b = softmax(a.sum(1) - x.mean(1), 0);
    return (gram(a) * b.unsqueeze(1)).sum(0) + x.sum(1) * rate;
  };
  auto f = compile(plain);
  DeviceRuntime& runtime = runtime_of(card_);
  for (int k = 0; k < 14; ++k) {
    const Tensor x = drawn({64, 500}, k);
    assign_(rate, scalar_tensor(0.5 + k, kF32, kCPU));
    std::optional<StreamScope> beside;
    if (k / 4 % 2) beside.emplace(runtime.copy_stream(card_.index, 0));
    const Tensor got = f(x);
    // A graph is the stream's: the first run on another one goes step by step.
    EXPECT_EQ(f.report().device_graphs, k >= 2 && k % 4 != 0 ? 1 : 0) << k;
    beside.reset();
    expect_close(got, plain(x), 1e-4);
  }
}

TEST_F(CompiledOnCard, ValuesGoToTheHostAndComeBack) {
  auto f = compile([&](const Tensor& x) {
    const Tensor there = (x * x + 1.0).sum(1).to(kCPU);
    return std::pair(there, softmax(there.to(card_) - x.sum(1), 0));
  });
  for (int k = 0; k < 5; ++k) {
    const Tensor x = drawn({4, 30}, k);
    const auto [sums, shares] = f(x);
    EXPECT_TRUE(sums.device().is_cpu());
    expect_close(sums, (x * x + 1.0).sum(1), 1e-5);
    expect_close(shares, softmax((x * x + 1.0).sum(1) - x.sum(1), 0), 1e-5);
  }
  EXPECT_GE(f.report().replays, 2) << f.report().why_not;
}

TEST_F(CompiledOnCard, FactorisationsByTheHost) {
  const auto factor = [&](const Tensor& x) {
    return linalg::cholesky(matmul(x, transpose(x, 0, 1)) + eye(6, {kF32, card_})) * 2.0;
  };
  auto f = compile(factor);
  for (int k = 0; k < 5; ++k) {
    const Tensor x = drawn({6, 6}, k);
    expect_close(f(x), factor(x), 1e-5);
  }
  EXPECT_GE(f.report().replays, 2) << f.report().why_not;
}

TEST_F(CompiledOnCard, SizesThatVary) {
  auto f = compile([&](const Tensor& x) { return softmax(gelu(x) * 2.0, 1).sum(0); });
  for (int64_t n : {5, 5, 7, 9, 12, 30, 31, 64, 5}) {
    const Tensor x = drawn({3, n}, n);
    expect_close(f(x), softmax(gelu(x) * 2.0, 1).sum(0), 1e-5);
  }
}

TEST_F(CompiledOnCard, AFunctionThatReadsAValue) {
  auto f = compile([&](const Tensor& x) {
    const Tensor y = x * 3.0 + 1.0;
    return y.sum().item<float>() > 0 ? exp(y) : -y;
  });
  for (int k = 0; k < 5; ++k) {
    const Tensor x = drawn({50}, k), y = x * 3.0 + 1.0;
    expect_close(f(x), y.sum().item<float>() > 0 ? exp(y) : -y, 1e-6);
  }
}

}  // namespace
}  // namespace tessera::test
