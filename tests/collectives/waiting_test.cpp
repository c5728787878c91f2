// On every backend, a rank that waits for long logs which rank it waits for.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <latch>
#include <thread>

#include "collectives/rendezvous.h"
#include "collectives/store/memory_store.h"
#include "tests/support/printed.h"

namespace tessera {
namespace {

// Captures what is written to stderr while it lives.
class StandardError {
 public:
  StandardError() { dup2(text_, STDERR_FILENO); }
  ~StandardError() {
    dup2(before_, STDERR_FILENO);
    close(before_), close(text_);
  }
  StandardError(const StandardError&) = delete;
  StandardError& operator=(const StandardError&) = delete;

  std::string text() const {
    char bytes[4096];
    std::string text;
    for (ssize_t n; (n = pread(text_, bytes, sizeof bytes, off_t(text.size()))) > 0;)
      text.append(bytes, size_t(n));
    return text;
  }
  /// Waits until it has `part`; false if that does not come within a minute.
  bool await(const std::string& part) const {
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    for (; std::chrono::steady_clock::now() < until; std::this_thread::sleep_for(Millis(5)))
      if (text().find(part) != std::string::npos) return true;
    return false;
  }

 private:
  const int before_ = dup(STDERR_FILENO), text_ = memfd_create("stderr", MFD_CLOEXEC);
};

TEST(Waiting, AfterAWhileItIsSaidForWhom) {
  for (bool joins_late : {true, false}) {
    auto store = std::make_shared<MemoryStore>();
    std::latch said(1);
    const StandardError errors;
    auto rank = [&](int r) {
      if (r == 1 && joins_late) said.wait();
      Ref<ProcessGroup> g = detail::join_by_store(
          detail::make_world("world", r, 2),
          {.backend = "shm",
           .store = store,
           .prefix = "pg/",
           .timeout = Millis(60'000),
           .join_timeout = Millis(600'000),
           .watchdog = std::make_shared<detail::Watchdog>(r, 2, store, "pg/", -1, Millis(300))});
      if (r == 1 && !joins_late) said.wait();
      g->barrier();
    };
    std::thread first(rank, 0), late(rank, 1);
    EXPECT_TRUE(errors.await(joins_late ? " s for rank 1; the deadline is 600 s"
                                        : " s for rank 1; the deadline is 60 s"))
        << errors.text();
    said.count_down();
    first.join(), late.join();
    const std::string text = errors.text();
    EXPECT_GE(number_after(": has waited ", text), 0.3) << text;
    EXPECT_NE(text.find(joins_late ? "init_process_group on world: has waited "
                                   : "barrier #1 on world (waiting_test.cpp:"),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace tessera
