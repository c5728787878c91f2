// Attention by cuDNN beside that of our own kernels: which of the two computes, what comes of it,
// and what becomes of a program whose library is missing, old or broken. Executions are counted
// where the virtual GPU does that.
#include "tests/cuda/graphs.h"

#include <dlfcn.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "core/autograd/autograd.h"
#include "core/base/deterministic.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/primitive/registry.h"
#include "tests/cuda/made_library.h"

namespace tessera::cuda {
namespace {

TEST_F(CudaGraphs, AttentionAndItsGradients) {
  struct Heads {
    int64_t queries, keys, width, value_width;
  };
  for (DType t : {kF16, kBF16})
    for (bool causal : {false, true})
      for (const Heads& h : {Heads{9, 9, 8, 8}, {5, 12, 16, 8}, {12, 5, 64, 64}, {3, 7, 8, 128}}) {
        SCOPED_TRACE(fmt::format("{} {} {} {} {} {}", name_of(t), causal, h.queries, h.keys,
                                 h.width, h.value_width));
        const std::vector<Tensor> in{values({2, 3, h.queries, h.width}, t, 1),
                                     values({2, 3, h.keys, h.width}, t, 2),
                                     values({2, 3, h.keys, h.value_width}, t, 3)};
        compare(
            [&] {
              return with_gradients(
                  [&](const std::vector<Tensor>& v) {
                    return scaled_dot_product_attention(v[0], v[1], v[2], {.causal = causal});
                  },
                  in);
            },
            t, {{"cudnn products", 2}});
      }
}
/// Operands of attention that a tensor of other things has, as `lying` cuts them from it.
struct Lying {
  const char* name;
  Shape whole;
  std::function<std::vector<Tensor>(const Tensor&)> lying;
  int64_t launches;  // of copies, beside the library's, in each direction
};
std::vector<Tensor> parts_of(const Tensor& x, int dim) {
  std::vector<Tensor> all;
  for (int64_t i = 0; i < 3; ++i) all.push_back(permute(select(x, dim, i), {0, 2, 1, 3}));
  return all;
}
// Without copies where rows begin at multiples of 16 bytes, each at one of its own.
TEST_F(CudaGraphs, AttentionTakesOperandsWhereTheyLie) {
  const Lying cases[] = {
      {"a projection's parts", {2, 9, 3, 4, 8}, [](const Tensor& x) { return parts_of(x, 2); }, 0},
      {"a projection's heads", {2, 9, 4, 3, 8}, [](const Tensor& x) { return parts_of(x, 3); }, 0},
      {"one sequence", {1, 9, 3, 1, 8}, [](const Tensor& x) { return parts_of(x, 2); }, 0},
      {"rows with gaps of 4",
       {2, 9, 3, 4, 12},
       [](const Tensor& x) { return parts_of(narrow(x, 4, 0, 8), 2); },
       3},
      {"rows from 2 bytes on",
       {2 * 9 * 3 * 4 * 8 + 1},
       [](const Tensor& x) {
         return parts_of(reshape(narrow(x, 0, 1, x.numel() - 1), {2, 9, 3, 4, 8}), 2);
       },
       3},
      {"one head for all",
       {2, 9, 3, 1, 8},
       [](const Tensor& x) {
         auto all = parts_of(x, 2);
         for (Tensor& t : all) t = expand(t, {2, 4, 9, 8});
         return all;
       },
       3},
      {"turned rows",
       {3, 2, 4, 8, 9},
       [](const Tensor& x) {
         std::vector<Tensor> all;
         for (int64_t i = 0; i < 3; ++i) all.push_back(transpose(x[i], 2, 3));
         return all;
       },
       3}};
  for (const Lying& c : cases) {
    SCOPED_TRACE(c.name);
    std::vector<Tensor> in = c.lying(values(c.whole, kBF16, 1));
    for (Tensor& t : in) t = t.detach().requires_grad_();
    const Shape& s = in[0].shape();
    const Tensor seed = permute(values({s[0], s[2], s[1], s[3]}, kBF16, 2), {0, 2, 1, 3});
    const auto attend = [&] {
      const Tensor y = scaled_dot_product_attention(in[0], in[1], in[2], {.causal = true});
      std::vector<Tensor> all{y.detach()};
      for (Tensor& g : grad({&y, 1}, in, {&seed, 1})) all.push_back(g);
      return all;
    };
    compare(attend, kBF16, {{"cudnn products", 2}});
    const int64_t before = runs_of(nullptr);
    attend();
    if (before >= 0) {
      EXPECT_EQ(runs_of(nullptr) - before, 2 * (1 + c.launches));
    }
  }
}
PrimRef prim_of(std::string_view name) {
  for (const OpEntry& e : op_registry().entries())
    if (e.name == name) return e.samples()[0].prim;
  return {};
}
// Results too may have to be copied to where they are wanted.
TEST_F(CudaGraphs, AttentionWritesWhereNoRowBegins) {
  const Shape shape{2, 3, 9, 8};
  const auto at_2_bytes = [&] {
    const Tensor all = zeros({2 * 3 * 9 * 8 + 1}, {kBF16, device_of(0)});
    return reshape(narrow(all, 0, 1, all.numel() - 1), shape);
  };
  const Tensor q = values(shape, kBF16, 1), k = values(shape, kBF16, 2),
               v = values(shape, kBF16, 3);
  const auto attend = [&] {
    const Tensor y = at_2_bytes(), lse = zeros({2, 3, 9}, {kF32, device_of(0)});
    assign(std::vector{y, lse}, prim_of("attention"), operands(Tensor(q), Tensor(k), Tensor(v)));
    std::vector<Tensor> gradients{at_2_bytes(), at_2_bytes(), at_2_bytes()};
    std::vector<Tensor> in{v, q, k, v, y, lse};
    assign(gradients, prim_of("attention_grad"), in);
    gradients.push_back(y);
    return gradients;
  };
  compare(attend, kBF16, {{"cudnn products", 2}});
}
// What the op hands to others, or cuDNN does not compute.
TEST_F(CudaGraphs, OtherAttentionIsOurKernels) {
  const auto attend = [](const Shape& shape, DType t, const AttentionOptions& o) {
    const Tensor q = values(shape, t, 1);
    return [=] { return std::vector{scaled_dot_product_attention(q, q, q, o)}; };
  };
  compare(attend({2, 3, 9, 8}, kF32, {}), kF32, {{"cudnn products", 0}});
  compare(attend({2, 3, 9, 12}, kBF16, {}), kBF16, {{"cudnn products", 0}});
  compare(attend({1, 1, 3, 136}, kBF16, {}), kBF16, {{"cudnn products", 0}});
  const Tensor by_query = ones({9, 1}, {kBool, device_of(0)});
  compare(attend({2, 3, 9, 8}, kBF16, {.mask = by_query}), kBF16, {{"cudnn products", 0}});
}
// Masks are bools or numbers, some of them -inf, for every part of a batch that may share one;
// query 3 attends to no key.
TEST_F(CudaGraphs, AttentionWithMasks) {
  const int64_t queries = 9, keys = 12;
  DType t = kF16;
  for (const Shape& s :
       {Shape{2, 1, 1, keys}, {2, 3, queries, keys}, {3, queries, keys}, {queries, keys}, {keys}}) {
    t = t == kF16 ? kBF16 : kF16;
    const std::vector<Tensor> in{values({2, 3, queries, 8}, t, 1), values({2, 3, keys, 8}, t, 2),
                                 values({2, 3, keys, 16}, t, 3)};
    for (const auto& [of_mask, causal] :
         {std::pair{kBool, false}, {kBool, true}, {kF32, true}, {t, false}}) {
      SCOPED_TRACE(fmt::format("{} {} {} {}", to_string(s), name_of(t), name_of(of_mask), causal));
      Tensor sees = gt(values(s, kF32, 4), -0.2);
      if (s.size() > 1 && s[s.size() - 2] > 1)
        sees = sees & ne(arange(0, queries, 1, {.device = device_of(0)}), 3).unsqueeze(1);
      const Tensor mask = of_mask == kBool ? sees
                                           : where(sees, values(s, of_mask, 5),
                                                   scalar_tensor(-INFINITY, of_mask, device_of(0)));
      const AttentionOptions o{.mask = mask, .causal = causal};
      compare(
          [&] {
            return with_gradients(
                [&](const std::vector<Tensor>& v) {
                  return scaled_dot_product_attention(v[0], v[1], v[2], o);
                },
                in);
          },
          t, {{"cudnn products", 2}});
    }
  }
}
bool equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const Tensor x = a[i].cpu(), y = b[i].cpu();
    if (std::memcmp(contiguous(x).raw_values(), contiguous(y).raw_values(), x.nbytes()))
      return false;
  }
  return true;
}
// Tiles of keys at the beginning that no query of a sequence sees; if causal, queries that see
// none.
TEST_F(CudaGraphs, AttentionWithPaddingInFrontOfKeys) {
  const int64_t keys = 200;
  const Tensor begin = from_values<int64_t>({0, 129, 199}, {3, 1, 1, 1}),
               sees = ge(arange(0, keys, 1, {.device = kCPU}), begin);
  for (DType t : kTypes)
    for (bool causal : {false, true}) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(t), causal));
      const int64_t queries = causal ? keys : 9;
      const std::vector<Tensor> in{values({3, 1, queries, 8}, t, 1), values({3, 1, keys, 8}, t, 2),
                                   values({3, 1, keys, 8}, t, 3)};
      const auto attend = [&](Device on) {
        std::vector<Tensor> there;
        for (const Tensor& x : in) there.push_back(x.to(on));
        const AttentionOptions o{.mask = sees.to(on), .causal = causal};
        return with_gradients(
            [&](const std::vector<Tensor>& v) {
              return scaled_dot_product_attention(v[0], v[1], v[2], o);
            },
            there);
      };
      compare([&] { return attend(device_of(0)); }, t, {{"cudnn products", t == kF32 ? 0 : 2}});
      const auto got = attend(device_of(0)), want = attend(kCPU);
      for (size_t i = 0; i < got.size(); ++i)
        sweep::expect_close(got[i].cpu(), want[i], tolerance(t), fmt::format("CPU, result {}", i));
    }
}
// Numbers that programs write for -inf.
TEST_F(CudaGraphs, LowNumbersOfMasksAreNone) {
  for (DType t : {kF16, kBF16}) {
    const Tensor q = values({1, 2, 5, 8}, t, 1), row = arange(0, 5, 1, {.device = device_of(0)}),
                 sees = ne(row.unsqueeze(1), 3) & lt(row, 4);
    const auto with = [&](double low) {
      return with_gradients(
          [&](const std::vector<Tensor>& v) {
            const Tensor mask = where(sees, 0.5, scalar_tensor(low, kF32, device_of(0)));
            return scaled_dot_product_attention(v[0], v[0], v[0], {.mask = mask});
          },
          {q});
    };
    compare([&] { return with(std::numeric_limits<float>::lowest()); }, t, {{"cudnn products", 2}});
    EXPECT_TRUE(equal(with(-65504), with(-INFINITY)));
    EXPECT_EQ(amax(abs(select(with(-1e9)[0], 2, 3))).item<float>(), 0);
  }
}

