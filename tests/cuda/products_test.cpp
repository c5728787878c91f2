// Products by cuBLASLt beside those of our own kernels: which of the two computes, what comes of
// it, and what becomes of a program whose library is missing, old or broken. Launches are counted
// where the virtual GPU does that.
#include "core/backend/cuda/ops/products.h"

#include <dlfcn.h>

#include <cstring>
#include <string>
#include <vector>

#include "core/backend/cuda/cublaslt.h"
#include "core/base/deterministic.h"
#include "core/base/matmul_precision.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/contract.h"
#include "core/ops/contract_epilogues.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/views.h"
#include "tests/core/ops/sweep.h"
#include "tests/cuda/card.h"
#include "tests/cuda/counters.h"
#include "tests/cuda/made_library.h"

namespace tessera::cuda {
namespace {

int64_t library_runs() { return runs_of("cublasLt DEFAULT"); }
int64_t kernel_runs() { return runs_of(nullptr); }

double tolerance(DType t) {
  return t == kF32 ? 1e-6 : t == kF64 ? 1e-15 : t == kF16 ? 2e-3 : 1.6e-2;
}
Tensor values(const Shape& s, DType t, int64_t seed) {
  return (rand(s, {kF32}, from_values<int64_t>({seed, 3}, {2})) - 0.5).to(t).to(device_of(0));
}

class CudaProducts : public OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (device_count() && !cublaslt()) GTEST_SKIP() << why_no_cublaslt();
  }
  /// The product by the library, which has to take it, and by our own kernels.
  void compare(const char* spec, const Tensor& a, const Tensor& b, int64_t calls = 1) {
    SCOPED_TRACE(fmt::format("{} of {} and {}", spec, describe(a), describe(b)));
    const int64_t before = library_runs(), all = kernel_runs();
    const Tensor got = contract(spec, a, b);
    if (before >= 0) {
      EXPECT_EQ(library_runs(), before + calls);
      EXPECT_EQ(kernel_runs(), all + calls) << "the library's launches are all";
    }
    const OwnProducts own;
    const Tensor want = contract(spec, a, b);
    EXPECT_EQ(library_runs(), before >= 0 ? before + calls : before);
    // Sums of k terms below 1/4, in two orders.
    sweep::expect_close(got.cpu(), want.cpu(), tolerance(a.dtype()) * 8, spec);
  }
  void expect_own(const char* spec, const Tensor& a, const Tensor& b) {
    SCOPED_TRACE(spec);
    const int64_t before = library_runs();
    const Tensor got = contract(spec, a, b);
    EXPECT_EQ(library_runs(), before);
    sweep::expect_close(got.cpu(), contract(spec, a.cpu(), b.cpu()), tolerance(a.dtype()) * 8,
                        spec);
  }
};

constexpr DType kTypes[] = {kF32, kF64, kF16, kBF16};

