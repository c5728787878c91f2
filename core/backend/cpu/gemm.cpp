// Products by libraries, oneDNN (f32, bf16) and OpenBLAS (f64), and the choice between these and
// the packed product. oneDNN gets bf16 where the CPU has dot instructions for it; other bf16, and
// f16 always, are computed in f32. The packed product computes f32 and bf16 products whose operands
// come from the third-level cache, and exact contraction, since its order of sums depends on k
// alone.
#include "core/backend/cpu/gemm.h"

#include <algorithm>

#include "core/backend/cpu/blas.h"
#include "core/backend/cpu/onednn.h"
#include "core/base/boundary.h"
#include "core/base/error.h"
#include "core/base/isa.h"

namespace tessera::cpu {
namespace {

// A prepared oneDNN primitive with the memory objects it runs on; only their pointers change
// between calls.
struct Prepared final : RefCounted {
  dnnl::matmul primitive;
  dnnl::memory a, b, c, scratch;
  size_t scratch_bytes;
};

// Multiplications that take about as long as to wake the other threads, which is thousands of times
// as long where another program holds one of their cores. One thread computes so few.
constexpr int64_t kFewProducts = limit("product.one_thread");

bool for_one_thread(const Gemm& g) {
  int64_t products = g.m * g.n * g.k;
  for (int i = 0; i < g.batch; ++i) products *= g.extent[i];
  meet("product.one_thread", products);
  return products <= kFewProducts;
}

Ref<const Prepared> prepare(const Gemm& g) {
  auto type = g.dtype == kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
  auto desc = [&](const int64_t* batch_stride, int64_t rows, int64_t columns, int64_t row_stride,
                  int64_t column_stride) {
    dnnl::memory::dims dims, strides;
    for (int i = 0; i < g.batch; ++i) {
      dims.push_back(batch_stride[i] == 0 ? 1 : g.extent[i]);
      strides.push_back(std::max<int64_t>(batch_stride[i], 1));
    }
    dims.push_back(rows), dims.push_back(columns);
    strides.push_back(row_stride), strides.push_back(column_stride);
    return dnnl::memory::desc(dims, type, strides);
  };
  auto a = desc(g.a_batch, g.m, g.k, g.a_m, g.a_k), b = desc(g.b_batch, g.k, g.n, g.b_k, g.b_n),
       c = desc(g.c_batch, g.m, g.n, g.c_m, 1);
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const auto pd = description_of<dnnl::matmul>(attr, a, b, c);
  auto handle = [&](const dnnl::memory::desc& d) { return dnnl::memory(d, engine(), nullptr); };
  Ref<Prepared> p = make_ref<Prepared>();
  p->primitive = dnnl::matmul(pd);
  p->a = handle(a), p->b = handle(b), p->c = handle(c), p->scratch = handle(pd.scratchpad_desc());
  p->scratch_bytes = pd.scratchpad_desc().get_size();
  return p;
}

void run_onednn(const Prepared& p, const void* a, const void* b, void* c, void* work) {
  p.a.set_data_handle(const_cast<void*>(a));
  p.b.set_data_handle(const_cast<void*>(b));
  p.c.set_data_handle(c);
  p.scratch.set_data_handle(work);
  const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, p.a.get()},
                                  {DNNL_ARG_WEIGHTS, p.b.get()},
                                  {DNNL_ARG_DST, p.c.get()},
                                  {DNNL_ARG_SCRATCHPAD, p.scratch.get()}};
  dnnl_status_t status =
      dnnl_primitive_execute(p.primitive.get(), stream().get(), p.scratch_bytes ? 4 : 3, args);
  TESSERA_ASSERT(status == dnnl_success, "oneDNN matmul failed with status {}", int(status));
}

void run_blas(const Gemm& g, const double* a, const double* b, double* c) {
  blas_on_one_thread();
  int64_t index[kMaxBatch] = {};
  for (;;) {
    bool ta = g.a_k != 1 && g.k != 1, tb = g.b_n != 1 && g.n != 1;
    int64_t lda = ta ? g.a_k : std::max(g.a_m, g.k), ldb = tb ? g.b_n : std::max(g.b_k, g.n);
    if (ta) lda = std::max(lda, g.m);
    if (tb) ldb = std::max(ldb, g.k);
    cblas_dgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans,
                blasint(g.m), blasint(g.n), blasint(g.k), 1, a, blasint(lda), b, blasint(ldb), 0, c,
                blasint(std::max(g.c_m, g.n)));
    int d = g.batch - 1;
    for (; d >= 0; --d) {
      a += g.a_batch[d], b += g.b_batch[d], c += g.c_batch[d];
      if (++index[d] < g.extent[d]) break;
      a -= g.a_batch[d] * g.extent[d], b -= g.b_batch[d] * g.extent[d],
          c -= g.c_batch[d] * g.extent[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

// Products whose operands come from beyond the second cache: reading them ahead and packing deep
// panels makes ours faster, by 1 to 25 %. Smaller ones may still lie in that cache, where both are
// equal. Measured by `bench products` on a core of Zen 4.
bool suits_packed(const Gemm& g) {
  constexpr int64_t kLeast = limit("packed.least"),
                    kLeastBytes = limit("packed.least_elements") * int64_t(sizeof(float));
  if (g.dtype == kF64 || g.batch > 0 || current_isa() != Isa::kV4) return false;
  meet("packed.least", std::min({g.m, g.n, g.k}));
  if (std::min({g.m, g.n, g.k}) < kLeast || !packed_gemm_takes(g)) return false;
  const int64_t elements = g.m * g.k + g.k * g.n + g.m * g.n;
  if (g.dtype == kF32) meet("packed.least_elements", elements);
  return int64_t(size_of(g.dtype)) * elements >= kLeastBytes;
}

}  // namespace

PlannedGemm::PlannedGemm(const Gemm& g) : g_(g) {
  if (g.dtype == kF64) return;
  if (suits_packed(g)) {
    by_ = By::kPacked;
    workspace_bytes_ = packed_gemm_workspace(g, 0);
    return;
  }
  by_ = By::kOneDnn;
  one_thread_ = for_one_thread(g);
  LibraryThreads threads(one_thread_);
  Ref<const Prepared> prepared = prepare(g);
  workspace_bytes_ = prepared->scratch_bytes;
  library_ = std::move(prepared);
}

void PlannedGemm::run(const void* a, const void* b, void* c, void* work) const {
  if (by_ == By::kPacked) return run_packed_gemm(g_, 0, a, b, c, work);
  if (by_ == By::kBlas)
    return run_blas(g_, static_cast<const double*>(a), static_cast<const double*>(b),
                    static_cast<double*>(c));
  LibraryThreads threads(one_thread_);
  run_onednn(static_cast<const Prepared&>(*library_), a, b, c, work);
}

}  // namespace tessera::cpu
