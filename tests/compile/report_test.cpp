// The report of a run and the profile of its thread: every kernel is there once and in order, and
// communication beside computation counts as hidden.
#include "compile/run/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>

#include "collectives/decorators/decorator.h"
#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/record/trace.h"
#include "core/base/profile.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "tests/compile/bits.h"
#include "tests/support/temp_folder.h"

namespace tessera::compiler {
namespace {

TEST(Report, EveryKernelInOrder) {
  Tensor x = rand({64, 64});
  Trace trace({.inputs = {x}});
  Executor executor(trace.finish({sum(exp(x) * 2.0, {0})}));
  Tensors expected = executor.run({&x, 1});
  Profiler profiler;
  test::expect_same_bits(executor.run({&x, 1})[0], expected[0], "recorded");
  std::string names;
  double last = 0;
  for (const ProfileEvent& e : profiler.profile()->events()) {
    if (e.category != "kernel") continue;
    names += e.name + " ";
    EXPECT_GE(e.begin_us, last);
    EXPECT_NE(e.detail.find(" = " + e.name + "("), std::string::npos) << e.detail;
    last = e.begin_us + e.took_us;
  }
  EXPECT_EQ(names, "exp full mul sum ");
  EXPECT_EQ(executor.traffic().kernels, 4);
  constexpr size_t kSquare = 64 * 64 * 4;
  EXPECT_EQ(executor.traffic().kernel_bytes, (2 + 2 + 1) * kSquare + 4 + 4 + 64 * 4);
  EXPECT_EQ(executor.traffic().collectives, 0);
  expect_contains(report(executor), "kernels        4, 0.08 MB read and written");
}

// An event that takes effect when a thread waits for it: attached to what a collective writes, that
// is when the collective is executed.
class Begun final : public Event {
 public:
  bool done() const override { return begun_; }
  void wait() override {
    begun_ = true;
    begun_.notify_all();
  }
  void await() const { begun_.wait(false); }

 private:
  std::atomic<bool> begun_{false};
};

// A group whose gathers are in progress when submit returns, however busy the machine is. It then
// calls `under_way` on the thread that gathers.
class PromptGroup final : public Decorator {
 public:
  PromptGroup(Ref<ProcessGroup> inner, std::function<void()> under_way)
      : Decorator(std::move(inner)), under_way_(std::move(under_way)) {}
  Ref<Work> submit(const Collective& c) override {
    if (c.kind != CollKind::kAllGather || !c.async) return inner_->submit(c);
    auto begun = make_ref<Begun>();
    c.out[0].storage()->add_reader(begun);
    Ref<Work> work = inner_->submit(c);
    begun->await();
    under_way_();
    return work;
  }

 protected:
  Ref<ProcessGroup> decorate(Ref<ProcessGroup> group) override {
    return make_ref<PromptGroup>(std::move(group), under_way_);
  }

 private:
  const std::function<void()> under_way_;
};

// Tells where a rank is: others wait for the id of its thread, which is set when it computes while
// its gather is in progress, or kEnded if it ends before that.
class Whereabouts {
 public:
  static constexpr pid_t kEnded = -1;

  void tell() { set(gettid()); }
  /// Blocks until told.
  pid_t thread() const {
    thread_.wait(0);
    return thread_;
  }

  /// Lives as long as the rank.
  class Rank {
   public:
    explicit Rank(Whereabouts& at) : at_(at) {}
    ~Rank() { at_.set(kEnded); }

   private:
    Whereabouts& at_;
  };

 private:
  void set(pid_t thread) {
    pid_t unset = 0;
    thread_.compare_exchange_strong(unset, thread);
    thread_.notify_all();
  }
  std::atomic<pid_t> thread_{0};
};

constexpr int kAsleepMs = 20;

// Returns when a thread of this process has slept for kAsleepMs without interruption, or has ended.
// A busy machine may keep a thread from running for longer than that, so a clock alone does not
// tell.
void await_sleep(pid_t thread) {
  // How often it went to sleep so far; "" where it is awake, nothing where it is no more.
  auto blocked = [&]() -> std::optional<std::string> {
    std::ifstream status(fmt::format("/proc/self/task/{}/status", thread));
    std::string line, count;
    bool asleep = false;
    while (std::getline(status, line)) {
      asleep |= line.starts_with("State:\tS");
      if (line.starts_with("voluntary_ctxt_switches")) count = line;
    }
    if (count.empty()) return std::nullopt;
    return asleep ? count : "";
  };
  for (std::optional<std::string> before = "";;) {
    const std::optional<std::string> now = blocked();
    if (!now || (!now->empty() && now == before)) return;
    before = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(kAsleepMs));
  }
}

TEST(Report, CommunicationBesideComputation) {
  Whereabouts first;
  run_ranks(2, [&](ProcessGroup& g) {
    std::optional<Whereabouts::Rank> alive;
    if (g.rank() == 0) alive.emplace(first);
    auto group = make_ref<PromptGroup>(Ref<ProcessGroup>(&g), [&] {
      if (g.rank() == 0 && current_profile()) first.tell();  // tracing gathers too, before the run
    });
    Tensor x = rand({256, 256});
    Trace trace({.inputs = {x}});
    Tensor all = all_gather(x * 2.0, group), y = x;
    for (int i = 0; i < 100; ++i) y = gelu(y);
    Executor executor(trace.finish({sum(all), y, all_reduce(y, group)}));
    TESSERA_CHECK(executor.traffic().collectives == 2, "{}", executor.traffic().collectives);
    TESSERA_CHECK(executor.traffic().collective_bytes == 3 * 256 * 256 * 4, "{}",
                  executor.traffic().collective_bytes);
    // Rank 1 comes late: rank 0's gather is under way while it computes, and then it waits.
    if (g.rank() == 1) await_sleep(first.thread());
    std::vector<ProfileEvent> events;
    {
      Profiler profiler;
      for (const Tensor& t : executor.run({&x, 1})) t.storage()->wait_ready();
      events = profiler.profile()->events();
    }
    if (g.rank() == 1) return;
    auto gather = std::ranges::find_if(
        events, [&](auto& e) { return e.lane == g.name() && e.name == "all_gather"; });
    TESSERA_CHECK(gather != events.end() && gather->category == "collective", "no gather");
    double kernels = 0;
    int beside = 0;
    for (const ProfileEvent& e : events)
      if (e.category == "kernel" && e.begin_us >= gather->begin_us &&
          e.begin_us + e.took_us <= gather->begin_us + gather->took_us)
        kernels += e.took_us, ++beside;
    TESSERA_CHECK(beside >= 100, "{} kernels ran beside the gather", beside);
    TESSERA_CHECK(gather->took_us >= kernels + 1e3 * kAsleepMs, "the gather took {} us, {} kernels",
                  gather->took_us, kernels);
    CommunicationTime c = communication_of(events);
    TESSERA_CHECK(c.total_us >= gather->took_us && c.exposed_us >= 1e3 * kAsleepMs,
                  "{} us of communication, {} exposed", c.total_us, c.exposed_us);
    TESSERA_CHECK(c.hidden() < 1, "{} hidden", c.hidden());
  });
}

}  // namespace
}  // namespace tessera::compiler