TEST_F(CudaProducts, OfMatricesInEachOrder) {
  for (DType t : kTypes) {
    const Tensor a = values({9, 34}, t, 1), b = values({34, 7}, t, 2);
    const Tensor at = permute(values({34, 9}, t, 1), {1, 0}),
                 bt = permute(values({7, 34}, t, 2), {1, 0});
    for (const Tensor& x : {a, at})
      for (const Tensor& y : {b, bt}) compare("ij,jk->ik", x, y), compare("ij,jk->ki", x, y);
  }
}
TEST_F(CudaProducts, OfLayersAndTheirGradients) {
  for (DType t : kTypes) {
    const Tensor x = values({2, 5, 16}, t, 1), w = values({24, 16}, t, 2),
                 g = values({2, 5, 24}, t, 3);
    compare("abk,nk->abn", x, w);
    compare("abn,nk->abk", g, w);
    compare("abn,abk->nk", g, x);
  }
}
// The op that the compiler makes, as the library computes it, and as other kernels do.
TEST_F(CudaProducts, WithABiasAreOneLaunch) {
  for (DType t : kTypes)
    for (const char* spec : {"abk,nk->abn", "abk,kn->abn"}) {
      ContractAttributes c;
      c.parse(spec);
      const PrimRef op = contract_bias_op(c);
      const Shape weight = c.b == "nk" ? Shape{24, 16} : Shape{16, 24};
      const std::vector<Tensor> in{values({2, 5, 16}, t, 1), values(weight, t, 2),
                                   values({24}, t, 3)};
      const auto run = [](const PrimRef& prim, std::vector<Tensor> operands) {
        return dispatch1(prim, operands);
      };
      const int64_t before = runs_of("cublasLt BIAS"), all = kernel_runs();
      const Tensor got = run(op, in);
      if (before >= 0) {
        const bool beside = t != kF64;  // else the library's product, and an addition
        EXPECT_EQ(runs_of("cublasLt BIAS"), before + beside);
        EXPECT_EQ(kernel_runs(), all + (beside ? 1 : 2));
      }
      const OwnProducts own;
      const Tensor want = run(op, in);
      sweep::expect_close(got.cpu(), want.cpu(), tolerance(t) * 8, spec);
      sweep::expect_close(want.cpu(), (contract(spec, in[0], in[1]) + in[2]).cpu(),
                          tolerance(t) * 8, spec);
    }
}
// The ops that the compiler makes of products and what follows them: as the library computes them
// in one launch named `epilogue`, or, where that is null, as a product and `more` kernels.
class CudaEpilogues : public CudaProducts {
 protected:
  void expect(const PrimRef& op, std::vector<Tensor> in, const char* epilogue, int more) {
    SCOPED_TRACE(fmt::format("{} of {}", to_string(*op), describe(in[0])));
    const char* name = epilogue ? epilogue : "cublasLt DEFAULT";
    const int64_t before = runs_of(name), all = kernel_runs();
    const Tensors got = dispatch(op, in);
    if (before >= 0) {
      EXPECT_EQ(runs_of(name), before + 1);
      EXPECT_EQ(kernel_runs(), all + 1 + (epilogue ? 0 : more));
    }
    const OwnProducts own;
    const Tensors want = dispatch(op, in);
    std::vector<Tensor> on_cpu;
    for (const Tensor& t : in) on_cpu.push_back(t.cpu());
    const Tensors exact = op->decompose(on_cpu);
    for (size_t i = 0; i < got.size(); ++i) {
      sweep::expect_close(got[i].cpu(), want[i].cpu(), tolerance(in[0].dtype()) * 8, "own");
      sweep::expect_close(got[i].cpu(), exact[i], tolerance(in[0].dtype()) * 8, "decomposition");
    }
  }
  static int64_t library_runs_with_c() { return runs_of("cublasLt DEFAULT + C"); }
  static ContractAttributes product(const char* spec) {
    ContractAttributes c;
    c.parse(spec);
    return c;
  }
};

