// Sums of which ranks hold terms: backward sees the bits that forward saw, and a layout has one
// value.
#include <gtest/gtest.h>

#include "collectives/decorators/counting.h"
#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/autograd/transforms.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "dtensor/dtensor.h"
#include "tests/support/temp_folder.h"

namespace tessera::test {
namespace {

// The sum over both axes is rounded differently on different routes. If backward took another route
// than forward, no element would equal the maximum, and the gradient would be 0 / 0.
TEST(Partial, GradientOfAMaximumOfSumsIsOne) {
  for (auto [a, b] : {std::pair{2, 2}, {3, 2}, {2, 3}})
    run_ranks(a * b, [&](ProcessGroup& group) {
      DeviceMesh mesh = init_device_mesh({{"a", a}, {"b", b}});
      for (uint64_t i = 0; i < 20; ++i) {
        manual_seed(1000 * i + uint64_t(group.rank()));
        const Tensor term = randn({2, 3, 4});
        for (bool transform : {false, true}) {
          Tensor local = term.clone().requires_grad_();
          auto loss = [&](const Tensor& x) {
            AllowCommunication allowed;
            Tensor t = from_local(x, mesh, {Partial(), Partial()}, {2, 3, 4});
            return full_tensor(sum(amax(t, {0, 2})));
          };
          Tensor g = transform ? grad(loss)(local) : (loss(local).backward(), local.grad());
          TESSERA_ASSERT(sum(g).item<float>() == 3, "{} x {}, draw {}: gradient sums to {}", a, b,
                         i, sum(g).item<float>());
        }
      }
    });
}

// What forward reduced is not reduced again: the gradient alone is gathered.
TEST(Partial, BackwardReadsWhatForwardReduced) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto counting = make_ref<CountingGroup>(Ref<ProcessGroup>(&group));
    DeviceMesh mesh = init_device_mesh({{"a", 2}}, counting);
    Tensor local = ones({4, 2}).requires_grad_();
    AllowCommunication allowed;
    Tensor y = sum(square(from_local(local, mesh, {Partial()}, {4, 2})));
    int64_t forward = counting->counts().total_calls();
    y.backward();
    TESSERA_ASSERT(counting->counts().total_calls() == forward + 1, "{} calls",
                   counting->counts().total_calls());
  });
}

TEST(Partial, ReductionsThatDoNotCommuteAreRefused) {
  run_ranks(4, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"a", 2}, {"b", 2}});
    const Tensor x = ones({3});
    for (ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct}) {
      std::string e = error_of([&] { from_local(x, mesh, {Partial(), Partial(op)}, {3}); });
      TESSERA_ASSERT(e.find("has no value of its own") != e.npos, "{}: {}", name_of(op), e);
      Tensor sums = from_local(x, mesh, {Partial(), Replicate()}, {3});
      e = error_of([&] { redistribute(sums, "b", Partial(op)); });
      TESSERA_ASSERT(e.find("has no value of its own") != e.npos, "{}: {}", name_of(op), e);
      from_local(x, mesh, {Partial(op), Partial(op)}, {3});
    }
    Tensor means = from_local(x, mesh, {Partial(ReduceOp::kAvg), Partial()}, {3});
    TESSERA_ASSERT(amax(full_tensor(means)).item<float>() == 2, "a mean of sums");
  });
}

TEST(Partial, UnevenPiecesWithoutTheGlobalShapeAreRefusedOnEveryRank) {
  for (auto [a, b] : {std::pair{2, 1}, {1, 3}, {2, 2}})
    run_ranks(a * b, [&](ProcessGroup& group) {
      DeviceMesh mesh = init_device_mesh({{"a", a}, {"b", b}});
      const Layout layout{a > 1 ? Shard(0) : Replicate(), b > 1 ? Shard(0) : Replicate()};
      bool last = group.rank() == group.size() - 1;
      std::string e = error_of([&] { from_local(ones({last ? 2 : 3}), mesh, layout); });
      TESSERA_ASSERT(e.find("dim 0 of the ranks' pieces is 2 to 3") != e.npos, "{}", e);
    });
}

}  // namespace
}  // namespace tessera::test
