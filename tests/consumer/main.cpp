// Fits a line on two ranks: exercises ops, autograd, an optimizer and a collective from outside.
#include <cmath>
#include <cstdio>

#include "collectives/loopback/run_ranks.h"
#include "core/base/version.h"
#include "core/core.h"

using namespace tessera;

int main() {
  double slope[2];
  run_ranks(2, [&](ProcessGroup& group) {
    manual_seed(uint64_t(group.rank()));
    auto model = nn::linear(1, 1);
    for (const NamedTensor& p : model->named_parameters()) group.broadcast(p.tensor.detach(), 0);
    auto opt = optim::SGD(model->parameters(), {.lr = 0.1});
    for (int step = 0; step < 100; ++step) {
      Tensor x = randn({64, 1});
      opt.zero_grad();
      mean(square(model->forward(x) - x * 3.0)).backward();
      for (const Tensor& p : model->parameters()) group.all_reduce(p.grad(), ReduceOp::kAvg);
      opt.step();
    }
    slope[group.rank()] = model->parameters()[0].item<float>();
  });
  std::printf("%s\nslope %.4f\n", version_text("consumer").c_str(), slope[0]);
  return slope[0] == slope[1] && std::abs(slope[0] - 3) < 0.01 ? 0 : 1;
}