TEST_F(CudaEpilogues, GeluOfAProductAndItsBias) {
  const auto gelu = [&](DType t, int64_t width, const char* epilogue) {
    expect(contract_gelu_op(product("abk,nk->abn")),
           {values({2, 5, 16}, t, 1), values({width, 16}, t, 2), values({width}, t, 3)}, epilogue,
           2);
  };
  for (DType t : {kBF16, kF16}) gelu(t, 24, "cublasLt GELU_AUX_BIAS");
  for (DType t : {kF32, kF64}) gelu(t, 24, nullptr);
  gelu(kBF16, 20, nullptr);  // rows of aux that are no multiple of 8
}
TEST_F(CudaEpilogues, GradientsOfGeluAndItsBias) {
  const auto grad = [&](DType t, int64_t width, const char* epilogue) {
    expect(contract_gelu_grad_op(product("abk,kn->abn")),
           {values({2, 5, 16}, t, 1), values({16, width}, t, 2), values({2, 5, width}, t, 3)},
           epilogue, 2);
  };
  for (DType t : {kBF16, kF16}) grad(t, 24, "cublasLt DGELU_BGRAD");
  for (DType t : {kF32, kF64}) grad(t, 24, nullptr);
  grad(kBF16, 20, nullptr);
  // What GELU read is at an address that is none for the library.
  const Tensor x = narrow(values({10 * 24 + 8}, kBF16, 3), 0, 1, 10 * 24).reshape({2, 5, 24});
  expect(contract_gelu_grad_op(product("abk,kn->abn")),
         {values({2, 5, 16}, kBF16, 1), values({16, 24}, kBF16, 2), x}, nullptr, 2);
}
TEST_F(CudaEpilogues, SumsOfOperands) {
  for (DType t : kTypes) {
    const auto sums = [&](const char* spec, bool of_b, const Tensor& a, const Tensor& b,
                          const char* epilogue, int more = 1) {
      expect(contract_sums_op({product(spec), of_b}), {a, b}, t == kF64 ? nullptr : epilogue, more);
    };
    const Tensor g = values({2, 5, 24}, t, 1), x = values({2, 5, 16}, t, 2);
    sums("abn,abk->nk", false, g, x, "cublasLt BGRADB");
    sums("abk,abn->kn", true, x, g, "cublasLt BGRADA");
    // An operand that lies by columns: our own sum reads a copy.
    const Tensor turned = permute(values({24, 10}, t, 3), {1, 0});
    sums("an,ak->nk", false, turned, values({10, 16}, t, 4), "cublasLt BGRADB", 2);
  }
}

// A gradient is added to one that is there: in its dtype, or in f32 from 16 bits.
TEST_F(CudaEpilogues, SumsWithWhatIsThere) {
  for (DType t : kTypes)
    for (DType to : {t, kF32}) {
      if (t == kF64 && to == kF32) continue;
      const Tensor g = values({2, 5, 24}, t, 1), x = values({2, 5, 16}, t, 2);
      expect(contract_add_op(product("abn,abk->nk")), {g, x, values({24, 16}, to, 3)},
             "cublasLt DEFAULT + C", 0);
      expect(contract_add_op(product("bij,bjk->bik")),
             {values({3, 4, 8}, t, 1), values({3, 8, 16}, t, 2), values({3, 4, 16}, to, 3)},
             "cublasLt DEFAULT + C", 0);
      if (to == t) continue;
      Tensor of[] = {g, x};
      const Tensor wide = dispatch1(contract_wide_op(product("abn,abk->nk")), of);
      EXPECT_EQ(wide.dtype(), kF32);
      expect(contract_wide_op(product("abn,abk->nk")), {g, x}, "cublasLt DEFAULT", 0);
      // Our own kernels sum this in parts.
      expect(contract_wide_op(product("an,ak->nk")),
             {values({8192, 8}, t, 4), values({8192, 8}, t, 5)}, "cublasLt DEFAULT", 0);
      sweep::expect_close(wide.cpu(), contract("abn,abk->nk", g.cpu().to(kF32), x.cpu().to(kF32)),
                          1e-6, "not rounded to 16 bits");
    }
}
// The sum lies where its term was, but never where a factor is.
TEST_F(CudaEpilogues, SumsTakeTheMemoryOfTheirTerm) {
  const PrimRef op = contract_add_op(product("ij,jk->ik"));
  const auto at = [&](const Shape& a, const Shape& b) {
    std::vector<Tensor> in{values(a, kF32, 1), values(b, kF32, 2), values({a[0], b[1]}, kF32, 3)};
    const Tensor want = in[0].cpu().matmul(in[1].cpu()) + in[2].cpu();
    const void* at[] = {in[0].device_data(), in[1].device_data(), in[2].device_data()};
    const int64_t before = library_runs_with_c();
    const Tensor got = dispatch1(op, in);
    EXPECT_EQ(library_runs_with_c(), before >= 0 ? before + 1 : before);
    sweep::expect_close(got.cpu(), want, 1e-6, "sum");
    EXPECT_NE(got.device_data(), at[0]);
    EXPECT_NE(got.device_data(), at[1]);
    return got.device_data() == at[2];
  };
  EXPECT_TRUE(at({8, 16}, {16, 24}));
  EXPECT_FALSE(at({16, 16}, {16, 16}));
  Tensor w = values({16, 16}, kF32, 1), b = values({16, 16}, kF32, 2);
  const Tensor want = w.cpu().matmul(b.cpu()) + w.cpu();
  Tensor in[] = {w, b, w};
  const int64_t before = library_runs_with_c();
  assign({&w, 1}, op, in);
  EXPECT_EQ(library_runs_with_c(), before >= 0 ? before + 1 : before);
  sweep::expect_close(w.cpu(), want, 1e-6, "a factor that is overwritten");
}

