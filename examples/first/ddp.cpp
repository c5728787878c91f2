// Ranks learn the frequency of a wave together, each from its own samples. The exit status is 0
// when they have learned it and hold the same weights: tlaunch --nproc 2 ddp
#include <tessera/tessera.h>

#include <cstdio>

using namespace tessera;

struct Waves final : data::ItemDataset {
  int64_t size() const override { return 1024; }
  data::Example get(int64_t i) const override {
    return {sin(arange(16) * (double(i) / 1024)), tensor({double(i) / 1024})};
  }
};

int main() {
  auto group = init_process_group();
  auto model = nn::sequential(nn::linear(16, 64), nn::relu(), nn::linear(64, 1));
  parallel::ddp(model);
  auto opt = optim::Adam(model->parameters(), {.lr = 3e-3});
  auto loader =
      parallel::distributed_loader(std::make_shared<Waves>(), {.batch_size = 32, .shuffle = true});

  Tensor loss;
  for (int epoch = 0; epoch < 20; ++epoch)
    for (data::Batch& batch : loader) {
      loss = nn::mse_loss((*model)(batch.inputs), batch.targets);
      opt.zero_grad();
      loss.backward();
      opt.step();
    }

  bool same = true;
  for (const Tensor& w : model->parameters()) same &= equal(w, broadcast(w.detach(), group, 0));
  std::printf("loss %.6f, weights %s rank 0's\n", loss.item<float>(), same ? "are" : "are not");
  return same && loss.item<float>() < 1e-3f ? 0 : 1;
}