std::vector<Tensor> gradients_twice_summed() {
  const Tensor x = values({16, 8, 6, 6}, kF32, 1), w = values({8, 8, 3, 3}, kF32, 2);
  return with_gradients([](const std::vector<Tensor>& v) { return conv2d(v[0], v[1]); }, {x, w});
}

// ---- in other processes ----

/// A convolution and its gradients, twice, and attention. Not a test by itself: those below run it.
TEST(CudaGraphsChild, DISABLED_Compute) {
  register_cuda();
  const Tensor x = values({2, 8, 6, 6}, kF32, 1), w = values({8, 8, 3, 3}, kF32, 2);
  for (int i = 0; i < 2; ++i)
    sweep::expect_close(conv2d(x, w).cpu(), conv2d(x.cpu(), w.cpu()), 1e-5, "convolution");
  const Tensor q = values({2, 3, 9, 8}, kBF16, 1);
  sweep::expect_close(scaled_dot_product_attention(q, q, q).cpu(),
                      scaled_dot_product_attention(q.cpu(), q.cpu(), q.cpu()), 3e-2, "attention");
  std::printf("library %d\n", int(runs_of("cudnn convolution") + runs_of("cudnn products")));
}
/// Whether two runs of one gradient have equal bits, by the engine whose sums change their order.
TEST(CudaGraphsChild, DISABLED_SumTwice) {
  register_cuda();
  const auto one = gradients_twice_summed(), two = gradients_twice_summed();
  const DeterministicScope deterministic;
  const auto three = gradients_twice_summed(), four = gradients_twice_summed();
  std::printf("equal %d, deterministic %d\n", equal(one, two), equal(three, four));
}