// ---- TF32

/// Products of f32 in a process that allows TF32, until this dies.
struct AllowTF32 {
  AllowTF32() { set_float32_matmul_precision("high"); }
  ~AllowTF32() { set_float32_matmul_precision("highest"); }
};
TEST_F(CudaProducts, AreInTF32WhereThatIsAskedFor) {
  // 1 + 2^-12 has 13 bits of mantissa, of which TF32 keeps 11.
  const float exact = 1 + std::ldexp(1.0f, -12);
  const auto first = [&](DType t) {
    const Tensor a = full({8, 16}, exact, {kF32, device_of(0)}).to(t);
    return matmul(a, eye(16, {.dtype = t, .device = device_of(0)}))
        .cpu()
        .to(kF64)
        .values<double>()[0];
  };
  const int64_t tf32 = runs_of("cublasLt DEFAULT TF32");
  EXPECT_EQ(first(kF32), exact);
  EXPECT_EQ(runs_of("cublasLt DEFAULT TF32"), tf32);
  {
    const AllowTF32 high;
    EXPECT_EQ(first(kF32), 1);
    EXPECT_EQ(first(kF64), exact) << "other dtypes are what they were";
    EXPECT_EQ(runs_of("cublasLt DEFAULT TF32"), tf32 >= 0 ? tf32 + 1 : tf32);
    const OwnProducts own;
    EXPECT_EQ(first(kF32), exact) << "our own kernels know no TF32";
  }
  EXPECT_EQ(first(kF32), exact);
}

TEST_F(CudaProducts, OfVectors) {
  for (DType t : kTypes) {
    const Tensor a = values({9, 34}, t, 1), v = values({34}, t, 2), w = values({9}, t, 3);
    compare("ij,j->i", a, v);
    compare("ij,i->j", a, w);
    compare("i,j->ij", w, v);
    compare("i,i->", v, v);
  }
}
// A batch has one stride; each further one is a call for each of its positions.
TEST_F(CudaProducts, OfBatches) {
  for (DType t : kTypes) {
    compare("bij,bjk->bik", values({6, 5, 8}, t, 1), values({6, 8, 4}, t, 2));
    compare("bhtd,bhsd->bhts", values({2, 3, 5, 8}, t, 1), values({2, 3, 4, 8}, t, 2));
    const Tensor q = values({2, 5, 3, 8}, t, 1), k = values({2, 5, 3, 8}, t, 2);
    compare("bthd,bshd->bhts", q, k, 2);
    compare("bhts,bshd->bthd", values({2, 3, 5, 5}, t, 3), k, 2);
    compare("bij,jk->bik", permute(values({8, 5, 6}, t, 1), {2, 1, 0}), values({8, 4}, t, 2));
  }
}
TEST_F(CudaProducts, OfPartsAtAnyAddress) {
  for (DType t : kTypes) {
    const Tensor wide = values({9, 40}, t, 1), flat = values({400}, t, 2);
    for (int64_t begin : {0, 1, 2, 3, 8}) {
      const Tensor a = narrow(wide, 1, begin, 30);
      const Tensor b = reshape(narrow(flat, 0, begin, 150), {30, 5});
      compare("ij,jk->ik", a, b);
    }
  }
}
TEST_F(CudaProducts, OurKernelsHaveWhatTheLibraryCannotState) {
  const Tensor a = values({9, 32}, kF32, 1), b = values({16, 7}, kF32, 2);
  expect_own("ij,jk->ik", slice(a, 1, 0, 32, 2), b);
  expect_own("ij,jk->ik", expand(values({1, 16}, kF32, 3), {9, 16}), b);
  expect_own("ij,jk->ik", zeros({9, 0}, {kF32, device_of(0)}), zeros({0, 4}, {kF32, device_of(0)}));
  const Tensor q = values({40, 2, 50, 3}, kF32, 1);
  expect_own("bthd,bshd->bhts", q, q);  // 40 heads of 50 batches, which share no stride
}

