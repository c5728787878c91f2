// Function transforms of sharded tensors: gradients have the placements and the values that the
// tape gives, and ops that change placements work like others, except under vmap.
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

// What places a tensor is a step of the function like any other: values and placements of the
// derivatives are the tape's, forward derivatives those of the whole tensors.
TEST(Transforms, PlacesAreChangedInside) {
  const std::pair<const char*, Loss> losses[] = {
      {"redistribute",
       [](const Tensor& w, const Tensor& x) {
         return sum(square(redistribute(w, {Replicate()})) * x);
       }},
      {"a Partial",
       [](const Tensor& w, const Tensor& x) {
         return sum(square(redistribute(sum(w, {0}), {Replicate()})) * sum(x, {0}));
       }},
      {"full_tensor", [](const Tensor& w,
                         const Tensor& x) { return sum(square(full_tensor(w)) * full_tensor(x)); }},
      {"to_local and back",
       [](const Tensor& w, const Tensor& x) {
         const Tensor piece = square(to_local(w));
         return sum(
             redistribute(from_local(piece, mesh_of(w), layout_of(w), w.shape()), {Replicate()}) *
             x);
       }},
      {"distribute",
       [](const Tensor& w, const Tensor& x) {
         return sum(redistribute(distribute(square(full_tensor(w)), mesh_of(w), {Shard(1)}),
                                 {Replicate()}) *
                    x);
       }},
  };
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}});
    manual_seed(3);
    const Tensor w0 = randn({5, 3}, {.dtype = kF64}), x0 = randn({5, 3}, {.dtype = kF64}),
                 v0 = randn({5, 3}, {.dtype = kF64});
    auto far = [](const Tensor& a, const Tensor& b) {
      return amax(abs(full_tensor(a) - full_tensor(b))).item<double>();
    };
    for (const auto& [name, loss] : losses) {
      const Tensor x = distribute(x0, mesh, {Replicate()}), w = distribute(w0, mesh, {Shard(0)}),
                   v = distribute(v0, mesh, {Shard(0)});
      Tensor leaf = distribute(w0, mesh, {Shard(0)}).requires_grad_();
      Tensor l = loss(leaf, x);
      TESSERA_ASSERT(placed(l) == placed(loss(w, x)), "{}", name);
      full_tensor(l).backward();
      auto of_w = [&](const Tensor& w) { return full_tensor(loss(w, x)); };
      const Tensor g = grad(of_w)(w);
      TESSERA_ASSERT(placed(g) == placed(leaf.grad()), "{}: {}, not {}", name, placed(g),
                     placed(leaf.grad()));
      TESSERA_ASSERT(far(g, leaf.grad()) == 0, "{}", name);
      auto [value, pull] = vjp(of_w, w);
      TESSERA_ASSERT(far(value, full_tensor(l)) == 0, "{}: value", name);
      const Tensor forward = jvp(of_w, w, v).second;
      TESSERA_ASSERT(
          std::abs(forward.item<double>() - sum(full_tensor(g) * v0).item<double>()) < 1e-12,
          "{}: jvp {}", name, forward.item<double>());
      const Tensor second =
          grad([&](const Tensor& w) { return sum(full_tensor(grad(of_w)(w)) * v0); })(w);
      leaf = distribute(w0, mesh, {Shard(0)}).requires_grad_();
      const Tensor root = full_tensor(loss(leaf, x)),
                   first = grad({&root, 1}, {&leaf, 1}, {}, {.create_graph = true})[0];
      const Tensor again = sum(full_tensor(first) * v0);
      TESSERA_ASSERT(far(second, grad({&again, 1}, {&leaf, 1})[0]) < 1e-12, "{}: second", name);
    }
  });
}

// zeros_like and what draws like a tensor are placed as the tensor is, whether it is an argument or
// comes from outside, and hold what they hold outside.
TEST(Transforms, CreationsArePlacedLikeTheTensor) {
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}});
    const Tensor w = distribute(ones({5, 3}), mesh, {Shard(0)});
    manual_seed(1);
    const Tensor drawn = full_tensor(randn(w.shape(), options_of(w)));
    auto f = [&](const Tensor& x) {
      manual_seed(1);
      const Tensor zero = zeros_like(x), number = randn(w.shape(), options_of(w));
      TESSERA_ASSERT(layout_of(zero) == Layout{Shard(0)}, "zeros_like");
      TESSERA_ASSERT(layout_of(number) == Layout{Shard(0)}, "randn");
      TESSERA_ASSERT(zero.shape() == w.shape(), "zeros_like is {}", describe(zero));
      return sum(square(maximum(x, zero)) * number);
    };
    const Tensor g = grad(f)(w);
    TESSERA_ASSERT(amax(abs(full_tensor(g) - drawn * 2.0)).item<float>() == 0, "grad");
    const Tensor unused = grad<1>([](const Tensor& x, const Tensor&) { return sum(x); })(w, w);
    TESSERA_ASSERT(layout_of(unused) == Layout{Shard(0)}, "a gradient that nothing reached");
  });
}

// Under vmap it is the batch that is placed.
TEST(Transforms, SamplesHaveNoPlaces) {
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}});
    Tensor w = distribute(ones({4, 3}), mesh, {Shard(0)});
    auto refused = [&](auto f) {
      try {
        vmap(f)(w);
      } catch (const UserError& e) {
        return std::string(e.what()).find("is a sample of vmap") != std::string::npos;
      }
      return false;
    };
    TESSERA_ASSERT(refused([](const Tensor& w) { return sum(full_tensor(w)); }), "full_tensor");
    TESSERA_ASSERT(refused([](const Tensor& w) { return sum(to_local(w)); }), "to_local");
    TESSERA_ASSERT(refused([](const Tensor& w) { return sum(redistribute(w, {Replicate()})); }),
                   "redistribute");
  });
}

// A plain sample that backward would place: the gradient of a sharded tensor would depend on it.
TEST(Transforms, CotangentsOfSamplesHaveNoPlacesEither) {
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}});
    const Tensor w = distribute(ones({4, 3}), mesh, {Shard(0)}), batch = ones({5, 4, 3});
    std::string told;
    try {
      vmap([&](const Tensor& x) {
        return full_tensor(grad([&](const Tensor& u) { return sum(full_tensor(u) * x); })(w));
      })(batch);
    } catch (const UserError& e) {
      told = e.what();
    }
    for (const char* part : {"from_local: ", "is a sample of vmap", "backward",
                             "gradient of a sharded tensor depends on the sample"})
      TESSERA_ASSERT(told.find(part) != std::string::npos, "\"{}\" lacks \"{}\"", told, part);
    // What it says to do works.
    const Tensor g = grad([&](const Tensor& u) { return sum(full_tensor(u) * batch); })(w);
    TESSERA_ASSERT(layout_of(g) == Layout{Shard(0)} && full_tensor(g).shape() == w.shape(), "grad");
  });
}

}  // namespace
}  // namespace tessera
