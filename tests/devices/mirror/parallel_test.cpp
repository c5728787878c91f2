// Ranks as threads that train on the device with the bits of the CPU, and checkpoints.
#include <unistd.h>

#include <filesystem>

#include "collectives/loopback/run_ranks.h"
#include "core/core.h"
#include "core/io/hash.h"
#include "core/tensor/device_runtime.h"
#include "dtensor/dtensor.h"
#include "parallel/checkpoint/training_state.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "testing.h"

using namespace tessera;

namespace {

struct Run {
  explicit Run(Device device) : device(device), scope(device) {
    manual_seed(3);
    model = nn::sequential(nn::linear(12, 32), nn::gelu(), nn::dropout(0.1), nn::linear(32, 32),
                           nn::layer_norm(32), nn::linear(32, 10));
    model->init(5);
  }
  void make_optimizer() {
    optimizer =
        std::make_unique<optim::AdamW>(model->named_parameters(), optim::AdamWOptions{.lr = 0.01});
  }
  void step(int64_t number, int64_t rank) {
    const Tensor key = from_values<int64_t>({number, rank}, {2});
    const Tensor x = randn({4, 12}, {.device = kCPU}, key).to(device),
                 y = randint(0, 10, {4}, {.device = kCPU}, key).to(device);
    optimizer->zero_grad();
    nn::cross_entropy((*model)(x), y).backward();
    const optim::Clip clip = optim::clip_grad_norm(model->parameters(), 0.5);
    optimizer->step(clip.scale);
  }
  checkpoint::TrainingState state() const {
    return {.model = model.get(), .optimizer = optimizer.get()};
  }
  std::string hash() const {
    std::vector<NamedTensor> all;
    for (NamedTensor& t : model->state()) all.push_back({t.name, full_tensor(t.tensor)});
    return io::params_xxh128(all);
  }

  const Device device;
  const DeviceScope scope;
  std::shared_ptr<nn::Sequential> model;
  std::unique_ptr<optim::Optimizer> optimizer;
};

using Wrap = std::function<void(nn::Module&)>;
void under_ddp(nn::Module& m) { parallel::ddp(m, {.bucket_bytes = 1024}); }
void fully_sharded(nn::Module& m) { parallel::fully_shard(m); }

// Four steps on two ranks; each has a device of its own, or both have one.
std::string trained(const Wrap& wrap, std::function<Device(int rank)> device) {
  std::string hashes[2];
  run_ranks(2, [&](ProcessGroup& group) {
    Run run(device(group.rank()));
    wrap(*run.model);
    run.make_optimizer();
    for (int64_t s = 0; s < 4; ++s) run.step(s, group.rank());
    hashes[group.rank()] = run.hash();
  });
  EXPECT_EQ(hashes[0], hashes[1]);
  return hashes[0];
}

void expect_same_as_on_the_cpu(const Wrap& wrap) {
  const std::string want = trained(wrap, [](int) { return kCPU; });
  mirror::for_each_seed([&] {
    EXPECT_EQ(trained(wrap, [](int rank) { return mirror::device(rank); }), want);
    EXPECT_EQ(trained(wrap, [](int) { return mirror::device(); }), want) << "on one device";
  });
}

TEST(MirrorRanks, Ddp) { expect_same_as_on_the_cpu(under_ddp); }
TEST(MirrorRanks, FullySharded) { expect_same_as_on_the_cpu(fully_sharded); }

// A kernel still reads the memory that a message is to arrive in.
TEST(MirrorRanks, AMessageWaitsForReadersOfItsMemory) {
  mirror::for_each_seed([] {
    run_ranks(2, [](ProcessGroup& group) {
      const Tensor x = full({64}, group.rank() + 1.0).to(mirror::device()), y = x * 2.0;
      if (group.rank() == 0) return group.send(x, 1);
      group.recv_async(x, 0)->wait();
      EXPECT_EQ(y.sum().item<float>(), 256);
      EXPECT_EQ(x.sum().item<float>(), 64);
    });
  });
}

// Saved on one device after two steps, while two more run; loaded on `second`, the same two steps
// follow.
void save_and_resume(Device first, Device second) {
  const std::string folder =
      std::filesystem::temp_directory_path() / fmt::format("mirror-{}", getpid());
  std::filesystem::remove_all(folder);
  std::string hashes[2];
  run_ranks(2, [&](ProcessGroup& group) {
    Run run(first);
    fully_sharded(*run.model);
    run.make_optimizer();
    checkpoint::Checkpointer saver(folder, &group);
    for (int64_t s = 0; s < 4; ++s) {
      if (s == 2) run.state().save(saver, s);
      run.step(s, group.rank());
    }
    saver.wait();
    hashes[0] = run.hash();
  });
  run_ranks(2, [&](ProcessGroup& group) {
    Run run(second);
    fully_sharded(*run.model);
    run.make_optimizer();
    run.state().load(folder, &group);
    for (int64_t s = 2; s < 4; ++s) run.step(s, group.rank());
    hashes[1] = run.hash();
  });
  std::filesystem::remove_all(folder);
  EXPECT_EQ(hashes[0], hashes[1]);
}

TEST(MirrorRanks, ACheckpointIsSavedFromTheDeviceAndLoadedToIt) {
  mirror::for_each_seed([] {
    save_and_resume(mirror::device(), mirror::device(1));
    save_and_resume(kCPU, mirror::device());
    save_and_resume(mirror::device(), kCPU);
  });
}

}  // namespace
