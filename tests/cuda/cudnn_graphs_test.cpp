// Whether the real cuDNN computes our graphs: it suggests engines for them and compiles a plan, for
// the devices that tests/golden/devices describes, so that no card is needed
// (tests/scripts/cudnn_without_a_card). The bench's models at their sizes, in bf16.
#include <fmt/format.h>

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "core/backend/cuda/cudnn/graphs.h"
#include "tests/cuda/card.h"
#include "tests/cuda/made_library.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;
using dnn::AttentionProblem;
using dnn::ConvKind;
using dnn::ConvProblem;
using dnn::Extents;
using dnn::Graph;

class CudnnCompiles : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!cudnn()) GTEST_SKIP() << why_no_cudnn();
    if (cudnn()->emulated)
      GTEST_SKIP() << "the virtual library takes what the real one is asked for";
    std::ifstream file(fs::path(std::getenv("TESSERA_SOURCE")) / "tests/golden/devices" /
                       (GetParam() + ".json"));
    const std::string json{std::istreambuf_iterator<char>(file), {}};
    std::string why;
    std::optional<dnn::Object> device = dnn::described_device(*cudnn(), json, why);
    ASSERT_TRUE(device) << GetParam() << ": " << why;
    device_.emplace(std::move(*device));
  }
  template <class Problem>
  void expect_plan(const std::string& name, const Problem& p, dnn::Demands demands = {}) {
    std::string why;
    const dnn::Plans plans = compile(p, demands, nullptr, why);
    EXPECT_EQ(plans.size(), 1u) << name << ": " << why;
    if (plans.empty()) return;
    const auto& plan = plans[0];
    ++compiled_;
    most_scratch_ = std::max(most_scratch_, plan->workspace_bytes());
    // The choice that is kept on disk finds the engine again, without suggestions.
    if (compiled_ % 8 != 1) return;
    const auto kept = dnn::engine_of(text_of(plan->engine()));
    ASSERT_TRUE(kept) << text_of(plan->engine());
    const dnn::Plans again = compile(p, demands, &*kept, why);
    ASSERT_EQ(again.size(), 1u) << name << ": " << why;
    EXPECT_EQ(text_of(again[0]->engine()), text_of(plan->engine())) << name;
    EXPECT_EQ(again[0]->workspace_bytes(), plan->workspace_bytes()) << name;
    // So does the plan that is kept, where the engine compiles.
    const std::string text = again[0]->text();
    if (text.empty()) return;
    const auto reloaded = reload(p, *kept, text, why);
    ASSERT_TRUE(reloaded) << name << ": " << why;
    EXPECT_EQ(reloaded->workspace_bytes(), plan->workspace_bytes()) << name;
    EXPECT_EQ(reloaded->text(), text) << name;
    ++reloaded_;
  }
  template <class Problem>
  dnn::Plans compile(const Problem& p, dnn::Demands demands, const dnn::Engine* kept,
                     std::string& why, size_t most = 1) {
    return graph_of(*cudnn(), p).compile({nullptr, device_->at()}, demands, kept, most, why);
  }
  template <class Problem>
  std::unique_ptr<dnn::ExecutionPlan> reload(const Problem& p, const dnn::Engine& engine,
                                             const std::string& text, std::string& why) {
    return graph_of(*cudnn(), p).reload({nullptr, device_->at()}, engine, text, why);
  }
  void TearDown() override {
    if (compiled_)
      std::printf(
          "cuDNN %d for %s: %d graphs compiled, %d reloaded, at most %zu bytes of scratch\n",
          cudnn()->version, GetParam().c_str(), compiled_, reloaded_, most_scratch_);
  }
  std::optional<dnn::Object> device_;
  int compiled_ = 0, reloaded_ = 0;
  size_t most_scratch_ = 0;
};

