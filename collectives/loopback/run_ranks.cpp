#include "collectives/loopback/run_ranks.h"

#include <atomic>
#include <thread>
#include <vector>

#include "collectives/backend_name.h"
#include "collectives/rendezvous.h"
#include "collectives/store/memory_store.h"
#include "core/base/parallel.h"

namespace tessera {
namespace {

/// Keeps the error of the first rank that failed.
class FirstError {
 public:
  void offer(std::exception_ptr e) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(e);
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

std::string text_of(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an unknown exception";
  }
}

}  // namespace

void run_ranks(int n, FunctionRef<void(ProcessGroup&)> body, const RunOptions& options) {
  TESSERA_CHECK(n >= 1, "run_ranks: {} ranks; at least 1", n);
  detail::check_backend_name("run_ranks", options.backend, detail::RanksAre::kThreads);
  Millis timeout = options.timeout.count() > 0 ? options.timeout : detail::default_timeout();
  auto hub = std::make_shared<detail::Hub>();
  auto store = std::make_shared<MemoryStore>();
  FirstError first;
  auto run = [&](int rank) {
    set_num_threads(1);
    Ref<ProcessGroup> group;
    try {
      auto members = detail::make_world("world", rank, n);
      if (options.backend == detail::kGloo) {
        group = detail::join_by_store(std::move(members), {.backend = options.backend,
                                                           .store = store,
                                                           .prefix = "pg/",
                                                           .timeout = timeout,
                                                           .join_timeout = timeout});
      } else {
        group = detail::join_threads(
            std::move(members), hub, timeout,
            {.read_in_place = options.read_in_place, .way = options.way, .watchdog = nullptr});
      }
      set_world(group);
      body(*group);
      group->flush();
    } catch (...) {
      first.offer(std::current_exception());
      if (group) group->abort(text_of(std::current_exception()));
    }
    set_world(nullptr);
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) threads.emplace_back(run, r);
  for (std::thread& t : threads) t.join();
  first.rethrow();
}

}  // namespace tessera
