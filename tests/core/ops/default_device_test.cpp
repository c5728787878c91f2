// The device of tensors that are created without one.
#include "core/dispatch/default_device.h"

#include <gtest/gtest.h>

#include <thread>

#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/random.h"
#include "core/tensor/device_runtime.h"

namespace tessera {
namespace {

// A kind of device of which this machine has none.
class Absent final : public DeviceRuntime {
 public:
  std::string_view name() const override { return "absent"; }
  int count() override { return 0; }
  std::string why_none() override { return "no driver was found; install one"; }
  std::string describe(int) override { return {}; }
  Allocator& allocator(int) override { return cpu_allocator(); }
  MemoryStats memory_stats(int) override { return {}; }
  void reset_peak_memory(int) override {}
  void release_cached_memory(int) override {}
  bool copy(void*, Device, const void*, Device, size_t, const Stream&) override { return false; }
};
Device absent() {
  static const DeviceKind kind = register_device(std::make_unique<Absent>());
  return {kind, 0};
}

std::vector<Tensor> created(TensorOptions o = {}) {
  return {full({2}, 1, o),          zeros({2}, o),        ones({2}, o),
          arange(0, 4, 1, o),       linspace(0, 1, 3, o), eye(2, 2, o),
          logspace(0, 1, 3, 10, o), rand({2}, o),         randn({2}, o),
          randint(0, 3, {2}, o)};
}
void expect_on(Device d, const std::vector<Tensor>& all) {
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i].device(), d) << "number " << i;
}

TEST(DefaultDevice, EveryCreationTakesIt) {
  expect_on(kCPU, created());
  DeviceScope scope(kMeta);
  expect_on(kMeta, created());
  TensorOptions given;
  given.device = kCPU;
  expect_on(kCPU, created(given));
  EXPECT_EQ(zeros_like(zeros({2}, given)).device(), kCPU);
}

TEST(DefaultDevice, ScopesNestAndAreOfTheirThread) {
  {
    DeviceScope outer(kMeta);
    {
      DeviceScope inner(kCPU);
      EXPECT_EQ(ones({1}).device(), kCPU);
    }
    EXPECT_EQ(ones({1}).device(), kMeta);
    std::thread([] { EXPECT_EQ(ones({1}).device(), kCPU); }).join();
    EXPECT_THROW(
        {
          DeviceScope failing(kCPU);
          throw UserError("ends the scope");
        },
        UserError);
    EXPECT_EQ(default_device(), kMeta);
  }
  EXPECT_EQ(ones({1}).device(), kCPU);
  set_default_device(kMeta);
  EXPECT_EQ(ones({1}).device(), kMeta);
  set_default_device(kCPU);
}

TEST(DefaultDevice, ModulesAreBuiltOnIt) {
  DeviceScope scope(kMeta);
  auto net = nn::sequential(nn::linear(3, 2), nn::batch_norm1d({.channels = 2}));
  for (const nn::Slot& s : net->slots()) EXPECT_EQ(s.tensor->device(), kMeta) << s.name;
  nn::OnDevice host(kCPU);  // of parameters alone
  EXPECT_EQ(nn::linear(3, 2)->weight.device(), kCPU);
  EXPECT_EQ(ones({1}).device(), kMeta);
}

TEST(DefaultDevice, WhatIsNotThereIsRefused) {
  for (auto ask :
       {+[] { set_default_device(absent()); }, +[] { DeviceScope scope(absent()); },
        +[] { zeros({2}, {.device = absent()}); }, +[] { (void)ones({2}).to(absent()); }}) {
    try {
      ask();
      ADD_FAILURE() << "accepted";
    } catch (const UserError& e) {
      EXPECT_NE(
          std::string(e.what()).find(": absent:0 cannot be used: no driver was found; install one"),
          std::string::npos)
          << e.what();
    }
  }
  EXPECT_EQ(default_device(), kCPU);
}

}  // namespace
}  // namespace tessera