/// A square convolution of ResNet: padding keeps the extent at stride 1.
ConvProblem square(ConvKind kind, int type, int64_t batch, int64_t in, int64_t extent, int64_t out,
                   int64_t kernel, int64_t stride) {
  ConvProblem p;
  p.kind = kind, p.type = type;
  const int64_t padding = kernel / 2, places = (extent + 2 * padding - kernel) / stride + 1;
  const int64_t x[] = {batch, in, extent, extent}, w[] = {out, in, kernel, kernel},
                y[] = {batch, out, places, places};
  std::copy(x, x + 4, p.x), std::copy(w, w + 4, p.w), std::copy(y, y + 4, p.y);
  for (int d = 0; d < 2; ++d)
    p.begin[d] = p.end[d] = padding, p.stride[d] = stride, p.dilation[d] = 1;
  return p;
}

// in, extent, out, kernel, stride of each convolution of ResNet-50 at 224 x 224.
std::set<std::array<int64_t, 5>> resnet50() {
  std::set<std::array<int64_t, 5>> all{{3, 224, 64, 7, 2}};
  int64_t in = 64, extent = 56;
  for (const auto& [blocks, width] : {std::pair{3, 64}, {4, 128}, {6, 256}, {3, 512}})
    for (int b = 0; b < blocks; ++b) {
      const int64_t stride = b == 0 && width > 64 ? 2 : 1, out = 4 * width;
      all.insert({in, extent, width, 1, 1});
      all.insert({width, extent, width, 3, stride});
      all.insert({width, extent / stride, out, 1, 1});
      if (b == 0) all.insert({in, extent, out, 1, stride});
      in = out, extent /= stride;
    }
  return all;
}

