// The training program of the README: a small classifier learns to tell two spirals apart.
#include <tessera/tessera.h>

#include <cstdio>

using namespace tessera;

// Points [n, 2] on two arms, and which arm each is on: i64 [n].
std::pair<Tensor, Tensor> spirals(int64_t n) {
  Tensor arm = randint(0, 2, {n}), t = rand({n}) * 3.0 + 0.5,
         angle = t * 2.0 + arm.to(kF32) * 3.14159;
  return {stack({t * cos(angle), t * sin(angle)}, 1) + randn({n, 2}) * 0.05, arm};
}

int main() {
  manual_seed(1);
  auto model = nn::sequential(nn::linear(2, 64), nn::gelu(), nn::linear(64, 64), nn::gelu(),
                              nn::linear(64, 2));
  auto opt = optim::AdamW(model->parameters(), {.lr = 3e-3, .weight_decay = 0.01});
  auto schedule = optim::warmup(20, optim::cosine(3e-3, 3e-4, 480));
  std::printf("%s%ld parameters\n", model->to_string().c_str(), long(model->num_parameters()));

  for (int step = 0; step < 500; ++step) {
    auto [x, y] = spirals(256);
    Tensor loss = nn::cross_entropy((*model)(x), y);
    opt.zero_grad();
    loss.backward();
    opt.set_lr(schedule(step));
    opt.step(optim::clip_grad_norm(model->parameters(), 1.0).scale);
    if (step % 100 == 0 || step == 499)
      std::printf("step %3d  loss %.4f\n", step, loss.item<float>());
  }

  NoGrad evaluation;
  model->eval();
  auto [x, y] = spirals(2000);
  Tensor right = eq(argmax((*model)(x), 1), y).to(kF32);
  std::printf("accuracy on new points %.3f\n", mean(right).item<float>());
}
