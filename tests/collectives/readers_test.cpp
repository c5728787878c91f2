// A program may overwrite an operand of an asynchronous collective at once: the write waits until
// all ranks have read it. Each case delays a peer, which would get the new values without the wait.
// It also runs under ThreadSanitizer.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"

namespace tessera {
namespace {

constexpr int64_t kN = 600'000;  // more than what fits the mailboxes of a send
const auto kLate = std::chrono::milliseconds(30);

Tensor of(int rank) { return full({kN}, double(rank + 1)); }

void expect_all(const Tensor& t, float value) {
  const float* p = t.values<float>();
  for (int64_t i = 0; i < t.numel(); ++i) ASSERT_EQ(p[i], value) << "element " << i;
}

struct Case {
  const char* name;
  // Starts a collective that reads `in`; returns its result (undefined where there is none).
  std::function<Tensor(ProcessGroup&, const Tensor& in)> start;
  float want;  // all elements of the result
};

const Case kCases[] = {
    {"all_gather",
     [](ProcessGroup& g, const Tensor& in) {
       Tensor out = empty({2 * kN});
       g.all_gather_async(out, in);
       return narrow(out, 0, (1 - g.rank()) * kN, kN);
     },
     0},  // the other rank's
    {"reduce_scatter",
     [](ProcessGroup& g, const Tensor& in) {
       Tensor out = empty({kN / 2});
       g.reduce_scatter_async(out, in);
       return out;
     },
     3},
    {"all_to_all",
     [](ProcessGroup& g, const Tensor& in) {
       Tensor out = empty({kN});
       g.all_to_all_async(out, in);
       return narrow(out, 0, (1 - g.rank()) * kN / 2, kN / 2);
     },
     0},
    {"broadcast",
     [](ProcessGroup& g, const Tensor& in) {
       Tensor t = g.rank() == 0 ? in : empty({kN});
       g.broadcast_async(t, 0);
       return g.rank() == 0 ? Tensor() : t;
     },
     1},
    {"gather",
     [](ProcessGroup& g, const Tensor& in) {
       Tensor out[] = {empty({kN}), empty({kN})};
       g.gather_async(g.rank() == 0 ? std::span<const Tensor>(out) : std::span<const Tensor>(), in,
                      0);
       return g.rank() == 0 ? out[1] : Tensor();
     },
     2},
    {"scatter",
     [](ProcessGroup& g, const Tensor& in) {
       Tensor out = empty({kN / 2});
       g.scatter_async(
           out, g.rank() == 0 ? std::span<const Tensor>(&in, 1) : std::span<const Tensor>(), 0);
       return out;
     },
     1},
    {"send",
     [](ProcessGroup& g, const Tensor& in) {
       if (g.rank() == 0) return g.send_async(in, 1), Tensor();
       Tensor out = empty({kN});
       g.recv_async(out, 0);
       return out;
     },
     1},
};

class Operands : public testing::TestWithParam<std::tuple<bool, int>> {};

TEST_P(Operands, MayBeOverwrittenAtOnce) {
  auto [in_place, number] = GetParam();
  const Case& c = kCases[number];
  for (int late : {0, 1})
    run_ranks(2,
              [&](ProcessGroup& g) {
                Tensor in = of(g.rank());
                if (g.rank() == late) std::this_thread::sleep_for(kLate);
                Tensor out = c.start(g, in);
                fill_(in, -1);
                if (out.defined()) expect_all(out, c.want ? c.want : float(2 - g.rank()));
                expect_all(in, -1);
              },
              {.read_in_place = in_place});
}

INSTANTIATE_TEST_SUITE_P(Cases, Operands,
                         testing::Combine(testing::Bool(),
                                          testing::Range(0, int(std::size(kCases)))),
                         [](const auto& p) {
                           return std::string(kCases[std::get<1>(p.param)].name) +
                                  (std::get<0>(p.param) ? "_in_place" : "_staged");
                         });

TEST(Operands, TheNextCollectiveWaitsTooBeforeItWritesThem) {
  run_ranks(2, [](ProcessGroup& g) {
    Ref<ProcessGroup> other = g.split(0);
    Tensor t = of(g.rank()), all = empty({2 * kN});
    if (g.rank() == 1) std::this_thread::sleep_for(kLate);
    g.all_gather_async(all, t);
    other->all_reduce_async(t);  // of another group, so on another thread
    expect_all(narrow(all, 0, 0, kN), 1);
    expect_all(narrow(all, 0, kN, kN), 2);
    expect_all(t, 3);
  });
}

// An event that is added to a tensor as a reader and delays writes to the tensor.
class SlowReader final : public Event {
 public:
  bool done() const override { return done_; }
  void wait() override {
    if (!done_.exchange(true)) std::this_thread::sleep_for(kLate);
  }

