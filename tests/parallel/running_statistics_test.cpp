// Running statistics of several ranks and micro-batches are the mean of what each would have made.
#include "parallel/running_statistics.h"

#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"

namespace tessera {
namespace {

std::vector<float> values(const Tensor& t) {
  return {t.data<float>(), t.data<float>() + t.numel()};
}

struct Statistics {
  std::vector<float> mean, var;
  int64_t count = 0;
  bool operator==(const Statistics&) const = default;
};
Statistics statistics_of(const nn::BatchNorm1d& norm) {
  return {values(norm.running_mean), values(norm.running_var),
          norm.num_batches_tracked.item<int64_t>()};
}

// Two steps of eight micro-batches of four rows; leaf l of step s has rows of x. `attached`: uses
// what ddp (accumulate_first) or fully_shard attaches.
Statistics after_two_steps(const Tensor& x, int ranks, bool accumulate_first,
                           bool attached = false) {
  const int each = 8 / ranks;
  std::vector<Statistics> out(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](ProcessGroup& group) {
    NoGrad off;
    auto norm = nn::batch_norm1d({.channels = 3});
    parallel::RunningStatistics statistics(*norm, Ref<ProcessGroup>(&group), accumulate_first);
    std::shared_ptr<parallel::DataParallel> wrapper;
    if (attached && accumulate_first)
      wrapper = parallel::ddp(norm, {.group = Ref<ProcessGroup>(&group)});
    else if (attached)
      wrapper = parallel::fully_shard(norm);
    for (int step = 0; step < 2; ++step)
      for (int k = 0; k < each; ++k) {
        const int leaf = accumulate_first ? group.rank() * each + k : k * ranks + group.rank();
        if (wrapper) wrapper->set_sync(k + 1 == each);
        if (!wrapper) statistics.before(size_t(k), size_t(each));
        (*norm)(narrow(x, 0, 4 * (8 * step + leaf), 4));
        if (!wrapper) statistics.after(size_t(k), size_t(each));
      }
    out[size_t(group.rank())] = statistics_of(*norm);
  });
  for (const Statistics& s : out) EXPECT_EQ(s, out[0]);  // on every rank
  return out[0];
}

TEST(RunningStatistics, EqualBitsHoweverLeavesAreDealt) {
  manual_seed(3);
  const Tensor x = randn({64, 3}) * 2.0 + 1.0;
  const Statistics serial = after_two_steps(x, 1, true);
  for (int ranks : {1, 2, 4, 8})
    for (bool accumulate_first : {true, false})
      for (bool attached : {false, true})
        EXPECT_EQ(after_two_steps(x, ranks, accumulate_first, attached), serial)
            << ranks << " ranks, " << (attached ? "attached" : "by hand");
  EXPECT_EQ(serial.count, 2);  // a step counts once
}

TEST(RunningStatistics, MeanOfWhatMicroBatchesMade) {
  manual_seed(4);
  const Tensor x = randn({64, 3}) * 2.0 + 1.0;
  std::vector<double> mean(3, 0), var(3, 1);
  for (int step = 0; step < 2; ++step) {
    std::vector<double> next_mean(3, 0), next_var(3, 0);
    for (int leaf = 0; leaf < 8; ++leaf)
      for (size_t c = 0; c < 3; ++c) {
        double sum = 0, squares = 0;
        for (int r = 0; r < 4; ++r) {
          const double v = x.data<float>()[(4 * (8 * step + leaf) + r) * 3 + int(c)];
          sum += v, squares += v * v;
        }
        const double m = sum / 4, unbiased = (squares - 4 * m * m) / 3;
        next_mean[c] += (0.9 * mean[c] + 0.1 * m) / 8;
        next_var[c] += (0.9 * var[c] + 0.1 * unbiased) / 8;
      }
    mean = next_mean, var = next_var;
  }
  const Statistics got = after_two_steps(x, 2, true);
  for (size_t c = 0; c < 3; ++c) {
    EXPECT_NEAR(got.mean[c], mean[c], 1e-5);
    EXPECT_NEAR(got.var[c], var[c], 1e-5);
  }
}

// One rank with one micro-batch has what the layer makes by itself.
TEST(RunningStatistics, OneMicroBatchIsPlain) {
  NoGrad off;
  auto plain = nn::batch_norm1d({.channels = 3}), tended = nn::batch_norm1d({.channels = 3});
  run_ranks(1, [&](ProcessGroup& group) {
    NoGrad inner;
    parallel::RunningStatistics statistics(*tended, Ref<ProcessGroup>(&group), true);
    const Tensor x = randn({5, 3});
    (*plain)(x);
    statistics.before(0, 1);
    (*tended)(x);
    statistics.after(0, 1);
  });
  EXPECT_EQ(statistics_of(*tended), statistics_of(*plain));
}

// A constant buffer beside them is not rounded, and forwards that do not train do not communicate.
struct WithConstant final : nn::Module {
  WithConstant() {
    norm = register_module("norm", nn::batch_norm1d({.channels = 3}));
    register_buffer("third", third, full({2}, 1.0 / 3));
    register_buffer("mine", mine, zeros({1}), false);
    register_buffer("stored", stored, ones({2}, {.dtype = kF8E4M3}));  // no sum has this dtype
  }
  std::shared_ptr<nn::BatchNorm1d> norm;
  Tensor third, mine, stored;

