#include "examples/train/strategy.h"

#include <algorithm>
#include <map>

#include "core/io/hash.h"
#include "dtensor/dtensor.h"
#include "examples/models/gpt_parallel.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/tensor_parallel.h"

namespace tessera::train {
namespace {

// Axes of each strategy, those that replicate the model or share a batch first.
const std::map<std::string, std::vector<std::string>> kAxes = {
    {"ddp", {"dp"}}, {"fsdp", {"dp"}},          {"hsdp", {"replicate", "shard"}},
    {"tp", {"tp"}},  {"fsdp+tp", {"dp", "tp"}}, {"hsdp+tp", {"replicate", "shard", "tp"}},
};

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& n : names) text += (text.empty() ? "" : ",") + n + "=N";
  return text;
}

DeviceMesh make_mesh(const Options& o, const Ref<ProcessGroup>& group) {
  const std::vector<std::string>& names = kAxes.at(o.strategy);
  std::vector<MeshAxis> axes;
  if (!o.mesh.empty()) {
    axes = parse_mesh(o.mesh);
  } else {
    TESSERA_CHECK(names.size() == 1, "train: --strategy {} needs --mesh {}", o.strategy,
                  listed(names));
    axes = {{names[0], group->size()}};
  }
  bool same = std::ranges::equal(axes, names, {}, &MeshAxis::name);
  TESSERA_CHECK(same, "train: --mesh {} for --strategy {}; expected {}", o.mesh, o.strategy,
                listed(names));
  return init_device_mesh(axes, group);
}

class Ddp final : public Strategy {
 public:
  Ddp(const Options& o, Ref<ProcessGroup> group, Task& task) {
    data_group_ = group;
    task.fill();
    reducer_ =
        parallel::make_reducer(*task.model, {.group = group, .tree_accumulation = o.deterministic});
  }
  void set_sync(bool sync) override { reducer_->set_sync(sync); }
  double communication_ms() override { return reducer_->communication_ms(); }

 private:
  std::unique_ptr<parallel::Reducer> reducer_;
};

// Parameters cut over data-parallel axes, a tensor-parallel axis, or both.
class Sharded final : public Strategy {
 public:
  Sharded(const Options& o, const Ref<ProcessGroup>& group, Task& task)
      : mesh_(make_mesh(o, group)) {
    bool tp = mesh_.has_axis("tp");
    std::vector<std::string> dp = mesh_.axes();
    if (tp) dp.pop_back();
    // Neighbours on the last data-parallel axis hold neighbouring leaves of the tree.
    int index = 0;
    for (const std::string& axis : dp) index = index * mesh_.size(axis) + mesh_.coordinate(axis);
    data_group_ = tp ? group->split(mesh_.coordinate("tp"), index) : group;
    if (tp) cut_model(o, task);
    if (!dp.empty()) {
      parallel::FsdpOptions f{.mesh = mesh_.slice(dp), .tree_accumulation = o.deterministic};
      fsdp_ = parallel::fully_shard(*task.model, f);
    } else {
      parallel::materialize(*task.model);
    }
    ReplicatePlain weights_are_read_by_all;
    task.fill();
  }
  data::Deal deal() const override { return data::Deal::kReduceThenAccumulate; }
  bool collective_forward() const override { return true; }
  double communication_ms() override { return fsdp_ ? fsdp_->communication_ms() : 0; }
  std::string memory() const override {
    if (!fsdp_) return {};
    parallel::FsdpMemory m = fsdp_->memory();
    auto mib = [](int64_t bytes) { return double(bytes) / double(1 << 20); };
    return fmt::format(
        "fully sharded: {:.1f} MiB of parameters on this rank; at most {:.1f} MiB of whole weights "
        "and {:.1f} MiB of whole gradients at a time",
        mib(m.sharded), mib(m.gathered_peak), mib(m.gradients_peak));
  }

 private:
  void cut_model(const Options& o, Task& task) {
    auto gpt = std::dynamic_pointer_cast<models::Gpt>(task.model);
    TESSERA_CHECK(gpt, "train: --strategy {} has no tensor-parallel plan for --model {}",
                  o.strategy, o.model);
    parallel::parallelize_module(*gpt, mesh_["tp"], models::tensor_parallel_plan(gpt->options));
  }

  DeviceMesh mesh_;
  std::shared_ptr<parallel::Fsdp> fsdp_;
};

}  // namespace

bool shards_parameters(const Options& o) { return o.strategy != "ddp"; }

std::unique_ptr<Strategy> make_strategy(const Options& o, Ref<ProcessGroup> group, Task& task) {
  TESSERA_CHECK(kAxes.contains(o.strategy), "train: unknown strategy \"{}\"", o.strategy);
  if (shards_parameters(o)) return std::make_unique<Sharded>(o, group, task);
  if (!o.mesh.empty()) make_mesh(o, group);  // checked, and of no further use
  return std::make_unique<Ddp>(o, std::move(group), task);
}

std::vector<NamedTensor> gather_state(nn::Module& model, ProcessGroup& group) {
  std::vector<NamedTensor> whole;
  for (NamedTensor& t : model.state()) {
    Tensor full = full_tensor(t.tensor.detach());
    if (group.rank() == 0) whole.push_back({t.name, full});
  }
  return whole;
}

std::string hash_of(nn::Module& model) {
  std::vector<NamedTensor> params = model.named_parameters();
  std::ranges::sort(params, {}, &NamedTensor::name);
  io::ParamsHasher hasher;
  for (const NamedTensor& p : params) hasher.add(p.name, full_tensor(p.tensor.detach()));
  return hasher.hex();
}

}  // namespace tessera::train
