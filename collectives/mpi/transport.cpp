#include "collectives/mpi/transport.h"

#include <unistd.h>

#include <charconv>
#include <thread>

#include "collectives/backend_name.h"
#include "collectives/mpi/library.h"
#include "collectives/mpi/store.h"
#include "collectives/shm/cpu.h"

namespace tessera::detail {
namespace {

constexpr int kSpins = 200;  // rounds of polling before a wait yields its core between them
constexpr int kYields = 2000;
constexpr auto kNap = std::chrono::microseconds(50);
// A tag tells groups and steps apart, and collectives from messages. Messages that agree in all of
// these keep their order, which MPI guarantees.
constexpr int kStepBits = 2, kGroups = 1 << 28;

class MpiTransport final : public Transport {
 public:
  MpiTransport(const Membership& m, const MpiOptions& o) : name_(m.group) {
    // Tags are shared by MPI's whole world, so they are assigned in its store, whatever the group's
    // store is.
    std::shared_ptr<Store> all = connect_mpi_store(job_environment(), o.join_timeout);
    Store& store = *o.store;
    std::vector<std::string> keys;
    for (int r = 0; r < m.size; ++r) keys.push_back(fmt::format("{}mpi/{}", o.prefix, r));
    std::string own = fmt::format("{}", mpi_.rank());
    if (m.rank == 0) own += fmt::format(" {}", all->add("mpi/groups", 1));
    store.set(keys[size_t(m.rank)], own);
    for (const std::string& text : store.multi_get(keys, o.join_timeout)) {
      int rank = 0;
      auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
      world_ranks_.push_back(rank);
      if (world_ranks_.size() == 1 && *end == ' ')
        std::from_chars(end + 1, text.data() + text.size(), group_);
    }
    TESSERA_CHECK(group_ > 0 && group_ < kGroups, "mpi: no tags are left for group {} ({} made)",
                  m.group, group_);
  }

  std::string_view name() const override { return kMpi; }

  void exchange(const Call& call, std::span<const Transfer> transfers, Slot slot,
                Watch& watch) override {
    int tag = group_ << (kStepBits + 1) | int(slot.p2p) << kStepBits | int(slot.step);
    std::atomic<bool> ended{false};
    Watch::Op op(watch, call, [&](const CommError&) { ended = true; });
    try {
      std::vector<Mpi::Request> requests;
      for (bool sends : {false, true})
        for (const Transfer& t : transfers)
          if (t.sends == sends)
            mpi_.begin(sends, t.data, t.bytes, world_ranks_[size_t(t.peer)], tag, requests);
      for (int i = 0; !mpi_.done(requests); ++i) {
        if (ended) end_process(explained(call, transfers, watch, "the wait was ended"));
        if (i < kSpins) {
          relax();
        } else if (i < kYields) {
          std::this_thread::yield();
        } else {
          std::this_thread::sleep_for(kNap);
        }
      }
    } catch (const Error& e) {  // MPI's own error; transfers cannot be taken back either
      end_process(explained(call, transfers, watch, e.what()));
    }
  }

  void close() override {}  // peers find the failure in the store

 private:
  static std::string explained(const Call& call, std::span<const Transfer> transfers, Watch& watch,
                               const std::string& why) {
    try {
      watch.explain(call, transfers[0].peer, why);
    } catch (const Error& e) {
      return e.what();
    }
  }
  [[noreturn]] static void end_process(const std::string& text) {
    std::string line = fmt::format("mpi: {}\n", text);
    [[maybe_unused]] auto written = write(STDERR_FILENO, line.data(), line.size());
    _exit(1);
  }

  const std::string name_;  // of the group
  Mpi& mpi_ = Mpi::get();
  std::vector<int> world_ranks_;  // of the members, in MPI's world
  int group_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(const Membership& members,
                                              const MpiOptions& options) {
  return std::make_unique<MpiTransport>(members, options);
}

}  // namespace tessera::detail
