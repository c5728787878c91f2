// What a graph's collectives move is in the memory of their group, if it has some: in an arena that
// is planned, shared between executors and released as the ordinary one is.
#include <gtest/gtest.h>

#include <algorithm>

#include "collectives/decorators/decorator.h"
#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/ir/interpreter.h"
#include "compile/record/trace.h"
#include "compile/run/executor.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/compile/bits.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;

constexpr int64_t kRows = 64, kColumns = 256;
constexpr size_t kBytes = size_t(kRows * kColumns) * sizeof(float);

// A group with memory of its own that records what it allocated, and which tensors of its calls
// were in it.
class OwnMemoryGroup final : public Decorator {
 public:
  using Decorator::Decorator;
  bool has_own_memory(Device) const override { return owns; }
  Ref<Storage> allocate(size_t bytes, Device) override {
    given.push_back(inner_->allocate(bytes));
    return given.back();
  }
  Ref<Work> submit(const Collective& c) override {
    calls.push_back({c.kind, std::ranges::all_of(c.in, [&](auto& t) { return is_mine(t); }),
                     std::ranges::all_of(c.out, [&](auto& t) { return is_mine(t); })});
    return inner_->submit(c);
  }
  bool is_mine(const Tensor& t) const {
    return std::ranges::any_of(given, [&](const Ref<Storage>& s) {
      auto *begin = static_cast<std::byte*>(s->data()),
           *at = static_cast<std::byte*>(t.storage()->data()) +
                 t.offset() * int64_t(size_of(t.dtype()));
      return at >= begin && at + t.nbytes() <= begin + s->bytes();
    });
  }

  struct Seen {
    CollKind kind;
    bool in, out;
  };
  bool owns = true;
  std::vector<Ref<Storage>> given;
  std::vector<Seen> calls;

 private:
  Ref<ProcessGroup> decorate(Ref<ProcessGroup> group) override {
    return make_ref<OwnMemoryGroup>(std::move(group));
  }
};

Tensor input(int rank, int n) {
  Tensor x = empty({kRows, kColumns});
  for (int64_t i = 0; i < x.numel(); ++i)
    x.data<float>()[i] = float((i * 7 + rank * 3 + n * 5) % 101) / 16;
  return x;
}

void on_two_ranks(FunctionRef<void(const Ref<OwnMemoryGroup>&)> f) {
  run_ranks(2, [&](ProcessGroup& g) { f(make_ref<OwnMemoryGroup>(Ref<ProcessGroup>(&g))); });
}

// Reduced results over their operands and beside them, views and rows of a larger value, pieces.
Tensors step(const Ref<ProcessGroup>& group, const Tensor& x) {
  Tensor y = x * 2.0, all = all_reduce(gelu(y) * 1.5, group);
  Tensor kept = y + 1.0, beside = all_reduce(kept, group) * kept;
  Tensor rows = all_reduce(slice(tanh(x), 0, kRows / 2, kRows), group);
  Tensor shard = reduce_scatter(transpose(exp(x * 0.1), 0, 1), group);
  Tensor gathered = all_gather(shard * 3.0, group);
  Tensor pieces = reduce_scatter_v(gelu(x), group, {kRows, 1, kColumns});
  return {sum(all) + sum(beside) + sum(rows), gathered + transpose(x, 0, 1), sum(pieces)};
}

TEST(GroupMemory, HoldsWhatCollectivesMove) {
  on_two_ranks([](const Ref<OwnMemoryGroup>& group) {
    Tensor x = input(group->rank(), 0);
    Trace trace({.inputs = {x}});
    Graph graph = trace.finish(step(group, x));
    Executor executor(graph);
    EXPECT_TRUE(group->given.empty());  // before the first run
    for (int n = 0; n < 4; ++n) {
      Tensor mine = input(group->rank(), n);
      Tensors expected = interpret(graph, {mine});
      group->calls.clear();
      expect_same_bits(executor.run({&mine, 1}), expected, "run " + std::to_string(n));
      ASSERT_EQ(group->calls.size(), 6u);
      for (const auto& [kind, in, out] : group->calls) {
        EXPECT_TRUE(in) << name_of(kind);
        EXPECT_TRUE(out || kind != CollKind::kAllReduce) << name_of(kind);
      }
    }
    EXPECT_EQ(group->given.size(), 1u);
  });
}

