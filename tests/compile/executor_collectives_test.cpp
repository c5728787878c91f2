// Graphs with collectives on the executor: memory that a collective still reads or writes is not
// touched while peers are late, the order of calls does not change, and a rank that fails does not
// break the executors of the others.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/ir/interpreter.h"
#include "compile/record/trace.h"
#include "compile/run/executor.h"
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/compile/bits.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;

constexpr int64_t kRows = 64, kColumns = 257;

Ref<ProcessGroup> group_of(ProcessGroup& g) { return Ref<ProcessGroup>(&g); }

// Makes ranks late in turn, so that what the others submit stays pending for a while.
void be_late(int rank, int run) {
  if (run % 2 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(15));
}

// Values of this rank in run `n`.
Tensor input(int rank, int n) {
  Tensor x = empty({kRows, kColumns});
  for (int64_t i = 0; i < x.numel(); ++i)
    x.data<float>()[i] = float((i * 7 + rank * 3 + n * 5) % 101) / 16;
  return x;
}

// Work between a submission and the wait, which uses all the memory that it can get.
Tensor busy(const Tensor& x) {
  Tensor y = x;
  for (int i = 0; i < 6; ++i) y = gelu(y) * 1.5 + x;
  return y;
}

// Runs `step` eagerly, as a replay of its graph and on an executor, and compares the results.
template <class F>
void compare(F step) {
  run_ranks(2, [&](ProcessGroup& g) {
    auto group = group_of(g);
    Tensor state = zeros({kRows, kColumns}), x = input(g.rank(), 0);
    Trace trace({.inputs = {x}});
    Graph graph = trace.finish(step(group, state, x));
    Executor executor(graph);
    for (int n = 0; n < 6; ++n) {
      Tensor y = input(g.rank(), n), before = state.clone();
      Tensors expected = interpret(graph, {y}), given;
      for (const Tensor& t : expected) given.push_back(t.clone());  // outputs may be the state
      Tensor after = state.clone();
      assign_(state, before);
      be_late(g.rank(), n);
      expect_same_bits(executor.run({&y, 1}), given, "run " + std::to_string(n));
      expect_same_bits(state, after, "state after run " + std::to_string(n));
    }
  });
}

TEST(ExecutorCollectives, AnOperandLivesUntilItsCollectiveIsDone) {
  compare([](auto& group, const Tensor&, const Tensor& x) {
    Tensor sent = x * 2.0, all = all_gather(sent, group), other = busy(x);
    return Tensors{sum(all, {0}) + sum(other, {0})};
  });
}

TEST(ExecutorCollectives, AResultNobodyReads) {
  compare([](auto& group, const Tensor&, const Tensor& x) {
    all_gather(x * 2.0, group);
    return Tensors{busy(x)};
  });
}

TEST(ExecutorCollectives, OutputsMayBePending) {
  compare([](auto& group, const Tensor&, const Tensor& x) {
    Tensor y = busy(x);
    return Tensors{all_reduce(y * 1.0, group), all_gather(y, group), y};
  });
}

TEST(ExecutorCollectives, ARunWaitsForWhatTheLastOneLeftUnderWay) {
  run_ranks(2, [](ProcessGroup& g) {
    auto group = group_of(g);
    Tensor x = input(g.rank(), 0);
    Trace trace({.inputs = {x}});
    Executor executor(trace.finish({all_gather(x * 2.0, group)}));
    for (int n = 0; n < 6; ++n) {
      be_late(g.rank(), n);
      std::vector<Tensor> outs;
      for (int run = 0; run < 2; ++run) {
        Tensor mine = input(g.rank(), n + run);
        outs.push_back(executor.run({&mine, 1})[0]);
      }
      for (int run = 0; run < 2; ++run) {
        Tensor both[] = {input(0, n + run) * 2.0, input(1, n + run) * 2.0};
        expect_same_bits(outs[size_t(run)], cat(both, 0), "run " + std::to_string(run));
      }
    }
  });
}

