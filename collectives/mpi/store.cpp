#include "collectives/mpi/store.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "collectives/mpi/library.h"
#include "collectives/store/tcp_server.h"
#include "collectives/store/tcp_store.h"
#include "core/base/log.h"
#include "core/base/silence.h"

namespace tessera::detail {
namespace {

// What rank 0 sends to the others: where the store is.
struct StoreAddress {
  int32_t port = 0;
  char key[124] = {};
};

class Meeting {
 public:
  Meeting(const JobEnvironment& job, Millis timeout) {
    Mpi& mpi = Mpi::get();
    TESSERA_CHECK(mpi.size() == job.world_size && mpi.rank() == job.rank,
                  "mpi: rank {} of {} by the environment, {} of {} by MPI; start the program with "
                  "one launcher",
                  job.rank, job.world_size, mpi.rank(), mpi.size());
    TESSERA_CHECK(job.local_world_size == job.world_size,
                  "mpi: {} of {} ranks are on this host; ranks on several hosts are not supported "
                  "yet, start them all on one",
                  job.local_world_size, job.world_size);
    if (job.rank == 0) {
      std::string key = make_store_key();
      server_ = std::make_unique<TcpStoreServer>("127.0.0.1", 0, key);
      address_.port = server_->port();
      std::memcpy(address_.key, key.data(), std::min(key.size(), sizeof address_.key - 1));
    }
    std::vector<Mpi::Request> requests;
    bool tells = job.rank == 0;
    for (int r = tells ? 1 : 0; r < (tells ? job.world_size : 1); ++r)
      mpi.begin(tells, &address_, sizeof address_, r, Mpi::kTag, requests);
    auto deadline = std::chrono::steady_clock::now() + timeout;
    Silence silence(timeout);
    while (!mpi.done(requests)) {
      if (silence.over())
        logging::warn("init_process_group: has waited {:.0f} s for {} under mpirun",
                      silence.waited(), tells ? "other ranks" : "rank 0");
      if (std::chrono::steady_clock::now() > deadline)
        throw CommError(fmt::format("init_process_group: {} within {:.3g} s; look at their output",
                                    tells ? "not all ranks called it" : "rank 0 did not call it",
                                    double(timeout.count()) / 1000),
                        "world", 0, tells ? std::vector<int>{} : std::vector<int>{0});
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  std::shared_ptr<Store> connect(Millis timeout) const {
    return std::make_shared<TcpStore>("127.0.0.1", address_.port, address_.key, timeout);
  }

 private:
  StoreAddress address_;
  std::unique_ptr<TcpStoreServer> server_;
};

}  // namespace

std::shared_ptr<Store> connect_mpi_store(const JobEnvironment& job, Millis timeout) {
  // The object is never destroyed: other ranks may need the store for as long as this process
  // lives.
  static const Meeting& meeting = *new Meeting(job, timeout);
  return std::make_shared<PrefixStore>(attempt_prefix(job.restart_count), meeting.connect(timeout));
}

}  // namespace tessera::detail
