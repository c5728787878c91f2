#include "collectives/gloo/carrier.h"

#include <gloo/transport/unbound_buffer.h>

#include "collectives/backend_name.h"
#include "collectives/gloo/connect.h"

namespace tessera::detail {
namespace {

using Buffer = gloo::transport::UnboundBuffer;

// Gloo's own timeout only backs up the deadlines that Watch keeps, because it names nobody.
constexpr Millis kGrace = std::chrono::seconds(10);
// Messages of a collective are told apart by its number and step, those between two ranks by
// theirs.
constexpr int kStepBits = 3;
constexpr uint64_t kMessage = uint64_t{1} << 62;

class GlooCarrier final : public Carrier {
 public:
  GlooCarrier(const Membership& m, const GlooOptions& o) : context_(connect_gloo(m, o)) {}

  std::string_view name() const override { return kGloo; }
  void exchange(const Call& call, std::span<const Transfer> transfers, Slot slot,
                Watch& watch) override;
  void close() override { context_->closeConnections(); }

 private:
  std::shared_ptr<gloo::rendezvous::Context> context_;
};

void GlooCarrier::exchange(const Call& call, std::span<const Transfer> transfers, Slot slot,
                           Watch& watch) {
  std::vector<std::unique_ptr<Buffer>> buffers;
  for (const Transfer& t : transfers)
    buffers.push_back(t.bytes ? context_->createUnboundBuffer(t.data, size_t(t.bytes)) : nullptr);
  auto op = watch.begin(call, [&buffers] {
    for (auto& b : buffers) {
      if (!b) continue;
      b->abortWaitRecv();
      b->abortWaitSend();
    }
  });
  struct Ender {
    Watch& watch;
    Watch::Handle op;
    ~Ender() { watch.end(op); }
  } ender{watch, op};
  int peer = 0;
  auto for_each = [&](bool sends, auto act) {
    for (size_t i = 0; i < transfers.size(); ++i)
      if (transfers[i].sends == sends && buffers[i]) {
        peer = transfers[i].peer;
        act(*buffers[i]);
      }
  };
  uint64_t key = (slot.p2p ? kMessage : 0) | slot.number << kStepBits | uint64_t(slot.step);
  Millis limit = call.timeout + kGrace;
  auto waited = [&](bool done) {
    if (!done) throw gloo::IoException("the wait was ended");
  };
  try {
    for_each(false, [&](Buffer& b) { b.recv(peer, key); });
    for_each(true, [&](Buffer& b) { b.send(peer, key); });
    for_each(false, [&](Buffer& b) { waited(b.waitRecv(nullptr, limit)); });
    for_each(true, [&](Buffer& b) { waited(b.waitSend(nullptr, limit)); });
  } catch (const std::exception& e) {
    watch.explain(call, peer, e.what());
  }
}

}  // namespace

std::unique_ptr<Carrier> make_gloo_carrier(const Membership& members, const GlooOptions& options) {
  return std::make_unique<GlooCarrier>(members, options);
}

}  // namespace tessera::detail
