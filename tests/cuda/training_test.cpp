// A training step on a card: batches come from pinned memory beside the kernels, keys go by value,
// losses are read one step late, and the host waits for nothing else. Checkpoints are copied out
// beside the steps that follow them.
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <numeric>
#include <thread>

#include "collectives/process_group.h"
#include "core/backend/cuda/pinned.h"
#include "core/core.h"
#include "core/io/hash.h"
#include "examples/models/gpt.h"
#include "parallel/checkpoint/training_state.h"
#include "tests/cuda/card.h"
#include "tests/cuda/counters.h"
#include "tests/cuda/gate.h"
#include "tests/cuda/windows.h"

namespace tessera::cuda {
namespace {

class CudaTraining : public OnCard {};

struct Training {
  explicit Training(Device device)
      : device(device),
        scope(device),
        model(models::GptOptions{
            .vocab = 11, .context = 6, .layers = 2, .heads = 2, .dim = 16, .dropout = 0.1}),
        loader(std::make_shared<Windows>(),
               data::DataLoaderOptions{.batch_size = 3, .repeat = true, .device = device}) {
    manual_seed(5);
    model.init(3);
    optimizer =
        std::make_unique<optim::AdamW>(model.named_parameters(), optim::AdamWOptions{.lr = 0.01});
  }
  // Returns the loss, which nobody has waited for.
  Tensor step() {
    const data::Batch batch = *loader.next();
    SampleScope samples(batch.sample_numbers);
    const Tensor loss = model.loss(batch.inputs, batch.targets);
    optimizer->zero_grad();
    loss.backward();
    optimizer->set_lr(0.01);
    optimizer->step_if_finite(optim::clip_grad_norm(model.parameters(), 0.5).scale);
    return loss.detach().cpu();
  }
  checkpoint::TrainingState state() {
    return {.model = &model, .optimizer = optimizer.get(), .loader = &loader};
  }
  std::string hash() { return io::params_xxh128(model.state()); }

  const Device device;
  const DeviceScope scope;
  models::Gpt model;
  data::DataLoader loader;
  std::unique_ptr<optim::Optimizer> optimizer;
};

TEST_F(CudaTraining, AStepWaitsForTheLossOfTheOneBeforeAndNothingElse) {
  Training run(device_of(0));
  Tensor before = run.step();
  for (int s = 0; s < 2; ++s) before = run.step();  // kernels are compiled and memory is taken
  std::vector<float> losses;
  for (int s = 0; s < 4; ++s) {
    const int64_t waits = host_waits();
    const Tensor loss = run.step();
    EXPECT_EQ(host_waits(), waits);
    losses.push_back(before.item<float>());
    EXPECT_LE(host_waits(), waits + 1);
    before = loss;
  }
  Training there(kCPU);
  for (int s = 0; s < 2; ++s) there.step();
  for (float loss : losses) EXPECT_NEAR(loss, there.step().item<float>(), 1e-4);
}

TEST_F(CudaTraining, BatchesComeFromPinnedMemory) {
  const int64_t before = pinned_allocator().stats().live_bytes;
  data::DataLoader loader(
      std::make_shared<Windows>(),
      data::DataLoaderOptions{
          .batch_size = 100, .repeat = true, .prefetch = 3, .device = device_of(0)});
  EXPECT_GE(pinned_allocator().stats().live_bytes, before + 3 * 100 * (6 + 6 + 1) * 8);
  Tensor sums = zeros({}, {.dtype = kI64, .device = device_of(0)});
  int64_t want = 0;
  for (int64_t s = 0; s < 20; ++s) {
    const data::Batch batch = *loader.next();
    sums = sums + sum(batch.inputs) + sum(batch.sample_numbers);
    for (int64_t n = 100 * s; n < 100 * (s + 1); ++n) {
      want += n;
      for (int64_t t = 0; t < 6; ++t) want += (n * 7 + t * t) % 11;
    }
  }
  EXPECT_EQ(sums.item<int64_t>(), want);
}

/// Windows that count what has been read.
class CountedWindows final : public data::Dataset {
 public:
  int64_t size() const override { return windows_.size(); }
  data::Batch allocate(int64_t rows) const override { return windows_.allocate(rows); }
  void read(const data::Sample& s, int64_t row, const data::Batch& to) const override {
    windows_.read(s, row, to);
    ++rows;
  }
  mutable std::atomic<int64_t> rows = 0;

