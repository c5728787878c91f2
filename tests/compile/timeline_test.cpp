// Recorded runs: every call is there once and in order, communication beside computation shows and
// counts as hidden, and the trace is JSON of the form that viewers read.
#include "compile/timeline.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/trace.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "tests/compile/bits.h"
#include "tests/support/temp_folder.h"

namespace tessera::compiler {
namespace {

TEST(Timeline, EveryCallInOrder) {
  Tensor x = rand({64, 64});
  Trace trace({.inputs = {x}});
  Executor executor(trace.finish({sum(exp(x) * 2.0, {0})}));
  std::vector<CallRecord> calls;
  test::expect_same_bits(executor.run_recorded({&x, 1}, calls)[0], executor.run({&x, 1})[0],
                         "recorded");
  std::string names;
  double last = 0;
  for (const CallRecord& c : calls) {
    names += c.name + " ";
    EXPECT_GE(c.begin_us, last);
    EXPECT_GE(c.end_us, c.begin_us);
    last = c.end_us;
  }
  EXPECT_EQ(names, "exp full mul sum ");
  EXPECT_EQ(executor.traffic().kernels, 4);
  constexpr size_t kSquare = 64 * 64 * 4;
  EXPECT_EQ(executor.traffic().kernel_bytes, (2 + 2 + 1) * kSquare + 4 + 4 + 64 * 4);
  EXPECT_EQ(executor.traffic().collectives, 0);
  EXPECT_EQ(overlap_of(calls).hidden(), 1);
  expect_contains(report(executor, calls), "kernels        4, 0.08 MB read and written");
}

TEST(Timeline, CommunicationBesideComputation) {
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
    std::vector<CallRecord> calls;
    Tensors out = executor.run_recorded({&x, 1}, calls);
    TESSERA_CHECK(!out[2].storage()->ready() || out[2].storage()->ready()->done(), "still pending");
    if (g.rank() == 1) return;
    const CallRecord* gather = nullptr;
    double kernels = 0;  // while the gather is under way
    for (const CallRecord& c : calls)
      if (c.lane == g.name() && c.name == "all_gather") gather = &c;
    TESSERA_CHECK(gather, "no gather in the lane of {}", g.name());
    for (const CallRecord& c : calls)
      if (c.lane.empty() && c.begin_us >= gather->begin_us && c.end_us <= gather->end_us)
        kernels += c.end_us - c.begin_us;
    TESSERA_CHECK(kernels > 0, "nothing was computed beside the gather");
    Overlap o = overlap_of(calls);
    TESSERA_CHECK(o.collective_us > 100e3 && o.exposed_us > 20e3,
                  "{} us of communication, {} exposed", o.collective_us, o.exposed_us);
    TESSERA_CHECK(o.hidden() > 0 && o.hidden() < 0.9, "{} hidden", o.hidden());
    TESSERA_CHECK(report(executor, calls).find("% hidden") != std::string::npos, "no share");

    auto json = nlohmann::json::parse(chrome_trace(executor.graph(), calls, 3));
    std::map<int, std::string> lanes;
    int collectives = 0, waits = 0;
    for (const auto& e : json["traceEvents"]) {
      TESSERA_CHECK(e["pid"] == 3, "another process");
      if (e["ph"] == "M") lanes[e["tid"]] = e["args"]["name"];
    }
    for (const auto& e : json["traceEvents"]) {
      if (e["ph"] != "X") continue;
      std::string category = e["cat"];
      collectives += category == "collective";
      waits += category == "wait";
      TESSERA_CHECK(lanes.contains(e["tid"]) && e["dur"] >= 0, "{}", e.dump());
      TESSERA_CHECK((lanes[e["tid"]] == "kernels") == (category != "collective"), "{}", e.dump());
    }
    TESSERA_CHECK(lanes.size() == 2 && collectives == 2 && waits >= 1, "{} lanes, {} collectives",
                  lanes.size(), collectives);
  });
}

}  // namespace
}  // namespace tessera::compiler
