// Statements about streams, events and host functions.
#include "tests/vgpu/conformance/fixture.h"

namespace vgpu_test {
namespace {

class Streams : public OnDevice {};
class Events : public OnDevice {};

TEST_F(Streams, AnEmptyOneIsDone) {
  EXPECT_EQ(cuda().stream_query(stream), Result::kSuccess);
  EXPECT_EQ(cuda().stream_synchronize(stream), Result::kSuccess);
}
TEST_F(Streams, OneWithWorkIsNotReady) {
  Gate gate(stream);
  EXPECT_EQ(cuda().stream_query(stream), Result::kNotReady);
  gate.open();
  EXPECT_EQ(cuda().stream_synchronize(stream), Result::kSuccess);
  EXPECT_EQ(cuda().stream_query(stream), Result::kSuccess);
}
TEST_F(Streams, WorkGoesOnWhileTheHostDoesSomethingElse) {
  std::atomic<bool> ran = false;
  check(cuda().launch_host_function(
            stream, [](void* p) { *static_cast<std::atomic<bool>*>(p) = true; }, &ran),
        "host function");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!ran && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  EXPECT_TRUE(ran);
}
TEST_F(Streams, OpsOfOneAreInOrder) {
  const DevicePtr p = allocate(4000);
  check(cuda().fill_32(p, 1, 1000, stream), "fill");
  run(common()["add"], 8, 128, 0, stream, p, 1000, 41);
  EXPECT_EQ(download<int>(p, 1000, stream), std::vector<int>(1000, 42));
}
TEST_F(Streams, HostFunctionsAreInOrder) {
  const DevicePtr p = allocate(4);
  void* pinned;
  check(cuda().host_allocate(&pinned, 4096, kHostAllocPortable), "pinned");
  check(cuda().fill_32(p, 5, 1, stream), "fill");
  check(cuda().copy_to_host(pinned, p, 4, stream), "copy");
  int done = 0;
  check(cuda().launch_host_function(
            stream, [](void* d) { *static_cast<int*>(d) += 1; }, &done),
        "host");
  check(cuda().launch_host_function(
            stream, [](void* d) { *static_cast<int*>(d) *= 10; }, &done),
        "host");
  EXPECT_EQ(cuda().stream_synchronize(stream), Result::kSuccess);
  EXPECT_EQ(done, 10);
  EXPECT_EQ(*static_cast<int*>(pinned), 5);
  check(cuda().host_free(pinned), "free");
}
TEST_F(Streams, HostFunctionsCallNothing) {
  Result result = Result::kSuccess;
  check(cuda().launch_host_function(
            stream,
            [](void* r) {
              DevicePtr p;
              *static_cast<Result*>(r) = cuda().memory_allocate(&p, 256);
            },
            &result),
        "host");
  check(cuda().stream_synchronize(stream), "wait");
  EXPECT_EQ(result, Result::kNotPermitted);
}
TEST_F(Streams, AStreamIsDestroyedWithItsWorkGoingOn) {
  const StreamHandle other = new_stream();
  const EventHandle event = new_event();
  const DevicePtr p = allocate(4);
  check(cuda().fill_32(p, 8, 1, other), "fill");
  check(cuda().event_record(event, other), "record");
  EXPECT_EQ(cuda().stream_destroy(other), Result::kSuccess);
  check(cuda().stream_wait_event(stream, event, 0), "wait");
  EXPECT_EQ(download<int>(p, 1, stream), std::vector<int>{8});
}
TEST_F(Streams, SynchronizingTheContextWaitsForAll) {
  const StreamHandle other = new_stream();
  int done = 0;
  check(cuda().launch_host_function(
            other, [](void* d) { *static_cast<int*>(d) = 1; }, &done),
        "host");
  EXPECT_EQ(cuda().synchronize(), Result::kSuccess);
  EXPECT_EQ(done, 1);
  check(cuda().stream_destroy(other), "destroy");
}

TEST_F(Events, ThatWereNeverRecordedAreDone) {
  const EventHandle event = new_event();
  EXPECT_EQ(cuda().event_query(event), Result::kSuccess);
  EXPECT_EQ(cuda().event_synchronize(event), Result::kSuccess);
  EXPECT_EQ(cuda().stream_wait_event(stream, event, 0), Result::kSuccess);
  EXPECT_EQ(cuda().stream_query(stream), Result::kSuccess);
  EXPECT_EQ(cuda().event_destroy(event), Result::kSuccess);
}
TEST_F(Events, OrderStreams) {
  const StreamHandle other = new_stream();
  const EventHandle made = new_event(), used = new_event();
  const DevicePtr p = allocate(4000), q = allocate(4000);
  for (int round = 0; round < 5; ++round) {
    check(cuda().fill_32(p, static_cast<unsigned>(round), 1000, stream), "fill");
    check(cuda().event_record(made, stream), "record");
    check(cuda().stream_wait_event(other, made, 0), "wait");
    run(common()["copy"], 8, 128, 0, other, p, q, 1000);
    check(cuda().event_record(used, other), "record");
    check(cuda().stream_wait_event(stream, used, 0), "wait");
    check(cuda().fill_32(p, 99, 1000, stream), "fill");
    EXPECT_EQ(download<int>(q, 1000, stream), std::vector<int>(1000, round));
  }
  check(cuda().stream_synchronize(other), "wait");
  check(cuda().stream_destroy(other), "destroy");
}
TEST_F(Events, AWaitMeansWhatWasRecordedThen) {
  const StreamHandle other = new_stream();
  const EventHandle event = new_event();
  check(cuda().event_record(event, other), "record");
  check(cuda().stream_wait_event(stream, event, 0), "wait");
  Gate gate(other);
  check(cuda().event_record(event, other), "record");
  EXPECT_EQ(cuda().stream_synchronize(stream), Result::kSuccess);  // not for the gate
  EXPECT_EQ(cuda().event_query(event), Result::kNotReady);
  gate.open();
  EXPECT_EQ(cuda().event_synchronize(event), Result::kSuccess);
  check(cuda().stream_destroy(other), "destroy");
}
TEST_F(Events, MayBeDestroyedWhileTheyAreWaitedFor) {
  const StreamHandle other = new_stream();
  Gate gate(other);
  const EventHandle event = new_event();
  check(cuda().event_record(event, other), "record");
  check(cuda().stream_wait_event(stream, event, 0), "wait");
  EXPECT_EQ(cuda().event_destroy(event), Result::kSuccess);
  EXPECT_EQ(cuda().stream_query(stream), Result::kNotReady);
  gate.open();
  EXPECT_EQ(cuda().stream_synchronize(stream), Result::kSuccess);
  check(cuda().stream_destroy(other), "destroy");
}
TEST_F(Events, Time) {
  const EventHandle from = new_event(kEventDefault), to = new_event(kEventDefault);
  const DevicePtr p = allocate(4 << 20);
  check(cuda().event_record(from, stream), "record");
  check(cuda().fill_8(p, 0, 4 << 20, stream), "fill");
  Gate gate(stream);
  check(cuda().event_record(to, stream), "record");
  float ms = -1;
  EXPECT_EQ(cuda().event_elapsed(&ms, from, to), Result::kNotReady);
  gate.open();
  check(cuda().event_synchronize(to), "wait");
  EXPECT_EQ(cuda().event_elapsed(&ms, from, to), Result::kSuccess);
  EXPECT_GT(ms, 0);
  EXPECT_LT(ms, 10000);
}
TEST_F(Events, WithoutTimeHaveNone) {
  const EventHandle from = new_event(), to = new_event();
  check(cuda().event_record(from, stream), "record");
  check(cuda().event_record(to, stream), "record");
  check(cuda().event_synchronize(to), "wait");
  float ms;
  EXPECT_EQ(cuda().event_elapsed(&ms, from, to), Result::kInvalidHandle);
}
TEST_F(Events, NotRecordedHaveNoTime) {
  const EventHandle from = new_event(kEventDefault), to = new_event(kEventDefault);
  float ms;
  EXPECT_EQ(cuda().event_elapsed(&ms, from, to), Result::kInvalidHandle);
}

// ---- two devices ----

class TwoDevices : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (device_count() < 2) GTEST_SKIP() << "one device";
  }
  void TearDown() override {
    check(cuda().set_current(context_of(0)), "current");
    OnDevice::TearDown();
  }
};

