// Factorisations and triangular systems. They are computed on the host, by the CPU's kernels: the
// call waits until operands are there and copies results back. An error, as of a matrix that is not
// positive definite, is the CPU's, and is thrown by the call.
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/runtime.h"
#include "core/dispatch/backend.h"
#include "core/dispatch/copy.h"

namespace tessera::cuda {
namespace {

void run_on_host(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                 Workspace, const Stream&) {
  Tensors operands;
  for (const Tensor& t : in) operands.push_back(transferred(t, kCPU));
  const Tensors results = eager_backend().run(PrimRef(&prim), operands);
  for (size_t i = 0; i < out.size(); ++i)
    copy_values(out[i], transferred(results[i], out[i].device()));
}

}  // namespace

void register_linalg(KernelTable& table) {
  for (const char* op : {"cholesky", "qr", "solve_triangular", "svd"})
    table.add(register_cuda(), op, {.run = run_on_host, .uncapturable = true});
}

}  // namespace tessera::cuda