/// A convolution twice in a capture, twice afterwards, and in deterministic mode.
TEST(CudaGraphsChild, DISABLED_Capture) {
  register_cuda();
  const Tensor x = values({2, 8, 6, 6}, kBF16, 1), w = values({8, 8, 3, 3}, kBF16, 2);
  const auto runs = [&](auto&& f) {
    const int64_t before = runs_of("cudnn convolution");
    f();
    return int(runs_of("cudnn convolution") - before);
  };
  conv2d(x, w, {}, {.padding = 1});  // memory is there
  const StreamHandle stream = handle_of(compute_stream(0));
  GraphHandle graph = nullptr;
  const int captured = runs([&] {
    driver().begin_capture(stream, kCaptureThreadLocal);
    const Tensor y = conv2d(x, w), again = conv2d(x, w);
    driver().end_capture(stream, &graph);
    driver().graph_destroy(graph);
  });
  const int after = runs([&] { conv2d(x, w), conv2d(x, w); });
  const DeterministicScope deterministic;
  const int once = runs([&] { conv2d(x, w); });
  std::printf("captured %d, after %d, deterministic %d\n", captured, after, once);
}

/// A convolution with moments, twice.
TEST(CudaGraphsChild, DISABLED_Moments) {
  register_cuda();
  const Tensor x = values({3, 8, 6, 5}, kBF16, 1), w = values({16, 8, 3, 3}, kBF16, 2);
  const Tensors want = dispatch(stats_of_conv(), operands(x.cpu(), w.cpu()));
  for (int i = 0; i < 2; ++i) {
    const Tensors got = dispatch(stats_of_conv(), operands(Tensor(x), Tensor(w)));
    for (size_t k = 0; k < want.size(); ++k)
      sweep::expect_close(got[k].cpu(), want[k], 3e-2, fmt::format("result {}", k));
  }
  std::printf("library %d\n", int(runs_of("cudnn convolution")));
}

