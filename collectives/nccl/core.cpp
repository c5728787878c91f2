#include "collectives/nccl/core.h"

#include <algorithm>
#include <utility>

#include "collectives/nccl/ended.h"
#include "collectives/thread.h"
#include "collectives/together.h"
#include "core/backend/cuda/capture.h"
#include "core/dispatch/default_device.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/ready_lock.h"

namespace tessera::nccl {

using detail::Part;
using detail::Parts;
using detail::Plan;
using detail::Watchdog;

namespace {

int64_t total_bytes(const Parts& parts) {
  int64_t sum = 0;
  for (const Part& p : parts) sum += p.bytes;
  return sum;
}
bool follow_each_other(const Parts& parts) {
  for (size_t i = 1; i < parts.size(); ++i)
    if (parts[i].data != parts[i - 1].data + parts[i - 1].bytes) return false;
  return true;
}
// The same pieces in memory that begins at `at`, one behind the other.
Parts moved_to(const Parts& parts, std::byte* at) {
  Parts moved = parts;
  for (Part& p : moved) p.data = at, at += p.bytes;
  return moved;
}
void copy_parts(const Parts& to, const Parts& from, const Stream& stream) {
  DeviceRuntime& runtime = runtime_of(stream.device);
  for (size_t i = 0; i < to.size(); ++i)
    if (to[i].bytes)
      runtime.copy(to[i].data, stream.device, from[i].data, stream.device, size_t(to[i].bytes),
                   stream);
}
// Memory whose uses are all on `stream`.
Ref<Storage> memory_on(const Stream& stream, int64_t bytes) {
  const StreamScope scope(stream);
  return make_ref<Storage>(size_t(bytes), stream.device, allocator_of(stream.device));
}

}  // namespace

GroupCore::GroupCore(detail::Membership members, GroupContext context, Device device,
                     Communicators communicators)
    : members_(std::move(members)), context_(std::move(context)), device_(device) {
  for (size_t i = 0; i < lanes_.size(); ++i) lanes_[i].comm = std::move(communicators[i]);
}

GroupCore::Lane& GroupCore::lane_of(const Plan& plan) {
  if (!plan.is_p2p()) return lanes_[0];
  const bool from_here = plan.kind == CollKind::kSend;
  const bool upwards = (plan.record.peer > members_.rank) == from_here;
  return lanes_[upwards ? 1 : 2];
}

// What the profile of the calling thread says of the call: each communicator has a lane.
ProfileEvent GroupCore::event_of(const Plan& plan, const CallSite& site) {
  constexpr std::string_view kLanes[] = {"", ", messages to higher ranks",
                                         ", messages to lower ranks"};
  return {.name = std::string(name_of(plan.kind)),
          .category = "device",
          .lane = fmt::format("{}, NCCL of {}{}", to_string(device_), members_.group,
                              kLanes[&lane_of(plan) - lanes_.data()]),
          .detail = fmt::format("{} at {}", name_of(plan.dtype), detail::describe(site)),
          .bytes = std::max(total_bytes(plan.give), total_bytes(plan.take))};
}

// Calls that are submitted together are one event.
void GroupCore::add_to_profile(std::span<const Ready> calls, const Ref<Event>& begun,
                               const Ref<Event>& ended) {
  const auto first =
      std::ranges::find_if(calls, [](const Ready& r) { return bool(r.add_to_profile); });
  if (first == calls.end()) return;
  ProfileEvent event = first->event;
  if (calls.size() > 1) event.detail += fmt::format(", one of {} calls together", calls.size());
  for (const Ready& r : calls)
    if (&r != &*first) event.bytes += r.event.bytes;
  first->add_to_profile(std::move(event), begun, ended);
}

bool GroupCore::idle() const {
  return put_off_.empty() &&
         std::ranges::all_of(lanes_, [](const Lane& l) { return l.underway.empty(); });
}

// NCCL takes pieces that follow each other, and no result that lies over an operand in part.
GroupCore::Ready GroupCore::prepare(const Ref<CardCall>& call, const Collective& c,
                                    const Stream& stream) {
  Plan& plan = call->plan;
  Ready ready{call, nullptr, Tensors(c.in.begin(), c.in.end()), Clock::now()};
  for (const Tensor& t : c.out) ready.tensors.push_back(t);
  const bool pieces = plan.kind == CollKind::kReduceScatter && plan.record.form == 0;
  if (plan.must_stage() || (pieces && !follow_each_other(plan.give))) {
    const Ref<Storage> memory = memory_on(stream, total_bytes(plan.give));
    const Parts copies = moved_to(plan.give, static_cast<std::byte*>(memory->data()));
    copy_parts(copies, plan.give, stream);
    plan.give = copies;
    ready.memory.push_back(memory);
  }
  if (plan.kind == CollKind::kAllGather && plan.record.form == 0 && !follow_each_other(plan.take)) {
    const Ref<Storage> memory = memory_on(stream, total_bytes(plan.take));
    const Parts results = plan.take;
    plan.take = moved_to(plan.take, static_cast<std::byte*>(memory->data()));
    ready.memory.push_back(memory);
    ready.after = [=, taken = plan.take] { copy_parts(results, taken, stream); };
  }
  return ready;
}

Ref<Work> GroupCore::submit(const Collective& c) {
  if (dead()) throw_failure();
  if (cuda::is_captured(cuda::compute_stream(device_.index))) return capture(c);
  const Millis limit = c.timeout.count() > 0 ? c.timeout : context_.timeout;
  auto call = make_ref<CardCall>(Ref<CallOwner>(this), c.site, limit, c.async);
  detail::make_plan(c, members_.rank, members_.size, call->plan, device_);
  const Stream& stream = lane_of(call->plan).comm->stream();
  for (const Tensor& t : c.in) t.storage()->wait_ready(stream);
  for (const Tensor& t : c.out) t.storage()->wait_writable(stream);
  Ready ready = prepare(call, c, stream);
  // The first event of a profile waits for the thread's kernels, so no lock is held.
  if (current_profile()) {
    ready.event = event_of(call->plan, c.site);
    ready.add_to_profile = device_times(device_);
  }
  const bool message = call->plan.is_p2p();
  TogetherScope* const together = c.async && !message ? TogetherScope::current() : nullptr;
  if (together) together->add(call), ready.together = true;
  {
    std::lock_guard lock(mutex_);
    if (dead()) throw_failure();
    detail::seal(call->plan.record, message ? ++messages_ : ++collectives_);
    if (!message) journal_.add(call->plan.record, c.site);
    start_watching();
    if (message || together) {
      put_off_.push_back(std::move(ready));
      if (c.kind == CollKind::kSend && !c.async) submit_all_put_off();
    } else {
      submit_all_put_off();
      submit_now(lanes_[0], {std::move(ready)});
    }
    changed_.notify_all();
  }
  {
    std::lock_guard lock(ready_lock());
    for (const Tensor& t : c.out) {
      t.storage()->bump_version();
      t.storage()->set_ready(call);
    }
    for (const Tensor& t : c.in)
      if (t.storage()->ready() != call) t.storage()->add_reader(call);
  }
  // What the program enqueues after a synchronous verb comes after it, whatever it uses.
  if (!c.async && call->submitted()) call->wait_on(cuda::compute_stream(device_.index));
  return call;
}

void GroupCore::submit_put_off() {
  std::lock_guard lock(mutex_);
  if (dead()) throw_failure();
  submit_all_put_off();
}

void GroupCore::submit_all_put_off(bool of_scopes) {
  std::array<std::vector<Ready>, 3> calls;  // by lane
  for (Ready& r : std::exchange(put_off_, {}))
    if (r.together && !of_scopes)
      put_off_.push_back(std::move(r));
    else
      calls[size_t(&lane_of(r.call->plan) - lanes_.data())].push_back(std::move(r));
  try {
    for (size_t i = 0; i < calls.size(); ++i)
      if (!calls[i].empty()) submit_now(lanes_[i], std::move(calls[i]));
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& e) {  // those who wait for these calls would wait for ever
    die(CommError(fmt::format("{}: rank {} cannot submit its calls: {}", members_.group,
                              members_.rank, e.what()),
                  members_.group, 0, {members_.rank}));
    throw;
  }
}

void GroupCore::submit_now(Lane& lane, std::vector<Ready> calls) {
  DeviceRuntime& runtime = runtime_of(device_);
  const Stream& stream = lane.comm->stream();
  const bool timed =
      std::ranges::any_of(calls, [](const Ready& r) { return r.call->async || r.add_to_profile; });
  const auto record = [&] { return timed ? runtime.record_timed(stream) : runtime.record(stream); };
  const Ref<Event> begun = record();
  submit_to_nccl(lane, calls, stream);
  const Ref<Event> ended = record();
  const Ref<cuda::Refusals> thread = cuda::refusals_of(cuda::compute_stream(device_.index));
  for (const Ready& r : calls) {
    // The time of calls together is that of the first, so that a sum over calls counts it once.
    r.call->set_submitted(begun, ended, timed && &r == &calls.front());
    lane.underway.push_back({r.call, thread});
  }
  add_to_profile(calls, begun, ended);
}

void GroupCore::submit_to_nccl(Lane& lane, std::span<const Ready> calls, const Stream& stream) {
  const CardCall& first = *calls[0].call;
  std::vector<const Plan*> plans;
  for (const Ready& r : calls) plans.push_back(&r.call->plan);
  with_nccl(first.title(), facts_of(first), first.limit,
            [&](const Communicator::Pause& pause) { lane.comm->submit(plans, stream, pause); });
  for (const Ready& r : calls)
    if (r.after) r.after();
}

// Runs `body` with a pause that ends it when a peer is gone or the deadline has passed. The mutex
// is held.
void GroupCore::with_nccl(const std::string& title, detail::WaitFacts facts, Millis limit,
                          const std::function<void(const Communicator::Pause&)>& body) {
  const auto since = Clock::now();
  PeerWait wait(std::move(facts), limit, key("failure"),
                [this](const CommError& e) { request_failure(e); });
  std::optional<Watchdog::Scope> scope;
  try {
    body([&] {
      if (dead()) throw_failure();
      if (const auto error = requested()) throw *error;
      if (!scope && Clock::now() - since > Watchdog::kCheckInterval)
        scope.emplace(context_.watchdog.get(), wait, since);
    });
  } catch (const Error& e) {
    scope.reset();
    die(nccl_failure(
        fmt::format("{} on {}: rank {}: NCCL: {}", title, members_.group, members_.rank, e.what()),
        members_, *context_.store, wait.facts().seq, "", {members_.rank}));
    throw_failure();
  } catch (const CommError& e) {
    scope.reset();
    die(e);
    throw_failure();
  }
}

Communicators GroupCore::split(int color, int key) {
  std::lock_guard lock(mutex_);
  if (dead()) throw_failure();
  submit_all_put_off();
  detail::WaitFacts facts;
  facts.group = members_.group, facts.members = members_.world_ranks;
  facts.number = facts.seq = collectives_ + 1, facts.call = "split";
  Communicators parts;
  with_nccl("split", std::move(facts), context_.timeout, [&](const Communicator::Pause& pause) {
    for (size_t i = 0; i < parts.size(); ++i) parts[i] = lanes_[i].comm->split(color, key, pause);
  });
  return parts;
}

void GroupCore::flush() {
  std::vector<Ref<CardCall>> calls;
  {
    std::lock_guard lock(mutex_);
    if (!dead()) submit_all_put_off();
    for (const Lane& lane : lanes_)
      for (const Underway& u : lane.underway) calls.push_back(u.call);
  }
  for (const Ref<CardCall>& call : calls) call->wait();
  if (dead()) throw_failure();
}

GroupCore::~GroupCore() { close_communicators(); }

// ---- failure ----

std::exception_ptr GroupCore::failure() const {
  if (!dead()) return nullptr;
  std::lock_guard lock(failure_mutex_);
  return failure_;
}

void GroupCore::throw_failure() {
  if (const auto own = cuda::refusals_of(cuda::compute_stream(device_.index))) own->forget_posted();
  std::rethrow_exception(failure());
}

void GroupCore::request_failure(const CommError& error) {
  {
    std::lock_guard lock(failure_mutex_);
    if (!requested_) requested_ = error;
  }
  changed_.notify_all();
}

std::optional<CommError> GroupCore::requested() const {
  std::lock_guard lock(failure_mutex_);
  return requested_;
}

// Kills the group with the first failure of its ranks: the program learns of it before NCCL lets
// its streams go on. The mutex is held.
void GroupCore::die(CommError error) {
  if (dead()) return;
  if (error.culprits().empty()) {
    std::vector<int> culprits;
    for (int r : error.ranks())
      if (r >= 0 && r < members_.size) culprits.push_back(members_.world_ranks[size_t(r)]);
    error = CommError(error.what(), members_.group, error.seq(), error.ranks(), culprits);
  }
  const StoreTimeLimit limit(Watchdog::kResponseTime);
  try {
    error = detail::decode_error(
        context_.store->compare_set(key("failure"), "", detail::encode(error)), members_.group);
  } catch (const tessera::Error&) {  // the store is gone; peers see that this rank ends
  }
  const bool first = context_.watchdog->remember_failure(error);
  {
    std::lock_guard lock(failure_mutex_);
    failure_ = std::make_exception_ptr(error);
    dead_.store(true, std::memory_order_release);
  }
  if (first) context_.watchdog->publish_failure(error);
  std::set<cuda::Refusals*> threads;
  for (const Lane& lane : lanes_)
    for (const Underway& u : lane.underway)
      if (u.thread && u.call->error() && threads.insert(u.thread.get()).second)
        u.thread->post(failure());
  for (const Lane& lane : lanes_) graphs_ ? lane.comm->abort_beside() : lane.comm->abort();
  put_off_.clear();
  changed_.notify_all();
}

void GroupCore::abort(const std::string& why) {
  const std::vector<int> culprits = context_.watchdog->culprits();
  std::lock_guard lock(mutex_);
  die(CommError(fmt::format("{}: rank {} aborted the group: {}", members_.group,
                            members_.world_ranks[size_t(members_.rank)], why),
                members_.group, collectives_, {members_.rank}, culprits));
}

}  // namespace tessera::nccl
