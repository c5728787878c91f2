// Statements about cuDNN: descriptors and graphs for a described device, which need neither a
// driver nor a card, and executions, which do.
#include "tests/vgpu/conformance/cudnn.h"

namespace vgpu_test {
namespace {

class CudnnObjects : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_cudnn(); !why.empty()) GTEST_SKIP() << why;
  }
};
class CudnnGraphs : public CudnnObjects {};

TEST_F(CudnnObjects, VersionIs9) {
  EXPECT_GE(cudnn().version(), 90600u);
  EXPECT_LT(cudnn().version(), 100000u);
}

TEST_F(CudnnObjects, AttributesHaveTypesAndCounts) {
  Thing t(kTensor);
  const float number = 1;
  EXPECT_EQ(t.set(kConvolutionDims, 2), Status::kBadParam) << "another descriptor's";
  EXPECT_EQ(t.set(5555, 2), Status::kBadParam);
  EXPECT_EQ(t.set(kTensorUid, kTypeFloat, 1, &number), Status::kAttributeType);
  EXPECT_EQ(t.set(kTensorUid, Numbers{1, 2}), Status::kBadParam);
  EXPECT_EQ(t.set(kTensorUid, kTypeInt64, 0, &number), Status::kBadParam);
  EXPECT_EQ(t.set(kTensorUid, kTypeInt64, 1, nullptr), Status::kBadParam);
  EXPECT_EQ(t.set(kTensorUid, 7), Status::kSuccess);
  char said[256] = {};
  EXPECT_EQ(t.finish(), Status::kBadParam);
  cudnn().last_error(said, sizeof(said));
  EXPECT_NE(said[0], '\0');
}

TEST_F(CudnnObjects, TensorsNeedDimsStridesAndAnAlignment) {
  const auto without = [](int attribute) {
    Thing t(kTensor);
    if (attribute != kTensorType) t.set_kind(kTensorType, kTypeDataType, kFloat);
    if (attribute != kTensorDims) t.set(kTensorDims, Numbers{1, 2, 3, 4});
    if (attribute != kTensorStrides) t.set(kTensorStrides, Numbers{24, 12, 4, 1});
    if (attribute != kTensorAlignment) t.set(kTensorAlignment, 16);
    return t.finish();
  };
  EXPECT_EQ(without(kTensorDims), Status::kBadParam);
  EXPECT_EQ(without(kTensorStrides), Status::kBadParam);
  EXPECT_EQ(without(kTensorAlignment), Status::kBadParam);
  EXPECT_EQ(without(kTensorType), Status::kSuccess);  // a float
  const auto of = [](const Numbers& dims, const Numbers& strides, int64_t alignment = 16) {
    return unfinished_tensor({1, dims, strides, kFloat, false, alignment}).finish();
  };
  EXPECT_EQ(of({2, 3, 4, 5}, {60, 20, 5}), Status::kBadParam);
  EXPECT_EQ(of({2, -1, 4, 5}, {60, 20, 5, 1}), Status::kBadParam);
  EXPECT_EQ(of({2, 3, 4, 5}, {60, 20, 5, -1}), Status::kBadParam);
  EXPECT_EQ(of(Numbers(9, 1), Numbers(9, 1)), Status::kBadParam);
  EXPECT_EQ(of({2, 3, 4, 5}, {60, 20, 5, 1}, 3), Status::kBadParam);
  EXPECT_EQ(of({2, 3, 4, 5}, {60, 20, 5, 1}, 4), Status::kSuccess);
  EXPECT_EQ(of({2, 3, 4, 5}, {60, 1, 15, 3}), Status::kSuccess);
}

