#include "collectives/nccl/captured.h"

#include <algorithm>
#include <utility>

namespace tessera::nccl {

CapturedCalls::CapturedCalls(Ref<GroupCore> core) : core_(std::move(core)) {
  std::lock_guard lock(core_->mutex_);
  ++core_->graphs_;
}

CapturedCalls::~CapturedCalls() {
  std::lock_guard lock(core_->mutex_);
  --core_->graphs_;
}

void CapturedCalls::add(const CardCall& call, std::vector<Ref<Storage>> memory) {
  calls_.push_back({call.plan, call.site});
  limit_ = std::max(limit_, call.limit);
  for (Ref<Storage>& m : memory) memory_.push_back(std::move(m));
}

void CapturedCalls::before_launch(const Stream& stream) {
  std::lock_guard lock(core_->mutex_);
  TESSERA_ASSERT(!core_->stop_, "a graph with calls of {} is launched, but the group was closed",
                 core_->members_.group);
  if (core_->dead()) core_->throw_failure();
  core_->submit_all_put_off();
  const GroupCore::Lane& lane = core_->lanes_[0];
  if (!lane.underway.empty()) make_ref<cuda::StreamEvent>(lane.comm->stream())->wait_on(stream);
  begun_ = make_ref<cuda::StreamEvent>(stream);
}

void CapturedCalls::launched(const Stream& stream) {
  std::lock_guard lock(core_->mutex_);
  for (Call& c : calls_) {
    detail::seal(c.facts.record, ++core_->collectives_);
    core_->journal_.add(c.facts.record, c.site);
  }
  auto launch = make_ref<CardCall>(Ref<CallOwner>(core_), calls_[0].site, limit_, /*async=*/true);
  launch->captured = calls_.size();
  static_cast<detail::PlanFacts&>(launch->plan) = calls_[0].facts;
  GroupCore::Lane& lane = core_->lanes_[0];
  const auto ended = make_ref<cuda::StreamEvent>(stream);
  ended->wait_on(lane.comm->stream());
  launch->set_submitted(std::move(begun_), ended, /*timed=*/false);
  const Ref<cuda::Refusals> thread = cuda::refusals_of(stream);
  if (core_->dead()) {  // since before_launch(): nobody has told the thread
    if (thread) thread->post(core_->failure());
    return;
  }
  lane.underway.push_back({std::move(launch), thread});
  core_->start_watching();
  core_->changed_.notify_all();
}

// The call comes behind what the thread has captured so far. Whoever needs its result lets the
// stream wait for it.
Ref<Work> GroupCore::capture(const Collective& c) {
  const Millis limit = c.timeout.count() > 0 ? c.timeout : context_.timeout;
  auto call = make_ref<CardCall>(Ref<CallOwner>(this), c.site, limit, c.async);
  detail::make_plan(c, members_.rank, members_.size, call->plan, device_);
  TESSERA_ASSERT(!call->plan.is_p2p(), "{} cannot be captured", name_of(c.kind));
  auto& part = static_cast<CapturedCalls&>(
      cuda::captured_part(this, [&] { return make_ref<CapturedCalls>(Ref<GroupCore>(this)); }));
  const Stream stream = cuda::capture_stream(device_.index, cuda::CaptureUse::kCommunication);
  make_ref<cuda::StreamEvent>(cuda::compute_stream(device_.index))->wait_on(stream);
  Ready ready = prepare(call, c, stream);
  {
    std::lock_guard lock(mutex_);
    if (dead()) throw_failure();
    detail::seal(call->plan.record, collectives_ + part.count() + 1);  // for errors of NCCL
    submit_to_nccl(lanes_[0], {&ready, 1}, stream);
  }
  call->set_submitted(nullptr, make_ref<cuda::StreamEvent>(stream), /*timed=*/false);
  part.add(*call, std::move(ready.memory));
  return call;
}

}  // namespace tessera::nccl
