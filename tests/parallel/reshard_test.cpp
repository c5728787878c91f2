// Every layout is saved and loaded under every other: full values and optimizer moments have equal
// bits, and training continues without a difference.
#include <gtest/gtest.h>

#include <cmath>

#include "collectives/loopback/run_ranks.h"
#include "core/ops/compose.h"
#include "core/ops/views.h"
#include "examples/models/gpt.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/load.h"
#include "parallel/checkpoint/sharded.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/tensor_parallel.h"
#include "tests/parallel/small_gpt.h"
#include "tests/support/temp_folder.h"

namespace tessera::parallel {
namespace {

using test::Run;

struct Way {
  const char* strategy;  // serial, ddp, fsdp (over all axes but tp), tp
  std::vector<MeshAxis> axes;
};
const std::vector<Way> kWays = {
    {"serial", {{"dp", 1}}},
    {"ddp", {{"dp", 2}}},
    {"ddp", {{"dp", 4}}},
    {"fsdp", {{"dp", 2}}},
    {"fsdp", {{"dp", 4}}},
    {"fsdp", {{"dp", 8}}},
    {"fsdp", {{"replicate", 2}, {"shard", 2}}},
    {"tp", {{"tp", 2}}},
    {"tp", {{"tp", 3}}},
    {"tp", {{"tp", 4}}},
    {"fsdp", {{"dp", 2}, {"tp", 2}}},
    {"fsdp", {{"dp", 2}, {"tp", 3}}},
    {"fsdp", {{"replicate", 2}, {"shard", 2}, {"tp", 2}}},
};

int ranks_of(const Way& way) {
  int n = 1;
  for (const MeshAxis& a : way.axes) n *= a.size;
  return n;
}
std::string name_of(const Way& way) {
  std::string text = way.strategy;
  for (const MeshAxis& a : way.axes) text += fmt::format(" {}={}", a.name, a.size);
  return text;
}

// A run spread in one way; made anew on each rank.
struct Spread {
  DeviceMesh mesh;
  std::unique_ptr<Reducer> reducer;
  std::unique_ptr<Run> run;

  explicit Spread(const Way& way) : mesh(init_device_mesh(way.axes)) {
    std::vector<std::string> dp;
    test::TrainOptions o;
    for (const std::string& axis : mesh.axes())
      if (axis != "tp") {
        dp.push_back(axis);
        o.dp_ranks *= mesh.size(axis);
        o.dp_rank = o.dp_rank * mesh.size(axis) + mesh.coordinate(axis);
      }
    run = std::make_unique<Run>(
        [&](models::Gpt& m) {
          if (mesh.has_axis("tp"))
            parallelize_module(m, mesh["tp"], models::tensor_parallel_plan(m.options));
          if (std::string(way.strategy) == "fsdp") fully_shard(m, {.mesh = mesh.slice(dp)});
        },
        o);
    if (std::string(way.strategy) == "ddp") reducer = make_reducer(run->model(), {});
  }
  double step(int64_t number) {
    Tensor loss = from_values<double>({run->step(number)}, {1});
    world().all_reduce(loss, ReduceOp::kAvg);
    return loss.item<double>();
  }
  std::vector<NamedTensor> state() {
    std::vector<NamedTensor> all = run->model().state();
    for (NamedTensor& t : run->optimizer().named_state())
      all.push_back({"optimizer." + t.name, t.tensor});
    return all;
  }
  checkpoint::State pieces() {
    checkpoint::State s;
    for (NamedTensor& t : state()) s.pieces.push_back(checkpoint::piece_of(t.name, t.tensor));
    return s;
  }
};

struct Saved {
  std::vector<NamedTensor> full;
  double next_loss = 0;
};

Saved save(const Way& way, const std::string& folder) {
  Saved saved;
  run_ranks(ranks_of(way), [&](ProcessGroup& group) {
    Spread s(way);
    s.step(0), s.step(1);
    {
      checkpoint::Checkpointer saver(folder, &group);
      saver.save(2, s.pieces());
      saver.wait();
    }
    std::vector<NamedTensor> full;
    for (NamedTensor& t : s.state())
      full.push_back({t.name, clone(full_tensor(t.tensor.detach()))});
    double next = s.step(2);
    if (group.rank() == 0) saved = {std::move(full), next};
  });
  return saved;
}

void load_and_compare(const Way& way, const std::string& folder, const Saved& saved) {
  run_ranks(ranks_of(way), [&](ProcessGroup& group) {
    Spread s(way);
    s.step(7);  // something else than what is loaded
    checkpoint::load(folder, s.pieces().pieces, &group);
    s.run->optimizer().load_state(s.run->optimizer().named_state());
    size_t i = 0;
    for (NamedTensor& t : s.state()) {
      const NamedTensor& want = saved.full[i++];
      Tensor got = full_tensor(t.tensor.detach());
      TESSERA_ASSERT(t.name == want.name && equal(got, want.tensor), "{} differs", t.name);
    }
    double next = s.step(2);
    TESSERA_ASSERT(std::abs(next / saved.next_loss - 1) < 1e-12, "the next loss is {}, not {}",
                   next, saved.next_loss);
  });
}

TEST(Reshard, EveryLayoutLoadsUnderEveryOther) {
  for (const Way& from : kWays) {
    TempFolder folder;
    Saved saved = save(from, folder.str());
    ASSERT_FALSE(saved.full.empty());
    for (const Way& to : kWays) {
      SCOPED_TRACE("saved under " + name_of(from) + ", loaded under " + name_of(to));
      EXPECT_NO_THROW(load_and_compare(to, folder.str(), saved));
    }
  }
}

}  // namespace
}  // namespace tessera::parallel
