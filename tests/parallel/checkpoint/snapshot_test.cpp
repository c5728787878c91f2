// A save has the state at the time of the call, bit for bit, whatever the program overwrites from
// then on and by whatever means; and no thread waits for a save that failed. It also runs under
// ThreadSanitizer.
#include "parallel/checkpoint/snapshot.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "core/base/boundary.h"
#include "core/core.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/load.h"
#include "tests/parallel/checkpoint/training.h"
#include "tests/support/boundaries.h"
#include "tests/support/temp_folder.h"

namespace tessera::checkpoint {
namespace {

using Clock = Snapshot::Clock;
constexpr auto kLong = std::chrono::minutes(5);

// Overwrites all of `s` in the order of `random`.
using Overwrite = std::function<void(const Tensor&)>;
void overwrite(const State& s, std::mt19937& random, const Overwrite& by) {
  NoGrad off;
  std::vector<Piece> pieces = s.pieces;
  std::shuffle(pieces.begin(), pieces.end(), random);
  for (const Piece& p : pieces) by(p.values.detach());
}

const std::pair<const char*, Overwrite> kWays[] = {
    {"fill", [](const Tensor& t) { fill_(t, 1); }},
    {"a view", [](const Tensor& t) { fill_(t.ndim() ? narrow(t, 0, 0, 1) : t, 1); }},
    {"data", [](const Tensor& t) { std::memset(t.raw(), 1, t.nbytes()); }},
    {"a collective", [](const Tensor& t) { world().broadcast_async(t, 0); }},
};

class Save : public testing::TestWithParam<size_t> {};  // staging_bytes
INSTANTIATE_TEST_SUITE_P(StagingBytes, Save, testing::Values(0, 2 << 20));

TEST_P(Save, IsTheStateAtTheCallWhateverIsOverwrittenRightAfter) {
  TempFolder dir;
  Training run;
  run.step();
  std::mt19937 random(7);
  Checkpointer saver(dir / "c", nullptr, {.staging_bytes = GetParam()});
  int64_t step = 0;
  for (const auto& [name, way] : kWays)
    for (int repeat = 0; repeat < 3; ++repeat) {
      SCOPED_TRACE(name);
      overwrite(run.state(), random, [](const Tensor& t) {
        if (t.dtype() == kF32) assign_(t, randn(t.shape()));
      });
      Values expected = values_of(run.state());
      saver.save(++step, run.state());
      overwrite(run.state(), random, way);
      saver.wait();
      expect_saved(saver.folder() + "/" + step_name(step), expected);
      EXPECT_EQ(saver.last().step, step);
      EXPECT_GE(saver.last().blocked_seconds, saver.last().held_up_seconds);
    }
}

TEST_P(Save, IsTheStateAtTheCallWhileTrainingGoesOn) {
  TempFolder dir;
  Training run, undisturbed;
  Checkpointer saver(dir / "c", nullptr, {.staging_bytes = GetParam()});
  std::vector<Values> expected;
  manual_seed(11);
  for (int64_t step = 0; step < 8; ++step) {
    run.step();
    expected.push_back(values_of(run.state()));
    saver.save(step, run.state());
  }
  saver.wait();
  for (int64_t step = 0; step < 8; ++step)
    expect_saved(saver.folder() + "/" + step_name(step), expected[size_t(step)]);
  manual_seed(11);  // and training does not notice
  for (int64_t step = 0; step < 8; ++step) undisturbed.step();
  EXPECT_EQ(values_of(undisturbed.state()), expected.back());
}

TEST_P(Save, OfSeveralRanksIsTheStateAtTheCall) {
  TempFolder dir;
  run_ranks(3, [&](ProcessGroup& g) {
    constexpr int64_t kRows = 700, kColumns = 1000;
    Tensor mine = full({kRows, kColumns}, double(g.rank())), all = ones({kRows, kColumns});
    State s{{{"cut", {3 * kRows, kColumns}, {g.rank() * kRows, 0}, mine}, whole("all", all)}, {}};
    Checkpointer saver(dir / "c", &g, {.staging_bytes = GetParam()});
    for (int64_t step = 0; step < 4; ++step) {
      saver.save(step, s);
      add_(mine, ones({1}));
      g.all_reduce_async(all);
    }
    saver.wait();
    for (int64_t step = 0; step < 4; ++step) {
      load(saver.folder() + "/" + step_name(step), s.pieces, &g);
      EXPECT_TRUE(bytes_of(mine) ==
                  bytes_of(full({kRows, kColumns}, double(g.rank() + int(step)))));
      EXPECT_TRUE(bytes_of(all) == bytes_of(full({kRows, kColumns}, std::pow(3.0, double(step)))));
      g.barrier();
    }
  });
}

TEST(Snapshot, OfTensorsThatAreDroppedAtOnce) {
  TempFolder dir;
  Checkpointer saver(dir / "c");
  Values expected;
  {
    State s{{whole("a", randn({900, 1000})), whole("b", randn({5}))}, {}};
    expected = values_of(s);
    saver.save(0, s);
  }
  std::vector<Tensor> others;
  for (int i = 0; i < 4; ++i) others.push_back(ones({900, 1000}));
  saver.wait();
  expect_saved(saver.folder() + "/" + step_name(0), expected);
}

TEST(Snapshot, NotLazyIsCopiedWhenSaveReturns) {
  TempFolder dir;
  Tensor t = randn({900, 1000});
  float* kept = t.data<float>();
  State s{{whole("t", t)}, {}};
  Values expected = values_of(s);
  Checkpointer saver(dir / "c", nullptr, {.lazy = false});
  saver.save(0, s);
  std::fill_n(kept, t.numel(), 0.0f);
  saver.wait();
  expect_saved(saver.folder() + "/" + step_name(0), expected);
  EXPECT_EQ(saver.last().held_up_seconds, 0);
}

// ---- one snapshot without a writer: what waits, and what does not

// Takes all bytes, as the writer does.
std::vector<std::byte> take_all(Snapshot& s, size_t bytes, size_t each = 8 << 20) {
  std::vector<std::byte> out;
  while (out.size() < bytes) {
    auto part = s.take(std::min(each, bytes - out.size()));
    if (part.empty()) break;
    out.insert(out.end(), part.begin(), part.end());
    s.release(part.size());
  }
  return out;
}

TEST(Snapshot, AWriteCopiesItsOwnTensorAndNoOther) {
  Tensor a = randn({1000, 1000}), b = randn({1000, 1000});
  std::vector<std::byte> expected = bytes_of(a), rest = bytes_of(b);
  expected.insert(expected.end(), rest.begin(), rest.end());
  Snapshot s(0);
  s.reserve(expected.size());
  s.begin({a, b}, kLong);
  Tensor c = a + b;
  EXPECT_EQ(s.held_up_seconds(), 0) << "reading waits for nobody";
  fill_(a, 0);
  EXPECT_GT(s.held_up_seconds(), 0);
  ASSERT_EQ(b.storage()->readers().size(), 1u);
  EXPECT_FALSE(b.storage()->readers()[0]->done());
  EXPECT_TRUE(take_all(s, expected.size()) == expected);
  EXPECT_TRUE(b.storage()->readers()[0]->done());
  double before = s.held_up_seconds();
  fill_(b, 0);
  EXPECT_EQ(s.held_up_seconds(), before) << "it is copied already";
}

TEST(Snapshot, KeepsNoTensorAliveOnceItIsCopied) {
  Snapshot s(0);
  s.reserve(4 << 20);
  Tensor t = randn({1000});
  s.begin({t}, kLong);
  EXPECT_FALSE(t.uniquely_owned());
  s.copy_all();
  EXPECT_TRUE(t.uniquely_owned());
}

TEST(Snapshot, StridedTensorsOfEverySize) {
  std::mt19937 random(5);
  for (int i = 0; i < 40; ++i) {
    auto draw = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    std::vector<Tensor> tensors;
    std::vector<std::byte> expected;
    for (int k = 0; k < 4; ++k) {
      Shape shape{draw(1, 90), draw(1, 70), draw(1, 120)};
      Tensor t = randint(0, 100, shape).to(k % 2 ? kF64 : kI64);
      if (draw(0, 1)) t = transpose(t, int(draw(0, 2)), int(draw(0, 2)));
      if (t.size(1) > 2) t = slice(t, 1, draw(0, 1), t.size(1), draw(1, 2));
      tensors.push_back(t);
      std::vector<std::byte> b = bytes_of(t);
      expected.insert(expected.end(), b.begin(), b.end());
    }
    Snapshot s(i % 2 ? 2 << 20 : 0);
    s.reserve(expected.size());
    s.begin(tensors, kLong);
    EXPECT_TRUE(take_all(s, expected.size(), size_t(draw(1, 300)) * 4096) == expected);
  }
}

TEST(Snapshot, ThreadsShareUnitsAndPages) {
  const int before = num_threads();
  set_num_threads(3);
  {
    CountBoundaries counting;
    for (int64_t mebibytes : {1, 2, 3, 5}) {  // units, in one to three pages
      const Tensor t = randn({mebibytes << 18});
      const std::vector<std::byte> expected = bytes_of(t);
      Snapshot s(0);
      s.reserve(expected.size());
      s.begin({t}, kLong);
      s.copy_all();
      EXPECT_TRUE(take_all(s, expected.size()) == expected) << mebibytes << " MiB";
    }
  }
  EXPECT_EQ(test::not_met({"snapshot"}), "");
  set_num_threads(before);
}

TEST(Snapshot, AFullBufferHoldsUpAWriteUntilThereIsRoom) {
  Tensor a = randn({1 << 20}), b = randn({1 << 20});
  std::vector<std::byte> expected = bytes_of(a), rest = bytes_of(b);
  expected.insert(expected.end(), rest.begin(), rest.end());
  Snapshot s(2 << 20);
  s.reserve(expected.size());
  ASSERT_EQ(s.capacity(), size_t(2 << 20));
  s.begin({a, b}, kLong);
  std::atomic<bool> written{false};
  std::thread training([&] {
    fill_(b, 0);
    written = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(written);
  EXPECT_TRUE(take_all(s, expected.size(), 512 << 10) == expected);
  training.join();
}

// Several threads write and the writer copies, all at once.
TEST(Snapshot, ManyThreadsAtOnce) {
  for (size_t limit : {size_t(0), size_t(2 << 20)})
    for (int repeat = 0; repeat < 10; ++repeat) {
      std::vector<Tensor> tensors;
      std::vector<std::byte> expected;
      for (int i = 0; i < 12; ++i) {
        tensors.push_back(full({i % 3 ? 300'000 : 7}, double(i)));
        std::vector<std::byte> b = bytes_of(tensors.back());
        expected.insert(expected.end(), b.begin(), b.end());
      }
      Snapshot s(limit);
      s.reserve(expected.size());
      s.begin(tensors, kLong);
      std::vector<std::thread> threads;
      for (size_t k = 0; k < 3; ++k)
        threads.emplace_back([&, k] {
          set_num_threads(1);
          for (size_t i = k; i < tensors.size(); i += 3) fill_(tensors[i], -1);
        });
      EXPECT_TRUE(take_all(s, expected.size(), 1 << 20) == expected);
      for (std::thread& t : threads) t.join();
    }
}

// ---- after a failure, all threads go on

TEST(Snapshot, GivenUpHoldsUpNobody) {
  Tensor t = ones({1 << 20}), late = ones({1 << 20});
  Snapshot s(2 << 20);
  s.reserve(8 << 20);
  s.begin({t, late}, kLong);
  std::thread training([&] { fill_(late, 0); });  // for which there is no room
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  s.give_up();
  training.join();
  fill_(t, 0);
  EXPECT_TRUE(s.take(4096).empty());
  EXPECT_TRUE(t.uniquely_owned());
}

TEST(Snapshot, AWriteThatWaitsTooLongGivesItUp) {
  Tensor t = ones({1 << 20});
  Snapshot s(2 << 20);
  s.reserve(4 << 20);
  s.begin({t}, std::chrono::milliseconds(50));
  fill_(t, 0);
  EXPECT_TRUE(s.take(4096).empty());
  EXPECT_GE(s.held_up_seconds(), 0.05);
}

TEST(Snapshot, ThatIsGoneHoldsUpNobody) {
  Tensor t = ones({1 << 20});
  {
    Snapshot s(0);
    s.reserve(4 << 20);
    s.begin({t}, kLong);
  }
  fill_(t, 0);
  EXPECT_TRUE(t.uniquely_owned());
}

TEST(Snapshot, PiecesThatCannotBeReadFailOnAllRanks) {
  TempFolder dir;
  run_ranks(2, [&](ProcessGroup& g) {
    class Broken final : public Event {
      bool done() const override { return false; }
      void wait() override { throw UserError("these values never came"); }
    };
    Checkpointer saver(dir / "c", &g);
    Tensor t = ones({100});
    State s{{{"t", {2, 100}, {g.rank(), 0}, reshape(t, {1, 100})}}, {}};
    saver.save(0, s);
    saver.wait();
    if (g.rank() == 1) t.storage()->set_ready(make_ref<Broken>());
    auto save = [&] { saver.save(1, s), saver.wait(); };
    EXPECT_THROW(save(), UserError);
    t.storage()->set_ready(nullptr);
    if (g.rank() == 1) {
      EXPECT_THROW(saver.wait(), UserError);
    }
    fill_(t, 2);
    saver.save(2, s);
    saver.wait();
    EXPECT_EQ(read_latest(dir / "c").step, 2);
  });
}

// A child that is forked while a save is in progress overwrites its own copies of the tensors,
// destroys its copy of the checkpointer and ends; the parent's save is not disturbed.
TEST(Snapshot, AForkedChildWaitsForNobody) {
  TempFolder dir;
  State s;
  for (int i = 0; i < 8; ++i) s.pieces.push_back(whole(fmt::format("w{}", i), randn({1 << 20})));
  Values expected = values_of(s);
  auto saver = std::make_unique<Checkpointer>(dir / "c");
  saver->save(0, s);
  fflush(nullptr);
  pid_t child = fork();
  if (child == 0) {
    alarm(20);
    for (const Piece& p : s.pieces) std::memset(p.values.raw(), 0, p.values.nbytes());
    saver.reset();
    _exit(0);
  }
  for (const Piece& p : s.pieces) fill_(p.values, 1);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  saver->wait();
  expect_saved(saver->folder() + "/" + step_name(0), expected);
  EXPECT_THROW(Checkpointer(dir / "c"), UserError) << "the child must not have let go of the lock";
}

}  // namespace
}  // namespace tessera::checkpoint
