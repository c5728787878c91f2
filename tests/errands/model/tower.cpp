// A model that `train` runs: a tower of linear layers, its row of the registry, and the program.
#include "core/nn/nn.h"
#include "examples/models/registry.h"
#include "examples/train/train_main.h"

using namespace tessera;

struct TowerOptions {
  int64_t in = 32, hidden = 64, out = 10;
};
models::Fields fields_of(TowerOptions& o) {
  return {"tower", {{"in", &o.in}, {"hidden", &o.hidden}, {"out", &o.out}}};
}

nn::SequentialPtr tower(const TowerOptions& o) {
  return nn::sequential(nn::linear(o.in, o.hidden), nn::gelu(), nn::linear(o.hidden, o.hidden),
                        nn::gelu(), nn::linear(o.hidden, o.out));
}

int main(int argc, char** argv) {
  models::ModelSpec spec{.name = "tower",
                         .options = TowerOptions(),
                         .data = models::Data::kValues,
                         .make = models::on<TowerOptions>(tower)};
  spec.tensor_parallel = {.plan = [](const models::ModelOptions&) -> parallel::ParallelPlan {
                            return {{"0", parallel::colwise()}, {"2", parallel::rowwise()}};
                          },
                          .field = "hidden",
                          .parts = "hidden units"};
  models::register_model(spec);
  return train_main(argc, argv);
}
