// Send and recv through shared memory. Each ordered pair of ranks has a mailbox, through which the
// values pass in chunks, two at a time. All messages that a rank has in progress proceed together,
// except that those to the same peer in the same direction proceed one after the other. A send is
// finished when the receiver has taken its last chunk. Invariant: `sent` and `got` of a mailbox are
// equal between messages.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "collectives/shm/cpu.h"
#include "collectives/shm/engine.h"

namespace tessera::detail {
namespace {

// Two ranks that appear to wait for each other may be about to move on; it is an error once that
// has looked the same for this long.
constexpr auto kSuspicion = std::chrono::milliseconds(200);
// What a rank with messages in progress publishes: that it is blocked by one synchronous send or
// recv, or something else. A rank with asynchronous messages may be about to send what its peer
// waits for.
constexpr uint64_t kSendMark = 1, kRecvMark = 2, kOtherMark = 3;

const Part& part_of(const Plan& plan) { return plan.takes ? plan.take[0] : plan.give[0]; }
int peer_of(const Plan& plan) { return plan.record.peer; }

uint64_t chunks_of(int64_t bytes, size_t chunk) {
  return std::max<uint64_t>(1, (uint64_t(bytes) + chunk - 1) / chunk);
}

}  // namespace

// Reports the wait of a message to the watchdog.
class ShmEngine::MessageWait final : public Watchdog::Wait {
 public:
  MessageWait(ShmEngine& engine, Ref<Call> call, Clock::time_point since)
      : engine_(engine),
        call_(std::move(call)),
        scope_(engine.options_.watchdog.get(), *this, since) {}
  WaitFacts facts() const override {
    const int peer = engine_.members_.world_ranks[size_t(peer_of(call_->plan))];
    WaitFacts f = engine_.facts_of(*call_);
    f.kind = WaitFacts::Kind::kMessages;
    f.peer = peer;
    f.absent = {peer};
    return f;
  }
  Millis timeout() const override { return call_->timeout; }
  std::string progress_of(int) const override { return engine_.progress_of(peer_of(call_->plan)); }
  void fail(const CommError& error) override { engine_.abort(error); }

