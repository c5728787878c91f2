// A small network with batch-norm over ranks, trained on a batch that is cut over them.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "core/core.h"
#include "dtensor/dtensor.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/sync_batch_norm.h"

namespace tessera {

using Named = std::vector<std::pair<std::string, Tensor>>;

inline Tensor draw(const Shape& s, int64_t key, DType t = kF64) {
  return randn(s, {kF64}, from_values<int64_t>({key, 1}, {2})).to(t);
}

inline double apart(const Tensor& a, const Tensor& b) {
  return a.numel() ? amax(abs(a.to(kF64) - b.to(kF64))).item<double>() : 0;
}
inline void expect_near(const Named& got, const Named& want, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_LE(apart(got[i].second, want[i].second), tolerance) << what << ": " << got[i].first;
}

inline nn::SequentialPtr small_net() {
  auto model = nn::sequential(
      nn::conv2d({.in = 2, .out = 4, .kernel = 3, .padding = 1, .bias = false}),
      nn::batch_norm2d({.channels = 4}), nn::relu(),
      nn::conv2d({.in = 4, .out = 3, .kernel = 3, .stride = 2}), nn::batch_norm2d({.channels = 3}));
  model->init(5);
  return model;
}

using Prepare = std::function<std::shared_ptr<void>(nn::Module&)>;
inline Prepare under_ddp() {
  return [](nn::Module& m) -> std::shared_ptr<void> { return parallel::make_reducer(m, {}); };
}
inline Prepare fully_sharded() {
  return [](nn::Module& m) -> std::shared_ptr<void> { return parallel::fully_shard(m, {}); };
}

using Step = std::function<Tensor(const Tensor&, const Tensor&)>;
using Wrap = std::function<Step(Step)>;  // what runs the step: a compiled one
// The mean losses of three steps, and the parameters and buffers after them.
inline Named train(int ranks, const Prepare& prepare, const Wrap& wrap = {}) {
  const Tensor x = draw({6, 2, 6, 6}, 1, kF32) + 1.0, t = draw({6, 3, 2, 2}, 2, kF32);
  std::mutex mutex;
  Named out;
  run_ranks(ranks, [&](ProcessGroup& group) {
    auto model = small_net();
    if (ranks > 1) nn::convert_sync_batch_norm(*model);
    auto keep = prepare ? prepare(*model) : nullptr;
    optim::SGD opt(model->parameters(), {.lr = 0.1, .momentum = 0.9});
    const int64_t rows = 6 / ranks, first = rows * group.rank();
    Step step = [&](const Tensor& a, const Tensor& b) {
      Tensor loss = mean(square((*model)(a)-b));
      opt.zero_grad();
      loss.backward();
      opt.step();
      return loss.detach();
    };
    if (wrap) step = wrap(step);
    Named mine;
    for (int s = 0; s < 4; ++s) {
      const Tensor a = narrow(x, 0, first, rows).clone(), b = narrow(t, 0, first, rows).clone();
      const Tensor loss = step(a, b);
      mine.push_back({"loss", all_reduce(loss.clone(), world_group()) / double(ranks)});
    }
    for (const NamedTensor& s : model->state())
      mine.push_back({s.name, full_tensor(s.tensor.detach()).clone()});
    std::lock_guard lock(mutex);
    if (group.rank() == 0) out = mine;
  });
  return out;
}

}  // namespace tessera
