// Slices of a mesh: one object for each set of axes, however it was asked for.
#include "dtensor/mesh.h"

#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"

namespace tessera {
namespace {

TEST(Mesh, SlicesOfTheSameAxesAreTheSameMesh) {
  run_ranks(4, [](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"tp", 2}});
    DeviceMesh tp = mesh["tp"], dp = mesh["dp"];
    EXPECT_EQ(mesh["tp"], tp);
    EXPECT_FALSE(dp == tp);
    EXPECT_EQ(dp.joined(tp), mesh);
    EXPECT_EQ(tp.joined(dp), mesh);
    EXPECT_EQ(mesh.slice({"dp", "tp"}), mesh);
  });
}

TEST(Mesh, AxesAreReadFromText) {
  const std::vector<MeshAxis> axes = parse_mesh("dp=2,tp=13");
  ASSERT_EQ(axes.size(), 2u);
  EXPECT_EQ(axes[0].name + axes[1].name, "dptp");
  EXPECT_EQ(axes[0].size, 2);
  EXPECT_EQ(axes[1].size, 13);
}

TEST(Mesh, AsManyRanksAs64BitsForgetAreRefused) {
  run_ranks(1, [](ProcessGroup&) {  // 2^65 + 1
    EXPECT_THROW(init_device_mesh({{"a", 11806113}, {"b", 409891}, {"c", 7623851}}), UserError);
  });
}

TEST(Mesh, ARefusedSliceLeavesTheOthersAsTheyAre) {
  run_ranks(4, [](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"tp", 2}});
    DeviceMesh tp = mesh["tp"];
    EXPECT_THROW(mesh.slice({"tp", "dp"}),
                 UserError);  // reads "tp" before it finds the order wrong
    EXPECT_THROW(mesh.slice({"tp", "tp"}), UserError);
    EXPECT_THROW(mesh.slice({"tp", "pp"}), UserError);
    EXPECT_EQ(mesh["tp"], tp);
  });
}

}  // namespace
}  // namespace tessera
