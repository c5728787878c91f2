#include "collectives/messages/engine.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include "collectives/reduction.h"
#include "core/base/boundary.h"

namespace tessera::detail {
namespace {

/// The message that ranks exchange before a collective: the facts of their calls and the call
/// sites.
struct Header {
  CallRecord record;
  OrderDigest digest;
  char site[88] = {};
};
static_assert(std::is_trivially_copyable_v<Header>);

Header make_header(const Call& call) {
  Header h;
  h.record = call.plan.record;
  h.digest = call.digest;
  std::string site = describe(call.site);
  std::memcpy(h.site, site.data(), std::min(site.size(), sizeof h.site - 1));
  return h;
}

}  // namespace

MessageEngine::MessageEngine(const Membership& m, std::unique_ptr<Transport> transport,
                             std::shared_ptr<Watchdog> dog, std::shared_ptr<Store> store,
                             std::string prefix)
    : members_(m),
      rank_(m.rank),
      size_(m.size),
      watch_(m, std::move(dog), std::move(store), std::move(prefix)),
      transport_(std::move(transport)),
      sent_(size_t(m.size)),
      received_(size_t(m.size)) {}

void MessageEngine::interrupt() {
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void MessageEngine::abort(const CommError& error) {
  watch_.kill(error);
  // Closing the transport makes peers that wait for this rank look for the failure.
  std::lock_guard lock(mutex_);
  if (!std::exchange(closed_, true)) transport_->close();
}

/// Sends `mine` to every other rank and gathers theirs into `all`, rank by rank.
std::vector<Transfer> MessageEngine::with_all(void* mine, void* all, int64_t bytes) const {
  std::vector<Transfer> transfers;
  for (int k = 1; k < size_; ++k) {
    int to = (rank_ + k) % size_, from = (rank_ + size_ - k) % size_;
    transfers.push_back({to, mine, bytes, true});
    transfers.push_back({from, static_cast<std::byte*>(all) + from * bytes, bytes, false});
  }
  return transfers;
}

void MessageEngine::check_calls(const Call& call) {
  std::vector<Header> all(static_cast<size_t>(size_));
  Header mine = all[size_t(rank_)] = make_header(call);
  exchange(call, with_all(&mine, all.data(), sizeof(Header)), Step::kHeaders);
  bool same = true;
  std::vector<OrderDigest> digests;
  for (const Header& h : all) {
    same &= h.record.fingerprint == mine.record.fingerprint;
    if (call.order) digests.push_back(h.digest);
  }
  if (same) return check_orders(call, digests);
  std::vector<CallRecord> records;
  std::vector<std::string> sites;
  for (Header& h : all) {
    h.site[sizeof h.site - 1] = 0;
    records.push_back(h.record);
    sites.push_back(h.site);
  }
  std::vector<int> blame;
  std::string text = compare_calls(records, sites, members_.group, blame);
  watch_.fail_group(call, text, blame);
}

void MessageEngine::check_orders(const Call& call, std::span<const OrderDigest> digests) {
  if (!call.order) return;
  std::vector<int> blame;
  std::string text = compare_orders(digests, *call.order, rank_, call.title(members_.group), blame);
  if (!text.empty()) watch_.fail_group(call, text, blame);
}

void MessageEngine::check_splits(const Call& call) {
  std::vector<int64_t> mine, all(2 * size_t(size_ * size_));
  for (const Part& p : call.plan.give) mine.push_back(p.bytes);
  for (const Part& p : call.plan.take) mine.push_back(p.bytes);
  int64_t bytes = int64_t(mine.size() * sizeof(int64_t));
  std::copy(mine.begin(), mine.end(), all.begin() + 2 * size_ * rank_);
  exchange(call, with_all(mine.data(), all.data(), bytes), Step::kSplits);
  std::vector<int> blame;
  std::string text = compare_splits(all, size_, call.title(members_.group), blame);
  if (!text.empty()) watch_.fail_group(call, text, blame);
}

void MessageEngine::run(Call& call) {
  check_calls(call);
  if (call.plan.has_splits()) check_splits(call);
  if (call.plan.kind != CollKind::kBarrier) move(call);
}

void MessageEngine::move(Call& call) {
  const Plan& plan = call.plan;
  if (plan.kind != CollKind::kAllReduce) return move_pieces(call);
  std::vector<std::byte> copy;  // the result would overwrite what is still to be read
  const Part in = plan.must_stage() ? copied(plan.give, copy)[0] : plan.give[0];
  std::vector<int> all(static_cast<size_t>(size_));
  std::iota(all.begin(), all.end(), 0);
  all_reduce(call, in, plan.take[0], all, rank_);
}

/// Sends every piece straight from its giver to its taker. A taker that reduces does so in rank
/// order.
void MessageEngine::move_pieces(const Call& call) {
  const Plan& plan = call.plan;
  bool only_root_takes = traits(plan.kind).rooted && plan.giver < 0;
  std::vector<std::byte> copy;
  auto given = [&](int piece) { return plan.give[plan.one_for_each ? size_t(piece) : 0]; };
  // The pieces are copied where results would overwrite what is still to be sent.
  const Parts give = plan.must_stage() ? copied(plan.give, copy) : plan.give;
  int64_t bytes = plan.reduces && plan.takes ? plan.take[0].bytes : 0;
  const Scratch terms(bytes * size_);
  std::vector<const void*> sources(static_cast<size_t>(size_));
  std::vector<Transfer> transfers;
  for (int k = 1; k < size_; ++k) {
    int to = (rank_ + k) % size_, from = (rank_ + size_ - k) % size_;
    if (plan.gives() && (!only_root_takes || to == plan.record.peer)) {
      const Part& p = give[plan.one_for_each ? size_t(to) : 0];
      transfers.push_back({to, p.data, p.bytes, true});
    }
    if (!plan.takes || (plan.giver >= 0 && plan.giver != from)) continue;
    const Part& p = plan.take[plan.reduces || plan.giver >= 0 ? 0 : size_t(from)];
    std::byte* place = plan.reduces ? terms.data() + from * bytes : p.data;
    sources[size_t(from)] = place;
    transfers.push_back({from, place, p.bytes, false});
  }
  exchange(call, transfers, Step::kPieces);
  if (!plan.takes || !plan.gives()) return;
  const Part own = plan.must_stage() ? give[plan.one_for_each ? size_t(rank_) : 0] : given(rank_);
  if (plan.reduces) {
    sources[size_t(rank_)] = own.data;
    reduce_tree(plan.op, plan.dtype, plan.take[0].data, sources,
                bytes / int64_t(size_of(plan.dtype)));
  } else {
    const Part& to = plan.take[plan.giver >= 0 ? 0 : size_t(rank_)];
    if (own.data != to.data && own.bytes) std::memmove(to.data, own.data, size_t(own.bytes));
  }
}

/// Each rank reduces a slice, in rank order, and sends it to all: 2 (P-1)/P of the bytes each way
/// (Rabenseifner 2004, with direct exchanges). A small tensor is sent whole to every rank.
void MessageEngine::all_reduce(const Call& call, const Part& in, const Part& out,
                               std::span<const int> ours, int place) {
  const Plan& plan = call.plan;
  const int n = int(ours.size());
  meet("messages.alone", lines_of(in.bytes));
  const bool whole = in.bytes <= kReduceAloneBytes;
  auto slice = [&](const Part& of, int i) -> Part {
    const Slice s = whole ? Slice{0, of.bytes} : slice_of(of.bytes, i, n);
    return {of.data + s.begin, s.end - s.begin};
  };
  const Part mine = slice(out, place);
  const Scratch terms(mine.bytes * n);
  std::vector<const void*> sources(static_cast<size_t>(n));
  std::vector<Transfer> transfers;
  for (int k = 1; k < n; ++k) {
    int to = (place + k) % n, from = (place + n - k) % n;
    const Part theirs = slice(in, to);
    transfers.push_back({ours[size_t(to)], theirs.data, theirs.bytes, true});
    std::byte* term = terms.data() + from * mine.bytes;
    sources[size_t(from)] = term;
    transfers.push_back({ours[size_t(from)], term, mine.bytes, false});
  }
  exchange(call, transfers, Step::kPieces);
  sources[size_t(place)] = slice(in, place).data;
  reduce_tree(plan.op, plan.dtype, mine.data, sources, mine.bytes / int64_t(size_of(plan.dtype)),
              size_);
  if (whole) return;
  transfers.clear();
  for (int k = 1; k < n; ++k) {
    int to = (place + k) % n, from = (place + n - k) % n;
    const Part theirs = slice(out, from);
    transfers.push_back({ours[size_t(to)], mine.data, mine.bytes, true});
    transfers.push_back({ours[size_t(from)], theirs.data, theirs.bytes, false});
  }
  exchange(call, transfers, Step::kGather);
}

/// Transfers one message: header, then values, then the receiver's confirmation that they fit and
/// arrived.
void MessageEngine::message(const Call& call, uint64_t number) {
  const Plan& plan = call.plan;
  int peer = plan.record.peer;
  bool sends = !plan.takes;
  const Part& part = sends ? plan.give[0] : plan.take[0];
  auto pass = [&](Step step, Transfer t) {
    transport_->exchange(call, {&t, 1}, {number, step, true}, watch_);
  };
  Header header = make_header(call);
  int64_t answer = 1;
  pass(Step::kHeaders, {peer, &header, sizeof header, sends});
  if (!sends &&
      (header.record.counts != plan.record.counts || header.record.dtype != plan.record.dtype))
    watch_.fail_group(
        call,
        fmt::format("{}: expects {} elements of {}, but rank {} sends {} of {} at {} (#{}); "
                    "make both equal",
                    call.title(members_.group), plan.record.counts, name_of(plan.dtype), peer,
                    header.record.counts, name_of(header.record.dtype), header.site,
                    header.record.seq),
        {peer});
  pass(Step::kPieces, {peer, part.data, part.bytes, sends});
  pass(Step::kGather, {peer, &answer, sizeof answer, !sends});
}

void MessageEngine::run_p2p(const Ref<Call>& first, FunctionRef<Ref<Call>()> next) {
  // A message follows the one before it to or from the same peer, so its number is assigned here,
  // in order; after that each message proceeds on a thread of its own.
  std::vector<std::thread> threads;
  std::exception_ptr failure;
  int running = 0;
  std::vector<Ref<Call>> previous(2 * size_t(size_));
  auto start = [&](Ref<Call> call) {
    int peer = call->plan.record.peer;
    bool sends = !call->plan.takes;
    uint64_t number = ++(sends ? sent_ : received_)[size_t(peer)];
    Ref<Call> before = std::exchange(previous[size_t(2 * peer + sends)], call);
    {
      std::lock_guard lock(mutex_);
      ++running;
    }
    threads.emplace_back([this, call, before, number, &failure, &running] {
      std::exception_ptr error;
      try {
        if (before) before->wait();
        message(*call, number);
        call->finish(nullptr);
      } catch (...) {
        error = std::current_exception();
        call->finish(error);
      }
      std::lock_guard lock(mutex_);
      if (error && !failure) failure = error;
      --running;
      changed_.notify_all();
    });
  };
  start(first);
  for (;;) {
    while (Ref<Call> call = next()) start(std::move(call));
    std::unique_lock lock(mutex_);
    if (running == 0) break;
    changed_.wait_for(lock, std::chrono::milliseconds(5));
  }
  for (std::thread& t : threads) t.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tessera::detail