 private:
  std::atomic<bool> done_{false};
};

// The operand may be the first of the result's pieces; the other pieces are waited for too.
TEST(Operands, PiecesThatBeginWithTheOperandAreWaitedFor) {
  using Pieces = std::vector<Tensor>;
  using Take = void (*)(ProcessGroup&, const Pieces&);
  const Take takes[] = {
      [](ProcessGroup& g, const Pieces& p) { g.all_gather(p, p[size_t(g.rank())]); },
      [](ProcessGroup& g, const Pieces& p) {
        g.gather(g.rank() == 0 ? std::span<const Tensor>(p) : std::span<const Tensor>(),
                 p[size_t(g.rank())], 0);
      }};
  for (const Take take : takes)
    run_ranks(2, [&](ProcessGroup& g) {
      Ref<ProcessGroup> other = g.split(0);
      const Pieces pieces = {of(0), of(1)};
      Tensor nine = g.rank() == 0 ? pieces[1] : full({kN}, 9.0);
      if (g.rank() == 1) nine.storage()->add_reader(make_ref<SlowReader>());
      Ref<Work> work = other->broadcast_async(nine, 1);
      take(g, pieces);
      work->wait();
      if (g.rank() == 0) expect_all(pieces[1], 2);
    });
}

TEST(Operands, ARingThatSendsAndReceivesThroughOneBuffer) {
  run_ranks(3, [](ProcessGroup& g) {
    Tensor t = of(g.rank());
    // Rank 0's values go around: a receive overwrites what the send before it still reads.
    if (g.rank() == 0) {
      g.send_async(t, 1);
      g.recv_async(t, 2);
      expect_all(t, 1);
      return;
    }
    g.recv_async(t, g.rank() - 1);
    g.send_async(t, (g.rank() + 1) % 3);
    fill_(t, 5);
    expect_all(t, 5);
  });
}

TEST(Operands, AnOptimizerStepWaits) {
  run_ranks(2, [](ProcessGroup& g) {
    Tensor p = of(g.rank());
    p.requires_grad_();
    optim::SGD optimizer(std::vector<Tensor>{p}, {.lr = 1});
    Tensor all = empty({2 * kN});
    if (g.rank() == 0) std::this_thread::sleep_for(kLate);
    g.all_gather_async(all, p.detach());
    p.set_grad(ones({kN}));
    optimizer.step();
    expect_all(narrow(all, 0, 0, kN), 1);
    expect_all(narrow(all, 0, kN, kN), 2);
    expect_all(p, float(g.rank()));
  });
}

TEST(Operands, AWriteGoesOnWhenTheCollectiveFails) {
  auto program = [](ProcessGroup& g) {
    Tensor t = of(g.rank());
    if (g.rank() == 1) {
      std::this_thread::sleep_for(kLate);
      throw UserError("rank 1 gave up");
    }
    Ref<Work> work = g.send_async(t, 1);
    fill_(t, -1);
    expect_all(t, -1);
    EXPECT_THROW(work->wait(), CommError);
  };
  EXPECT_THROW(run_ranks(2, program), UserError);
}

// A child's memory is its own, and no thread in it finishes what the parent has begun.
TEST(Operands, AForkedChildWaitsForNobody) {
  run_ranks(2, [](ProcessGroup& g) {
    Tensor t = of(g.rank()), out = empty({kN});
    if (g.rank() == 1) {
      std::this_thread::sleep_for(10 * kLate);
      g.recv(out, 0);
      return expect_all(out, 1);
    }
    Ref<Work> work = g.send_async(t, 1);
    pid_t child = fork();
    if (child == 0) {
      alarm(20);
      fill_(t, -1);
      bool told = false;
      try {
        work->wait();
      } catch (const CommError& e) {
        told = std::string(e.what()).find("forked") != std::string::npos;
      }
      _exit(told && t.values<float>()[kN - 1] == -1 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  });
}

}  // namespace
}  // namespace tessera
