// Statements about cuDNN's plans as texts: which plans have one with compiled code, what is made of
// it, and what is refused; for a described device, which needs neither a driver nor a card, and on
// one.
#include <algorithm>
#include <cctype>

#include "tests/vgpu/conformance/cudnn.h"

namespace vgpu_test {
namespace {

Thing unfinished_sums(const Thing& x, const Thing& sums, const Thing& squares) {
  Thing op(kStatisticsOp);
  op.set_kind(kStatisticsMode, kTypeStatisticsMode, kSumAndSquares);
  op.set_kind(kStatisticsPrecision, kTypeDataType, kFloat);
  op.set(kStatisticsX, x), op.set(kStatisticsSum, sums), op.set(kStatisticsSquares, squares);
  return op;
}

struct Made {
  Thing plan;
  bool compiled;  // when the plan was made, says a note of its engine
};
/// Up to `most` plans of a convolution, with the sums of its channels in the same graph or without
/// them. They outlive the descriptors that they are made of.
std::vector<Made> plans(bool sums, size_t most) {
  const Numbers x{2, 64, 8, 8}, w{32, 64, 3, 3}, y{2, 32, 8, 8}, each{1, 32, 1, 1};
  Thing window_ = window({1, 1}, {1, 1});
  EXPECT_EQ(window_.finish(), Status::kSuccess);
  const Thing tx = tensor({1, x, last(x), kBFloat16}), tw = tensor({2, w, last(w), kBFloat16}),
              ty = tensor({3, y, last(y), kBFloat16}), ts = tensor({4, each, last(each)}),
              tq = tensor({5, each, last(each)}), d = device();
  Thing conv = unfinished_conv(tx, tw, ty, window_), statistics = unfinished_sums(ty, ts, tq);
  EXPECT_EQ(conv.finish(), Status::kSuccess);
  if (sums) {
    EXPECT_EQ(statistics.finish(), Status::kSuccess);
  }
  std::vector<const Thing*> ops{&conv};
  if (sums) ops.push_back(&statistics);
  Thing graph = unfinished_graph(ops);
  EXPECT_EQ(graph.finish(), Status::kSuccess);
  std::vector<Made> all;
  for (const Thing& config : suggestions(graph, &d)) {
    Thing plan = unfinished_plan(config, d);
    if (plan.finish() != Status::kSuccess) continue;
    Thing engine(kEngine);
    int64_t count = 0;
    int notes[32];
    EXPECT_EQ(
        cudnn().get_attribute(config.at, kConfigEngine, kTypeDescriptor, 1, &count, &engine.at),
        Status::kSuccess);
    EXPECT_EQ(
        cudnn().get_attribute(engine.at, kEngineBehavior, kTypeBehaviorNote, 32, &count, notes),
        Status::kSuccess);
    all.push_back({std::move(plan), std::count(notes, notes + count, kNoteRuntimeCompilation) > 0});
    if (all.size() == most) break;
  }
  EXPECT_FALSE(all.empty());
  return all;
}

std::string text_of(const Thing& plan) {
  int64_t count = 0;
  EXPECT_EQ(cudnn().get_attribute(plan.at, kPlanText, kTypeChar, 0, &count, nullptr),
            Status::kSuccess);
  std::string text(static_cast<size_t>(count), '\0');
  EXPECT_EQ(cudnn().get_attribute(plan.at, kPlanText, kTypeChar, count, &count, text.data()),
            Status::kSuccess);
  EXPECT_EQ(static_cast<size_t>(count), text.size());
  return text;
}
int64_t workspace_of(const Thing& plan) {
  int64_t bytes = -1, one = 0;
  EXPECT_EQ(cudnn().get_attribute(plan.at, kPlanWorkspace, kTypeInt64, 1, &one, &bytes),
            Status::kSuccess);
  return bytes;
}
Thing unfinished_plan_of(const std::string& text, const Thing& d) {
  Thing p(kPlan);
  EXPECT_EQ(p.set(kPlanText, kTypeChar, static_cast<int64_t>(text.size()), text.data()),
            Status::kSuccess);
  EXPECT_EQ(p.set(kPlanDevice, d), Status::kSuccess);
  return p;
}
Status taken(const std::string& text, const Thing& d = device()) {
  return unfinished_plan_of(text, d).finish();
}
/// The text of a plan whose code was compiled.
const std::string& compiled_text() {
  static const std::string text = text_of(plans(true, 1)[0].plan);
  return text;
}

/// `text` with another word at the one place where it has `from`.
std::string with(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, text.npos) << from << " is not in the text";
  return at == text.npos ? text : text.replace(at, from.size(), to);
}
/// `text` with another number behind `key`.
std::string with_number(std::string text, const std::string& key, int64_t number) {
  size_t at = text.find("\"" + key + "\"");
  EXPECT_NE(at, text.npos) << key << " is not in the text";
  if (at == text.npos) return text;
  at = text.find(':', at) + 1;
  while (text[at] == ' ') ++at;
  size_t end = at;
  while (std::isdigit(text[end])) ++end;
  return text.replace(at, end - at, std::to_string(number));
}
Thing device_with(const char* key, int64_t number) {
  const std::string text = with_number(kDevice, key, number);
  Thing d(kDeviceProperties);
  EXPECT_EQ(d.set(kDeviceJson, kTypeChar, static_cast<int64_t>(text.size()), text.data()),
            Status::kSuccess);
  EXPECT_EQ(d.finish(), Status::kSuccess);
  return d;
}

class CudnnPlans : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_cudnn(); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_F(CudnnPlans, AreMadeAgainOfTheirText) {
  const Thing d = device();
  for (bool sums : {false, true})
    for (const Made& m : plans(sums, 2)) {
      const std::string text = text_of(m.plan);
      Thing again = unfinished_plan_of(text, d);
      ASSERT_EQ(again.finish(), Status::kSuccess) << sums;
      EXPECT_EQ(workspace_of(again), workspace_of(m.plan));
      EXPECT_EQ(text_of(again), text);
      // The text has the code that was compiled for the plan. Sums need an engine that compiles.
      EXPECT_EQ(text.find("\"payload\"") != text.npos, m.compiled) << sums;
      EXPECT_EQ(m.compiled, sums);
    }
}
TEST_F(CudnnPlans, AreNotMadeOfOtherTexts) {
  const std::string& text = compiled_text();
  EXPECT_EQ(taken(text), Status::kSuccess);
  EXPECT_EQ(taken(text + '\0'), Status::kSuccess);
  for (const std::string& wrong :
       {std::string("xyz"), std::string("{}"), std::string(" "), text.substr(0, text.size() / 2),
        text.substr(0, text.size() - 1), text + "x", with(text, "\"payload\"", "\"paylord\""),
        with(text, "\"operationGraph\"", "\"operationgraph\""),
        with(text, "\"GPUProfile\"", "\"GPUprofile\""), with(text, "\"engine\"", "\"Engine\"")})
    EXPECT_EQ(taken(wrong), Status::kBadParam) << wrong.substr(0, 100);
  EXPECT_EQ(taken(with_number(text, "engineId", 999)), Status::kNotSupported);
}
TEST_F(CudnnPlans, AreOfOneVersionAndKindOfDevice) {
  const std::string& text = compiled_text();
  const auto version = static_cast<int64_t>(cudnn().version());
  for (int64_t other : {version - 100, version + 1})
    EXPECT_EQ(taken(with_number(text, "cudnnVersion", other)), Status::kOtherLibrary) << other;
  EXPECT_EQ(taken(with_number(text, "schemaVersion", 999)), Status::kOtherFormat);
  EXPECT_EQ(taken(text, device_with("multiProcessorCount", 114)), Status::kOtherDevice);
  EXPECT_EQ(taken(text, device_with("deviceVer", 800)), Status::kOtherDevice);
  EXPECT_EQ(taken(text, device_with("driverVer", 12090)), Status::kOtherDevice);
  // Another card of the kind.
  EXPECT_EQ(taken(text, device_with("cudaDeviceId", 1)), Status::kSuccess);
}
TEST_F(CudnnPlans, HaveAConfigurationOrAText) {
  const Thing d = device();
  const Made m = std::move(plans(false, 1)[0]);
  Thing config(kEngineConfig), both = unfinished_plan_of(text_of(m.plan), d);
  int64_t count = 0;
  ASSERT_EQ(cudnn().get_attribute(m.plan.at, kPlanConfig, kTypeDescriptor, 1, &count, &config.at),
            Status::kSuccess);
  EXPECT_EQ(both.set(kPlanConfig, config), Status::kSuccess);
  EXPECT_EQ(both.finish(), Status::kBadParam);
}
TEST_F(CudnnPlans, GiveTheirTextWholeOrNotAtAll) {
  const Thing d = device();
  const Made m = std::move(plans(false, 1)[0]);
  const std::string text = text_of(m.plan);
  std::string part(text.size(), '\0');
  int64_t count = 0;
  const auto get = [&](const Thing& plan, size_t most) {
    return cudnn().get_attribute(plan.at, kPlanText, kTypeChar, static_cast<int64_t>(most), &count,
                                 part.data());
  };
  EXPECT_EQ(get(m.plan, text.size() - 1), Status::kSizeInsufficient);
  EXPECT_EQ(get(m.plan, text.size()), Status::kSuccess);
  EXPECT_EQ(get(unfinished_plan_of(text, d), text.size()), Status::kNotInitialized);
  Thing finished = unfinished_plan_of(text, d);
  EXPECT_EQ(finished.finish(), Status::kSuccess);
  EXPECT_EQ(finished.set(kPlanText, kTypeChar, 2, "{}"), Status::kBadParam);
}

// ---- on a card

// The sums of a convolution of ones, by plans that compile: as made, and as made of their texts.
TEST_F(CudnnOnDevice, APlanOfItsTextComputesTheSame) {
  const Numbers x{2, 8, 6, 6}, w{16, 8, 3, 3}, y{2, 16, 4, 4}, each{1, 16, 1, 1};
  constexpr uint16_t kOne = 0x3f80;
  Thing graph(kOperationGraph);
  {
    Thing window_ = window({0, 0}, {1, 1});
    ASSERT_EQ(window_.finish(), Status::kSuccess);
    const Thing tx = tensor({1, x, last(x), kBFloat16}), tw = tensor({2, w, last(w), kBFloat16}),
                ty = tensor({3, y, last(y), kBFloat16}), ts = tensor({4, each, last(each)}),
                tq = tensor({5, each, last(each)});
    Thing conv = unfinished_conv(tx, tw, ty, window_), statistics = unfinished_sums(ty, ts, tq);
    ASSERT_EQ(conv.finish(), Status::kSuccess);
    ASSERT_EQ(statistics.finish(), Status::kSuccess);
    const Descriptor ops[] = {conv.at, statistics.at};
    graph.set(kGraphOps, kTypeDescriptor, 2, ops), graph.set(kGraphHandle, kTypeHandle, 1, &handle);
    ASSERT_EQ(graph.finish(), Status::kSuccess);
  }
  const std::vector<Thing> configs = suggestions(graph, nullptr);
  ASSERT_FALSE(configs.empty());
  const DevicePtr at_x = upload(std::vector<uint16_t>(2 * 8 * 36, kOne), stream),
                  at_w = upload(std::vector<uint16_t>(16 * 8 * 9, kOne), stream);
  const auto expect_sums = [&](const Thing& plan) {
    const DevicePtr at_y = upload(std::vector<uint16_t>(2 * 16 * 16, 0), stream),
                    at_s = upload(std::vector<float>(16, -1), stream),
                    at_q = upload(std::vector<float>(16, -1), stream),
                    workspace = allocate(static_cast<size_t>(workspace_of(plan)) + 16);
    Thing pack(kVariantPack);
    const int64_t uids[] = {1, 2, 3, 4, 5};
    const DevicePtr pointers[] = {at_x, at_w, at_y, at_s, at_q};
    pack.set(kPackUids, kTypeInt64, 5, uids), pack.set(kPackPointers, kTypePointer, 5, pointers);
    pack.set(kPackWorkspace, kTypePointer, 1, &workspace);
    ASSERT_EQ(pack.finish(), Status::kSuccess);
    ASSERT_EQ(cudnn().execute(handle, plan.at, pack.at), Status::kSuccess);
    const auto sums = download<float>(at_s, 16, stream),
               squares = download<float>(at_q, 16, stream);
    for (size_t i = 0; i < 16; ++i) {
      ASSERT_EQ(sums[i], 2 * 16 * 72) << i;
      ASSERT_EQ(squares[i], 2 * 16 * 72 * 72) << i;
    }
    for (DevicePtr p : {at_y, at_s, at_q, workspace}) check(cuda().memory_free(p), "free");
  };
  int ran = 0;
  for (const Thing& c : configs) {
    Thing plan(kPlan), again(kPlan);
    plan.set(kPlanHandle, kTypeHandle, 1, &handle), plan.set(kPlanConfig, c);
    if (plan.finish() != Status::kSuccess) continue;
    const std::string text = text_of(plan);
    EXPECT_NE(text.find("\"payload\""), text.npos);
    again.set(kPlanText, kTypeChar, static_cast<int64_t>(text.size()), text.data());
    again.set(kPlanHandle, kTypeHandle, 1, &handle);
    ASSERT_EQ(again.finish(), Status::kSuccess);
    EXPECT_EQ(workspace_of(again), workspace_of(plan));
    expect_sums(plan), expect_sums(again);
    if (++ran == 2) break;  // each takes seconds to compile
  }
  EXPECT_GT(ran, 0);
  for (DevicePtr p : {at_x, at_w}) check(cuda().memory_free(p), "free");
}

}  // namespace
}  // namespace vgpu_test