TEST_F(CudaProducts, OurKernelsHaveSumsInTheOrderOfLeaves) {
  const ExactContraction exact;
  const int64_t before = library_runs();
  contract("ij,jk->ik", values({4, 16}, kF32, 1), values({16, 4}, kF32, 2));
  EXPECT_EQ(library_runs(), before);
}

// Added one after the other, these terms give 3, since 1e8 + 1 is 1e8; in three parts they give 1.
TEST_F(CudaProducts, SumsAreWholeInDeterministicMode) {
  const Tensor terms = from_values<float>({1, 1e8f, -1e8f, 1, 1, 1, 0, 0}, {8, 1});
  const Tensor a = ones({8, 8}, {kF32, device_of(0)});
  const Tensor b = contiguous(expand(terms, {8, 8})).to(device_of(0));
  const auto sum = [&] { return matmul(a, b).cpu(); };
  const Tensor split = sum();
  const DeterministicScope deterministic;
  const Tensor whole = sum(), again = sum();
  EXPECT_EQ(std::memcmp(whole.raw_values(), again.raw_values(), whole.nbytes()), 0);
  if (!driver().emulated) return;  // which algorithm is the first is a library's own choice
  EXPECT_EQ(split.values<float>()[0], 1);
  EXPECT_EQ(whole.values<float>()[0], 3);
}

// ---- in other processes ----

