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
  if (core_->dead()) core_->throw_failure();
  core_->submit_all_put_off();
  launch_ = make_ref<CardCall>(Ref<CallOwner>(core_), calls_[0].site, limit_, /*async=*/true);
  launch_->captured = calls_.size();
  for (size_t i = 0; i < calls_.size(); ++i) {
    detail::seal(calls_[i].facts.record, ++core_->collectives_);
    core_->journal_.add(calls_[i].facts.record, calls_[i].site);
  }
  static_cast<detail::PlanFacts&>(launch_->plan) = calls_[0].facts;
  GroupCore::Lane& lane = core_->lanes_[0];
  if (!lane.underway.empty()) make_ref<cuda::StreamEvent>(lane.comm->stream())->wait_on(stream);
  begun_ = make_ref<cuda::StreamEvent>(stream);
}

void CapturedCalls::launched(const Stream& stream) {
  std::lock_guard lock(core_->mutex_);
  GroupCore::Lane& lane = core_->lanes_[0];
  const auto ended = make_ref<cuda::StreamEvent>(stream);
  ended->wait_on(lane.comm->stream());
  launch_->set_submitted(std::move(begun_), ended, /*timed=*/false);
  lane.underway.push_back({std::move(launch_), cuda::refusals_of(stream)});
  core_->start_watching();
  core_->changed_.notify_all();
}

// Behind what the thread has captured so far. Whoever needs a result lets its stream wait for the
// call.
Ref<Work> GroupCore::capture(const Collective& c) {
  const Millis limit = c.timeout.count() > 0 ? c.timeout : context_.timeout;
  auto call = make_ref<CardCall>(Ref<CallOwner>(this), c.site, limit, c.async);
  detail::make_plan(c, members_.rank, members_.size, call->plan, device_);
  TESSERA_ASSERT(!call->plan.is_p2p(), "{} cannot be captured", name_of(c.kind));
  auto& part = static_cast<CapturedCalls&>(
      cuda::captured_part(this, [&] { return make_ref<CapturedCalls>(Ref<GroupCore>(this)); }));
  Lane& lane = lanes_[0];
  const Stream& stream = lane.comm->stream();
  make_ref<cuda::StreamEvent>(cuda::compute_stream(device_.index))->wait_on(stream);
  Ready ready = prepare(call, c);
  {
    std::lock_guard lock(mutex_);
    if (dead()) throw_failure();
    submit_to_nccl(lane, {&ready, 1});
  }
  call->set_submitted(nullptr, make_ref<cuda::StreamEvent>(stream), /*timed=*/false);
  part.add(*call, std::move(ready.memory));
  return call;
}

GroupCore::~GroupCore() { close_communicators(); }

}  // namespace tessera::nccl
