// Pools and their gradients, at the operands' strides.
#include "core/backend/cuda/kernels/scan.h"
#include "core/backend/cuda/kernels/walk.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/ops/windows.h"
#include "core/backend/cuda/runtime.h"
#include "core/ops/quantized_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;

// x and y are the large and the small images; `out` is the one that is written.
void run_pool(const char* entry, const PoolAttributes::Windows& w, const Tensor& in,
              const Tensor& out, const Tensor& x, const Tensor& y, void* places,
              const Stream& stream) {
  if (out.numel() == 0) return;
  countable(x.numel() / (x.size(0) * x.size(1)), "places of an image");
  PoolCall c{};
  for (PoolDim& d : c.dim) d = {1, 1, 1, 1, 0, 1};
  for (int d = 0; d < w.spatial(); ++d) {
    PoolDim& to = c.dim[3 - w.spatial() + d];
    to.in = int(x.shape()[d + 2]), to.out = int(w.windows[d]);
    if (w.adaptive) {
      countable((x.shape()[d + 2] + 1) * (w.windows[d] + 1), "places times windows of a pool");
      continue;
    }
    to.kernel = int(w.kernel[d]), to.stride = int(w.stride[d]);
    to.padding = int(w.padding[d]), to.dilation = int(w.dilation[d]);
  }
  c.in = in.device_data(), c.out = out.device_data(), c.places = static_cast<int*>(places);
  c.x = strides_of(x), c.y = strides_of(y);
  c.divisor = w.divisor, c.adaptive = w.adaptive, c.count_padding = w.count_padding;
  c.channels = unsigned(x.shape()[1]), c.count = countable(out.numel(), "a pool's result");
  launch(pool_instance(in.dtype()).name, entry, cover(c.count, 256), stream, c);
}

const PoolAttributes::Windows& windows(const Primitive& p) {
  return attributes_of<PoolAttributes>(p).windows;
}
void run_max_pool(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  run_pool("max_pool", windows(p), in[0], out[0], in[0], out[0], out[1].device_data(), stream);
}
void run_avg_pool(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  run_pool("avg_pool", windows(p), in[0], out[0], in[0], out[0], nullptr, stream);
}
void run_max_pool_grad(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  run_pool("max_pool_grad", windows(p), in[0], out[0], out[0], in[0], in[1].device_data(), stream);
}
void run_avg_pool_grad(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  run_pool("avg_pool_grad", windows(p), in[0], out[0], out[0], in[0], nullptr, stream);
}

void run_quantized_max_pool(const Primitive& p, In in, Out out, Workspace, const Stream& stream) {
  run_pool("max_pool", attributes_of<QuantizedPoolAttributes>(p).windows, in[0], out[0], in[0],
           out[0], nullptr, stream);
}

// Places have the strides of the values.
void plan_dense(const Primitive&, In in, std::span<Meta>, Plan& plan) {
  plan.dense_in = in.size() > 1 ? 3 : 0;
}

}  // namespace

void register_pool(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  table.add(cuda, "max_pool", {.plan = plan_dense, .run = run_max_pool});
  table.add(cuda, "quantized_max_pool", {.run = run_quantized_max_pool});
  table.add(cuda, "avg_pool", {.plan = plan_dense, .run = run_avg_pool});
  table.add(cuda, "max_pool_grad", {.plan = plan_dense, .run = run_max_pool_grad});
  table.add(cuda, "avg_pool_grad", {.plan = plan_dense, .run = run_avg_pool_grad});
}

}  // namespace tessera::cuda
