// fully_shard with offload: what a rank holds is in memory of the host, training has the bits of
// training without it, and the host waits neither in forward nor in backward.
#include "collectives/loopback/run_ranks.h"
#include "core/core.h"
#include "core/io/hash.h"
#include "dtensor/dtensor.h"
#include "examples/models/gpt.h"
#include "parallel/fsdp.h"
#include "tests/cuda/card.h"
#include "tests/cuda/counters.h"
#include "tests/cuda/gate.h"

namespace tessera::cuda {
namespace {

class CudaOffload : public OnCard {};

struct How {
  bool offload = true;
  bool meta = false;  // parameters get memory from fully_shard
  int micro_batches = 1;
  DType autocast = kF32;  // kF16: with a loss scale
  bool unscale = false;   // by unscale_(), else by the norm
  parallel::MixedPrecision precision = {};
};

struct Trained {
  std::vector<float> losses = {};
  std::string hash = {};  // of all parameters
  int64_t held = 0;       // bytes of the card after the last step, without rooms
  int64_t halfway = 0;    // and between its forward and its backward
  int64_t sharded = 0;    // bytes of a rank's parameters
};

models::Gpt small_gpt() {
  return models::Gpt(models::GptOptions{
      .vocab = 11, .context = 6, .layers = 3, .heads = 2, .dim = 32, .dropout = 0.1});
}

Tensor tokens(int64_t first) {
  return (arange(first, first + 24, 1, {kI64, default_device()}) * 7).reshape({4, 6}) % 11;
}

Trained train(ProcessGroup& group, const How& how) {
  const Device card = device_of(group.rank());
  const DeviceScope scope(card);
  manual_seed(5);
  std::optional<nn::OnDevice> nowhere;
  if (how.meta) nowhere.emplace(kMeta);
  models::Gpt model = small_gpt();
  nowhere.reset();
  if (!how.meta) model.init(3);
  auto fsdp = parallel::fully_shard(model, {.precision = how.precision, .offload = how.offload});
  if (how.meta) model.init(3);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 0.01});
  optim::GradScaler scaler({.init_scale = 256, .enabled = how.autocast == kF16});
  Trained out{.sharded = fsdp->memory().sharded};
  for (int s = 0; s < 3; ++s) {
    const int64_t waits = host_waits();
    Tensor loss;
    for (int m = 0; m < how.micro_batches; ++m) {
      {
        Autocast precision(how.autocast);
        loss = model.loss(tokens(s + m + group.rank()), tokens(s + m + group.rank() + 1));
      }
      out.halfway = memory_stats(card).live_bytes;
      scaler.scale(loss).backward();
    }
    fsdp->communication_ms();
    // The sum over micro-batches is computed on the CPU. In the first step copies of parameters to
    // the host are pending.
    EXPECT_TRUE(how.micro_batches > 1 || s == 0 || host_waits() == waits) << s;
    if (how.unscale) scaler.unscale_(optimizer);
    // The norm is summed in another order on the CPU, so it clips nothing here.
    scaler.step(optimizer, optim::clip_grad_norm(
                               model.parameters(), std::numeric_limits<double>::infinity(),
                               {.grad_scale = how.unscale ? Tensor() : scaler.inverse_scale()}));
    scaler.update();
    optimizer.zero_grad();
    out.losses.push_back(loss.item<float>());
  }
  synchronize(compute_stream(group.rank()));
  out.held = memory_stats(card).live_bytes - fsdp->memory().rooms;
  std::vector<NamedTensor> all;
  for (const NamedTensor& t : model.named_parameters()) {
    EXPECT_EQ(t.tensor.device(), how.offload ? kCPU : card);
    all.push_back({t.name, full_tensor(t.tensor)});
  }
  out.hash = io::params_xxh128(all);
  return out;
}

// Returns what rank 0 has seen.
Trained trained(int ranks, const How& how) {
  Trained out;
  run_ranks(ranks, [&](ProcessGroup& g) {
    const Trained mine = train(g, how);
    if (g.rank() == 0) out = mine;
  });
  return out;
}

void expect_same(int ranks, How how) {
  const Trained there = trained(ranks, how);
  SCOPED_TRACE(fmt::format("{} micro-batches, autocast {}, reduced in 16 bits {}",
                           how.micro_batches, name_of(how.autocast),
                           how.precision.reduce.has_value()));
  how.offload = false;
  const Trained plain = trained(ranks, how);
  EXPECT_EQ(there.losses, plain.losses);
  EXPECT_EQ(there.hash, plain.hash);
  // Parameters and two moments; what is left are a few numbers, and the rest of each room's page.
  constexpr int64_t kRooms = 6, kPage = 4096;
  EXPECT_LE(there.held, 1024 + (ranks == 1 ? 0 : kRooms * kPage));
  EXPECT_GE(plain.held, 3 * plain.sharded);
  // Between forward and backward no gathered weights are held, which one rank without offload does.
  EXPECT_GT(plain.halfway - there.halfway, plain.sharded * (ranks == 1 ? 13 : 10) / 4);
  EXPECT_EQ(there.sharded, plain.sharded);
}

