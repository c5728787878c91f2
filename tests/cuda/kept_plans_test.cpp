// Plans of cuDNN on disk: what a second process still compiles, and what becomes of files that are
// damaged, of another graph or library, or that the library does not take. On the virtual GPU,
// which says how each plan is made; tests/cuda/cudnn_graphs_test.cpp asks the real library.
#include "core/backend/cuda/cudnn/kept_plans.h"

#include <algorithm>
#include <filesystem>

#include "core/dispatch/dispatch.h"
#include "core/io/hash.h"
#include "core/ops/fused.h"
#include "tests/cuda/graphs.h"
#include "tests/cuda/made_library.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

void add_bits(std::string& bits, const Tensor& t) {
  const Tensor wide = t.cpu().to(kF32);
  bits.append(reinterpret_cast<const char*>(wide.data<float>()), size_t(wide.numel()) * 4);
}

/// A convolution with moments, attention and its gradient, whose engines compile, and a convolution
/// whose engine does not. Not a test by itself: those below run it.
TEST(CudaKeptPlansChild, DISABLED_Compute) {
  register_cuda();
  const Tensor x = values({3, 8, 6, 5}, kBF16, 1), w = values({16, 8, 3, 3}, kBF16, 2),
               q = values({2, 3, 9, 8}, kBF16, 3);
  std::string bits;
  const Tensors sums = dispatch(stats_of_conv(), operands(Tensor(x), Tensor(w))),
                want = dispatch(stats_of_conv(), operands(x.cpu(), w.cpu()));
  for (size_t i = 0; i < want.size(); ++i) {
    sweep::expect_close(sums[i].cpu(), want[i], 3e-2, fmt::format("sums {}", i));
    add_bits(bits, sums[i]);
  }
  const auto attend = [](const std::vector<Tensor>& v) {
    return scaled_dot_product_attention(v[0], v[0], v[0]);
  };
  const auto got = with_gradients(attend, {q});
  const OwnGraphs own;
  const auto ours = with_gradients(attend, {q});
  for (size_t i = 0; i < got.size(); ++i) {
    sweep::expect_close(got[i].cpu(), ours[i].cpu(), 3e-2, fmt::format("attention {}", i));
    add_bits(bits, got[i]);
  }
  std::printf("library %d, bits %s\n",
              int(runs_of("cudnn convolution") + runs_of("cudnn products")),
              to_string(io::xxh128(bits.data(), bits.size())).c_str());
}
/// A convolution whose engine compiles nothing.
TEST(CudaKeptPlansChild, DISABLED_Convolve) {
  register_cuda();
  const Tensor x = values({2, 8, 6, 6}, kBF16, 1), w = values({8, 8, 3, 3}, kBF16, 2);
  sweep::expect_close(conv2d(x, w).cpu(), conv2d(x.cpu(), w.cpu()), 3e-2, "convolution");
}

size_t count(const std::string& text, const std::string& words) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(words, at)) != text.npos; at += words.size()) ++n;
  return n;
}

class CudaKeptPlans : public CudaGraphs {
 protected:
  static constexpr size_t kGraphs = 3;  // of a child, whose engines compile

  std::string command(const std::string& environment,
                      const char* child = "CudaKeptPlansChild.DISABLED_Compute") const {
    return child_command(
        folder_, child,
        fmt::format("TESSERA_COMPILE_CACHE={} VGPU_TRACE_PLANS=1 {}", kept_.str(), environment));
  }
  struct Said {
    std::string text, bits;
    size_t from_graphs = 0, from_texts = 0;  // plans that were made
  };
  /// A child, whose results are right.
  template <class... Child>
  Said run(const std::string& environment = "", Child... child) const {
    Said s{output_of(command(environment, child...)), ""};
    EXPECT_NE(s.text.find("[  PASSED  ] 1 test"), s.text.npos) << s.text;
    EXPECT_EQ(count(s.text, "Tessera's own kernels compute"), 0u) << s.text;
    if (const size_t at = s.text.find("bits "); at != s.text.npos) s.bits = s.text.substr(at, 37);
    s.from_graphs = count(s.text, "vgpu: plan by engine") - count(s.text, "plan by engine 12");
    s.from_texts = count(s.text, "vgpu: plan by its text");
    return s;
  }
  /// Each of the graphs' plans is made in one of the two ways, `texts` of them from disk.
  static void expect_plans(const Said& s, size_t texts) {
    EXPECT_EQ(s.from_texts, texts) << s.text;
    EXPECT_EQ(s.from_graphs, kGraphs - texts) << s.text;
  }
  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& f : fs::directory_iterator(kept_.str()))
      if (f.path().extension() == ".plan") found.push_back(f.path());
    std::sort(found.begin(), found.end());
    return found;
  }
  TempFolder folder_, kept_;
};