TEST_P(CudnnCompiles, EveryConvolutionOfResNet50) {
  constexpr int64_t kBatch = 32;
  const auto all = resnet50();
  EXPECT_EQ(all.size(), 23u);
  for (const auto& [in, extent, out, kernel, stride] : all)
    for (ConvKind kind : {ConvKind::kForward, ConvKind::kGradInput, ConvKind::kGradWeight})
      for (bool deterministic : {false, true})
        expect_plan(fmt::format("{}: {} x {} to {}, {} x {}, stride {}", int(kind), in, extent, out,
                                kernel, kernel, stride),
                    square(kind, dnn::kBFloat16, kBatch, in, extent, out, kernel, stride),
                    {.deterministic = deterministic});
}
TEST_P(CudnnCompiles, SumsOfConvolutionsOfResNet50) {
  int k = 0;
  for (const auto& [in, extent, out, kernel, stride] : resnet50()) {
    if (k++ % 4) continue;
    ConvProblem p = square(ConvKind::kForward, dnn::kBFloat16, 32, in, extent, out, kernel, stride);
    p.statistics = 1;
    expect_plan(fmt::format("sums of {} x {} to {}, {} x {}, stride {}", in, extent, out, kernel,
                            kernel, stride),
                p);
  }
}
// Batch-norm of inference, of which each fourth has all parts.
TEST_P(CudnnCompiles, NormsOfConvolutionsOfResNet50) {
  int k = 0;
  for (const auto& [in, extent, out, kernel, stride] : resnet50()) {
    if (k++ % 4) continue;
    ConvProblem p = square(ConvKind::kForward, dnn::kBFloat16, 32, in, extent, out, kernel, stride);
    p.normalises = p.weight = p.bias = p.residual = p.relu = 1, p.eps = 1e-5;
    expect_plan(fmt::format("batch-norm of {} x {} to {}, {} x {}, stride {}", in, extent, out,
                            kernel, kernel, stride),
                p);
  }
  ConvProblem p = square(ConvKind::kForward, dnn::kFloat, 32, 64, 56, 64, 3, 1);
  p.normalises = 1, p.eps = 1e-5;
  expect_plan("batch-norm in f32", p, {.full_precision = true});
}
// The sums are those of batch-norm's derivative, behind gradients that are masked by a relu and
// added to another.
TEST_P(CudnnCompiles, SumsBehindGradientsOfResNet50) {
  int k = 0;
  const auto expect = [&](const char* name, ConvProblem p, bool relu, bool residual) {
    p.statistics = 1, p.relu = relu, p.residual = residual;
    EXPECT_TRUE(takes(p));
    expect_plan(
        fmt::format("{}: {} x {} to {}, {} x {}", name, p.x[1], p.x[2], p.w[0], p.w[2], p.w[3]), p);
  };
  for (const auto& [in, extent, out, kernel, stride] : resnet50())
    if (stride == 1 && k++ % 4 == 0)
      expect("relu and another gradient",
             square(ConvKind::kGradInput, dnn::kBFloat16, 32, in, extent, out, kernel, 1), true,
             true);
  const ConvProblem one = square(ConvKind::kGradInput, dnn::kHalf, 32, 64, 56, 64, 3, 1);
  expect("neither", one, false, false);
  expect("relu", one, true, false);
  expect("another gradient", one, false, true);
}
// Why takes() says no.
TEST_P(CudnnCompiles, NoSumsBehindGradientsWithStridesOrGroups) {
  const auto gradient = [](int64_t kernel, int64_t stride) {
    return square(ConvKind::kGradInput, dnn::kBFloat16, 32, 256, 56, 512, kernel, stride);
  };
  ConvProblem grouped = gradient(3, 1);
  grouped.w[1] = 8;
  for (ConvProblem p : {gradient(1, 2), gradient(3, 2), grouped}) {
    p.statistics = p.relu = 1;
    EXPECT_FALSE(takes(p));
    std::string why;
    EXPECT_TRUE(compile(p, {}, nullptr, why).empty());
    EXPECT_NE(why, "");
  }
}
/// What the library says of graphs around one convolution of ResNet, in bf16.
class CudnnFuses : public CudnnCompiles {
 protected:
  using Value = dnn::Graph::Value;
  struct Around {
    Graph& g;
    const Extents x, w, y, of_x, of_y;  // the last two: a number for each channel
    const Graph::Window window;
    Value lying(const Extents& e, int type = dnn::kBFloat16) {
      return g.tensor(e, dnn::last_strides(e), type);
    }
    Value inner(const Extents& e, int type = dnn::kFloat) {
      return g.inner(e, dnn::last_strides(e), type);
    }
    Value with(int mode, Value a, Value b, const Extents& e) {
      const Value r = inner(e);
      return g.pointwise(mode, a, b, r), r;
    }
    // relu(x scale + bias), in bf16 within the graph.
    Value normalised() {
      const Value scaled = with(dnn::kMul, lying(x), lying(of_x), x),
                  moved = with(dnn::kAdd, scaled, lying(of_x), x),
                  result = inner(x, dnn::kBFloat16);
      return g.pointwise(dnn::kReluForward, moved, Graph::kNone, result), result;
    }
  };
  bool fuses(int64_t in, int64_t kernel, int64_t stride, FunctionRef<void(Around&)> make) {
    const ConvProblem p =
        square(ConvKind::kForward, dnn::kBFloat16, 32, in, 56, 64, kernel, stride);
    Graph g(*cudnn());
    Around around{g,
                  {p.x, p.x + 4},
                  {p.w, p.w + 4},
                  {p.y, p.y + 4},
                  {1, in, 1, 1},
                  {1, 64, 1, 1},
                  {{p.begin, p.begin + 2}, {p.end, p.end + 2}, {stride, stride}, {1, 1}}};
    make(around);
    std::string why;
    return !g.compile({nullptr, device_->at()}, {}, nullptr, 1, why).empty();
  }
};
// Batch-norm in training, of the operand: not where channels are no multiple of 8, nor before the
// gradient of the weight.
TEST_P(CudnnFuses, WhatPrecedesAConvolution) {
  for (bool sums : {false, true})
    for (int64_t in : {64, 3})
      EXPECT_EQ(fuses(in, 3, 1,
                      [&](Around& a) {
                        const Value x = a.normalised(), y = a.lying(a.y);
                        a.g.convolution(ConvKind::kForward, x, a.lying(a.w), y, a.window);
                        if (sums)
                          a.g.statistics(y, a.lying(a.of_y, dnn::kFloat),
                                         a.lying(a.of_y, dnn::kFloat));
                      }),
                in == 64);
  EXPECT_FALSE(fuses(64, 3, 1, [&](Around& a) {
    const Value x = a.normalised();
    a.g.convolution(ConvKind::kGradWeight, x, a.lying(a.w), a.lying(a.y), a.window);
  }));
}
// Batch-norm's gradient: its sums may follow the gradient of the convolution behind it, past the
// relu between them; what it writes has to be in memory before the next gradients.
TEST_P(CudnnFuses, WhatIsAroundTheGradients) {
  EXPECT_TRUE(fuses(64, 3, 1, [&](Around& a) {
    const Value made = a.inner(a.x), zero = a.g.scalar(0), seen = a.inner(a.x, dnn::kBoolean),
                g = a.lying(a.x);
    a.g.convolution(ConvKind::kGradInput, made, a.lying(a.w), a.lying(a.y), a.window);
    a.g.pointwise(dnn::kCompareLess, zero, a.lying(a.x), seen);
    a.g.select(seen, made, zero, g);
    a.g.reduce(dnn::kReduceAdd, g, a.lying(a.of_x, dnn::kFloat));
    a.g.reduce(dnn::kReduceAdd, a.with(dnn::kMul, g, a.lying(a.x), a.x),
               a.lying(a.of_x, dnn::kFloat));
  }));
  for (ConvKind kind : {ConvKind::kGradInput, ConvKind::kGradWeight})
    EXPECT_FALSE(fuses(64, 3, 1, [&](Around& a) {
      const Value of_g = a.with(dnn::kMul, a.lying(a.y), a.lying(a.of_y), a.y),
                  of_x = a.with(dnn::kMul, a.lying(a.y), a.lying(a.of_y), a.y),
                  both = a.with(dnn::kAdd, of_g, of_x, a.y), g = a.inner(a.y, dnn::kBFloat16);
      a.g.pointwise(dnn::kAdd, both, a.lying(a.of_y), g);
      a.g.convolution(kind, a.lying(a.x), a.lying(a.w), g, a.window);
    }));
}
// The fastest of them is chosen by time.
TEST_P(CudnnCompiles, SeveralEnginesForAConvolution) {
  std::string why;
  for (int type : {dnn::kBFloat16, dnn::kFloat}) {
    const ConvProblem p = square(ConvKind::kForward, type, 32, 128, 28, 128, 3, 1);
    std::set<std::string> names;
    for (const auto& plan : compile(p, {.full_precision = type == dnn::kFloat}, nullptr, why, 4))
      names.insert(text_of(plan->engine()));
    EXPECT_EQ(names.size(), 4u) << why;
  }
}
TEST_P(CudnnCompiles, ConvolutionsOfOtherTypesWithoutTf32) {
  for (int type : {dnn::kFloat, dnn::kHalf})
    for (ConvKind kind : {ConvKind::kForward, ConvKind::kGradInput, ConvKind::kGradWeight})
      for (bool deterministic : {false, true}) {
        const dnn::Demands demands{deterministic, type == dnn::kFloat};
        expect_plan("the first", square(kind, type, 32, 3, 224, 64, 7, 2), demands);
        expect_plan("3 x 3", square(kind, type, 32, 128, 28, 128, 3, 1), demands);
        expect_plan("odd channels", square(kind, type, 2, 5, 9, 7, 3, 1), demands);
      }
}