 private:
  Windows windows_;
};

// next() enqueues the copy of the batch after the one that it returns, and that copy ends although
// the kernels before it have not.
TEST_F(CudaTraining, TheNextBatchArrivesBesideTheStepBefore) {
  const Device card = device_of(0);
  constexpr int64_t kRows = 10;
  const auto dataset = std::make_shared<CountedWindows>();
  data::DataLoader loader(
      dataset,
      data::DataLoaderOptions{.batch_size = kRows, .repeat = true, .prefetch = 3, .device = card});
  const auto copies_end = [&] {
    const auto hung = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (int turn : {0, 1}) {
      const Ref<Event> copied = runtime_of(card).record(runtime_of(card).copy_stream(0, turn));
      while (copied && !copied->done()) {
        if (std::chrono::steady_clock::now() > hung) return false;
        std::this_thread::yield();
      }
    }
    return true;
  };
  for (int64_t b = 0; b < 5; ++b) {
    // One thread reads: a batch is complete when the one after it has begun.
    while (dataset->rows <= kRows * (b + 2)) std::this_thread::yield();
    ASSERT_TRUE(copies_end());
    Gate gate(stream_);
    const int64_t copies = runs_so_far("copy to the device"), waits = host_waits();
    const Tensor total = sum(loader.next()->inputs);
    EXPECT_EQ(host_waits(), waits);
    const Ref<Event> computed = runtime_of(card).record(stream_);
    EXPECT_TRUE(copies_end());
    EXPECT_FALSE(computed->done());
    const int64_t batches = b == 0 ? 2 : 1;  // of three tensors
    EXPECT_TRUE(copies < 0 || runs_so_far("copy to the device") == copies + 3 * batches) << b;
    gate.open();
    int64_t want = 0;
    for (int64_t n = kRows * b; n < kRows * (b + 1); ++n)
      for (int64_t t = 0; t < 6; ++t) want += (n * 7 + t * t) % 11;
    EXPECT_EQ(total.item<int64_t>(), want);
  }
}

std::string folder_for(const char* what) {
  const std::string folder =
      std::filesystem::temp_directory_path() / fmt::format("tessera-cuda-{}-{}", what, getpid());
  std::filesystem::remove_all(folder);
  return folder;
}

// The same steps after a save, which goes on beside them, and after loading it.
void save_and_resume(Device first, Device second, bool exact) {
  const std::string folder = folder_for("resume");
  const Ref<ProcessGroup> alone = solo_group();
  std::string hashes[2];
  std::vector<float> losses[2];
  {
    Training run(first);
    checkpoint::Checkpointer saver(folder, alone.get());
    std::vector<Tensor> seen;
    for (int64_t s = 0; s < 5; ++s) {
      if (s == 2) {
        const int64_t waits = host_waits();
        run.state().save(saver, s);
        EXPECT_EQ(host_waits(), waits);
      }
      const Tensor loss = run.step();
      if (s >= 2) seen.push_back(loss);
    }
    saver.wait();
    for (const Tensor& t : seen) losses[0].push_back(t.item<float>());
    hashes[0] = run.hash();
  }
  {
    Training run(second);
    run.state().load(folder, alone.get());
    for (int64_t s = 2; s < 5; ++s) losses[1].push_back(run.step().item<float>());
    hashes[1] = run.hash();
  }
  std::filesystem::remove_all(folder);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(losses[0][i], losses[1][i], 1e-4);
  EXPECT_TRUE(!exact || hashes[0] == hashes[1]);
}

TEST_F(CudaTraining, ASaveHasTheBitsOfItsStep) {
  save_and_resume(device_of(0), device_of(0), true);
  save_and_resume(device_of(0), kCPU, false);
  save_and_resume(kCPU, device_of(0), false);
}

// What was computed from an operand that was refused is not saved.
TEST_F(CudaTraining, ASaveOfWhatWasRefusedFails) {
  const std::string folder = folder_for("refused");
  Training run(device_of(0));
  const Ref<ProcessGroup> alone = solo_group();
  checkpoint::Checkpointer saver(folder, alone.get());
  run.step();
  const Tensor ids = full({2, 6}, 50, {kI64, run.device});
  run.model.loss(ids, ids).backward();
  run.optimizer->step();
  const std::string error = error_of([&] {
    run.state().save(saver, 1);
    saver.wait();
  });
  EXPECT_NE(error.find("embedding: the id 50 at position 0"), std::string::npos) << error;
  EXPECT_FALSE(std::filesystem::exists(folder + "/latest"));
  error_of([&] { cuda::synchronize(stream_); });
  std::filesystem::remove_all(folder);
}

TEST_F(CudaTraining, KeysOnTheCardAreThoseOfTheHost) {
  const Device card = device_of(0);
  const Tensor x = ones({5, 7}, {kF32, card});
  Generator here(9), there(9);
  there.to(card);
  for (int k = 0; k < 3; ++k) {
    const Tensor a = dropout(x, 0.4, here.next_key()), b = dropout(x, 0.4, there.next_key());
    EXPECT_TRUE(equal(a.cpu(), b.cpu()));
  }
  here.seek(7), there.seek(7);
  EXPECT_TRUE(equal(here.next_key(), there.next_key().cpu()));
  there.seed(3);
  EXPECT_TRUE(equal(there.state().cpu(), Generator(3).state()));
  there.to(kCPU);
  EXPECT_TRUE(there.state().device().is_cpu());
}

}  // namespace
}  // namespace tessera::cuda