// On cards too, where a plan of the library's has never been executed otherwise than by its graph.
TEST_F(CudaKeptPlans, ASecondProcessTakesThem) {
  run();
  EXPECT_FALSE(files().empty());
  const Said second = run("TESSERA_LOG=info");
  EXPECT_EQ(count(second.text, "cuDNN compiles"), 0u) << second.text;
}

class CudaKeptPlansCounted : public CudaKeptPlans {
 protected:
  void SetUp() override {
    CudaGraphs::SetUp();
    if (device_count() && !driver().emulated) GTEST_SKIP() << "a real driver does not count";
  }
};

TEST_F(CudaKeptPlansCounted, ASecondProcessCompilesNone) {
  const Said first = run();
  expect_plans(first, 0);
  EXPECT_EQ(files().size(), kGraphs);
  const Said second = run();
  expect_plans(second, kGraphs);
  EXPECT_EQ(count(second.text, "vgpu: plan by engine"), 0u) << second.text;
  EXPECT_NE(first.bits, "");
  EXPECT_EQ(second.bits, first.bits);
  EXPECT_EQ(count(second.text, "library 3,"), 1u) << second.text;
}
// The plan that is kept is that of the engine which was the fastest when all were timed; here the
// fastest is neither the first engine nor the only one.
TEST_F(CudaKeptPlansCounted, TheFastestIsKept) {
  const std::string timed = "TESSERA_CUDA_TIME_GRAPHS=1 VGPU_CUDNN_SLOW=11,13";
  const Said first = run(timed), second = run(timed);
  EXPECT_GT(first.from_graphs, kGraphs) << first.text;
  EXPECT_EQ(count(second.text, "vgpu: plan by engine"), 0u) << second.text;
  EXPECT_EQ(count(second.text, "vgpu: plan by its text, engine 15"), second.from_texts);
  EXPECT_GE(second.from_texts, kGraphs) << second.text;
  EXPECT_EQ(second.bits, first.bits);
}
TEST_F(CudaKeptPlansCounted, PlansWhoseEngineCompilesNothingAreNotKept) {
  const auto convolve = [&] { return run("", "CudaKeptPlansChild.DISABLED_Convolve"); };
  EXPECT_EQ(convolve().from_graphs, 1u);
  EXPECT_TRUE(files().empty());
  EXPECT_EQ(convolve().from_graphs, 1u);
}
TEST_F(CudaKeptPlansCounted, DamagedOnesAreMadeAgain) {
  const Said first = run();
  const auto all = files();
  ASSERT_EQ(all.size(), kGraphs);
  const auto name = [&](size_t i) { return all[i].filename().string(); };
  const std::string whole = kept_.read(name(1));
  std::string flipped = whole;
  flipped[flipped.size() / 2] ^= 1;
  kept_.write(name(0), "");
  kept_.write(name(1), flipped);
  kept_.write(name(2), kept_.read(name(2)).substr(0, 500));
  const Said damaged = run();
  expect_plans(damaged, 0);
  EXPECT_EQ(count(damaged.text, "is damaged and is made again"), kGraphs) << damaged.text;
  EXPECT_EQ(damaged.bits, first.bits);
  EXPECT_EQ(kept_.read(name(1)), whole);
  expect_plans(run(), kGraphs);
}
// Whole files, under another's name: a plan of another graph would compute something else.
TEST_F(CudaKeptPlansCounted, OnesOfOtherGraphsAreNotTaken) {
  const Said first = run();
  const auto all = files();
  ASSERT_EQ(all.size(), kGraphs);
  const std::string mine = kept_.read(all[0].filename()), other = kept_.read(all[1].filename());
  kept_.write(all[0].filename(), other);
  kept_.write(all[1].filename(), mine);
  const Said second = run("TESSERA_LOG=info");
  expect_plans(second, kGraphs - 2);
  EXPECT_EQ(count(second.text, "does not take: it is of another graph"), 2u) << second.text;
  EXPECT_EQ(second.bits, first.bits);
  EXPECT_EQ(kept_.read(all[0].filename()), mine);
  expect_plans(run(), kGraphs);
}
TEST_F(CudaKeptPlansCounted, AnotherVersionOfTheLibraryHasItsOwn) {
  run();
  expect_plans(run("VGPU_CUDNN_VERSION=91800"), 0);
  EXPECT_EQ(files().size(), 2 * kGraphs);
  expect_plans(run("VGPU_CUDNN_VERSION=91800"), kGraphs);
  expect_plans(run(), kGraphs);
}
TEST_F(CudaKeptPlansCounted, OnesThatTheLibraryRefusesAreCompiledAgain) {
  const Said first = run();
  for (const char* status : {"1002", "2000", "3007", "4000"}) {
    const Said refused = run(fmt::format("TESSERA_LOG=info VGPU_FAIL='cudnn text:2:{}'", status));
    EXPECT_EQ(refused.from_texts, kGraphs - 1) << refused.text;
    EXPECT_EQ(refused.from_graphs, 1u) << refused.text;
    EXPECT_EQ(count(refused.text, "cuDNN compiles a graph again"), 1u) << refused.text;
    EXPECT_EQ(count(refused.text, "[warning]"), 0u) << refused.text;
    EXPECT_EQ(refused.bits, first.bits);
  }
}
// The library does not look at the code in a text; the driver may, as late as here.
TEST_F(CudaKeptPlansCounted, OnesThatCannotBeExecutedAreCompiledAgain) {
  const Said first = run();
  for (const char* status : {"3000", "5000"}) {
    const Said failed =
        run(fmt::format("TESSERA_LOG=info VGPU_FAIL=cudnnBackendExecute:1:{}", status));
    EXPECT_EQ(failed.from_texts, kGraphs) << failed.text;
    EXPECT_EQ(failed.from_graphs, 1u) << failed.text;
    EXPECT_EQ(count(failed.text, "whose kept plan failed with"), 1u) << failed.text;
    EXPECT_EQ(failed.bits, first.bits);
  }
  // Once a plan from disk has been executed, it fails as others do.
  constexpr const char* kTwice = "CudaGraphsChild.DISABLED_Moments";
  run("", kTwice);
  const std::string later = output_of(command("VGPU_FAIL=cudnnBackendExecute:2:3000", kTwice));
  EXPECT_EQ(count(later, "vgpu: plan by its text"), 1u) << later;
  EXPECT_EQ(count(later, "Tessera's own kernels compute the convolution"), 1u) << later;
  EXPECT_EQ(count(later, "[  PASSED  ] 1 test"), 1u) << later;
}
TEST_F(CudaKeptPlansCounted, ProcessesThatStartTogetherKeepWholeOnes) {
  const std::string said = output_of(fmt::format("{} & {} & wait", command(""), command("")));
  EXPECT_EQ(count(said, "[  PASSED  ] 1 test"), 2u) << said;
  EXPECT_EQ(count(said, "[warning]"), 0u) << said;
  EXPECT_EQ(files().size(), kGraphs);
  expect_plans(run(), kGraphs);
}
TEST_F(CudaKeptPlansCounted, AFolderThatCannotBeWrittenIsSaidOnce) {
  const Said said = run("TESSERA_COMPILE_CACHE=/proc/cache");
  expect_plans(said, 0);
  EXPECT_EQ(count(said.text, "every start has cuDNN compile its graphs again"), 1u) << said.text;
}
// As on a disk that is full: nothing can be put where a plan belongs.
TEST_F(CudaKeptPlansCounted, APlaceThatCannotBeWrittenIsSaidOnce) {
  const Said first = run();
  for (const fs::path& f : files()) fs::remove(f), fs::create_directory(f);
  const Said said = run();
  expect_plans(said, 0);
  EXPECT_EQ(count(said.text, "every start has cuDNN compile its graphs again"), 1u) << said.text;
  EXPECT_EQ(said.bits, first.bits);
}

}  // namespace
}  // namespace tessera::cuda