size_t count(const std::string& text, const std::string& words) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(words, at)) != text.npos; at += words.size()) ++n;
  return n;
}
constexpr const char* kOwn = "Tessera's own kernels compute convolutions and attention";

class CudaGraphsAlone : public CudaGraphs {
 protected:
  void SetUp() override {
    CudaGraphs::SetUp();
    if (device_count() && !driver().emulated) GTEST_SKIP() << "a real driver does not count";
  }
  std::string run(const std::string& environment = "") {
    return output_of(
        child_command(folder_, "CudaGraphsChild.DISABLED_Compute",
                      fmt::format("TESSERA_COMPILE_CACHE={} {}", kept_.str(), environment)));
  }
  /// All results are right, the count is this, and `line` is said once.
  static void expect(const std::string& output, int library, const std::string& line) {
    EXPECT_NE(output.find("[  PASSED  ] 1 test"), output.npos) << output;
    EXPECT_NE(output.find(fmt::format("library {}\n", library)), output.npos) << output;
    EXPECT_EQ(count(output, "Tessera's own kernels compute"), line.empty() ? 0u : 1u) << output;
    EXPECT_EQ(count(output, line.empty() ? "[warning]" : line), line.empty() ? 0u : 1u) << output;
  }
  TempFolder folder_, kept_;
};

