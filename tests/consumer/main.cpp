// Fits a line on two ranks, and generates by the GPT-2 that transformers saved in the folder given:
// exercises ops, autograd, an optimizer, a collective and the models from outside.
#include <tessera/tessera.h>

#include <cmath>
#include <cstdio>

#include "collectives/loopback/run_ranks.h"
#include "core/base/version.h"
#include "examples/models/hugging_face.h"

using namespace tessera;

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: consumer FOLDER\n"), 2;
  auto gpt = models::gpt(models::gpt_from_hugging_face(argv[1]));
  models::load_hugging_face(*gpt, argv[1]);
  const std::vector<int64_t> ids = models::generate(*gpt, {1}, {.tokens = 3, .temperature = 0});

  const Tensor larger = interpolate(ones({1, 1, 2, 2}), {.scale_factor = {2}});

  double slope[2];
  run_ranks(2, [&](ProcessGroup& group) {
    manual_seed(uint64_t(group.rank()));
    auto model = nn::linear(1, 1);
    for (const NamedTensor& p : model->named_parameters()) group.broadcast(p.tensor.detach(), 0);
    auto opt = optim::SGD(model->parameters(), {.lr = 0.1});
    for (int step = 0; step < 100; ++step) {
      Tensor x = randn({64, 1});
      opt.zero_grad();
      mean(square((*model)(x)-x * 3.0)).backward();
      for (const Tensor& p : model->parameters()) group.all_reduce(p.grad(), ReduceOp::kAvg);
      opt.step();
    }
    slope[group.rank()] = model->parameters()[0].item<float>();
  });
  std::printf("%s\nslope %.4f, %zu tokens\n", version_text("consumer").c_str(), slope[0],
              ids.size());
  return ids.size() == 4 && larger.numel() == 16 && slope[0] == slope[1] &&
                 std::abs(slope[0] - 3) < 0.01
             ? 0
             : 1;
}