/// `places` of heads whose rows are `width` long, dense; or each place's heads side by side, in a
/// tensor of `packed` such.
dnn::HeadStrides lying(const AttentionProblem& p, int64_t places, int64_t width, int packed) {
  if (!packed) return {p.heads * places * width, places * width, width};
  return {p.heads * places * width * packed, width, p.heads * width * packed};
}
void lie(AttentionProblem& p, bool packed) {
  const int three = packed ? 3 : 0, one = packed ? 1 : 0;
  p.q = p.dq = lying(p, p.queries, p.width, three), p.k = p.dk = lying(p, p.keys, p.width, three);
  p.v = p.dv = lying(p, p.keys, p.value_width, three);
  p.out = p.g = lying(p, p.queries, p.value_width, one);
}

TEST_P(CudnnCompiles, AttentionOfTheBenchsModels) {
  struct Model {
    const char* name;
    int64_t batch, heads, positions, width;
    bool causal, packed;
  };
  for (const Model& m : {Model{"BERT-base", 32, 12, 128, 64, false, true},
                         Model{"BERT-large", 16, 16, 512, 64, false, true},
                         Model{"GPT-2 124M", 8, 12, 1024, 64, true, true},
                         Model{"LLaMA-8B", 1, 32, 4096, 128, true, false},
                         Model{"odd positions", 2, 3, 77, 40, true, true},
                         Model{"odd and dense", 2, 3, 77, 40, false, false}}) {
    AttentionProblem p;
    p.causal = m.causal, p.scale = 0.125, p.batch = m.batch, p.heads = m.heads;
    p.queries = p.keys = m.positions, p.width = p.value_width = m.width;
    ASSERT_TRUE(takes(p, cudnn()->version)) << m.name;
    lie(p, m.packed);
    expect_plan(m.name, p, {.deterministic = true});
    p.gradient = 1;
    if (!takes(p, cudnn()->version)) continue;
    expect_plan(std::string(m.name) + ", gradient", p);
    p.one_sum = 1;
    expect_plan(std::string(m.name) + ", deterministic gradient", p, {.deterministic = true});
  }
}
// Padding of keys; one mask for all heads, for all sequences, for each head of each.
TEST_P(CudnnCompiles, AttentionWithMasks) {
  struct Model {
    const char* name;
    int64_t batch, heads, positions, of_batch, of_heads, of_queries;
    bool causal;
  };
  for (const Model& m : {Model{"BERT-base", 32, 12, 128, 32, 1, 1, false},
                         Model{"BERT-large", 16, 16, 512, 16, 1, 1, false},
                         Model{"GPT-2 124M, padded", 8, 12, 1024, 8, 1, 1, true},
                         Model{"odd positions", 2, 3, 77, 2, 1, 77, false},
                         Model{"a bias of positions", 8, 8, 512, 1, 8, 512, false},
                         Model{"all", 8, 8, 128, 8, 8, 128, true}}) {
    AttentionProblem p;
    p.causal = m.causal, p.scale = 0.125, p.batch = m.batch, p.heads = m.heads;
    p.queries = p.keys = m.positions, p.width = p.value_width = 64;
    p.mask[0] = m.of_batch, p.mask[1] = m.of_heads, p.mask[2] = m.of_queries, p.mask[3] = p.keys;
    lie(p, true);
    expect_plan(m.name, p, {.deterministic = true});
    p.gradient = 1;
    if (!takes(p, cudnn()->version)) continue;
    expect_plan(std::string(m.name) + ", gradient", p);
    p.one_sum = 1;
    expect_plan(std::string(m.name) + ", deterministic gradient", p, {.deterministic = true});
  }
}
// The library has no engine where takes() says no for this reason.
TEST_P(CudnnCompiles, NoAttentionOfOtherWidths) {
  for (int64_t width : {4, 12}) {
    AttentionProblem p;
    p.batch = 2, p.heads = 3, p.queries = p.keys = 16, p.width = p.value_width = width;
    lie(p, false);
    EXPECT_FALSE(takes(p, cudnn()->version));
    std::string why;
    EXPECT_TRUE(compile(p, {}, nullptr, why).empty());
    EXPECT_NE(why, "");
  }
}

