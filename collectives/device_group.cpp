#include "collectives/device_group.h"

#include <utility>
#include <vector>

#include "core/base/deterministic.h"
#include "core/base/log.h"
#include "core/dispatch/call.h"
#include "core/dispatch/copy.h"
#include "core/ops/create.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/ready_lock.h"
#include "core/tensor/wait_ended.h"

namespace tessera::detail {
namespace {

Device device_of(const Collective& c) {
  for (const Tensor& t : c.in)
    if (t.defined()) return t.device();
  for (const Tensor& t : c.out)
    if (t.defined()) return t.device();
  return kCPU;
}

// A call on copies of the tensors of another. What was one memory there is one copy here.
class Staged {
 public:
  /// `of_operand` and `of_result` make what stands for a tensor that is one, or only the other.
  template <class OfOperand, class OfResult>
  Staged(const Collective& c, OfOperand of_operand, OfResult of_result) : call_(c) {
    for (const Tensor& t : c.in) in_.push_back(t.defined() ? copy_of(t, of_operand) : t);
    for (const Tensor& t : c.out) out_.push_back(t.defined() ? copy_of(t, of_result) : t);
    call_.in = in_, call_.out = out_, call_.async = false;
  }
  Staged(const Staged&) = delete;
  Collective& call() { return call_; }
  const Collective& call() const { return call_; }
  const Tensor& out(size_t i) const { return out_[i]; }

 private:
  template <class MakeCopy>
  Tensor copy_of(const Tensor& t, MakeCopy make_copy) {
    for (const auto& [original, copy] : copies_)
      if (original.storage() == t.storage() && original.offset() == t.offset() &&
          same_layout(original.meta(), t.meta()))
        return copy;
    copies_.emplace_back(t, make_copy(t));
    return copies_.back().second;
  }
  std::vector<std::pair<Tensor, Tensor>> copies_;
  std::vector<Tensor> in_, out_;
  Collective call_;
};

// An asynchronous call on copies. Whoever needs a result first waits for the CPU's call and
// enqueues the copies back; until then the results' memory is kept.
class StagedWork final : public Work {
 public:
  /// `results` and copies of them; those have been waited for on `stream`, where the copies back
  /// run.
  StagedWork(Ref<Work> work, std::vector<std::pair<Tensor, Tensor>> results, const Stream& stream)
      : work_(std::move(work)), results_(std::move(results)), stream_(stream) {}

  bool done() const override {
    std::lock_guard lock(mutex_);
    return finished_ && (!copied_ || copied_->done());
  }
  void wait() override {
    if (const Ref<Event> copied = finish()) copied->wait();
  }
  bool wait_for(Millis timeout) override {
    if (!work_->wait_for(timeout)) return false;
    wait();
    return true;
  }
  void wait_on(const Stream& stream) override {
    if (const Ref<Event> copied = finish()) copied->wait_on(stream);
  }
  void hurry() override { work_->hurry(); }
  std::exception_ptr error() const override { return work_->error(); }
  uint64_t seq() const override { return work_->seq(); }
  double elapsed_ms() const override { return work_->elapsed_ms(); }
  /// Copies the results back where no thread has to wait for them.
  bool try_finish() {
    if (!work_->done()) return false;
    try {
      finish();
    } catch (const Error&) {  // whoever waits for them hears of it
    }
    return true;
  }

 private:
  // Where the call failed, the results are given up and every wait throws.
  Ref<Event> finish() {
    std::lock_guard lock(mutex_);
    if (!finished_) {
      try {
        work_->wait();
      } catch (...) {
        results_.clear();
        throw;
      }
      for (const auto& [result, copy] : results_) {
        const Device device = result.device();
        DeviceRuntime& runtime = runtime_of(device);
        auto* to = static_cast<std::byte*>(result.storage()->data()) +
                   size_t(result.offset()) * size_of(result.dtype());
        if (result.nbytes()) runtime.copy(to, device, copy.raw(), kCPU, result.nbytes(), stream_);
        copied_ = runtime.record(stream_);
        if (copied_) copy.storage()->add_reader(copied_);
      }
      results_.clear();
      finished_ = true;
    }
    return copied_;
  }