TEST_F(CudnnObjects, FinalizedOnesAreReadAndNotChanged) {
  Thing t = unfinished_tensor({1, {2, 3, 4, 5}, dense({2, 3, 4, 5})});
  int64_t values[8] = {}, count = 0;
  const auto get = [&](int attribute, int type, int64_t most) {
    return cudnn().get_attribute(t.at, attribute, type, most, &count, values);
  };
  EXPECT_EQ(get(kTensorDims, kTypeInt64, 8), Status::kNotInitialized);
  EXPECT_EQ(t.finish(), Status::kSuccess);
  EXPECT_EQ(t.finish(), Status::kBadParam);
  EXPECT_EQ(t.set(kTensorUid, 4), Status::kBadParam);
  EXPECT_EQ(get(kTensorDims, kTypeInt64, 8), Status::kSuccess);
  EXPECT_EQ(count, 4);
  EXPECT_EQ(values[3], 5);
  EXPECT_EQ(get(kTensorDims, kTypeInt64, 2), Status::kSuccess);
  EXPECT_EQ(count, 2);
  EXPECT_EQ(get(kTensorDims, kTypeFloat, 8), Status::kAttributeType);
  EXPECT_EQ(get(kConvolutionDims, kTypeInt64, 1), Status::kBadParam);
}

TEST_F(CudnnObjects, WindowsHaveAsManyNumbersAsDimsAndNoneBelowTheLeast) {
  EXPECT_EQ(window({1, 1}, {1, 1}).finish(), Status::kSuccess);
  EXPECT_EQ(window({-1, 0}, {1, 1}).finish(), Status::kBadParam);
  EXPECT_EQ(window({0, 0}, {0, 1}).finish(), Status::kBadParam);
  EXPECT_EQ(window({0}, {1, 1}).finish(), Status::kBadParam);
  EXPECT_EQ(Thing(kConvolution).finish(), Status::kBadParam);
}

TEST_F(CudnnObjects, DevicesAreDescribedByText) {
  const auto described = [](const char* text) {
    Thing d(kDeviceProperties);
    EXPECT_EQ(d.set(kDeviceJson, kTypeChar, static_cast<int64_t>(std::strlen(text)), text),
              Status::kSuccess);
    return d.finish();
  };
  EXPECT_EQ(described("xyz"), Status::kBadParam);
  EXPECT_EQ(described("{}"), Status::kBadParam);
  EXPECT_EQ(described(kDevice), Status::kSuccess);
}

TEST_F(CudnnObjects, RequiredOnesAreAskedFor) {
  EXPECT_EQ(Thing(kOperationGraph).finish(), Status::kBadParam);
  EXPECT_EQ(Thing(kHeuristics).finish(), Status::kBadParam);
  EXPECT_EQ(Thing(kEngine).finish(), Status::kNullPointer);
  EXPECT_EQ(Thing(kPlan).finish(), Status::kNotFinalized);
}

// ---- graphs, for a described device

const Numbers kX{2, 8, 6, 6}, kW{16, 8, 3, 3}, kY{2, 16, 6, 6};

struct Conv {
  Spec x{1, kX, last(kX), kBFloat16}, w{2, kW, last(kW), kBFloat16}, y{3, kY, last(kY), kBFloat16};
  Numbers padding{1, 1};

  Status finish() const {
    Thing window_ = window(padding, {1, 1});
    EXPECT_EQ(window_.finish(), Status::kSuccess);
    return unfinished_conv(tensor(x), tensor(w), tensor(y), window_).finish();
  }
  int compiling() const {
    Thing window_ = window(padding, {1, 1});
    window_.finish();
    const Thing a = tensor(x), b = tensor(w), c = tensor(y);
    Thing op = unfinished_conv(a, b, c, window_);
    EXPECT_EQ(op.finish(), Status::kSuccess);
    Thing graph = unfinished_graph({&op});
    EXPECT_EQ(graph.finish(), Status::kSuccess);
    return vgpu_test::compiling(graph, device());
  }
};

