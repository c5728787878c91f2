// Fully sharded training of a small GPT against serial training of the same model.
#include "parallel/fsdp.h"

#include <gtest/gtest.h>

#include <cmath>

#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "core/tensor/random.h"
#include "examples/models/gpt.h"

namespace tessera::parallel {
namespace {

constexpr int64_t kVocab = 19, kTokens = 6, kBatch = 8;

models::GptOptions small() {
  return {.vocab = kVocab, .context = kTokens, .layers = 3, .heads = 2, .dim = 10, .bias = true};
}

// Rows `first` .. of the batch of step `step`, the same on every rank.
Tensor ids(int64_t step, int64_t first, int64_t rows) {
  return clone(
      narrow(sample_integers({kBatch, kTokens}, 0, kVocab, uint64_t(step)), 0, first, rows));
}

struct Trained {
  std::vector<double> losses;  // of this rank
  std::vector<NamedTensor> params;
  double norm = 0;
};

using Wrap = std::function<std::shared_ptr<Fsdp>(models::Gpt&)>;

// Three clipped AdamW steps on rows [rank * n, ...) of each batch in `micro` micro-batches.
Trained train(ProcessGroup* group, const Wrap& wrap, int micro = 1, DType dtype = kF64) {
  Scoped<DType> type(context().default_dtype, dtype);
  manual_seed(3);
  auto model = models::gpt(small());
  std::shared_ptr<Fsdp> fsdp = wrap ? wrap(*model) : nullptr;
  optim::AdamW opt(model->named_parameters(), {.lr = 0.01, .weight_decay = 0.1});
  int64_t ranks = group ? group->size() : 1, rank = group ? group->rank() : 0;
  int64_t rows = kBatch / ranks / micro;
  Trained t;
  for (int64_t step = 0; step < 3; ++step) {
    double total = 0;
    for (int64_t k = 0; k < micro; ++k) {
      int64_t first = (k * ranks + rank) * rows;
      Tensor loss = model->loss(ids(step, first, rows), ids(step + 100, first, rows));
      total += loss.item<double>() / micro;
      backward(loss * (1.0 / micro));
    }
    optim::Clip clip = optim::clip_grad_norm(opt.parameters(), 0.5);
    t.norm = clip.norm.item<double>();
    opt.step(clip.scale);
    opt.zero_grad();
    t.losses.push_back(total);
  }
  for (NamedTensor& p : model->named_parameters())
    t.params.push_back({p.name, full_tensor(p.tensor.detach())});
  return t;
}

void expect_close(const Trained& got, const Trained& want, double tolerance) {
  for (size_t i = 0; i < want.params.size(); ++i) {
    const Tensor &a = got.params[i].tensor, &b = want.params[i].tensor;
    TESSERA_CHECK(got.params[i].name == want.params[i].name && a.shape() == b.shape(),
                  "{} where {}", got.params[i].name, want.params[i].name);
    double diff = amax(abs(a - b)).item<double>();
    TESSERA_CHECK(diff <= tolerance, "{} differs by {}", want.params[i].name, diff);
  }
  TESSERA_CHECK(std::abs(got.norm - want.norm) <= tolerance, "norm {} where {}", got.norm,
                want.norm);
}

TEST(Fsdp, TrainsAsSerial) {
  Trained serial = train(nullptr, nullptr);
  for (int ranks : {1, 2, 4, 8})  // rows of 19, 10 and 6 do not divide; 8 ranks leave empty pieces
    for (bool reshard : {true, false})
      run_ranks(ranks, [&](ProcessGroup& group) {
        Trained t = train(&group, [&](nn::Module& m) {
          return fully_shard(m, {.reshard_after_forward = reshard, .prefetch = reshard});
        });
        expect_close(t, serial, 1e-10);
      });
}

TEST(Fsdp, AnyDimAndAnyGroups) {
  Trained serial = train(nullptr, nullptr);
  run_ranks(4, [&](ProcessGroup& group) {
    FsdpOptions o;
    o.shard_dim = [](const std::string&, const Tensor& p) { return p.ndim() - 1; };
    o.groups = {"h.*.attn", "h.*.mlp"};
    expect_close(train(&group, [&](nn::Module& m) { return fully_shard(m, o); }), serial, 1e-10);
  });
}

TEST(Fsdp, HybridShardingTrainsAsSerial) {
  Trained serial = train(nullptr, nullptr);
  run_ranks(4, [&](ProcessGroup& group) {
    DeviceMesh mesh = init_device_mesh({{"replicate", 2}, {"shard", 2}});
    expect_close(train(&group, [&](nn::Module& m) { return fully_shard(m, {.mesh = mesh}); }),
                 serial, 1e-10);
  });
}

TEST(Fsdp, MicroBatchesAccumulate) {
  Trained serial = train(nullptr, nullptr);
  run_ranks(2, [&](ProcessGroup& group) {
    for (bool tree : {false, true})
      expect_close(
          train(
              &group, [&](nn::Module& m) { return fully_shard(m, {.tree_accumulation = tree}); },
              4),
          serial, 1e-10);
  });
}

TEST(Fsdp, AccumulationWithoutSyncReducesOnce) {
  run_ranks(2, [&](ProcessGroup& group) {
    manual_seed(3);
    auto model = models::gpt(small());
    auto fsdp = fully_shard(*model);
    fsdp->set_sync(false);
    backward(model->loss(ids(0, group.rank() * 2, 2), ids(100, group.rank() * 2, 2)) * 0.5);
    for (const Tensor& p : model->parameters())
      TESSERA_CHECK(!p.grad().defined(), "a gradient without sync");
    fsdp->set_sync(true);
    backward(model->loss(ids(0, 4 + group.rank() * 2, 2), ids(100, 4 + group.rank() * 2, 2)) * 0.5);
    std::vector<Tensor> got;
    for (const Tensor& p : model->parameters()) got.push_back(full_tensor(p.grad()));
    manual_seed(3);
    auto serial = models::gpt(small());
    backward(serial->loss(ids(0, 0, 8), ids(100, 0, 8)));
    size_t i = 0;
    for (const Tensor& p : serial->parameters())
      TESSERA_CHECK(amax(abs(p.grad() - got[i++])).item<double>() < 1e-5, "gradient {}", i);
  });
}

// Equal bits at every world size, for the same leaves.
TEST(Fsdp, TreeAccumulationGivesEqualBits) {
  Trained want;
  run_ranks(1, [&](ProcessGroup& group) {
    want = train(
        &group, [](nn::Module& m) { return fully_shard(m, {.tree_accumulation = true}); }, 4, kF32);
  });
  for (int ranks : {2, 4})
    run_ranks(ranks, [&](ProcessGroup& group) {
      Trained t = train(
          &group, [](nn::Module& m) { return fully_shard(m, {.tree_accumulation = true}); },
          4 / ranks, kF32);
      expect_close(t, want, 0);
    });
}

TEST(Fsdp, MixedPrecisionKeepsMasterWeights) {
  run_ranks(2, [&](ProcessGroup& group) {
    manual_seed(3);
    auto model = models::gpt(small());
    fully_shard(*model, {.precision = {.param = kBF16, .reduce = kF32, .output = kF32}});
    Tensor x = ids(0, group.rank() * 4, 4);
    Tensor logits = model->forward(x);
    TESSERA_CHECK(logits.dtype() == kF32, "output {}", describe(logits));
    backward(sum(square(logits)));
    for (const NamedTensor& p : model->named_parameters())
      TESSERA_CHECK(p.tensor.dtype() == kF32 && p.tensor.grad().dtype() == kF32, "{} is {}, {}",
                    p.name, describe(p.tensor), describe(p.tensor.grad()));
  });
}

// Nobody ever holds the whole model, and values are those of a model drawn at once.
TEST(Fsdp, MetaModelIsDrawnShardByShard) {
  auto whole = models::gpt(small());
  whole->init(7);
  run_ranks(4, [&](ProcessGroup&) {
    nn::OnDevice meta(kMeta);
    auto model = models::gpt(small());
    fully_shard(*model);
    model->init(7);
    auto want = whole->named_parameters();
    size_t i = 0;
    for (const NamedTensor& p : model->named_parameters()) {
      TESSERA_CHECK(p.tensor.is_sharded(), "{} is whole", p.name);
      Tensor full = full_tensor(p.tensor.detach());
      TESSERA_CHECK(amax(abs(full - want[i++].tensor.detach())).item<double>() == 0, "{} differs",
                    p.name);
    }
  });
}

TEST(Fsdp, WholeWeightsAreNotKept) {
  run_ranks(2, [&](ProcessGroup& group) {
    manual_seed(3);
    auto model = models::gpt(small());
    auto fsdp = fully_shard(*model);
    for (int step = 0; step < 3; ++step) {
      Tensor loss = model->loss(ids(0, group.rank() * 4, 4), ids(100, group.rank() * 4, 4));
      FsdpMemory between = fsdp->memory();
      backward(loss);
      FsdpMemory after = fsdp->memory();
      TESSERA_CHECK(after.gathered == 0 && after.gradients == 0,
                    "{} bytes of weights, {} of gradients", after.gathered, after.gradients);
      int64_t root = between.gathered;  // the model's own group stays
      TESSERA_CHECK(after.gathered_peak <= root + 2 * after.largest_group, "{} bytes were gathered",
                    after.gathered_peak);
    }
  });
}

TEST(Fsdp, ErrorsSayWhatToDo) {
  run_ranks(2, [&](ProcessGroup&) {
    auto text = [](auto f) -> std::string {
      try {
        f();
      } catch (const UserError& e) {
        return e.what();
      }
      return "no error";
    };
    auto model = models::gpt(small());
    std::string e = text([&] { fully_shard(*model, {.groups = {"blocks.*"}}); });
    TESSERA_CHECK(e.find("no module is called \"blocks.*\"") != e.npos, "{}", e);
    fully_shard(*model);
    e = text([&] { fully_shard(*model); });
    TESSERA_CHECK(
        e.find("sharded over axis") != e.npos || e.find("not slices of one mesh") != e.npos, "{}",
        e);
  });
}

}  // namespace
}  // namespace tessera::parallel
