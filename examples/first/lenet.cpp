// LeNet learns to read digits in noise, which the program draws in a font of three by five dots.
// The exit status is 0 when it reads 19 of 20 digits that it has not seen.
#include <tessera/tessera.h>

#include <cstdio>

using namespace tessera;

struct LeNet : nn::Module {
  LeNet() { register_modules({{"c1", c1}, {"c3", c3}, {"f5", f5}, {"f6", f6}, {"out", out}}); }
  nn::Conv2d c1{{.in = 1, .out = 6, .kernel = 5, .padding = 2}}, c3{6, 16, 5};
  nn::Linear f5{400, 120}, f6{120, 84}, out{84, 10};

 protected:
  Tensor forward(Tensor x) override {
    x = max_pool2d(relu(c1(x)), 2);
    x = max_pool2d(relu(c3(x)), 2);
    return out(relu(f6(relu(f5(x.flatten(1))))));
  }
};

// Each octal digit is a row of three dots.
const int font[] = {075557, 026227, 071747, 071717, 055711, 074717, 074757, 071111, 075757, 075717};

// Pictures [n, 1, 28, 28], and which digit each shows: i64 [n].
std::pair<Tensor, Tensor> digits(int64_t n) {
  Tensor dots = floor_divide(from_values<int>(font, {10, 1}), pow(2, arange(14, -1, -1))) % 2;
  Tensor glyphs = kron(dots.view({10, 5, 3}).to(kF32), ones({1, 4, 4}));
  Tensor x = rand({n, 1, 28, 28}), y = randint(0, 10, {n}), corner = randint(0, 9, {n, 2});
  for (int64_t i = 0; i < n; ++i) {
    const auto row = corner[i][0].item<int64_t>(), column = corner[i][1].item<int64_t>();
    x[i][0].narrow(0, row, 20).narrow(1, 4 + column, 12) += glyphs[y[i].item<int64_t>()];
  }
  return {x, y};
}

int main() {
  manual_seed(0);
  auto [x, y] = digits(2000);
  auto dataset = std::make_shared<data::TensorDataset>(x, y);
  data::DataLoader loader(dataset, {.batch_size = 64, .shuffle = true});

  LeNet net;
  auto opt = optim::Adam(net.parameters(), {.lr = 2e-3});
  for (int epoch = 0; epoch < 4; ++epoch) {
    Tensor loss;
    for (data::Batch& batch : loader) {
      loss = nn::cross_entropy(net(batch.inputs), batch.targets);
      opt.zero_grad();
      loss.backward();
      opt.step();
    }
    std::printf("epoch %d  loss %.4f\n", epoch, loss.item<float>());
  }

  NoGrad evaluation;
  auto [new_x, new_y] = digits(500);
  const float accuracy = (net(new_x).argmax(1) == new_y).to(kF32).mean().item<float>();
  std::printf("accuracy on new digits %.3f\n", accuracy);
  return accuracy > 0.95f ? 0 : 1;
}