  const Ref<Work> work_;
  mutable std::mutex mutex_;
  std::vector<std::pair<Tensor, Tensor>> results_;  // where they belong, and the CPU's
  const Stream stream_;
  bool finished_ = false;
  Ref<Event> copied_;
};

// NCCL sums in an order of its own.
bool takes(const CardGroup& cards, const Collective& c) {
  return cards.supports(c) && !(traits(c.kind).reduces && deterministic_algorithms());
}

}  // namespace

Ref<CardGroup> DeviceGroup::cards() const {
  std::lock_guard lock(mutex_);
  return cards_;
}

Ref<ProcessGroup> DeviceGroup::group_for(const Collective& c, Device device) {
  if (const Ref<ProcessGroup>& group = groups_[size_t(device.kind)]) return group;
  if (!make_cards_ || size() == 1 || device.is_meta() || runtime_of(device).name() != "cuda")
    return nullptr;
  std::lock_guard lock(mutex_);
  if (!decided_) {
    if (traits(c.kind).p2p) {  // only two of the ranks are here
      if (!std::exchange(told_, true))
        logging::warn(
            "{}: {} on {} passes through the host, as no collective has gone before it; "
            "begin with one, where NCCL is to move messages",
            name(), name_of(c.kind), to_string(device));
      return nullptr;
    }
    cards_ = make_cards_(cpu(), device);
    decided_ = true;
  }
  if (!cards_ || !cards_->supports(c)) return nullptr;
  if (takes(*cards_, c)) return cards_;
  if (!std::exchange(told_, true) && rank() == 0)
    logging::info("{}: deterministic reductions on {} pass through the host", name(),
                  to_string(device));
  return nullptr;
}

bool DeviceGroup::captures(const Collective& c) const {
  const Device device = device_of(c);
  if (const Ref<ProcessGroup>& group = groups_[size_t(device.kind)]) return group->captures(c);
  const Ref<CardGroup> group = cards();
  return group && runtime_of(device).name() == "cuda" && takes(*group, c) && group->captures(c);
}

std::string_view DeviceGroup::backend(Device device) const {
  if (!device.is_cpu() && !device.is_meta())
    if (const auto group = cards(); group && runtime_of(device).name() == "cuda")
      return group->backend(device);
  const Ref<ProcessGroup>& group = groups_[size_t(device.kind)];
  return group ? group->backend(device) : device.is_meta() ? "none" : cpu().backend();
}

bool DeviceGroup::supports(const Collective& c) const {
  const Device device = device_of(c);
  if (const Ref<ProcessGroup>& group = groups_[size_t(device.kind)]) return group->supports(c);
  if (device.is_meta()) return false;
  const auto same = [](const Tensor& t) { return empty(t.shape(), t.dtype(), kCPU); };
  const Staged copies(c, same, same);
  return cpu().supports(copies.call());
}

Ref<Work> DeviceGroup::submit(const Collective& c) {
  const Device device = device_of(c);
  if (device.is_cpu()) {
    if (const Ref<CardGroup> group = cards()) group->submit_messages();
    return cpu().submit(c);
  }
  if (const Ref<ProcessGroup> group = group_for(c, device)) return group->submit(c);
  TESSERA_CHECK(!device.is_meta(), "{}: tensors on meta have no values to send", name_of(c.kind));
  return submit_staged(c);
}

Ref<Work> DeviceGroup::submit_staged(const Collective& c) {
  // Every verb writes its results whole, so only operands are copied.
  Staged copies(
      c, [](const Tensor& t) { return transferred(t, kCPU); },
      [](const Tensor& t) {
        return empty_in(Meta::contiguous(t.shape(), t.dtype(), kCPU),
                        runtime_of(t.device()).host_allocator());
      });
  if (c.async) return submit_staged_async(c, copies.call());
  Ref<Work> work = cpu().submit(copies.call());
  for (size_t i = 0; i < c.out.size(); ++i)
    if (c.out[i].defined()) {
      copy_values(c.out[i], transferred(copies.out(i), c.out[i].device()));
      c.out[i].storage()->bump_version();
    }
  return work;
}

Ref<Work> DeviceGroup::submit_staged_async(const Collective& c, Collective& copies) {
  copies.async = true;
  Stream stream;
  for (const Tensor& t : c.out) {
    if (!t.defined()) continue;
    stream = runtime_of(t.device()).copy_stream(t.device().index, 0);
    t.storage()->wait_writable(stream);
  }
  Ref<Work> work = cpu().submit(copies);
  std::vector<std::pair<Tensor, Tensor>> results;
  for (size_t i = 0; i < c.out.size(); ++i)
    if (c.out[i].defined()) results.emplace_back(c.out[i], copies.out[i]);
  auto staged = make_ref<StagedWork>(std::move(work), std::move(results), stream);
  {
    std::lock_guard lock(ready_lock());
    for (const Tensor& t : c.out) {
      if (!t.defined()) continue;
      t.storage()->bump_version();
      t.storage()->set_ready(staged);
    }
  }
  std::lock_guard lock(mutex_);
  std::erase_if(staged_,
                [](const Ref<Work>& w) { return static_cast<StagedWork&>(*w).try_finish(); });
  staged_.push_back(staged);
  return staged;
}

DeviceGroup::~DeviceGroup() {
  for (const Ref<Work>& w : staged_) wait_ended(*w);
}

Ref<Storage> DeviceGroup::allocate(size_t bytes, Device device) {
  if (const Ref<ProcessGroup>& group = groups_[size_t(device.kind)])
    return group->allocate(bytes, device);
  if (const Ref<CardGroup> group = owner_of_memory(device)) {
    const auto on_all = [&](bool here) {
      const Tensor all = from_values<int32_t>({here}, {1});
      cpu().all_reduce(all, ReduceOp::kMin);
      return all.item<int32_t>() == 1;
    };
    Ref<Storage> own = group->allocate(bytes, on_all);
    if (on_all(bool(own))) return own;  // what some ranks register is of no use
    if (rank() == 0)
      logging::warn(
          "{}: NCCL has no memory on {} here or on another rank, or refuses to register it, so "
          "that collectives copy through its buffers; NCCL_DEBUG=WARN says why",
          name(), to_string(device));
    std::lock_guard lock(mutex_);
    registers_ = false;
  }
  return make_ref<Storage>(bytes, device, allocator_of(device));
}

Ref<CardGroup> DeviceGroup::owner_of_memory(Device device) const {
  std::lock_guard lock(mutex_);
  return registers_ && cards_ && cards_->has_own_memory(device) ? cards_ : nullptr;
}

bool DeviceGroup::has_own_memory(Device device) const {
  if (const Ref<ProcessGroup>& group = groups_[size_t(device.kind)])
    return group->has_own_memory(device);
  return bool(owner_of_memory(device));
}

Ref<ProcessGroup> DeviceGroup::split(int color, int key, CallSite site) {
  ByKind parts;
  for (size_t d = 0; d < parts.size(); ++d)
    if (groups_[d]) parts[d] = groups_[d]->split(color, key, site);
  const Ref<CardGroup> all = cards();
  const Ref<ProcessGroup>& part = parts[int(DeviceKind::kCPU)];
  Ref<CardGroup> cards = all ? all->split_beside(part.get(), color, key) : nullptr;
  if (color < 0) return nullptr;
  auto made = make_ref<DeviceGroup>(std::move(parts), publish_cause_, make_cards_);
  made->decided_ = bool(cards), made->cards_ = std::move(cards);
  std::lock_guard lock(mutex_);
  made->registers_ = registers_;
  return made;
}

void DeviceGroup::abort(const std::string& why) {
  for (const Ref<ProcessGroup>& group : groups_)
    if (group) group->abort(why);
  if (const auto group = cards()) group->abort(why);
  if (!publish_cause_) return;
  try {
    barrier();
  } catch (const CommError& first) {  // the error that killed the group, by this abort or before it
    if (!first.culprits().empty()) publish_cause_(first.culprits());
  }
}

void DeviceGroup::flush() {
  for (const Ref<ProcessGroup>& group : groups_)
    if (group) group->flush();
  std::vector<Ref<Work>> staged;
  {
    std::lock_guard lock(mutex_);
    staged = std::exchange(staged_, {});
  }
  for (const Ref<Work>& w : staged) w->wait();
  if (const auto group = cards()) group->flush();
}

}  // namespace tessera::detail
