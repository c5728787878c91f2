#include "collectives/gloo/transport.h"

#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <atomic>

#include "collectives/backend_name.h"
#include "collectives/gloo/connect.h"
#include "collectives/gloo/tcp_progress.h"

namespace tessera::detail {
namespace {

using Buffer = gloo::transport::UnboundBuffer;

// The watchdog keeps deadlines. A timeout of Gloo would name no rank, and close all connections.
constexpr Millis kNoLimit = std::chrono::hours(24 * 365);
// A message of a collective is identified by the collective's number and the step; a message
// between two ranks by its own number.
constexpr int kStepBits = 3;
constexpr uint64_t kMessage = uint64_t{1} << 62;
constexpr uint64_t kNever = uint64_t{1} << 63;  // the number of a message that is never sent

/// Gloo's text without the address, which is one of this process's own sockets (connect.cpp).
std::string reason(std::string text) {
  const size_t at = text.find(" [127.0.0.1]:");
  if (at == std::string::npos) return text;
  const size_t port = text.find(':', at) + 1, end = text.find_first_not_of("0123456789", port);
  return text.erase(at, std::min(end, text.size()) - at);
}

class GlooTransport final : public Transport {
 public:
  GlooTransport(const Membership& m, const GlooOptions& o)
      : GlooTransport(m.size, connect_gloo(m, o)) {}

  std::string_view name() const override { return kGloo; }
  void exchange(const Call& call, std::span<const Transfer> transfers, Slot slot,
                Watch& watch) override;
  void close() override { context_->closeConnections(); }

 private:
  GlooTransport(int size, GlooConnections connections)
      : context_(std::move(connections.context)),
        sockets_(std::move(connections.sockets)),
        lifelines_(size_t(size)) {}
  /// Why the connection to `peer` is lost; "": it is not. Called by the watch's thread.
  std::string lost(int peer);

  std::shared_ptr<gloo::rendezvous::Context> context_;
  const std::vector<int> sockets_;                  // of the context, by rank
  std::vector<std::unique_ptr<Buffer>> lifelines_;  // one for each peer
};

// When a connection ends, Gloo fails the operations that wait for it, but not always a message that
// it has moved in part. So each connection has a receive (a lifeline) that only its end completes.
// To test it without blocking, its wait is aborted before it begins.
std::string GlooTransport::lost(int peer) {
  try {
    std::unique_ptr<Buffer>& line = lifelines_[size_t(peer)];
    if (!line) {
      line = context_->createUnboundBuffer(nullptr, 0);
      line->recv(peer, kNever);
    }
    line->abortWaitRecv();
    line->waitRecv(nullptr, kNoLimit);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

void GlooTransport::exchange(const Call& call, std::span<const Transfer> transfers, Slot slot,
                             Watch& watch) {
  std::vector<std::unique_ptr<Buffer>> buffers;
  for (const Transfer& t : transfers)
    buffers.push_back(t.bytes ? context_->createUnboundBuffer(t.data, size_t(t.bytes)) : nullptr);
  const size_t none = transfers.size();
  std::atomic<size_t> awaited = none, is_lost = none;  // message waited for now; one to give up
  std::string why;
  auto end = [](Buffer& b) { b.abortWaitRecv(), b.abortWaitSend(); };
  Watch::Op op(
      watch, call,
      [&](const CommError&) {
        for (auto& b : buffers)
          if (b) end(*b);
      },
      [&] {
        const size_t i = awaited;
        if (i == none) return;
        if (i != is_lost) {
          why = lost(transfers[i].peer);
          if (why.empty()) return;
          is_lost = i;
        }
        end(*buffers[i]);
      },
      [&]() -> int64_t {
        // Before all ranks have made the call, what moves belongs to other calls.
        const size_t i = awaited;
        if (i == none || slot.step == Step::kHeaders) return -1;
        const TcpProgress p = tcp_progress(sockets_[size_t(transfers[i].peer)]);
        return transfers[i].sends ? p.acknowledged : p.received;
      });
  int peer = 0;
  auto for_each = [&](bool sends, auto act) {
    for (size_t i = 0; i < transfers.size(); ++i)
      if (transfers[i].sends == sends && buffers[i]) {
        peer = transfers[i].peer;
        awaited = i;
        op.awaits(peer, slot.step != Step::kHeaders);
        act(*buffers[i]);
      }
  };
  uint64_t key = (slot.p2p ? kMessage : 0) | slot.number << kStepBits | uint64_t(slot.step);
  auto wait = [&](auto once) {
    if (once()) return;
    if (is_lost != awaited) throw gloo::IoException("the wait was ended");
    // A peer may leave once it has sent everything, and what arrived before its end still counts.
    // Such a message is complete at once; any other is looked at by the next probe. A timeout
    // instead would close all connections before other ranks could be told why.
    if (!once()) throw gloo::IoException(why);
  };
  try {
    for_each(false, [&](Buffer& b) { b.recv(peer, key); });
    for_each(true, [&](Buffer& b) { b.send(peer, key); });
    for_each(false, [&](Buffer& b) { wait([&] { return b.waitRecv(nullptr, kNoLimit); }); });
    for_each(true, [&](Buffer& b) { wait([&] { return b.waitSend(nullptr, kNoLimit); }); });
  } catch (const std::exception& e) {
    watch.explain(call, peer, reason(e.what()));
  }
}

}  // namespace

std::unique_ptr<Transport> make_gloo_transport(const Membership& members,
                                               const GlooOptions& options) {
  return std::make_unique<GlooTransport>(members, options);
}

}  // namespace tessera::detail
