// What a run reports and what the profile of its thread says: every kernel is there once and in
// order, and communication beside computation counts as hidden.
#include "compile/report.h"

#include <gtest/gtest.h>

#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/trace.h"
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

TEST(Report, CommunicationBesideComputation) {
  run_ranks(2, [](ProcessGroup& g) {
    Ref<ProcessGroup> group(&g);
    Tensor x = rand({256, 256});
    Trace trace({.inputs = {x}});
    Tensor all = all_gather(x * 2.0, group), y = x;
    for (int i = 0; i < 100; ++i) y = gelu(y);
    Executor executor(trace.finish({sum(all), y, all_reduce(y, group)}));
    TESSERA_CHECK(executor.traffic().collectives == 2, "{}", executor.traffic().collectives);
    TESSERA_CHECK(executor.traffic().collective_bytes == 3 * 256 * 256 * 4, "{}",
                  executor.traffic().collective_bytes);
    executor.run({&x, 1});
    g.barrier();
    // Rank 1 comes late: rank 0's gather is under way while it computes, and then it waits.
    if (g.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
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
    double kernels = 0;  // while the gather is under way
    for (const ProfileEvent& e : events)
      if (e.category == "kernel" && e.begin_us >= gather->begin_us &&
          e.begin_us + e.took_us <= gather->begin_us + gather->took_us)
        kernels += e.took_us;
    TESSERA_CHECK(kernels > 0, "nothing was computed beside the gather");
    CommunicationTime c = communication_of(events);
    TESSERA_CHECK(c.total_us > 100e3 && c.exposed_us > 20e3, "{} us of communication, {} exposed",
                  c.total_us, c.exposed_us);
    TESSERA_CHECK(c.hidden() > 0 && c.hidden() < 0.9, "{} hidden", c.hidden());
  });
}

}  // namespace
}  // namespace tessera::compiler
