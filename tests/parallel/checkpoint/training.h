// A small training run, its state as bytes, and whether a save holds that state.
#pragma once
#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/core.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/load.h"

namespace tessera::checkpoint {

inline std::vector<std::byte> bytes_of(const Tensor& t) {
  Tensor dense = contiguous(t.detach());
  auto* p = static_cast<const std::byte*>(dense.raw_values());
  return {p, p + dense.nbytes()};
}

using Values = std::map<std::string, std::vector<std::byte>>;
inline Values values_of(const State& s) {
  Values out;
  for (const Piece& p : s.pieces) out[p.name] = bytes_of(p.values);
  return out;
}

inline void expect_saved(const std::string& folder, const Values& expected) {
  State to;
  for (const auto& [name, entry] : expected) {
    Manifest m = read_manifest(folder);
    const TensorEntry* t = m.find(name);
    ASSERT_TRUE(t) << name;
    to.pieces.push_back(whole(name, empty(t->shape, t->dtype)));
  }
  load(folder, to.pieces);
  for (const Piece& p : to.pieces)
    EXPECT_TRUE(bytes_of(p.values) == expected.at(p.name)) << p.name << " in " << folder;
}

// A small model with all that a training run saves.
struct Training {
  Training() {
    manual_seed(3);
    model = nn::sequential(nn::linear(96, 640), nn::gelu(), nn::dropout(0.1), nn::linear(640, 640),
                           nn::layer_norm(640), nn::linear(640, 8));
    optimizer =
        std::make_unique<optim::AdamW>(model->named_parameters(), optim::AdamWOptions{.lr = 0.01});
  }
  void forward_backward() {
    Tensor loss = nn::cross_entropy((*model)(randn({16, 96})), randint(0, 8, {16}));
    optimizer->zero_grad();
    loss.backward();
  }
  void step() {
    forward_backward();
    optimizer->step();
  }
  State state() const {
    State s;
    for (auto& t : model->state()) s.pieces.push_back(whole("model." + t.name, t.tensor));
    for (auto& t : optimizer->named_state())
      s.pieces.push_back(whole("optimizer." + t.name, t.tensor));
    s.pieces.push_back(whole("random", default_generator().state()));
    return s;
  }
  std::shared_ptr<nn::Sequential> model;
  std::unique_ptr<optim::AdamW> optimizer;
};

}  // namespace tessera::checkpoint
