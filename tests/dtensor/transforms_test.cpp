// Function transforms of sharded tensors: gradients have the placements and the values that the
// tape gives; what needs to see placements is refused inside.
#include "core/autograd/transforms.h"

#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "dtensor/dtensor.h"
#include "dtensor/shard_spec.h"

namespace tessera {
namespace {

using Loss = std::function<Tensor(const Tensor& w, const Tensor& x)>;

std::string placed(const Tensor& t) {
  const ShardSpec* s = spec_of(t);
  return s ? to_string(s->layout) : "plain";
}

TEST(Transforms, GradientsOfShardedTensorsArePlacedAsTheTapePlacesThem) {
  const std::pair<const char*, Loss> losses[] = {
      {"sum", [](const Tensor& w, const Tensor&) { return sum(w); }},
      {"mean of squares", [](const Tensor& w, const Tensor&) { return mean(square(w)); }},
      {"rms_norm", [](const Tensor& w, const Tensor& x) { return sum(rms_norm(w) * x); }},
      {"product", [](const Tensor& w, const Tensor& x) { return sum(square(linear(x, w))); }},
  };
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}});
    manual_seed(3);
    const Tensor w0 = randn({6, 6}, {.dtype = kF64}), x0 = randn({6, 6}, {.dtype = kF64});
    for (const Layout& layout : {Layout{Shard(0)}, Layout{Shard(1)}, Layout{Replicate()}})
      for (const auto& [name, loss] : losses) {
        // A row is normalised whole, and the partial sums of a product are not squared.
        const bool product = std::string_view(name) == "product";
        if (layout == Layout{Shard(1)} && (product || std::string_view(name) == "rms_norm"))
          continue;
        Tensor w = distribute(w0, mesh, layout),
               x = distribute(x0, mesh, product ? Layout{Replicate()} : layout);
        Tensor leaf = distribute(w0, mesh, layout).requires_grad_();
        loss(leaf, x).backward();
        Tensor g = grad(loss)(w, x);
        TESSERA_ASSERT(placed(g) == placed(leaf.grad()), "{} of {}: {}, not {}", name,
                       to_string(layout), placed(g), placed(leaf.grad()));
        Tensor difference = abs(full_tensor(g) - full_tensor(leaf.grad()));
        TESSERA_ASSERT(amax(difference).item<double>() == 0, "{} of {}", name, to_string(layout));
      }
  });
}

TEST(Transforms, PlacementsCannotBeSeenInside) {
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}});
    Tensor w = distribute(ones({4}), mesh, {Shard(0)});
    auto refused = [&](auto f) {
      try {
        grad(f)(w);
      } catch (const UserError& e) {
        return std::string(e.what()).find("inside a function transform") != std::string::npos;
      }
      return false;
    };
    TESSERA_ASSERT(refused([](const Tensor& w) { return sum(full_tensor(w)); }), "full_tensor");
    TESSERA_ASSERT(refused([](const Tensor& w) { return sum(to_local(w)); }), "to_local");
    TESSERA_ASSERT(refused([](const Tensor& w) { return sum(redistribute(w, {Replicate()})); }),
                   "redistribute");
  });
}

}  // namespace
}  // namespace tessera