TEST_F(CudnnGraphs, ConvolutionsWhoseExtentsDoNotFitAreRefused) {
  EXPECT_EQ(Conv{}.finish(), Status::kSuccess);
  Conv places, channels;
  places.y = {3, {2, 16, 5, 6}, last({2, 16, 5, 6}), kBFloat16};
  EXPECT_EQ(places.finish(), Status::kBadParam);
  channels.w = {2, {16, 3, 3, 3}, last({16, 3, 3, 3}), kBFloat16};
  EXPECT_EQ(channels.finish(), Status::kBadParam);
}
TEST_F(CudnnGraphs, ConvolutionsOfEachTypeHaveEngines) {
  for (int type : {kFloat, kHalf, kBFloat16}) {
    Conv c;
    c.x.type = c.w.type = c.y.type = type;
    EXPECT_GT(c.compiling(), 0) << type;
  }
}
TEST_F(CudnnGraphs, GroupsAreReadFromChannels) {
  Conv c;
  c.w = {2, {16, 4, 3, 3}, last({16, 4, 3, 3}), kBFloat16};
  EXPECT_GT(c.compiling(), 0);
}
// Sums of a convolution's channels and of their squares, in f32.
TEST_F(CudnnGraphs, StatisticsOfAConvolutionHaveEngines) {
  const auto engines = [](int64_t channels) {
    const Numbers x{2, 64, 8, 8}, w{32, 64, 3, 3}, y{2, 32, 8, 8}, sums{1, channels, 1, 1};
    Thing window_ = window({1, 1}, {1, 1});
    EXPECT_EQ(window_.finish(), Status::kSuccess);
    const Thing tx = tensor({1, x, last(x), kBFloat16}), tw = tensor({2, w, last(w), kBFloat16}),
                ty = tensor({3, y, last(y), kBFloat16}), ts = tensor({4, sums, last(sums)}),
                tq = tensor({5, sums, last(sums)});
    Thing conv = unfinished_conv(tx, tw, ty, window_), statistics(kStatisticsOp);
    statistics.set_kind(kStatisticsMode, kTypeStatisticsMode, kSumAndSquares);
    statistics.set_kind(kStatisticsPrecision, kTypeDataType, kFloat);
    statistics.set(kStatisticsX, ty), statistics.set(kStatisticsSum, ts);
    statistics.set(kStatisticsSquares, tq);
    EXPECT_EQ(conv.finish(), Status::kSuccess);
    if (statistics.finish() != Status::kSuccess) return 0;
    Thing graph = unfinished_graph({&conv, &statistics});
    return graph.finish() == Status::kSuccess ? compiling(graph, device()) : 0;
  };
  EXPECT_GT(engines(32), 0);
  EXPECT_EQ(engines(31), 0);
}