TEST_F(TwoDevices, CopiesAndEventsGoBetween) {
  const DevicePtr p = upload(std::vector<int>(100, 6), stream);
  const EventHandle event = new_event();
  check(cuda().event_record(event, stream), "record");
  check(cuda().set_current(context_of(1)), "current");
  const StreamHandle other = new_stream();
  const DevicePtr q = allocate(400);
  EXPECT_EQ(cuda().stream_wait_event(other, event, 0), Result::kSuccess);
  EXPECT_EQ(cuda().copy_to_peer(q, context_of(1), p, context_of(0), 400, other), Result::kSuccess);
  EXPECT_EQ(download<int>(q, 100, other), std::vector<int>(100, 6));
}
TEST_F(TwoDevices, AnEventIsRecordedOnItsOwn) {
  const EventHandle event = new_event();
  check(cuda().set_current(context_of(1)), "current");
  EXPECT_EQ(cuda().event_record(event, new_stream()), Result::kInvalidHandle);
}
TEST_F(TwoDevices, AFunctionRunsOnItsOwn) {
  const FunctionHandle f = common()["add"];
  check(cuda().set_current(context_of(1)), "current");
  DevicePtr p = allocate(4);
  int n = 1, x = 1;
  EXPECT_EQ(try_launch(f, 1, 32, 1, 1, 0, new_stream(), {&p, &n, &x}), Result::kInvalidHandle);
}
TEST_F(TwoDevices, PeerAccessIsEnabledOnce) {
  int can = 0;
  check(cuda().can_access_peer(&can, 0, 1), "peer");
  if (!can) GTEST_SKIP() << "these devices are no peers";
  EXPECT_EQ(cuda().enable_peer_access(context_of(1), 0), Result::kSuccess);
  EXPECT_EQ(cuda().enable_peer_access(context_of(1), 0), Result::kPeerAccessAlreadyEnabled);
  check(cuda().set_current(context_of(1)), "current");
  const DevicePtr p = upload(std::vector<int>(10, 1), new_stream());
  check(cuda().set_current(context_of(0)), "current");
  run(common()["add"], 1, 32, 0, stream, p, 10, 1);
  check(cuda().stream_synchronize(stream), "wait");
  check(cuda().set_current(context_of(1)), "current");
  EXPECT_EQ(download<int>(p, 10, new_stream()), std::vector<int>(10, 2));
}

}  // namespace
}  // namespace vgpu_test