TEST_F(CudaGraphsAlone, AreTheLibrarys) { expect(run(), 3, ""); }
TEST_F(CudaGraphsAlone, AreOursWhereTheLibraryIsSwitchedOff) {
  expect(run("TESSERA_CUDA_LIBRARY_GRAPHS=0"), 0, "");
}
TEST_F(CudaGraphsAlone, AreOursWhereTheLibraryDoesNotStart) {
  const std::string output = run("VGPU_FAIL=cudnnCreate:1:1001");
  expect(output, 0, kOwn);
  EXPECT_NE(output.find("cudnnCreate failed with CUDNN_STATUS_NOT_INITIALIZED"), output.npos);
}
TEST_F(CudaGraphsAlone, AreOursWhereTheLibraryIsOldOrNotTheVirtualOne) {
  std::string functions = "void cudnnGetLastErrorString(char* m, unsigned long n) {}\n";
#define FUNCTION(member, symbol, parameters) \
  functions += fmt::format("int {}() {{ return 1; }}\n", #symbol);
#include "core/backend/cuda/cudnn_functions.def"
#undef FUNCTION
  const std::string version = "unsigned long cudnnGetVersion() { return ";
  for (const auto& [text, why] :
       {std::pair<std::string, const char*>{"int cudnnCreate(void* h) { return 0; }",
                                            "is too old: version 0.0.0, without"},
        {version + "90100; }\n" + functions, "is too old: version 9.1.0"},
        {version + "92000; }\n" + functions, "does not compute on the virtual GPU"}}) {
    if (const std::string said = make_library(folder_, "libcudnn.so.9", text); !said.empty())
      GTEST_SKIP() << said;
    const std::string output = run();
    expect(output, 0, kOwn);
    EXPECT_NE(output.find(why), output.npos) << output;
  }
}
TEST_F(CudaGraphsAlone, AttentionIsOursWhereTheLibrarysIsKnownToBeWrong) {
  for (const char* version : {"91000", "91001"})
    expect(run(fmt::format("VGPU_CUDNN_VERSION={}", version)), 2,
           "Tessera's own kernels compute attention: that of cuDNN 9.10.");
  expect(run("VGPU_CUDNN_VERSION=91002"), 3, "");
}
// A graph that the library refuses is ours from then on, and others stay the library's.
TEST_F(CudaGraphsAlone, AreOursWhereTheLibraryRefusesThem) {
  const std::string line = "Tessera's own kernels compute the convolution f32 of [2, 8, 6, 6]";
  expect(run("VGPU_FAIL=cudnnBackendExecute:1:3000"), 1, line);
}
TEST_F(CudaGraphsAlone, AreOursWhenTheLibraryBreaks) {
  const std::string output = run("VGPU_FAIL=cudnnBackendExecute:2:4000");
  expect(output, 1, kOwn);
  EXPECT_NE(output.find("cudnnBackendExecute failed with CUDNN_STATUS_INTERNAL_ERROR"),
            output.npos);
}
// The first suggestion does not compile, the second is found; another process finds it kept, and so
// makes one plan for each graph: the convolution's by its engine, attention's from disk.
TEST_F(CudaGraphsAlone, EnginesAreChosenOnceOnAMachine) {
  const auto plans = [](const std::string& output) {
    return count(output, "vgpu: plan by engine 12");
  };
  const std::string first = run("VGPU_TRACE_PLANS=1"), second = run("VGPU_TRACE_PLANS=1");
  expect(first, 3, ""), expect(second, 3, "");
  EXPECT_EQ(plans(first), 2u) << first;
  EXPECT_EQ(plans(second), 0u) << second;
  EXPECT_EQ(count(second, "vgpu: plan by engine 11"), 1u) << second;
  EXPECT_EQ(count(second, "vgpu: plan by its text, engine 11"), 1u) << second;
}
// Each of a graph's three suggestions that compile runs four times, and the fastest once for each
// use; another process does not time them. The slow one is the first.
TEST_F(CudaGraphsAlone, EnginesAreTimedOnceOnAMachine) {
  const std::string timed = "TESSERA_CUDA_TIME_GRAPHS=1 VGPU_TRACE_PLANS=1 VGPU_CUDNN_SLOW=11";
  const std::string first = run(timed), second = run(timed);
  EXPECT_EQ(count(first, "vgpu: plan by engine 11"), 2u) << first;
  EXPECT_EQ(count(second, "vgpu: plan by engine 11"), 0u) << second;
  EXPECT_EQ(count(second, "vgpu: plan by engine 13") + count(second, "vgpu: plan by engine 15"),
            count(second, "vgpu: plan by engine"))
      << second;
  EXPECT_EQ(count(second, "[  PASSED  ] 1 test"), 1u) << second;
}
// Our own kernels take part for f32 alone.
TEST_F(CudaGraphsAlone, OurKernelsAreTimedToo) {
  const std::string timed = "TESSERA_CUDA_TIME_GRAPHS=1 VGPU_CUDNN_SLOW=11,13,15";
  expect(run(timed), 3 * 4 + 3 * 4 + 1, "");
  expect(run(timed), 1, "");
}
// Three engines run four times with sums; a convolution and moments do, whose three engines are
// timed then; and each use runs one of the two.
TEST_F(CudaGraphsAlone, MomentsAreTimedBesideSums) {
  const std::string output = output_of(child_command(
      folder_, "CudaGraphsChild.DISABLED_Moments",
      fmt::format("TESSERA_COMPILE_CACHE={} TESSERA_CUDA_TIME_GRAPHS=1", kept_.str())));
  expect(output, 3 * 4 + 4 + 3 * 4 + 2, "");
}
// A capture may not wait: the engine is the first suggestion there, and is timed at its next use.
TEST_F(CudaGraphsAlone, EnginesAreNotTimedInACaptureOrDeterministicMode) {
  const std::string output = output_of(child_command(
      folder_, "CudaGraphsChild.DISABLED_Capture",
      fmt::format("TESSERA_COMPILE_CACHE={} TESSERA_CUDA_TIME_GRAPHS=1 VGPU_TRACE_PLANS=1",
                  kept_.str())));
  EXPECT_NE(output.find("captured 0, after 14, deterministic 1\n"), output.npos) << output;
  // It belongs to another convolution: before the capture, in it, after it, and in deterministic
  // mode.
  EXPECT_EQ(count(output, "vgpu: plan by engine 12"), 4u) << output;
  EXPECT_NE(output.find("[  PASSED  ] 1 test"), output.npos) << output;
}
TEST_F(CudaGraphsAlone, ADamagedChoiceIsMadeAgain) {
  expect(run(), 3, "");
  size_t files = 0;
  for (const auto& file : std::filesystem::directory_iterator(kept_.str()))
    if (file.path().extension() == ".graph")
      std::ofstream(file.path(), std::ios::trunc) << "engine 1", ++files;
  EXPECT_EQ(files, 2u);
  const std::string damaged = run(), after = run();
  EXPECT_NE(damaged.find("library 3\n"), damaged.npos) << damaged;
  EXPECT_EQ(count(damaged, "is damaged and is made again"), files) << damaged;
  expect(after, 3, "");
}
TEST_F(CudaGraphsAlone, DeterministicModeTakesEnginesOfOneOrder) {
  const std::string output = output_of(
      child_command(folder_, "CudaGraphsChild.DISABLED_SumTwice",
                    fmt::format("TESSERA_COMPILE_CACHE={} VGPU_CUDNN_FIRST=13", kept_.str())));
  EXPECT_NE(output.find("equal 0, deterministic 1\n"), output.npos) << output;
}

}  // namespace
}  // namespace tessera::cuda
