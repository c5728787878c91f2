// Statements about capture, graphs, and errors that stay.
#include <unistd.h>

#include <array>
#include <cstdio>

#include "tests/vgpu/conformance/fixture.h"

namespace vgpu_test {
namespace {

constexpr int kCount = 1000;

class Captures : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    p = upload(std::vector<int>(kCount, 0), stream);
    common()["add"], common()["copy"];
  }
  void add(StreamHandle s, int x, DevicePtr to) {
    run(common()["add"], 8, 128, 0, s, to, kCount, x);
  }
  Result begin(int mode = kCaptureThreadLocal) { return cuda().begin_capture(stream, mode); }
  GraphHandle end() {
    GraphHandle graph = nullptr;
    EXPECT_EQ(cuda().end_capture(stream, &graph), Result::kSuccess);
    return graph;
  }
  GraphExecHandle instantiate(GraphHandle graph) {
    GraphExecHandle exec;
    check(cuda().graph_instantiate(&exec, graph, 0), "instantiate");
    return exec;
  }
  int first() { return download<int>(p, 1, stream)[0]; }
  DevicePtr p = 0;
};

TEST_F(Captures, RunNothingUntilTheLaunch) {
  ASSERT_EQ(begin(), Result::kSuccess);
  add(stream, 3, p);
  int status = -1;
  EXPECT_EQ(cuda().capture_status(stream, &status), Result::kSuccess);
  EXPECT_EQ(status, kCaptureActive);
  const GraphHandle graph = end();
  EXPECT_EQ(cuda().capture_status(stream, &status), Result::kSuccess);
  EXPECT_EQ(status, kCaptureNone);
  EXPECT_EQ(first(), 0);
  const GraphExecHandle exec = instantiate(graph);
  EXPECT_EQ(cuda().graph_destroy(graph), Result::kSuccess);
  EXPECT_EQ(cuda().graph_upload(exec, stream), Result::kSuccess);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(cuda().graph_launch(exec, stream), Result::kSuccess);
  EXPECT_EQ(download<int>(p, kCount, stream), std::vector<int>(kCount, 9));
  EXPECT_EQ(cuda().graph_exec_destroy(exec), Result::kSuccess);
}
TEST_F(Captures, ForkAndJoinByEvents) {
  const StreamHandle other = new_stream();
  const EventHandle fork = new_event(), join = new_event();
  const DevicePtr q = allocate(kCount * 4);
  ASSERT_EQ(begin(), Result::kSuccess);
  check(cuda().fill_32(p, 1, kCount, stream), "fill");
  check(cuda().event_record(fork, stream), "record");
  check(cuda().stream_wait_event(other, fork, 0), "wait");
  run(common()["copy"], 8, 128, 0, other, p, q, kCount);
  add(other, 5, q);
  check(cuda().event_record(join, other), "record");
  check(cuda().stream_wait_event(stream, join, 0), "wait");
  add(stream, 1, q);
  const GraphHandle graph = end();
  size_t count = 0;
  EXPECT_EQ(cuda().graph_nodes(graph, nullptr, &count), Result::kSuccess);
  EXPECT_EQ(count, 4u);
  const GraphExecHandle exec = instantiate(graph);
  for (int i = 0; i < 2; ++i) {
    check(cuda().graph_launch(exec, stream), "launch");
    EXPECT_EQ(download<int>(q, kCount, stream), std::vector<int>(kCount, 7));
  }
}
TEST_F(Captures, NodesHaveTypes) {
  const DevicePtr q = allocate(kCount * 4);
  ASSERT_EQ(begin(), Result::kSuccess);
  check(cuda().fill_32(p, 1, kCount, stream), "fill");
  check(cuda().copy_on_device(q, p, kCount * 4, stream), "copy");
  add(stream, 1, q);
  static int ran = 0;
  check(cuda().launch_host_function(
            stream, [](void*) { ++ran; }, nullptr),
        "host");
  const GraphHandle graph = end();
  size_t count = 8;
  std::vector<NodeHandle> nodes(count);
  ASSERT_EQ(cuda().graph_nodes(graph, nodes.data(), &count), Result::kSuccess);
  ASSERT_EQ(count, 4u);
  std::array<int, 8> types = {};
  for (size_t i = 0; i < count; ++i) {
    NodeType type;
    EXPECT_EQ(cuda().node_type(nodes[i], &type), Result::kSuccess);
    if (static_cast<size_t>(type) < types.size()) ++types[static_cast<size_t>(type)];
  }
  EXPECT_EQ(types, (std::array<int, 8>{1, 1, 1, 1, 0, 0, 0, 0}));
  const GraphExecHandle exec = instantiate(graph);
  check(cuda().graph_launch(exec, stream), "launch"),
      check(cuda().graph_launch(exec, stream), "launch");
  check(cuda().stream_synchronize(stream), "wait");
  EXPECT_EQ(ran, 2);
}
TEST_F(Captures, ParametersOfKernelsChange) {
  ASSERT_EQ(begin(), Result::kSuccess);
  add(stream, 3, p);
  const GraphHandle graph = end();
  size_t count = 1;
  NodeHandle node;
  ASSERT_EQ(cuda().graph_nodes(graph, &node, &count), Result::kSuccess);
  const GraphExecHandle exec = instantiate(graph);
  KernelNodeParams params = {};
  ASSERT_EQ(cuda().kernel_node_params(node, &params), Result::kSuccess);
  EXPECT_EQ(params.function, common()["add"]);
  EXPECT_EQ(params.grid_x, 8u);
  EXPECT_EQ(params.block_x, 128u);
  EXPECT_EQ(*static_cast<int*>(params.parameters[2]), 3);
  DevicePtr at = p;
  int n = kCount, x = 100;
  void* parameters[] = {&at, &n, &x};
  params.parameters = parameters;
  EXPECT_EQ(cuda().set_kernel_node_params(exec, node, &params), Result::kSuccess);
  check(cuda().graph_launch(exec, stream), "launch");
  EXPECT_EQ(first(), 100);
}
TEST_F(Captures, GraphsAreUpdatedWhole) {
  ASSERT_EQ(begin(), Result::kSuccess);
  add(stream, 3, p);
  const GraphExecHandle exec = instantiate(end());
  ASSERT_EQ(begin(), Result::kSuccess);
  add(stream, 4, p);
  const GraphHandle same = end();
  ASSERT_EQ(begin(), Result::kSuccess);
  add(stream, 4, p), add(stream, 4, p);
  const GraphHandle longer = end();
  GraphUpdateInfo info = {};
  EXPECT_EQ(cuda().graph_exec_update(exec, longer, &info), Result::kGraphExecUpdateFailure);
  EXPECT_NE(info.result, 0);
  EXPECT_EQ(cuda().graph_exec_update(exec, same, &info), Result::kSuccess);
  EXPECT_EQ(info.result, 0);
  check(cuda().graph_launch(exec, stream), "launch");
  EXPECT_EQ(first(), 4);
}
TEST_F(Captures, BeginAndEndOnce) {
  GraphHandle graph;
  EXPECT_EQ(cuda().end_capture(stream, &graph), Result::kIllegalState);
  ASSERT_EQ(begin(), Result::kSuccess);
  EXPECT_EQ(cuda().begin_capture(stream, kCaptureThreadLocal), Result::kIllegalState);
  cuda().end_capture(stream, &graph);
}
TEST_F(Captures, AnEmptyOneIsAGraph) {
  ASSERT_EQ(begin(), Result::kSuccess);
  const GraphExecHandle exec = instantiate(end());
  EXPECT_EQ(cuda().graph_launch(exec, stream), Result::kSuccess);
}
TEST_F(Captures, WaitingForACapturedStreamEndsIt) {
  ASSERT_EQ(begin(), Result::kSuccess);
  add(stream, 1, p);
  EXPECT_EQ(cuda().stream_synchronize(stream), Result::kStreamCaptureUnsupported);
  GraphHandle graph = nullptr;
  EXPECT_EQ(cuda().end_capture(stream, &graph), Result::kStreamCaptureInvalidated);
  EXPECT_EQ(graph, nullptr);
  EXPECT_EQ(first(), 0);
}
TEST_F(Captures, AskingACapturedStreamEndsIt) {
  ASSERT_EQ(begin(), Result::kSuccess);
  EXPECT_EQ(cuda().stream_query(stream), Result::kStreamCaptureUnsupported);
  GraphHandle graph;
  EXPECT_EQ(cuda().end_capture(stream, &graph), Result::kStreamCaptureInvalidated);
}
TEST_F(Captures, CapturedEventsAreNotAskedFor) {
  const EventHandle event = new_event();
  ASSERT_EQ(begin(), Result::kSuccess);
  check(cuda().event_record(event, stream), "record");
  EXPECT_EQ(cuda().event_query(event), Result::kCapturedEvent);
  GraphHandle graph;
  EXPECT_EQ(cuda().end_capture(stream, &graph), Result::kStreamCaptureInvalidated);
}
TEST_F(Captures, AllocatingIsForbiddenUnlessRelaxed) {
  DevicePtr q;
  GraphHandle graph;
  ASSERT_EQ(begin(kCaptureThreadLocal), Result::kSuccess);
  EXPECT_EQ(cuda().memory_allocate(&q, 256), Result::kStreamCaptureUnsupported);
  EXPECT_EQ(cuda().end_capture(stream, &graph), Result::kStreamCaptureInvalidated);
  ASSERT_EQ(begin(kCaptureRelaxed), Result::kSuccess);
  EXPECT_EQ(cuda().memory_allocate(&q, 256), Result::kSuccess);
  end();
  check(cuda().memory_free(q), "free");
}
TEST_F(Captures, WhatIsNotJoinedIsAnError) {
  const StreamHandle other = new_stream();
  const EventHandle fork = new_event();
  ASSERT_EQ(begin(), Result::kSuccess);
  check(cuda().event_record(fork, stream), "record");
  check(cuda().stream_wait_event(other, fork, 0), "wait");
  add(other, 1, p);
  GraphHandle graph = nullptr;
  EXPECT_EQ(cuda().end_capture(stream, &graph), Result::kStreamCaptureUnjoined);
  EXPECT_EQ(graph, nullptr);
  EXPECT_EQ(cuda().stream_synchronize(other), Result::kSuccess);
}
TEST_F(Captures, EndInTheStreamWhereTheyBegan) {
  const StreamHandle other = new_stream();
  const EventHandle fork = new_event();
  ASSERT_EQ(begin(), Result::kSuccess);
  check(cuda().event_record(fork, stream), "record");
  check(cuda().stream_wait_event(other, fork, 0), "wait");
  add(other, 1, p);
  GraphHandle graph = nullptr;
  EXPECT_EQ(cuda().end_capture(other, &graph), Result::kStreamCaptureUnmatched);
  EXPECT_EQ(cuda().end_capture(stream, &graph), Result::kStreamCaptureInvalidated);
  EXPECT_EQ(graph, nullptr);
}
TEST_F(Captures, NoStreamIsWaitedForMeanwhile) {
  const StreamHandle other = new_stream();
  ASSERT_EQ(begin(), Result::kSuccess);
  EXPECT_EQ(cuda().stream_synchronize(other), Result::kStreamCaptureUnsupported);
  GraphHandle graph = nullptr;
  EXPECT_EQ(cuda().end_capture(stream, &graph), Result::kStreamCaptureInvalidated);
}
TEST_F(Captures, EventsOfOutsideAreOutside) {
  const StreamHandle other = new_stream();
  const EventHandle event = new_event();
  Gate gate(other);
  check(cuda().event_record(event, other), "record");
  ASSERT_EQ(begin(), Result::kSuccess);
  EXPECT_EQ(cuda().stream_wait_event(stream, event, 0), Result::kStreamCaptureIsolation);
  gate.open();
  GraphHandle graph;
  cuda().end_capture(stream, &graph);
  check(cuda().stream_synchronize(other), "wait");
}
TEST_F(Captures, OtherStreamsGoOn) {
  const StreamHandle other = new_stream();
  ASSERT_EQ(begin(), Result::kSuccess);
  add(stream, 1, p);
  const DevicePtr q = p;
  check(cuda().fill_32(q, 50, kCount, other), "fill");
  const GraphHandle graph = end();
  EXPECT_EQ(cuda().stream_synchronize(other), Result::kSuccess);
  const GraphExecHandle exec = instantiate(graph);
  check(cuda().graph_launch(exec, stream), "launch");
  EXPECT_EQ(first(), 51);
}