/// Two equal products, and one of other sizes. Not a test by itself: those below run it.
TEST(CudaProductsChild, DISABLED_Multiply) {
  register_cuda();
  const Tensor a = values({8, 16}, kF32, 1), b = values({16, 24}, kF32, 2);
  for (int i = 0; i < 2; ++i)
    sweep::expect_close(matmul(a, b).cpu(), matmul(a.cpu(), b.cpu()), 1e-5, "product");
  sweep::expect_close(matmul(b, permute(b, {1, 0})).cpu(),
                      matmul(b.cpu(), permute(b, {1, 0}).cpu()), 1e-5, "product");
  std::printf("library %d, own %d\n", int(library_runs()),
              int(runs_of("matmul_f32_scalar_matmul")));
}
/// A product in a capture, and the same product afterwards. Not a test by itself, either.
TEST(CudaProductsChild, DISABLED_Capture) {
  register_cuda();
  const Tensor a = values({8, 16}, kF32, 1), b = values({16, 24}, kF32, 2);
  const Tensor first = matmul(b, permute(b, {1, 0}));  // memory for results is there
  const int64_t before = library_runs();
  const StreamHandle stream = handle_of(compute_stream(0));
  GraphHandle graph = nullptr;
  size_t nodes = 0;
  driver().begin_capture(stream, kCaptureThreadLocal);
  const Tensor captured = matmul(a, b);
  driver().end_capture(stream, &graph);
  driver().graph_nodes(graph, nullptr, &nodes);
  driver().graph_destroy(graph);
  EXPECT_EQ(library_runs(), before);
  matmul(a, b);
  std::printf("nodes %d, runs %d\n", int(nodes), int(library_runs() - before));
}
/// Sums and gradients whose operands are results as well. Not a test by itself, either.
TEST(CudaProductsChild, DISABLED_Join) {
  register_cuda();
  ContractAttributes c;
  c.parse("an,ak->nk");
  Tensor in[] = {values({8, 24}, kBF16, 1), values({8, 16}, kBF16, 2), values({24, 16}, kF32, 3)};
  const Tensor cpu[] = {in[0].cpu(), in[1].cpu(), in[2].cpu()};
  const void* term = in[2].device_data();
  const Tensor sum = dispatch1(contract_add_op(c), in);
  EXPECT_EQ(sum.device_data(), term);
  sweep::expect_close(sum.cpu(), contract_add_op(c)->decompose(cpu)[0], 1e-5, "sum");
  c.parse("ak,kn->an");
  Tensor of[] = {values({8, 16}, kBF16, 1), values({16, 24}, kBF16, 2), values({24}, kBF16, 3)};
  const Tensor on_cpu[] = {of[0].cpu(), of[1].cpu(), of[2].cpu()};
  const Tensors got = dispatch(contract_gelu_op(c), of),
                want = contract_gelu_op(c)->decompose(on_cpu);
  for (size_t i = 0; i < 2; ++i) sweep::expect_close(got[i].cpu(), want[i], 3e-2, "GELU");
  std::printf("joined %d\n",
              int(runs_of("cublasLt DEFAULT + C") + runs_of("cublasLt GELU_AUX_BIAS")));
}
std::string multiply_with(const TempFolder& folder, const std::string& environment = "") {
  return output_of(child_command(folder, "CudaProductsChild.DISABLED_Multiply", environment));
}
size_t count(const std::string& text, const std::string& words) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(words, at)) != text.npos; at += words.size()) ++n;
  return n;
}
constexpr const char* kOwn = "Tessera's own kernels compute products";

class CudaProductsAlone : public CudaProducts {
 protected:
  void SetUp() override {
    CudaProducts::SetUp();
    if (device_count() && !driver().emulated) GTEST_SKIP() << "a real driver does not count";
  }
  /// All results are right, the counts are these, and `line` is said once.
  static void expect(const std::string& output, int library, int own, const std::string& line) {
    EXPECT_NE(output.find("[  PASSED  ] 1 test"), output.npos) << output;
    EXPECT_NE(output.find(fmt::format("library {}, own {}\n", library, own)), output.npos)
        << output;
    if (line.empty())
      EXPECT_EQ(count(output, "Tessera's own kernel"), 0u) << output;
    else
      EXPECT_EQ(count(output, line), 1u) << output;
  }
  TempFolder folder_;
};

