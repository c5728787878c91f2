// Ops that put tensors into parts of another: copies into windows of the result.
#include "core/backend/cuda/ops/pointwise.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/runtime.h"
#include "core/ops/dim_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

// The part of `out` that has the shape of `like`, `begin` elements in.
Tensor window(const Tensor& out, const Tensor& like, const Strides& strides, int64_t begin) {
  return Tensor({like.shape(), strides, out.dtype(), out.device()}, out.storage(),
                out.offset() + begin);
}

void run_cat(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
             Workspace, const Stream& stream) {
  const int dim = attributes_of<CatAttributes>(prim).dim;
  int64_t at = 0;
  for (const Tensor& t : in) {
    convert(t, window(out[0], t, out[0].strides(), at * out[0].strides()[dim]), stream);
    at += t.shape()[dim];
  }
}

void run_unslice(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                 Workspace, const Stream& stream) {
  const auto& a = attributes_of<UnsliceAttributes>(prim);
  fill(out[0], 0, stream);
  Strides strides = out[0].strides();
  const int64_t begin = a.begin * strides[a.dim];
  strides[a.dim] *= a.step;
  convert(in[0], window(out[0], in[0], strides, begin), stream);
}

}  // namespace

void register_join(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  table.add(cuda, "cat", {.run = run_cat});
  table.add(cuda, "unslice", {.run = run_unslice});
}

}  // namespace tessera::cuda