// Its memory is used again within a run as the ordinary arena's is, and both are planned.
TEST(GroupMemory, IsPlanned) {
  on_two_ranks([](const Ref<OwnMemoryGroup>& group) {
    auto plan_of = [](const Ref<ProcessGroup>& g, const Tensor& x) {
      Trace trace({.inputs = {x}});
      Tensor y = x;
      for (int i = 0; i < 8; ++i) y = all_reduce(gelu(y) * 1.5, g) + x;
      return Executor(trace.finish({sum(y)}));
    };
    Tensor x = input(group->rank(), 0);
    Executor executor = plan_of(group, x);
    executor.run({&x, 1});
    ASSERT_EQ(group->given.size(), 1u);
    EXPECT_LE(group->given[0]->bytes(), 2 * kBytes);
    EXPECT_GE(executor.memory().arena_bytes, group->given[0]->bytes());
    EXPECT_LE(executor.memory().arena_bytes, 3 * kBytes);
  });
}

TEST(GroupMemory, IsGivenBackWithTheExecutor) {
  on_two_ranks([](const Ref<OwnMemoryGroup>& group) {
    Tensor x = input(group->rank(), 0);
    {
      Trace trace({.inputs = {x}});
      Executor executor(trace.finish({sum(all_reduce(x * 2.0, group))}));
      executor.run({&x, 1});
      ASSERT_EQ(group->given.size(), 1u);
      EXPECT_GT(group->given[0]->use_count(), 1);
    }
    group->flush();
    EXPECT_EQ(group->given[0]->use_count(), 1);
  });
}

// Executors that share an arena share that of the group, which grows once for the larger.
TEST(GroupMemory, IsSharedBetweenExecutors) {
  on_two_ranks([](const Ref<OwnMemoryGroup>& group) {
    auto shared = make_shared_arena();
    auto executor_of = [&](int64_t rows) {
      Tensor x = slice(input(group->rank(), 0), 0, 0, rows).clone();
      Trace trace({.inputs = {x}});
      return Executor(trace.finish({sum(all_reduce(x * 2.0, group) + x)}), {.arena = shared});
    };
    Executor small = executor_of(kRows / 2), large = executor_of(kRows);
    for (int n = 0; n < 4; ++n)
      for (Executor* e : {&small, &large}) {
        Tensor x =
            slice(input(group->rank(), n), 0, 0, e->graph()[e->graph().inputs[0]].meta.shape[0])
                .clone();
        Tensors expected = interpret(e->graph(), {x});
        expect_same_bits(e->run({&x, 1}), expected, "run " + std::to_string(n));
      }
    ASSERT_EQ(group->given.size(), 2u);
    EXPECT_EQ(group->given[0]->use_count(), 1);  // the smaller one is gone
    EXPECT_EQ(group->given[1]->bytes(), kBytes);
  });
}

// What two groups move lies in the memory of the first.
TEST(GroupMemory, OfTwoGroups) {
  run_ranks(2, [](ProcessGroup& g) {
    Ref<ProcessGroup> inner(&g);
    auto a = make_ref<OwnMemoryGroup>(inner), b = make_ref<OwnMemoryGroup>(inner);
    Tensor x = input(g.rank(), 0);
    Trace trace({.inputs = {x}});
    Tensor both = all_reduce(all_reduce(x * 2.0, a), b), own = all_reduce(tanh(x), b);
    Graph graph = trace.finish({sum(both) + sum(own)});
    Tensors expected = interpret(graph, {x});
    a->calls.clear(), b->calls.clear();
    Executor executor(graph);
    expect_same_bits(executor.run({&x, 1}), expected, "two groups");
    ASSERT_EQ(a->calls.size(), 1u);
    ASSERT_EQ(b->calls.size(), 2u);
    EXPECT_TRUE(a->calls[0].in && a->calls[0].out);
    EXPECT_EQ(std::ranges::count_if(b->calls, [](auto& c) { return c.in && c.out; }), 1);
  });
}

// A group without memory of its own is asked for none.
TEST(GroupMemory, IsOrdinaryWhereAGroupHasNone) {
  run_ranks(2, [](ProcessGroup& g) {
    EXPECT_FALSE(g.has_own_memory());
    auto group = make_ref<OwnMemoryGroup>(Ref<ProcessGroup>(&g));
    group->owns = false;
    Tensor x = input(g.rank(), 0);
    Trace trace({.inputs = {x}});
    Executor executor(trace.finish(step(group, x)));
    executor.run({&x, 1});
    EXPECT_TRUE(group->given.empty());
  });
}

}  // namespace
}  // namespace tessera::compiler