TEST_F(CudnnGraphs, MixedTypesHaveNoEngine) {
  Conv c;
  c.w.type = kFloat;
  EXPECT_EQ(c.compiling(), 0);
}
TEST_F(CudnnGraphs, OperandsMayBeAlignedToTheirElements) {
  Conv c;
  c.x.alignment = c.w.alignment = c.y.alignment = 2;
  EXPECT_GT(c.compiling(), 0);
}
// What goes into a convolution has its type: f32 between a relu and a bf16 convolution has no
// engine.
TEST_F(CudnnGraphs, InnerOperandsOfAConvolutionHaveItsType) {
  const Thing d = device();
  for (int inner : {kBFloat16, kFloat}) {
    Thing window_ = window({1, 1}, {1, 1});
    window_.finish();
    const Thing x = tensor({1, kX, last(kX), kBFloat16}),
                r = tensor({2, kX, last(kX), inner, true}),
                w = tensor({3, kW, last(kW), kBFloat16}), y = tensor({4, kY, last(kY), kBFloat16});
    const Thing kind = pointwise_kind(kReluForward);
    Thing relu = unfinished_pointwise(kind, x, nullptr, r),
          conv = unfinished_conv(r, w, y, window_);
    EXPECT_EQ(relu.finish(), Status::kSuccess);
    EXPECT_EQ(conv.finish(), Status::kSuccess);
    Thing graph = unfinished_graph({&conv, &relu});  // in any order
    EXPECT_EQ(graph.finish(), Status::kSuccess);
    EXPECT_EQ(compiling(graph, d) > 0, inner == kBFloat16);
  }
}
// What comes out of one may be f32: batch-norm by moments of channels, of which the root is taken
// in the graph, and a relu that keeps what is no number.
TEST_F(CudnnGraphs, ConvolutionsNormaliseTheirResult) {
  const Numbers one{1, 1, 1, 1}, each{1, kY[1], 1, 1};
  Thing window_ = window({1, 1}, {1, 1});
  window_.finish();
  const auto inner = [](int64_t uid, const Numbers& dims, int type = kFloat) {
    return tensor({uid, dims, last(dims), type, true});
  };
  const Thing x = tensor({1, kX, last(kX), kBFloat16}), w = tensor({2, kW, last(kW), kBFloat16}),
              made = inner(3, kY), var = tensor({4, each, last(each)}), root = inner(5, each),
              scaled = inner(6, kY), below = inner(7, kY, kBoolean),
              y = tensor({8, kY, last(kY), kBFloat16});
  Thing zero = unfinished_tensor({9, one, one});
  zero.set_bool(kTensorByValue, true);
  EXPECT_EQ(zero.finish(), Status::kSuccess);
  const Thing rsqrt = pointwise_kind(kReciprocalRoot), mul = pointwise_kind(kMul),
              less = pointwise_kind(kCompareLess), select = pointwise_kind(kSelect);
  Thing ops[] = {unfinished_conv(x, w, made, window_),
                 unfinished_pointwise(rsqrt, var, nullptr, root),
                 unfinished_pointwise(mul, made, &root, scaled),
                 unfinished_pointwise(less, scaled, &zero, below),
                 unfinished_pointwise(select, zero, &scaled, y)};
  ops[4].set(kPointwiseOpT, below);
  std::vector<const Thing*> all;
  for (Thing& op : ops) {
    EXPECT_EQ(op.finish(), Status::kSuccess);
    all.push_back(&op);
  }
  Thing graph = unfinished_graph(all);
  EXPECT_EQ(graph.finish(), Status::kSuccess);
  const Thing d = device();
  const auto suggested = suggestions(graph, &d);
  EXPECT_TRUE(std::any_of(suggested.begin(), suggested.end(), [&](const Thing& config) {
    return unfinished_plan(config, d).finish() == Status::kSuccess;
  }));
}
// Gradients by x are masked where a relu was 0, and summed; with strides once, and not with groups.
TEST_F(CudnnGraphs, GradientsOfConvolutionsAreMaskedAndSummed) {
  const auto engines = [](int64_t stride, int64_t groups, size_t sums_of) {
    const int64_t channels = 64, places = 8 / stride;
    const Numbers x{2, channels, 8, 8}, w{channels, channels / groups, 3, 3},
        y{2, channels, places, places}, one{1, 1, 1, 1}, each{1, channels, 1, 1};
    Thing window_ = window({1, 1}, {stride, stride});
    EXPECT_EQ(window_.finish(), Status::kSuccess);
    const Thing tw = tensor({1, w, last(w), kBFloat16}), ty = tensor({2, y, last(y), kBFloat16}),
                made = tensor({3, x, last(x), kFloat, true}),
                relu = tensor({4, x, last(x), kBFloat16}),
                seen = tensor({5, x, last(x), kBoolean, true}),
                masked = tensor({6, x, last(x), kBFloat16}),
                product = tensor({7, x, last(x), kFloat, true}),
                sums = tensor({8, each, last(each)}), products = tensor({9, each, last(each)});
    Thing zero = unfinished_tensor({10, one, one});
    zero.set_bool(kTensorByValue, true);
    EXPECT_EQ(zero.finish(), Status::kSuccess);
    const float by = 1, onto = 0;
    Thing conv(kConvDataOp), reduction(kReduction), reduce(kReductionOp), again(kReductionOp);
    conv.set(kConvDataX, made), conv.set(kConvDataW, tw), conv.set(kConvDataY, ty);
    conv.set(kConvDataWindow, window_);
    conv.set(kConvDataAlpha, kTypeFloat, 1, &by), conv.set(kConvDataBeta, kTypeFloat, 1, &onto);
    const Thing less = pointwise_kind(kCompareLess), select = pointwise_kind(kSelect),
                mul = pointwise_kind(kMul);
    Thing see = unfinished_pointwise(less, zero, &relu, seen),
          mask = unfinished_pointwise(select, made, &zero, masked),
          multiply = unfinished_pointwise(mul, masked, &relu, product);
    mask.set(kPointwiseOpT, seen);
    reduction.set_kind(kReductionOperator, kTypeReduction, kReduceAdd);
    reduction.set_kind(kReductionType, kTypeDataType, kFloat);
    EXPECT_EQ(reduction.finish(), Status::kSuccess);
    reduce.set(kReductionOpX, masked), reduce.set(kReductionOpY, sums);
    reduce.set(kReductionOpKind, reduction);
    again.set(kReductionOpX, product), again.set(kReductionOpY, products);
    again.set(kReductionOpKind, reduction);
    std::vector<const Thing*> ops;
    for (Thing* op : {&conv, &see, &mask, &reduce, &multiply, &again}) {
      EXPECT_EQ(op->finish(), Status::kSuccess);
      ops.push_back(op);
    }
    if (sums_of == 1) ops.resize(4);
    Thing graph = unfinished_graph(ops);
    EXPECT_EQ(graph.finish(), Status::kSuccess);
    const Thing d = device();
    const auto suggested = suggestions(graph, &d);
    return std::any_of(suggested.begin(), suggested.end(), [&](const Thing& config) {
      return unfinished_plan(config, d).finish() == Status::kSuccess;
    });
  };
  EXPECT_TRUE(engines(1, 1, 2));
  EXPECT_TRUE(engines(2, 1, 1));
  EXPECT_FALSE(engines(2, 1, 2));
  EXPECT_FALSE(engines(1, 8, 1));
}
TEST_F(CudnnGraphs, OperationsTakeAsManyOperandsAsTheyHave) {
  const Thing x = tensor({1, kX, last(kX)}), y = tensor({2, kX, last(kX)});
  const Thing add = pointwise_kind(kAdd), select = pointwise_kind(kSelect);
  EXPECT_EQ(unfinished_pointwise(add, x, nullptr, y).finish(), Status::kBadParam);
  EXPECT_EQ(unfinished_pointwise(add, x, &x, y).finish(), Status::kSuccess);
  EXPECT_EQ(unfinished_pointwise(select, x, &x, y).finish(), Status::kBadParam);
}
TEST_F(CudnnGraphs, EnginesAreFoundAgainByIndexAndKnobs) {
  const Thing d = device();
  Thing window_ = window({1, 1}, {1, 1});
  window_.finish();
  const Thing x = tensor({1, kX, last(kX)}), w = tensor({2, kW, last(kW)}),
              y = tensor({3, kY, last(kY)});
  Thing op = unfinished_conv(x, w, y, window_);
  op.finish();
  Thing graph = unfinished_graph({&op});
  graph.finish();
  for (const Thing& config : suggestions(graph, &d)) {
    if (unfinished_plan(config, d).finish() != Status::kSuccess) continue;
    Thing engine(kEngine), again(kEngine), made(kEngineConfig);
    int64_t count = 0, index = -1;
    ASSERT_EQ(
        cudnn().get_attribute(config.at, kConfigEngine, kTypeDescriptor, 1, &count, &engine.at),
        Status::kSuccess);
    ASSERT_EQ(cudnn().get_attribute(engine.at, kEngineIndex, kTypeInt64, 1, &count, &index),
              Status::kSuccess);
    std::vector<Thing> knobs;
    std::vector<Descriptor> places;
    for (int i = 0; i < 64; ++i) knobs.emplace_back(kKnobChoice);
    for (const Thing& k : knobs) places.push_back(k.at);
    ASSERT_EQ(
        cudnn().get_attribute(config.at, kConfigKnobs, kTypeDescriptor, 64, &count, places.data()),
        Status::kSuccess);
    std::vector<Thing> chosen;
    std::vector<Descriptor> choices;
    for (int64_t i = 0; i < count; ++i) {
      int type = 0;
      int64_t value = 0, one = 0;
      EXPECT_EQ(cudnn().get_attribute(places[size_t(i)], kKnobType, kTypeKnob, 1, &one, &type),
                Status::kSuccess);
      EXPECT_EQ(cudnn().get_attribute(places[size_t(i)], kKnobValue, kTypeInt64, 1, &one, &value),
                Status::kSuccess);
      chosen.emplace_back(kKnobChoice);
      chosen.back().set_kind(kKnobType, kTypeKnob, type), chosen.back().set(kKnobValue, value);
      EXPECT_EQ(chosen.back().finish(), Status::kSuccess);
      choices.push_back(chosen.back().at);
    }
    again.set(kEngineGraph, graph), again.set(kEngineIndex, index), again.set(kEngineDevice, d);
    EXPECT_EQ(again.finish(), Status::kSuccess);
    made.set(kConfigEngine, again);
    if (count) made.set(kConfigKnobs, kTypeDescriptor, count, choices.data());
    EXPECT_EQ(made.finish(), Status::kSuccess);
    EXPECT_EQ(unfinished_plan(made, d).finish(), Status::kSuccess);
    return;
  }
  FAIL() << "no suggestion compiles";
}