// ---- errors that stay: in a process of its own each, because they end the context ----

// Runs one test of this program; what it printed behind "came:".
std::string in_a_process(const std::string& test) {
  std::array<char, 4096> path = {};
  if (readlink("/proc/self/exe", path.data(), path.size() - 1) < 0) return "no path";
  FILE* pipe = popen((std::string(path.data()) +
                      " --gtest_also_run_disabled_tests --gtest_filter=" + test + " 2>/dev/null")
                         .c_str(),
                     "r");
  std::string all;
  for (std::array<char, 512> line; fgets(line.data(), line.size(), pipe);) all += line.data();
  pclose(pipe);
  const size_t at = all.find("came: ");
  return at == std::string::npos ? "nothing: " + all
                                 : all.substr(at + 6, all.find('\n', at) - at - 6);
}
void fail_with(const char* body) {
  start();
  const StreamHandle stream = new_stream();
  const Module module(std::string("extern \"C\" __global__ void f(int* p) { ") + body + " }");
  run(module["f"], 1, 32, 0, stream, DevicePtr{0});
  const Result first = cuda().stream_synchronize(stream);
  DevicePtr p;
  const Result then = cuda().memory_allocate(&p, 256);
  std::printf("came: %s, then %s\n", testing::PrintToString(first).c_str(),
              testing::PrintToString(then).c_str());
  std::fflush(stdout);
  _exit(0);
}
TEST(DISABLED_Child, NullPointer) { fail_with("p[threadIdx.x] = 1;"); }
TEST(DISABLED_Child, Trap) { fail_with("if (threadIdx.x == 3) __trap();"); }

TEST(Errors, AnIllegalAddressStays) {
  EXPECT_EQ(in_a_process("DISABLED_Child.NullPointer"),
            "CUDA_ERROR_ILLEGAL_ADDRESS, then CUDA_ERROR_ILLEGAL_ADDRESS");
}
TEST(Errors, ATrapStays) {
  EXPECT_EQ(in_a_process("DISABLED_Child.Trap"),
            "CUDA_ERROR_LAUNCH_FAILED, then CUDA_ERROR_LAUNCH_FAILED");
}

}  // namespace
}  // namespace vgpu_test
