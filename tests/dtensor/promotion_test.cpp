// Operands of several dtypes that are spread over ranks meet as those of one rank do.
#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "dtensor/dtensor.h"

namespace tessera::test {
namespace {

TEST(Promotion, OfShardedOperands) {
  run_ranks(2, [](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"a", 2}});
    // Small integers: every sum is exact.
    const Tensor whole = reshape(arange(0, 24, 1, {.dtype = kF32}), {4, 6}),
                 other = (whole - 7.0).to(kF64);
    const Tensor x = distribute(whole, mesh, {Shard(0)}), y = distribute(other, mesh, {Shard(0)}),
                 w = distribute(other, mesh, {Replicate()});
    auto expect = [](const Tensor& got, const Tensor& want, const char* what) {
      const Tensor all = full_tensor(got);
      TESSERA_ASSERT(all.dtype() == kF64 && equal(all, want), "{}: {}", what, to_string(all));
    };
    expect(x + y, whole.to(kF64) + other, "add");
    expect(where(gt(x, 3), x, y), where(gt(whole, 3), whole.to(kF64), other), "where");
    expect(contract("ij,kj->ik", x, w), contract("ij,kj->ik", whole.to(kF64), other), "contract");
    const Tensor parts[] = {x, y}, both[] = {whole.to(kF64), other};
    expect(cat(parts, 1), cat(both, 1), "cat");
  });
}

}  // namespace
}  // namespace tessera::test