// ---- executions, on a card

// A 2 x 2 convolution of ones, by every engine that compiles: each place sums what it sees.
TEST_F(CudnnOnDevice, AConvolutionSums) {
  const Numbers x{1, 4, 3, 3}, w{8, 4, 2, 2}, y{1, 8, 2, 2};
  Thing window_ = window({0, 0}, {1, 1});
  window_.finish();
  const Thing tx = tensor({11, x, last(x)}), tw = tensor({12, w, last(w)}),
              ty = tensor({13, y, last(y)});
  Thing op = unfinished_conv(tx, tw, ty, window_);
  ASSERT_EQ(op.finish(), Status::kSuccess);
  Thing graph = unfinished_graph({&op});
  graph.set(kGraphHandle, kTypeHandle, 1, &handle);
  ASSERT_EQ(graph.finish(), Status::kSuccess);
  std::vector<float> in(36);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i / 4);  // by place
  const DevicePtr at_x = upload(in, stream), at_w = upload(std::vector<float>(128, 1), stream),
                  at_y = upload(std::vector<float>(32, -1), stream);
  const std::vector<Thing> configs = suggestions(graph, nullptr);
  ASSERT_FALSE(configs.empty());
  int ran = 0;
  for (const Thing& c : configs) {
    Thing plan(kPlan);
    plan.set(kPlanHandle, kTypeHandle, 1, &handle), plan.set(kPlanConfig, c);
    if (plan.finish() != Status::kSuccess) continue;
    int64_t bytes = 0, one = 0;
    ASSERT_EQ(cudnn().get_attribute(plan.at, kPlanWorkspace, kTypeInt64, 1, &one, &bytes),
              Status::kSuccess);
    const DevicePtr workspace = allocate(static_cast<size_t>(bytes) + 16);
    Thing pack(kVariantPack);
    const int64_t uids[] = {12, 13, 11};
    const DevicePtr pointers[] = {at_w, at_y, at_x};
    pack.set(kPackUids, kTypeInt64, 3, uids), pack.set(kPackPointers, kTypePointer, 3, pointers);
    pack.set(kPackWorkspace, kTypePointer, 1, &workspace);
    ASSERT_EQ(pack.finish(), Status::kSuccess);
    ASSERT_EQ(cudnn().execute(handle, plan.at, pack.at), Status::kSuccess);
    const auto got = download<float>(at_y, 32, stream);
    for (size_t i = 0; i < 32; ++i) {
      const size_t place = i / 8, first = place / 2 * 3 + place % 2;
      ASSERT_EQ(got[i], static_cast<float>(4 * (4 * first + 0 + 1 + 3 + 4))) << i;
    }
    check(cuda().memory_free(workspace), "free");
    ++ran;
  }
  EXPECT_GT(ran, 0);
  for (DevicePtr p : {at_x, at_w, at_y}) check(cuda().memory_free(p), "free");
}

}  // namespace
}  // namespace vgpu_test