TEST_F(CudaOffload, OfOneRankHasTheBitsOfTheCard) {
  expect_same(1, {});
  expect_same(1, {.autocast = kF16});
}
TEST_F(CudaOffload, OfTwoRanksHasTheBitsOfTheCards) {
  if (device_count() < 2) GTEST_SKIP() << "one card";
  for (const How& how :
       {How{.autocast = kF16, .unscale = true}, How{.meta = true, .micro_batches = 2},
        How{.precision = {.param = kBF16, .reduce = kBF16}}})
    expect_same(2, how);
}

// Polls, since to wait might be to let go on what is held up.
template <class F>
bool soon(F holds) {
  const auto hung = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > hung) return false;
    std::this_thread::yield();
  }
  return true;
}

constexpr const char* kDropout = "dropout_f32_packs";

// Parameters arrive while the kernels before are held up, and gradients leave beside those that
// follow.
TEST_F(CudaOffload, CopiesRunBesideKernels) {
  const DeviceScope scope(device_of(0));
  models::Gpt model = small_gpt();
  model.init(3);
  parallel::fully_shard(model, {.reshard_after_forward = false, .offload = true});
  model.loss(tokens(0), tokens(1)).backward();  // kernels are compiled
  model.zero_grad();
  const Tensor from = tokens(0), to = tokens(1);
  for (const Stream& s : {stream_, copy_stream(0, 2)}) synchronize(s);
  if (runs_so_far("copy to the device") < 0) GTEST_SKIP() << "a real driver does not count";

  const int64_t up = runs_so_far("copy to the device");
  Gate kernels(stream_);
  const Tensor loss = model.loss(from, to);
  const Ref<Event> forward = runtime_of(device_of(0)).record(stream_);
  // Those of the model's own group at least: others may wait for memory. To ask lets the card go
  // on.
  const Ref<Event> copied = runtime_of(device_of(0)).record(copy_stream(0, 3));
  EXPECT_TRUE(soon([&] {
    copied->done();
    return runs_so_far("copy to the device") >= up + 3;
  }));
  EXPECT_FALSE(forward->done());
  kernels.open();

  for (const Stream& s : {stream_, copy_stream(0, 2), copy_stream(0, 3)}) synchronize(s);
  // Backward comes to the second block although gradients of the first wait. Later it waits for the
  // memory that these are in. A block has two dropouts beside that of attention.
  const int64_t down = runs_so_far("copy to the host"), dropouts = runs_so_far(kDropout);
  Gate gradients(copy_stream(0, 2));
  loss.backward();
  const Ref<Event> backward = runtime_of(device_of(0)).record(stream_);
  EXPECT_TRUE(soon([&] { return backward->done() || runs_so_far(kDropout) >= dropouts + 3; }));
  EXPECT_EQ(runs_so_far("copy to the host"), down);
  gradients.open();
  for (const NamedTensor& t : model.named_parameters())
    EXPECT_TRUE(std::isfinite(sum(full_tensor(t.tensor.grad())).item<float>())) << t.name;
}

// What is written into whole weights is kept, and grad() gives the gradients that backward gives.
TEST_F(CudaOffload, WholeWeightsAndFunctionalGradients) {
  const DeviceScope scope(device_of(0));
  models::Gpt model = small_gpt();
  model.init(3);
  auto fsdp = parallel::fully_shard(model, {.offload = true});
  fsdp->unshard();
  for (const NamedTensor& t : model.named_parameters()) {
    EXPECT_EQ(t.tensor.device(), device_of(0));
    NoGrad off;
    t.tensor.detach().fill_(0.5);
  }
  fsdp->reshard();
  const std::vector<Tensor> parameters = model.parameters();
  for (const Tensor& p : parameters)
    EXPECT_TRUE(equal(full_tensor(p.detach()), full(p.shape(), 0.5, {kF32, kCPU})));
  model.init(3);
  model.eval();
  const Tensor loss = model.loss(tokens(0), tokens(1));
  const Tensors functional = grad({&loss, 1}, parameters);
  model.loss(tokens(0), tokens(1)).backward();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(functional[i].device().is_cpu());
    EXPECT_TRUE(equal(full_tensor(functional[i]), full_tensor(parameters[i].grad()))) << i;
  }
}

TEST_F(CudaOffload, OfAModelOnTheCpuIsRefused) {
  models::Gpt model = small_gpt();
  const std::string error = error_of([&] { parallel::fully_shard(model, {.offload = true}); });
  EXPECT_NE(error.find("offload of wte.weight, which is in memory of the host already (cpu)"),
            std::string::npos)
      << error;
}

}  // namespace
}  // namespace tessera::cuda