TEST_F(CudaProductsAlone, AreTheLibrarys) { expect(multiply_with(folder_), 3, 0, ""); }
TEST_F(CudaProductsAlone, AreOursWhereTheLibraryIsSwitchedOff) {
  expect(multiply_with(folder_, "TESSERA_CUDA_LIBRARY_PRODUCTS=0"), 0, 3, "");
}
TEST_F(CudaProductsAlone, AreOursWhereTheLibraryDoesNotStart) {
  const std::string output = multiply_with(folder_, "VGPU_FAIL=cublasLtCreate:1:1");
  expect(output, 0, 3, kOwn);
  EXPECT_NE(output.find("cublasLtCreate failed with CUBLAS_STATUS_NOT_INITIALIZED"), output.npos);
}
TEST_F(CudaProductsAlone, AreOursWhereTheLibraryIsOldOrNotTheVirtualOne) {
  for (const auto& [text, why] :
       {std::pair("int cublasLtCreate(void* h) { return 0; }",
                  "is too old: version 0.0.0, without"),
        std::pair("#include <stddef.h>\nsize_t cublasLtGetVersion() { return 130200; }\n%s",
                  "does not compute on the virtual GPU")}) {
    TempFolder folder;
    std::string all = text;
    if (const size_t at = all.find("%s"); at != all.npos) {
      std::string functions;
#define FUNCTION(member, symbol, parameters) \
  functions += fmt::format("int {}() {{ return 1; }}\n", #symbol);
#include "core/backend/cuda/cublaslt_functions.def"
#undef FUNCTION
      all.replace(at, 2, functions);
    }
    if (const std::string said = make_library(folder, "libcublasLt.so.13", all); !said.empty())
      GTEST_SKIP() << said;
    const std::string output = multiply_with(folder);
    expect(output, 0, 3, kOwn);
    EXPECT_NE(output.find(why), output.npos) << output;
  }
}
// A product that the library refuses is ours from then on, and others stay the library's.
TEST_F(CudaProductsAlone, AreOursWhereTheLibraryRefusesThem) {
  const std::string line = "Tessera's own kernel computes the product f32 batch 1";
  expect(multiply_with(folder_, "VGPU_FAIL=cublasLtMatmulAlgoGetHeuristic:1:15"), 1, 2, line);
  expect(multiply_with(folder_, "VGPU_FAIL=cublasLtMatmul:2:15"), 2, 1, line);
}
TEST_F(CudaProductsAlone, AreOursWhenTheLibraryBreaks) {
  const std::string output = multiply_with(folder_, "VGPU_FAIL=cublasLtMatmul:2:14");
  expect(output, 1, 2, kOwn);
  EXPECT_NE(output.find("cublasLtMatmul failed with CUBLAS_STATUS_INTERNAL_ERROR"), output.npos);
}
// Two products with four suggestions each, which run four times; then once for each product.
TEST_F(CudaProductsAlone, AreTimedOnceOnAMachine) {
  TempFolder kept;
  const std::string environment =
      fmt::format("TESSERA_CUDA_TIME_PRODUCTS=1 TESSERA_COMPILE_CACHE={}", kept.str());
  expect(multiply_with(folder_, environment), 2 * 4 * 4 + 3, 0, "");
  expect(multiply_with(folder_, environment), 3, 0, "");
}

// Two joined products with four suggestions each, timed and not; and as ours.
TEST_F(CudaProductsAlone, JoinedProductsAreTimedAndReplacedToo) {
  for (const auto& [environment, runs] :
       {std::pair("", 2), std::pair("TESSERA_CUDA_TIME_PRODUCTS=1", 2 * 4 * 4 + 2),
        std::pair("VGPU_FAIL=cublasLtMatmul:1:15", 1),
        std::pair("VGPU_FAIL=cublasLtMatmul:2:15", 1),
        std::pair("TESSERA_CUDA_LIBRARY_PRODUCTS=0", 0)}) {
    TempFolder kept;
    const std::string output = output_of(
        child_command(folder_, "CudaProductsChild.DISABLED_Join",
                      fmt::format("{} TESSERA_COMPILE_CACHE={}", environment, kept.str())));
    EXPECT_NE(output.find("[  PASSED  ] 1 test"), output.npos) << environment << output;
    EXPECT_NE(output.find(fmt::format("joined {}\n", runs)), output.npos) << environment << output;
  }
}

// A capture may not wait: the product is the first suggestion there, and is timed at its next use.
TEST_F(CudaProductsAlone, AreNotTimedInACapture) {
  TempFolder kept;
  const std::string output = output_of(child_command(
      folder_, "CudaProductsChild.DISABLED_Capture",
      fmt::format("TESSERA_CUDA_TIME_PRODUCTS=1 TESSERA_COMPILE_CACHE={}", kept.str())));
  EXPECT_NE(output.find("nodes 1, runs 17\n"), output.npos) << output;
  EXPECT_NE(output.find("[  PASSED  ] 1 test"), output.npos) << output;
}

}  // namespace
}  // namespace tessera::cuda