/// Calls f(name, problem) for graphs whose engines compile.
template <class F>
void for_compiled_graphs(F&& f) {
  ConvProblem sums = square(ConvKind::kForward, dnn::kBFloat16, 32, 128, 28, 128, 3, 1);
  sums.statistics = 1;
  f("sums of a convolution", sums);
  ConvProblem behind = square(ConvKind::kGradInput, dnn::kBFloat16, 32, 64, 56, 64, 3, 1);
  behind.statistics = behind.relu = behind.residual = 1;
  f("sums behind a gradient", behind);
  AttentionProblem attention;
  attention.causal = 1, attention.batch = 8, attention.heads = 12;
  attention.queries = attention.keys = 1024, attention.width = attention.value_width = 64;
  lie(attention, true);
  f("attention", attention);
  attention.gradient = 1;
  if (takes(attention, cudnn()->version)) f("gradient of attention", attention);
}
double core_seconds(FunctionRef<void()> f) {
  const std::clock_t begin = std::clock();
  f();
  return double(std::clock() - begin) / CLOCKS_PER_SEC;
}

/// Reloads the plans of which KEPT_PLANS has the texts. Not a test by itself: the next runs it.
TEST_P(CudnnCompiles, DISABLED_Reload) {
  const fs::path folder = std::getenv("KEPT_PLANS");
  for_compiled_graphs([&](const char* name, const auto& p) {
    std::ifstream file(folder / name);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    std::string why;
    std::unique_ptr<dnn::ExecutionPlan> plan;
    const double s = core_seconds([&] { plan = reload(p, {}, text, why); });
    ASSERT_TRUE(plan) << name << ": " << why;
    EXPECT_EQ(plan->text(), text);
    std::printf("%s: reloaded in %.4f s\n", name, s);
  });
}
// What keeping plans is for: a text has the compiled code, so that another process makes the plan
// in a small part of the core's time that it costs from the graph: a 30th to a 100th was measured.
TEST_P(CudnnCompiles, AnotherProcessNeedNotCompile) {
  const TempFolder folder;
  std::map<std::string, double> from_graph;
  for_compiled_graphs([&](const char* name, const auto& p) {
    std::string why;
    dnn::Plans made = compile(p, {}, nullptr, why);
    ASSERT_EQ(made.size(), 1u) << name << ": " << why;
    const dnn::Engine engine = made[0]->engine();
    from_graph[name] = core_seconds([&] { made = compile(p, {}, &engine, why); });
    ASSERT_EQ(made.size(), 1u) << name << ": " << why;
    folder.write(name, made[0]->text());
  });
  const std::string said =
      output_of(child_command(folder, "Devices/CudnnCompiles.DISABLED_Reload/" + GetParam(),
                              fmt::format("KEPT_PLANS={}", folder.str())));
  ASSERT_NE(said.find("[  PASSED  ] 1 test"), said.npos) << said;
  for (const auto& [name, seconds] : from_graph) {
    const std::string before = name + ": reloaded in ";
    const size_t at = said.find("\n" + before);
    ASSERT_NE(at, said.npos) << name << ": " << said;
    const double reloaded = std::stod(said.substr(at + 1 + before.size()));
    EXPECT_LT(8 * reloaded, seconds) << name;
    std::printf("%s: %.3f s of a core from the graph, %.4f s from its text\n", name.c_str(),
                seconds, reloaded);
  }
}
// Precompiled engines need no text.
TEST_P(CudnnCompiles, PlansOfEnginesThatCompileNothingHaveNoText) {
  std::string why;
  for (ConvKind kind : {ConvKind::kForward, ConvKind::kGradInput, ConvKind::kGradWeight}) {
    const auto plans =
        compile(square(kind, dnn::kBFloat16, 32, 128, 28, 128, 3, 1), {}, nullptr, why);
    ASSERT_EQ(plans.size(), 1u) << why;
    EXPECT_EQ(plans[0]->text(), "");
  }
}
TEST_P(CudnnCompiles, TextsThatAreWrongAreNoPlans) {
  std::string why;
  ConvProblem p = square(ConvKind::kForward, dnn::kBFloat16, 32, 128, 28, 128, 3, 1);
  p.statistics = 1;
  const auto made = compile(p, {}, nullptr, why);
  ASSERT_EQ(made.size(), 1u) << why;
  const std::string text = made[0]->text();
  for (const std::string& wrong : {std::string("no text"), text.substr(0, text.size() / 2)}) {
    why.clear();
    EXPECT_FALSE(reload(p, made[0]->engine(), wrong, why));
    EXPECT_NE(why, "");
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, CudnnCompiles, testing::Values("h200"),
                         [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(Devices, CudnnFuses, testing::Values("h200"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tessera::cuda