TEST(ExecutorCollectives, StateIsReducedWhereItIs) {
  compare([](auto& group, const Tensor& state, const Tensor& x) {
    add_(state, x);
    all_reduce_(state, group);
    Tensor other = busy(x);
    all_reduce_(state, group);
    add_(state, other);
    return Tensors{state};
  });
}

TEST(ExecutorCollectives, BucketsOfViews) {
  compare([](auto& group, const Tensor& state, const Tensor& x) {
    Tensor top = slice(state, 0, 0, kRows / 2), rest = slice(state, 0, kRows / 2, kRows);
    assign_(top, slice(x, 0, 0, kRows / 2) * 2.0);
    assign_(rest, slice(x, 0, kRows / 2, kRows));
    all_reduce_(state, group);
    Tensor other = busy(x);
    return Tensors{top + rest, other};
  });
}

// A write to memory that a collective reads waits for it, though nothing reads its result before.
TEST(ExecutorCollectives, AWriteWaitsForTheCollectiveThatReads) {
  run_ranks(2, [](ProcessGroup& g) {
    auto group = group_of(g);
    Tensor state = zeros({kRows, kColumns}), x = input(g.rank(), 0);
    Trace trace({.inputs = {x}});
    assign_(state, x * 1.0);
    Tensor all = all_gather(state, group);
    all.raw();  // run eagerly, a program has to wait before it writes what a collective reads
    assign_(state, x * -1.0);
    Graph graph = trace.finish({all});
    Executor executor(graph);
    for (int n = 0; n < 6; ++n) {
      Tensor mine = input(g.rank(), n), both[] = {input(0, n), input(1, n)};
      be_late(g.rank(), n);
      expect_same_bits(executor.run({&mine, 1})[0], cat(both, 0), "run " + std::to_string(n));
    }
  });
}

TEST(ExecutorCollectives, SubmissionsDoNotWaitForEachOther) {
  run_ranks(2, [](ProcessGroup& g) {
    auto group = group_of(g);
    Tensor x = input(g.rank(), 0);
    Trace trace({.inputs = {x}});
    Tensor shard = reduce_scatter(x * 1.0, group), all = all_reduce(shard, group);
    Tensor other = busy(x);
    Graph graph = trace.finish({all, other});
    Executor executor(graph);
    executor.run({&x, 1});
    g.barrier();
    // Rank 1 comes late; rank 0 has submitted both and computed the rest by then.
    if (g.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    Tensors out = executor.run({&x, 1});
    TESSERA_CHECK(g.rank() == 1 || out[0].storage()->ready(), "rank 0 waited for its peer");
    Tensors again = executor.run({&x, 1});  // while the first outputs are held
    expect_same_bits(out[0], again[0], "two runs");
  });
}

TEST(ExecutorCollectives, ARankThatFailsIsReportedAndTheExecutorStaysUsable) {
  EXPECT_THROW(
      run_ranks(2,
                [](ProcessGroup& g) {
                  auto group = group_of(g);
                  Tensor x = input(g.rank(), 0), row = from_values<int64_t>({1}, {1});
                  Trace trace({.inputs = {x, row}});
                  Tensor all = all_reduce(x * 2.0, group);
                  Tensor picked = index_select(busy(x), 0, row);
                  Tensor gathered = all_gather(picked, group);
                  Graph graph = trace.finish({sum(all) + sum(gathered)});
                  Executor executor(graph);
                  Tensor good[] = {x, row}, bad[] = {x, from_values<int64_t>({kRows}, {1})};
                  executor.run(good);
                  if (g.rank() == 1) executor.run(bad);  // ends this rank, which aborts the group
                  for (int i = 0; i < 2; ++i) {
                    bool failed = false;
                    try {
                      executor.run(good);
                    } catch (const CommError&) {
                      failed = true;
                    }
                    TESSERA_CHECK(failed, "the failure of rank 1 was not seen");
                    TESSERA_CHECK(x.storage()->use_count() == 1, "an input was kept");
                  }
                }),
      UserError);
}

}  // namespace
}  // namespace tessera::compiler
