// The caches of a mesh are bounded, and entries in use stay.
#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "dtensor/bounded_cache.h"
#include "dtensor/dtensor.h"
#include "dtensor/mesh_state.h"

namespace tessera {
namespace {

TEST(BoundedCache, KeepsWhatIsUsed) {
  using Cache = BoundedCache<int>;
  constexpr int kMany = int(Cache::kCapacity);
  Cache cache;
  auto find = [&](int value) {
    return cache.find(uint64_t(value % 100), [&](int v) { return v == value; });
  };
  auto add = [&](int value) { cache.add(uint64_t(value % 100), std::make_unique<int>(value)); };
  add(-1), add(0);
  const int* used = find(-1);
  for (int i = 1; i < 5 * kMany; ++i) {
    add(i);
    ASSERT_EQ(find(i) ? *find(i) : -2, i);
    ASSERT_EQ(find(-1), used) << "an entry that is used was dropped or moved, at " << i;
    ASSERT_LE(cache.size(), 2 * Cache::kCapacity);
    ASSERT_TRUE(i != kMany / 2 || find(0));
  }
  EXPECT_EQ(find(0), nullptr) << "nobody asked for it";
  EXPECT_NE(find(5 * kMany - kMany), nullptr) << "one of the newest";
}

// Lengths that never come again, as sequences have.
TEST(BoundedCache, MeshesForgetShapes) {
  run_ranks(2, [](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    const size_t most = 2 * BoundedCache<int>::kCapacity;
    for (int64_t n = 1; n < 10000; ++n) {
      Tensor x = distribute(zeros({n}), mesh, {Replicate()});
      Tensor y = redistribute(x + x, {Shard(0)});
      TESSERA_ASSERT(to_local(y).numel() <= (n + 1) / 2, "{}", describe(y));
    }
    TESSERA_ASSERT(mesh.state().decisions.size() <= most, "{} decisions",
                   mesh.state().decisions.size());
    TESSERA_ASSERT(mesh.state().routes.size() <= most, "{} routes", mesh.state().routes.size());
    TESSERA_ASSERT(mesh.state().decisions.size() > most / 4, "{} decisions are remembered",
                   mesh.state().decisions.size());
  });
}

}  // namespace
}  // namespace tessera
