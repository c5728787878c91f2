// Wrong executions of cuDNN's graphs that the virtual library has to refuse, each by name, and what
// checked mode finds of graphs: they are ops like others.
#include "tests/vgpu/conformance/cudnn.h"
#include "tests/vgpu/faults/programs.h"

namespace vgpu_test {
namespace {

/// y = relu(x) of 2 x 8 x 4 x 4 floats, and an execution that is right; a fault changes it.
struct Execution {
  Handle handle = nullptr;
  StreamHandle stream = new_stream();
  DevicePtr x = written(256, stream), y = floats(256), workspace = allocate(4096);
  std::vector<int64_t> uids{1, 2};
  std::vector<DevicePtr> pointers{x, y};
  bool has_stream = true;

  Execution() {
    if (cudnn().create(&handle) != Status::kSuccess) throw std::runtime_error("create");
  }
  int run() {
    const int status = enqueue();
    return status + wait(stream);
  }
  int enqueue() {
    if (has_stream) cudnn().set_stream(handle, stream);
    const Numbers dims{2, 8, 4, 4};
    const Thing a = tensor({1, dims, last(dims)}), b = tensor({2, dims, last(dims)}),
                kind = pointwise_kind(kReluForward);
    Thing op = unfinished_pointwise(kind, a, nullptr, b);
    op.finish();
    Thing graph = unfinished_graph({&op});
    graph.set(kGraphHandle, kTypeHandle, 1, &handle);
    graph.finish();
    Thing engine(kEngine), config(kEngineConfig), plan(kPlan), pack(kVariantPack);
    engine.set(kEngineGraph, graph), engine.set(kEngineIndex, 11);
    engine.finish();
    config.set(kConfigEngine, engine);
    config.finish();
    plan.set(kPlanHandle, kTypeHandle, 1, &handle), plan.set(kPlanConfig, config);
    if (plan.finish() != Status::kSuccess) return 3;
    pack.set(kPackUids, kTypeInt64, static_cast<int64_t>(uids.size()), uids.data());
    pack.set(kPackPointers, kTypePointer, static_cast<int64_t>(pointers.size()), pointers.data());
    if (workspace) pack.set(kPackWorkspace, kTypePointer, 1, &workspace);
    pack.finish();
    return cudnn().execute(handle, plan.at, pack.at) == Status::kSuccess ? 0 : 4;
  }
};

void refused(const std::string& words, const std::function<void(Execution&)>& spoil,
             bool checked = false) {
  expect_found(checked, words, [&](const Kernels&) {
    Execution e;
    spoil(e);
    return e.run();
  });
}

TEST(Graphs, ARightOneIsNot) {
  expect_right([](const Kernels&) { return Execution().run(); });
}
TEST(Graphs, ValuesWithoutAddressesOrThatTheGraphDoesNotHave) {
  refused("tensor 2 has no address", [](Execution& e) { e.uids[1] = 3; });
  refused("the graph has no tensor 3 with memory",
          [](Execution& e) { e.uids.push_back(3), e.pointers.push_back(e.x); });
  refused("tensor 1 has no address", [](Execution& e) { e.pointers[0] = 0; });
}
TEST(Graphs, MisalignedAddresses) {
  refused("tensor 1 is not aligned to 16 bytes", [](Execution& e) { e.pointers[0] += 4; });
}
TEST(Graphs, WorkspacesThatAreMissing) {
  refused("no workspace; the plan needs 131 bytes", [](Execution& e) { e.workspace = 0; });
}
TEST(Graphs, HandlesWithoutAStreamOrGone) {
  refused("the handle has no stream", [](Execution& e) { e.has_stream = false; });
  refused("no handle, or one that was destroyed", [](Execution& e) { cudnn().destroy(e.handle); });
}
TEST(Graphs, AddressesOfAnotherDevice) {
  expect_found(false, "device",
               [](const Kernels&) {
                 Execution e;
                 check(cuda().set_current(context_of(1)), "set current");
                 e.pointers[1] = floats(256);
                 check(cuda().set_current(context_of(0)), "set current");
                 return e.run();
               },
               {{"VGPU_DEVICES", "2"}});
}
TEST(Graphs, AttributesThatAreNotEmulated) {
  expect_found(
      false, "attribute 905 of descriptors of type 17 is not emulated",
      [](const Kernels&) { return Thing(kTensor).set(905, 1) == Status::kSuccess ? 0 : 4; });
  expect_found(false, "descriptors of type 41 are not emulated",
               [](const Kernels&) { return Thing(41).at ? 0 : 4; });
}
TEST(Graphs, AreAskedToFail) {
  for (const char* what : {"cudnnBackendExecute", "cudnn plan"})
    expect_found(false, std::string(what) + ": fails, as VGPU_FAIL asks",
                 [](const Kernels&) { return Execution().run(); }, {{"VGPU_FAIL", what}});
  expect_found(false, "cudnn operations: fails, as VGPU_FAIL asks",
               [](const Kernels&) { return Execution().run(); },
               {{"VGPU_FAIL", "cudnn operations"}});
}
TEST(Graphs, RaceForAnOperandOrAWorkspace) {
  expect_found(true, "race", [](const Kernels&) {
    Execution e;
    const StreamHandle other = new_stream();
    check(cuda().fill_32(e.x, 0, 64, other), "fill");
    return e.run() + wait(other);
  });
  expect_found(true, "race", [](const Kernels&) {
    Execution e, second;
    second.workspace = e.workspace;
    const int status = e.enqueue() + second.enqueue();
    return status + wait(e.stream) + wait(second.stream);
  });
}
TEST(Graphs, UnwrittenOperandsAndOnesThatEndTooEarly) {
  refused(
      "nobody has written", [](Execution& e) { e.pointers[0] = floats(256); }, true);
  refused(
      "out of bounds", [](Execution& e) { e.pointers[0] = written(200, e.stream); }, true);
}

}  // namespace
}  // namespace vgpu_test
