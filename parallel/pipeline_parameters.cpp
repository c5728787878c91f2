#include "parallel/pipeline_parameters.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/autograd/autograd.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/default_device.h"
#include "core/io/hash.h"
#include "core/ops/create.h"
#include "dtensor/dtensor.h"

namespace tessera::parallel {
namespace {

/// Encodes what a stage holds as numbers that ranks can exchange.
std::vector<int64_t> encode(nn::Module& stage) {
  std::set<std::string> parameters;
  for (const NamedTensor& p : stage.named_parameters()) parameters.insert(p.name);
  std::vector<int64_t> words;
  for (const auto& [name, p] : stage.state()) {
    words.push_back(int64_t(p.dtype()));
    words.push_back(p.requires_grad());
    words.push_back(!parameters.contains(name));
    words.push_back(p.ndim());
    for (int64_t extent : p.shape()) words.push_back(extent);
    words.push_back(int64_t(name.size()));
    for (char c : name) words.push_back(c);
  }
  return words;
}

std::vector<PlacedTensor> decode(std::span<const int64_t> words, int stage) {
  std::vector<PlacedTensor> list;
  size_t at = 0;
  auto next = [&] { return words[at++]; };
  while (at < words.size()) {
    PlacedTensor& p = list.emplace_back();
    p.dtype = DType(next());
    p.trainable = next() != 0;
    p.is_buffer = next() != 0;
    for (int64_t n = next(); n > 0; --n) p.shape.push_back(next());
    for (int64_t n = next(); n > 0; --n) p.name += char(next());
    p.stages = {stage};
  }
  return list;
}

/// Returns every rank's `mine`; their lengths may differ.
std::vector<Tensor> all_gather_words(ProcessGroup& group, const std::vector<int64_t>& mine) {
  Tensor count = from_values<int64_t>({int64_t(mine.size())}, {1}),
         counts = empty({group.size()}, kI64);
  group.all_gather(counts, count);
  std::vector<Tensor> all;
  for (int r = 0; r < group.size(); ++r) all.push_back(empty({counts.values<int64_t>()[r]}, kI64));
  group.all_gather(all, from_values<int64_t>(mine, {int64_t(mine.size())}));
  return all;
}

std::string tell(const PlacedTensor& p) {
  return fmt::format("{}{}{}", name_of(p.dtype), to_string(p.shape), p.trainable ? "" : ", frozen");
}

}  // namespace

PipelineParameters::PipelineParameters(std::shared_ptr<nn::Module> stage,
                                       Ref<ProcessGroup> pipeline,
                                       const std::vector<std::string>& tied)
    : stage_(std::move(stage)), pipeline_(std::move(pipeline)) {
  exchange(tied);
  make_groups();
}

void PipelineParameters::exchange(const std::vector<std::string>& tied) {
  std::vector<Tensor> lists = all_gather_words(*pipeline_, encode(*stage_));
  std::map<std::string, size_t> place;
  for (int stage = 0; stage < pipeline_->size(); ++stage) {
    const Tensor& words = lists[size_t(stage)];
    for (PlacedTensor& p : decode({words.values<int64_t>(), size_t(words.numel())}, stage)) {
      auto [it, is_new] = place.try_emplace(p.name, all_.size());
      if (is_new) {
        all_.push_back(std::move(p));
        continue;
      }
      PlacedTensor& first = all_[it->second];
      if (p.is_buffer && first.is_buffer)
        continue;  // a constant that several stages have: the first stage's counts
      TESSERA_CHECK(std::ranges::find(tied, p.name) != tied.end(),
                    "pipeline: stages {} and {} both have a parameter {}; if it is one that they "
                    "share, name it in tied, else call it by its name in the whole model "
                    "(pipeline_stage() does)",
                    first.stages[0], stage, p.name);
      TESSERA_CHECK(
          first.shape == p.shape && first.dtype == p.dtype && first.trainable == p.trainable,
          "pipeline: {} is {} on stage {} and {} on stage {}; copies must be alike", p.name,
          tell(first), first.stages[0], tell(p), stage);
      first.stages.push_back(stage);
    }
  }
  for (const std::string& name : tied)
    TESSERA_CHECK(place.contains(name) && !all_[place[name]].is_buffer,
                  "pipeline: no stage has a parameter {}, which is in tied", name);
}

/// Makes one group for each set of stages that share a parameter. All ranks compute the same list.
void PipelineParameters::make_groups() {
  std::map<std::vector<int>, Ref<ProcessGroup>> groups;
  for (const PlacedTensor& p : all_)
    if (p.stages.size() > 1) groups[p.stages];
  int me = pipeline_->rank();
  for (auto& [stages, group] : groups)
    group = pipeline_->split(std::ranges::find(stages, me) == stages.end() ? -1 : 0);
  for (const PlacedTensor& p : all_)
    if (p.stages.size() > 1 && groups[p.stages]) copies_.push_back({p.name, groups[p.stages]});
}

// Looks the slot up each time, because wrappers replace what it holds.
Tensor PipelineParameters::at(const std::string& name) const { return stage_->slot(name); }

int64_t PipelineParameters::num_parameters() const {
  int64_t n = 0;
  for (const PlacedTensor& p : all_)
    if (!p.is_buffer) n += numel(p.shape);
  return n;
}

std::vector<NamedTensor> PipelineParameters::counted() const {
  std::vector<NamedTensor> mine;
  for (const PlacedTensor& p : all_)
    if (!p.is_buffer && p.stages[0] == pipeline_->rank()) mine.push_back({p.name, at(p.name)});
  return mine;
}

void PipelineParameters::check_copies_equal() const {
  for (const Copies& c : copies_) {
    const Tensor t = on_host(local_of(at(c.name)));
    uint64_t low = io::xxh128(t.raw_values(), t.nbytes()).low;
    Tensor mine = from_values<int64_t>({int64_t(low)}, {1}), all = empty({c.group->size()}, kI64);
    c.group->all_gather(all, mine);
    const int64_t* hashes = all.values<int64_t>();
    for (int r = 1; r < c.group->size(); ++r)
      TESSERA_CHECK(hashes[r] == hashes[0],
                    "pipeline: the copies of {} on ranks {} and {} of the world hold different "
                    "values; draw both by init() with one seed, or load both",
                    c.name, c.group->global_rank(0), c.group->global_rank(r));
  }
}

void PipelineParameters::check_copies_clear() const {
  for (const Copies& c : copies_)
    TESSERA_CHECK(!at(c.name).grad().defined(),
                  "pipeline: {}, which several stages share, still has the gradient of the last "
                  "step, where copies are summed already; call zero_grad() between steps, and "
                  "accumulate by more micro-batches",
                  c.name);
}

void PipelineParameters::sum_gradients_of_copies() const {
  NoGrad off;
  for (const Copies& c : copies_) {
    Tensor p = at(c.name);
    if (!p.requires_grad()) continue;
    if (!p.grad().defined()) p.set_grad(zeros_like(p.detach()));
    Tensor g = local_of(p.grad());
    c.group->all_reduce(g);
  }
}

std::vector<NamedTensor> PipelineParameters::gather(bool buffers) const {
  NoGrad off;
  std::vector<NamedTensor> out;
  for (const PlacedTensor& p : all_) {
    if (p.is_buffer && !buffers) continue;
    int owner = p.stages[0];
    Tensor t = owner == pipeline_->rank() ? full_tensor(at(p.name).detach()).contiguous()
                                          : empty(p.shape, p.dtype, default_device());
    pipeline_->broadcast(t, owner);
    out.push_back({p.name, t});
  }
  return out;
}

}  // namespace tessera::parallel
