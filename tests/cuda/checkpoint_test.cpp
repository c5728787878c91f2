// Checkpoints of ranks that have cards: every tensor has the bits that ranks of the CPU load and
// save again, in other numbers, and the other way round; and a save has the values of its call,
// whatever is enqueued after it.
#include <cstring>
#include <map>
#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "core/core.h"
#include "core/io/hash.h"
#include "examples/models/gpt.h"
#include "parallel/checkpoint/snapshot.h"
#include "parallel/checkpoint/training_state.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/sampler.h"
#include "parallel/tensor_parallel.h"
#include "tests/cuda/card.h"
#include "tests/cuda/windows.h"
#include "tests/support/temp_folder.h"

namespace tessera::cuda {
namespace {

class CudaCheckpoint : public OnCard {};

using Values = std::map<std::string, std::string>;

// The hash of each whole tensor of a step, and its texts.
Values contents_of(const std::string& folder) {
  const checkpoint::Manifest m = checkpoint::read_step(checkpoint::newest(folder)->folder);
  std::vector<checkpoint::Piece> pieces;
  for (const checkpoint::TensorEntry& t : m.tensors)
    pieces.push_back(checkpoint::whole(t.name, empty(t.shape, t.dtype)));
  checkpoint::load(folder, pieces, solo_group().get());
  Values out(m.extra.begin(), m.extra.end());
  for (const checkpoint::Piece& p : pieces)
    out[p.name] = to_string(io::xxh128(p.values.raw_values(), p.values.nbytes()));
  return out;
}

using Wrap = std::function<void(nn::Module&, ProcessGroup&)>;
void under_ddp(nn::Module& m, ProcessGroup&) { parallel::ddp(m); }
void fully_sharded(nn::Module& m, ProcessGroup&) { parallel::fully_shard(m); }

// All that a run can have, in fp16 with a loss scale. Where it does not train, its state differs
// from that of one that does.
struct Run {
  Run(Device device, const Wrap& wrap, ProcessGroup& group)
      : scope(device),
        model(models::GptOptions{
            .vocab = 11, .context = 6, .layers = 2, .heads = 4, .dim = 16, .dropout = 0.1}),
        loader(parallel::distributed_loader(
            std::make_shared<Windows>(),
            {.batch_size = 4 / group.size(), .repeat = true, .device = device})) {
    manual_seed(5);
    wrap(model, group);
    model.init(3);
    optimizer =
        std::make_unique<optim::AdamW>(model.named_parameters(), optim::AdamWOptions{.lr = 0.01});
    average = zeros({300, 1000}, {kF32, device});
  }
  void step() {
    const data::Batch batch = *loader.next();
    Tensor loss;
    {
      Autocast precision(kF16);
      SampleScope samples(batch.sample_numbers);
      loss = model.loss(batch.inputs, batch.targets);
    }
    optimizer->zero_grad();
    scaler.scale(loss).backward();
    scaler.step(*optimizer);
    scaler.update();
    average.add_(1.0);
  }
  checkpoint::TrainingState state() {
    return {.model = &model,
            .optimizer = optimizer.get(),
            .scaler = &scaler,
            .loader = &loader,
            .tensors = {{"average", average}}};
  }