 protected:
  Tensor forward(Tensor x) override {
    if (training()) add_(mine, ones({1}));
    return (*norm)(std::move(x));
  }
};

TEST(RunningStatistics, OnlyWhatATrainingForwardWritesIsShared) {
  run_ranks(3, [&](ProcessGroup& group) {
    NoGrad off;
    auto model = std::make_shared<WithConstant>();
    parallel::ddp(*model, {.group = Ref<ProcessGroup>(&group)});
    model->mine.data<float>()[0] = float(group.rank());
    for (int step = 0; step < 3; ++step) (*model)(randn({5, 3}) + double(group.rank()));
    const std::vector<float> third = values(model->third);
    TESSERA_ASSERT(third[0] == 1.0f / 3, "the constant moved by {}", third[0] - 1.0f / 3);
    TESSERA_ASSERT(values(model->mine)[0] == float(group.rank() + 3), "not persistent, yet shared");
    Tensor all = all_gather(unsqueeze(model->norm->running_mean, 0), Ref<ProcessGroup>(&group));
    TESSERA_ASSERT(values(all[0].clone()) == values(all[1].clone()) &&
                       values(all[0].clone()) == values(all[2].clone()),
                   "running means differ");
    model->eval();
    if (group.rank() == 1) (*model)(randn({5, 3}));
  });
}

TEST(RunningStatistics, AFailedForwardStartsTheStepAnew) {
  run_ranks(1, [&](ProcessGroup& group) {
    NoGrad off;
    const Tensor x = randn({8, 3});
    auto failing = nn::batch_norm1d({.channels = 3}), plain = nn::batch_norm1d({.channels = 3});
    auto ddp = parallel::ddp(failing, {.group = Ref<ProcessGroup>(&group)});
    {
      auto scope = ddp->no_sync();
      EXPECT_THROW((*failing)(ones({4, 2})), ShapeError);
    }
    (*failing)(x), (*plain)(x);
    EXPECT_EQ(statistics_of(*failing), statistics_of(*plain));
  });
}

// Nothing is left of a step whose loss or backward failed after a forward, neither where gradients
// are cleared for the next step nor where values were loaded.
TEST(RunningStatistics, AStepThatFailedBehindItsForwardIsForgotten) {
  for (bool load : {false, true})
    run_ranks(1, [&](ProcessGroup& group) {
      auto model = nn::batch_norm1d({.channels = 3}), plain = nn::batch_norm1d({.channels = 3});
      auto ddp = parallel::ddp(model, {.group = Ref<ProcessGroup>(&group)});
      {
        auto scope = ddp->no_sync();
        sum((*model)(randn({4, 3}) * 5.0)).backward();  // then the program catches an error
      }
      if (load)
        model->load_state(plain->state());
      else
        model->zero_grad(), plain->load_state(model->state());
      const Tensor x = randn({8, 3});
      (*model)(x), (*plain)(x);
      EXPECT_EQ(statistics_of(*model), statistics_of(*plain)) << load;
    });
}

}  // namespace
}  // namespace tessera
