// Profiles: nested spans and their own time, ops with operands, one profile for each thread, and a
// trace that is JSON of the form that viewers read.
#include "core/base/profile.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/autograd/autograd.h"
#include "core/base/error.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"

namespace tessera {
namespace {

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

TEST(Profile, OwnTimeIsWithoutWhatIsInside) {
  Profiler profiler;
  {
    ProfileSpan outer("outer");
    sleep_ms(4);
    {
      ProfileSpan inner("inner");
      sleep_ms(20);
    }
  }
  std::vector<ProfileEvent> events = profiler.profile()->events();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].name, "inner");
  EXPECT_EQ(events[1].name, "outer");
  EXPECT_GE(events[0].own_us, 20e3);
  EXPECT_EQ(events[0].own_us, events[0].took_us);
  EXPECT_DOUBLE_EQ(events[1].own_us, events[1].took_us - events[0].took_us);
  EXPECT_GE(events[1].own_us, 4e3);
  EXPECT_GE(events[0].begin_us, events[1].begin_us + 4e3);
}

TEST(Profile, OpsOfForwardAndBackwardInTheirModules) {
  auto model = nn::linear(8, 4);
  Tensor x = rand({2, 8});
  Profiler profiler;
  sum((*model)(x)).backward();
  std::map<std::string, std::string> details;
  int modules = 0;
  for (const ProfileEvent& e : profiler.profile()->events()) {
    details[e.name] += e.detail + "\n";
    modules += e.category == "module";
  }
  EXPECT_GE(modules, 1);
  EXPECT_NE(details["contract"].find("forward(f32[2, 8], f32[4, 8])"), std::string::npos)
      << details["contract"];
  EXPECT_NE(details["contract"].find("backward("), std::string::npos) << details["contract"];
}

TEST(Profile, ThreadsAreRecordedApart) {
  Profiler profiler;
  std::thread([] {
    EXPECT_EQ(current_profile(), nullptr);
    Profiler own;
    exp(ones({4}));
    EXPECT_EQ(own.profile()->events().size(), 2u);  // full, exp
  }).join();
  EXPECT_TRUE(profiler.profile()->events().empty());
  EXPECT_THROW(Profiler(), UserError);
  EXPECT_EQ(current_profile(), profiler.profile().get());
}

TEST(Profile, NothingIsRecordedWithoutAProfiler) {
  ProfileSpan span("x");
  EXPECT_FALSE(span);
  Ref<Profile> profile;
  {
    Profiler profiler;
    profile = profiler.profile();
  }
  exp(ones({4}));
  EXPECT_TRUE(profile->events().empty());
}

TEST(Profile, WhatIsAddedLaterIsAskedOnce) {
  Profiler profiler;
  int asked = 0;
  profiler.profile()->add_later([&] {
    ++asked;
    return ProfileEvent{.name = "late", .category = "device", .lane = "cuda:0"};
  });
  { ProfileSpan span("early"); }
  EXPECT_EQ(asked, 0);
  for (int i = 0; i < 2; ++i) {
    const std::vector<ProfileEvent> events = profiler.profile()->events();
    ASSERT_EQ(events.size(), 2u);
    EXPECT_EQ(events[0].name, "early");
    EXPECT_EQ(events[1].lane, "cuda:0");
  }
  EXPECT_EQ(asked, 1);
}

TEST(Profile, MemoryIsACounter) {
  const std::vector<ProfileEvent> events = {
      {.name = "add", .category = "device", .lane = "cuda:0", .begin_us = 5, .took_us = 2},
      {.name = "memory of cuda:0",
       .category = "memory",
       .lane = "cuda:0",
       .begin_us = 7,
       .bytes = 512}};
  const std::string trace = trace_events(events, 3);
  auto json = nlohmann::json::parse(chrome_trace({&trace, 1}));
  int counters = 0;
  for (const auto& e : json["traceEvents"]) {
    if (e["ph"] != "C") continue;
    ++counters;
    EXPECT_EQ(e["args"]["bytes"], 512);
    EXPECT_EQ(e["pid"], 3);
  }
  EXPECT_EQ(counters, 1);
  const std::string table = profile_table(events);
  EXPECT_EQ(table.find("memory"), std::string::npos) << table;
  EXPECT_NE(table.find("add                                      device"), std::string::npos)
      << table;
}

TEST(Profile, TraceOfTwoRanks) {
  std::vector<ProfileEvent> events = {
      {.name = "ex\"p\n", .category = "op", .begin_us = 10, .took_us = 5, .own_us = 5},
      {.name = "all_reduce",
       .category = "collective",
       .lane = "world",
       .begin_us = 12,
       .took_us = 8}};
  std::vector<std::string> ranks = {trace_events(events, 0), trace_events(events, 1)};
  auto json = nlohmann::json::parse(chrome_trace(ranks));
  std::map<std::pair<int, int>, std::string> lanes;
  for (const auto& e : json["traceEvents"])
    if (e["name"] == "thread_name") lanes[{e["pid"], e["tid"]}] = e["args"]["name"];
  EXPECT_EQ(lanes.size(), 4u);
  int spans = 0;
  for (const auto& e : json["traceEvents"]) {
    if (e["ph"] != "X") continue;
    ++spans;
    EXPECT_EQ((lanes[{e["pid"], e["tid"]}]), e["cat"] == "op" ? "program" : "world");
  }
  EXPECT_EQ(spans, 4);
}

TEST(Profile, TableSumsByName) {
  std::vector<ProfileEvent> events = {
      {.name = "add", .category = "op", .begin_us = 0, .took_us = 1000, .own_us = 1000},
      {.name = "exp", .category = "op", .begin_us = 1000, .took_us = 3000, .own_us = 2500},
      {.name = "add", .category = "op", .begin_us = 4000, .took_us = 6000, .own_us = 6000},
      {.name = "step", .category = "span", .begin_us = 0, .took_us = 10000, .own_us = 0}};
  std::string table = profile_table(events);
  size_t add = table.find("\nadd "), exp = table.find("\nexp ");
  ASSERT_NE(add, std::string::npos) << table;
  EXPECT_LT(add, exp);
  EXPECT_NE(table.find("7.000   70.0%    3500.00"), std::string::npos) << table;
  EXPECT_EQ(table.find("step"), std::string::npos) << table;
  EXPECT_EQ(profile_table(events, 1).find("exp"), std::string::npos);
}

TEST(Profile, CommunicationThatIsHidden) {
  std::vector<ProfileEvent> events = {
      {.name = "all_reduce", .category = "collective", .lane = "world", .took_us = 100},
      {.name = "wait", .category = "wait", .took_us = 20, .own_us = 15},
      {.name = "wait", .category = "wait", .took_us = 10, .own_us = 10},
      {.name = "checkpoint", .category = "wait", .took_us = 50, .own_us = 50}};
  EXPECT_DOUBLE_EQ(communication_of(events).hidden(), 0.75);
  EXPECT_EQ(communication_of({}).hidden(), 1);
}

}  // namespace
}  // namespace tessera