  const DeviceScope scope;
  models::Gpt model;
  data::DataLoader loader;
  std::unique_ptr<optim::Optimizer> optimizer;
  optim::GradScaler scaler{{.growth_interval = 2}};
  Tensor average;  // larger than a unit of copying
};

using Where = std::function<Device(int rank)>;
Device on_cards(int rank) { return device_of(rank); }
Device on_cpu(int) { return kCPU; }

// Ranks load `from`, where there is one, and save into `to`; more steps follow at once.
void load_and_save(int ranks, const Where& where, const Wrap& wrap, const std::string& from,
                   const std::string& to) {
  run_ranks(ranks, [&](ProcessGroup& group) {
    Run run(where(group.rank()), wrap, group);
    if (from.empty()) {
      for (int s = 0; s < 3; ++s) run.step();
    } else {
      run.state().load(from);
    }
    checkpoint::Checkpointer saver(to);
    const int64_t waits = host_waits();
    run.state().save(saver, 3);
    EXPECT_EQ(host_waits(), waits);
    run.step();
    saver.wait();
  });
}

void expect_equal_hashes(const Wrap& saved_by, const Wrap& loaded_by) {
  TempFolder dir;
  load_and_save(2, on_cards, saved_by, "", dir / "cards");
  load_and_save(4, on_cpu, loaded_by, dir / "cards", dir / "cpu");
  load_and_save(2, on_cards, saved_by, dir / "cpu", dir / "back");
  const Values saved = contents_of(dir / "cards");
  EXPECT_EQ(contents_of(dir / "cpu"), saved);
  EXPECT_EQ(contents_of(dir / "back"), saved);
  for (const char* name : {"average", "data.cursor", "model.h.0.attn.c_attn.weight",
                           "optimizer.exp_avg.wte.weight", "random.generator", "scaler.scale"})
    EXPECT_TRUE(saved.contains(name)) << name;

  load_and_save(4, on_cpu, loaded_by, "", dir / "first on the cpu");
  load_and_save(2, on_cards, saved_by, dir / "first on the cpu", dir / "then on cards");
  EXPECT_EQ(contents_of(dir / "then on cards"), contents_of(dir / "first on the cpu"));
}

TEST_F(CudaCheckpoint, TwoCardsAndFourRanksOfTheCpuSaveEqualHashes) {
  if (device_count() < 2) GTEST_SKIP() << "one card";
  expect_equal_hashes(fully_sharded, fully_sharded);
  expect_equal_hashes(under_ddp, fully_sharded);
}

// A tensor of each kind that is copied in a way of its own, wide elements first.
Tensors some(Device device) {
  const Tensor large = arange(0, 300'000, 1, {kF32, device});  // larger than a unit of copying
  return {arange(0, 7, 1, {kI64, device}), large + 1.0,
          transpose(reshape(large * 2.0, {500, 600}), 0, 1)};
}

std::string bytes_of(const Tensors& tensors) {
  std::string all;
  for (const Tensor& t : tensors) {
    const Tensor dense = t.contiguous();
    all.append(static_cast<const char*>(dense.raw_values()), dense.nbytes());
  }
  return all;
}

// The writes are done before the host looks at what was saved.
TEST_F(CudaCheckpoint, NoWriteThatIsEnqueuedAfterItIsInASave) {
  const Device card = device_of(0);
  const auto elsewhere = [](const std::function<void()>& f) { std::thread(f).join(); };
  const auto fill_on_this_stream = [](const Tensors& all) {
    for (const Tensor& t : all) t.fill_(5);
    synchronize(compute_stream(0));
  };
  const std::pair<const char*, std::function<void(Tensors&)>> ways[] = {
      {"on the stream of the tensors", fill_on_this_stream},
      {"on a stream of another thread",
       [&](Tensors& all) { elsewhere([&] { fill_on_this_stream(all); }); }},
      {"by copies from the host",
       [](Tensors& all) {
         for (const Tensor& t : all) assign_(t, zeros(t.shape(), {t.dtype(), kCPU}));
         synchronize(compute_stream(0));
       }},
      {"by tensors that get their memory",
       [&](Tensors& all) {
         all.clear();
         fill_on_this_stream(some(card));
       }},
  };
  Tensors want = some(kCPU);
  for (const Tensor& t : want) t.add_(1);
  const std::string bytes = bytes_of(want);
  checkpoint::Snapshot saved(0);
  saved.reserve(bytes.size());
  for (const auto& [name, write] : ways) {
    SCOPED_TRACE(name);
    Tensors all = some(card);
    elsewhere([&] {  // a write that was enqueued before the save is in it
      for (const Tensor& t : all) t.add_(1);
    });
    const int64_t waits = host_waits();
    saved.begin({all.begin(), all.end()}, std::chrono::minutes(5));
    EXPECT_EQ(host_waits(), waits);
    write(all);
    const std::span<const std::byte> got = saved.take(bytes.size());
    EXPECT_TRUE(std::memcmp(got.data(), bytes.data(), bytes.size()) == 0);
    saved.release(got.size());
  }
}

}  // namespace
}  // namespace tessera::cuda