 private:
  ShmEngine& engine_;
  const Ref<Call> call_;
  const Watchdog::Scope scope_;  // last, so that the other members exist while it does
};

void ShmEngine::interrupt() {
  interrupts_.fetch_add(1, std::memory_order_seq_cst);
  ring(rank_);
}

bool ShmEngine::can_step(const Message& m) const {
  int peer = peer_of(m.call->plan);
  bool sends = !m.call->plan.takes;
  Mailbox& box = sends ? segment_->mailbox(rank_, peer) : segment_->mailbox(peer, rank_);
  uint64_t sent = box.sent.load(std::memory_order_seq_cst);
  uint64_t got = box.got.load(std::memory_order_seq_cst);
  if (!sends) return sent > got;
  uint64_t all = chunks_of(part_of(m.call->plan).bytes, segment_->options().mail_bytes);
  return m.chunks < all ? sent - got < 2 : sent == got;
}

/// Moves what can be moved now; returns true when the message is finished.
bool ShmEngine::step(Message& m) { return m.call->plan.takes ? step_recv(m) : step_send(m); }

bool ShmEngine::step_send(Message& m) {
  const Plan& plan = m.call->plan;
  const Part& from = part_of(plan);
  int peer = peer_of(plan);
  Mailbox& box = segment_->mailbox(rank_, peer);
  int64_t chunk = int64_t(segment_->options().mail_bytes);
  uint64_t all = chunks_of(from.bytes, size_t(chunk));
  uint64_t sent = box.sent.load(std::memory_order_relaxed);
  while (m.chunks < all && sent - box.got.load(std::memory_order_acquire) < 2) {
    if (m.chunks == 0) {
      box.record = plan.record;
      std::string site = describe(m.call->site);
      std::memset(box.site, 0, sizeof box.site);
      std::memcpy(box.site, site.data(), std::min(site.size(), sizeof box.site - 1));
    }
    int64_t bytes = std::min(chunk, from.bytes - m.moved);
    if (bytes > 0)
      std::memcpy(segment_->mail(rank_, peer, int(sent & 1)), from.data + m.moved, size_t(bytes));
    m.moved += bytes;
    ++m.chunks;
    box.sent.store(++sent, std::memory_order_seq_cst);
    if (segment_->state(peer).sleep.load(std::memory_order_seq_cst) != Sleep::kNone) ring(peer);
  }
  return m.chunks == all && box.got.load(std::memory_order_acquire) == sent;
}

bool ShmEngine::step_recv(Message& m) {
  const Plan& plan = m.call->plan;
  const Part& to = part_of(plan);
  int peer = peer_of(plan);
  Mailbox& box = segment_->mailbox(peer, rank_);
  int64_t chunk = int64_t(segment_->options().mail_bytes);
  uint64_t all = chunks_of(to.bytes, size_t(chunk));
  uint64_t got = box.got.load(std::memory_order_relaxed);
  while (m.chunks < all && box.sent.load(std::memory_order_acquire) > got) {
    if (m.chunks == 0) {
      const CallRecord& theirs = box.record;
      if (theirs.counts != plan.record.counts || theirs.dtype != plan.record.dtype)
        fail_group(
            *m.call,
            fmt::format("{}: expects {} elements of {}, but {} sends {} of {} at {} (#{}); make "
                        "both equal",
                        m.call->title(members_.group), plan.record.counts, name_of(plan.dtype),
                        name_of_rank(peer), theirs.counts, name_of(theirs.dtype), box.site,
                        theirs.seq),
            {peer});
    }
    int64_t bytes = std::min(chunk, to.bytes - m.moved);
    if (bytes > 0)
      std::memcpy(to.data + m.moved, segment_->mail(peer, rank_, int(got & 1)), size_t(bytes));
    m.moved += bytes;
    ++m.chunks;
    box.got.store(++got, std::memory_order_seq_cst);
    if (segment_->state(peer).sleep.load(std::memory_order_seq_cst) != Sleep::kNone) ring(peer);
  }
  return m.chunks == all;
}

void ShmEngine::run_p2p(const Ref<Call>& first, FunctionRef<Ref<Call>()> next) {
  throw_if_failed();
  std::vector<Message> active;
  auto add = [&](Ref<Call> call) {
    Message m;
    m.call = std::move(call);
    m.since = Clock::now();
    active.push_back(std::move(m));
  };
  // Only the oldest message of each peer and direction moves.
  auto is_head = [&](size_t i) {
    for (size_t j = 0; j < i; ++j)
      if (active[j].call->plan.takes == active[i].call->plan.takes &&
          peer_of(active[j].call->plan) == peer_of(active[i].call->plan))
        return false;
    return true;
  };
  add(first);
  uint32_t seen = interrupts_.load(std::memory_order_seq_cst);
  auto ready = [&] {
    if (interrupts_.load(std::memory_order_seq_cst) != seen) return true;
    for (size_t i = 0; i < active.size(); ++i)
      if (is_head(i) && can_step(active[i])) return true;
    return false;
  };
  for (;;) {
    seen = interrupts_.load(std::memory_order_seq_cst);
    while (Ref<Call> call = next()) add(std::move(call));
    bool finished = false;
    for (size_t i = 0; i < active.size();) {
      if (!is_head(i) || !step(active[i])) {
        ++i;
        continue;
      }
      Message m = std::move(active[i]);
      active.erase(active.begin() + std::ptrdiff_t(i));
      m.call->finish(nullptr);
      finished = true;
    }
    if (active.empty()) break;
    if (finished) continue;  // the next call may have waited for this one
    bool moved = false;
    for (int i = spins(); i > 0 && !(moved = ready()); --i) relax();
    if (moved) continue;
    const Plan& plan = active[0].call->plan;
    uint64_t count = (me_.p2p.load(std::memory_order_relaxed) >> 32) + 1;
    bool held_up = active.size() == 1 && !active[0].call->async;
    uint64_t mark = !held_up ? kOtherMark : plan.takes ? kRecvMark : kSendMark;
    me_.site.write(describe(active[0].call->site));
    me_.site_seq.store(0, std::memory_order_seq_cst);
    me_.p2p.store(count << 32 | mark << 24 | uint64_t(peer_of(plan)), std::memory_order_seq_cst);
    // The peer may doze in a collective that precedes its side of a message.
    store_before_load();
    for (const Message& m : active) {
      const int peer = peer_of(m.call->plan);
      if (segment_->state(peer).sleep.load(std::memory_order_relaxed) == Sleep::kDoze) ring(peer);
    }
    while (!park(ready)) {
      throw_if_failed();
      for (size_t i = 0; i < active.size(); ++i)
        if (is_head(i)) inspect_p2p(active[i], active.size());
      // The head of the queue may have waited for an event of another group, which does not ring
      // this bell.
      if (Ref<Call> call = next()) {
        add(std::move(call));
        break;
      }
    }
    me_.p2p.store(count << 32, std::memory_order_seq_cst);
  }
}

void ShmEngine::inspect_p2p(Message& m, size_t n_active) {
  int peer = peer_of(m.call->plan);
  std::string title = m.call->title(members_.group);
  const char* preposition = m.call->plan.takes ? "from" : "to";
  Watchdog::EndReason reason;
  if (is_gone(peer, &reason) && !can_step(m))
    fail_group(*m.call,
               fmt::format("{} {} rank {}: {} is gone, {}; {}", title, preposition, peer,
                           name_of_rank(peer), reason.how, progress_of(peer)),
               {peer}, reason.culprits);
  auto now = Clock::now();
  uint64_t signature = 0;
  std::string text = deadlock_with(m, n_active, &signature);
  if (signature == 0 || signature != m.suspicion) {
    m.suspicion = signature;
    m.suspected = now;
  } else if (now - m.suspected >= kSuspicion && !can_step(m)) {
    fail_group(*m.call, fmt::format("{} {} rank {}: {}", title, preposition, peer, text), {peer});
  }
  if (!m.watched && now - m.since >= Watchdog::kCheckInterval)
    m.watched = std::make_unique<MessageWait>(*this, m.call, m.since);
}

/// Returns why this message and its peer wait for each other forever, or "" if they do not.
/// `signature` identifies such a state; 0: there is none.
std::string ShmEngine::deadlock_with(const Message& m, size_t n_active, uint64_t* signature) const {
  int peer = peer_of(m.call->plan);
  const RankState& s = segment_->state(peer);
  uint64_t entered = s.entered.load(std::memory_order_seq_cst);
  if (entered > me_.entered.load(std::memory_order_seq_cst)) {
    // The peer waits for this rank in a collective that this rank has not called.
    if (s.site_seq.load(std::memory_order_seq_cst) != entered) return "";
    *signature = entered << 8 | 1;
    return fmt::format(
        "ranks made different calls: {} waits in {} #{} at {}, which this rank has not called; "
        "they "
        "differ in kind; make matching calls",
        name_of_rank(peer), name_of(s.records[entered & 1].kind), entered, s.site.read());
  }
  uint64_t mark = m.call->plan.takes ? kRecvMark : kSendMark;
  uint64_t p2p = s.p2p.load(std::memory_order_seq_cst);
  bool same = (p2p & 0xffffffff) == (mark << 24 | uint64_t(rank_));
  if (n_active != 1 || m.call->async || !same) return "";
  *signature = p2p;
  return fmt::format(
      "ranks made different calls: {} waits in its own {} of this rank at {}; one "
      "of the two must be a {}, or use the _async form",
      name_of_rank(peer), mark == kRecvMark ? "recv" : "send", s.site.read(),
      mark == kRecvMark ? "send" : "recv");
}

}  // namespace tessera::detail
