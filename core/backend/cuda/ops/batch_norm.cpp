// Batch-norm and its gradient, whole and by halves, on rows of channels that lie side by side:
// moments (or sums) of pieces of rows, one launch that joins them, one that writes the rows. What
// has one value a channel is of the compute type.
#include "core/backend/cuda/ops/batch_norm.h"

#include "core/backend/cuda/kernels/scan.h"
#include "core/backend/cuda/kernels/walk.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/ops/windows.h"
#include "core/backend/cuda/runtime.h"
#include "core/ops/batch_norm_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;

// A call on x [N, C, ..], and what it points to until it is enqueued.
class Norm {
 public:
  BatchNormCall call{};

  Norm(const Tensor& x, const Stream& stream) : stream_(stream), dtype_(x.dtype()) {
    const int64_t channels = x.size(1), count = x.numel() / channels;
    call.x = rows(x), call.rows = countable(count, "values of a channel");
    call.channels = countable(channels, "channels");
    pieces_ = batch_norm_pieces(count, channels);
    call.piece = pieces_.piece, call.pieces = pieces_.pieces, call.share = 1;
  }
  // An operand that is as x; null where there is none.
  const void* rows(const Tensor& t) {
    if (!t.defined()) return nullptr;
    kept_.push_back(channels_last(t, stream_));
    return kept_.back().device_data();
  }
  // An operand [C], dense.
  void* channel(const Tensor& t) {
    const DType wide = dtype_ == kF64 ? kF64 : kF32;
    Tensor dense = t;
    if (t.dtype() != wide || !t.is_contiguous())
      convert(t, dense = empty(t.shape(), wide, stream_.device), stream_);
    kept_.push_back(dense);
    return dense.device_data();
  }
  // Scratch [C] of the compute type.
  void* scratch() { return scratch(call.channels); }

  // mean and var of x.
  void moments(const Tensor& mean, const Tensor& var) {
    call.mean = mean.device_data(), call.var = var.device_data();
    in_pieces("moments", "join_moments");
  }
  // sum_g and sum_product, and dw and db where the call has them.
  void grad_sums() { in_pieces("grad_sums", "join_sums"); }
  // The same of what they write to dresidual.
  void masked_sums() { in_pieces("masked_sums", "join_sums"); }
  // The same by sums of all rows.
  void join_sums(const Tensor& sum, const Tensor& products) {
    call.pieces = 1, call.first = sum.device_data(), call.second = products.device_data();
    join("join_sums");
  }
  void run(const char* entry) const { launch(name(), entry, pieces_.geometry, stream_, call); }

 private:
  std::string name() const { return batch_norm_instance(dtype_).name; }
  void* scratch(int64_t n) {
    kept_.push_back(empty({n}, dtype_ == kF64 ? kF64 : kF32, stream_.device));
    return kept_.back().device_data();
  }
  void in_pieces(const char* entry, const char* join) {
    const int64_t partial = int64_t(call.pieces) * call.channels;
    call.first = scratch(partial), call.second = scratch(partial);
    run(entry);
    this->join(join);
  }
  void join(const char* entry) const {
    launch(name(), entry, cover(call.channels, 256), stream_, call);
  }

  const Stream& stream_;
  const DType dtype_;
  BatchNormPieces pieces_;
  std::vector<Tensor> kept_;
};

void zero(Out all, const Stream& stream) {
  for (const Tensor& t : all) fill(t, 0, stream);
}

// The first `n` results are as x.
void plan_rows(std::span<Meta> out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i].strides = channels_last_strides(out[i].shape);
}
void plan_forward(const Primitive&, In, std::span<Meta> out, Plan&) { plan_rows(out, 1); }
// An element of x is read by the thread that writes that of the result.
void plan_apply(const Primitive&, In, std::span<Meta> out, Plan& plan) {
  plan_rows(out, 1), plan.in_place = true;
}
void plan_grad(const Primitive& prim, In, std::span<Meta> out, Plan&) {
  plan_rows(out, attributes_of<BatchNormAttributes>(prim).form.residual ? 2 : 1);
}

// y from mean and var; `beside`: weight, bias, residual where present.
void normalize(Norm& norm, const BatchNormAttributes& a, In beside, const Tensor& y) {
  BatchNormCall& c = norm.call;
  if (a.form.weight) c.weight = norm.channel(beside[0]);
  if (a.form.bias) c.bias = norm.channel(beside[a.form.weight ? 1 : 0]);
  if (a.form.residual) c.residual = norm.rows(beside.back());
  c.out = y.device_data(), c.eps = a.eps, c.relu = a.form.relu;
  norm.run("normalize");
}

void run_batch_norm(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  if (in[0].numel() == 0) return zero(out.subspan(1), stream);  // the moments of nothing
  Norm norm(in[0], stream);
  norm.moments(out[1], out[2]);
  normalize(norm, attributes_of<BatchNormAttributes>(prim), in.subspan(1), out[0]);
}
void run_stats(const Primitive&, In in, Out out, Workspace, const Stream& stream) {
  if (in[0].numel() == 0) return zero(out, stream);
  moments(in[0], out[0], out[1], stream);
}
void run_apply(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  if (in[0].numel() != 0) apply_norm(attributes_of<BatchNormAttributes>(prim), in, out[0], stream);
}

// Operands g, x, mean, ..., and y behind a relu.
Norm grad_of(const BatchNormAttributes& a, In in, const Stream& stream) {
  Norm norm(in[1], stream);
  norm.call.g = norm.rows(in[0]), norm.call.y = a.form.relu ? norm.rows(in.back()) : nullptr;
  norm.call.mean = norm.channel(in[2]), norm.call.eps = a.eps;
  return norm;
}
void write_grad(Norm& norm, const BatchNormAttributes& a, Out out) {
  norm.call.out = out[0].device_data();
  if (a.form.residual) norm.call.dresidual = out[1].device_data();
  norm.run("grad");
}

void run_grad(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const auto& a = attributes_of<BatchNormAttributes>(prim);
  const Out sums = out.subspan(a.form.residual ? 2 : 1);
  if (in[1].numel() == 0) return zero(sums, stream);
  Norm norm = grad_of(a, in, stream);
  BatchNormCall& c = norm.call;
  c.var = norm.channel(in[3]), c.share = 1 / double(c.rows);
  if (a.form.weight) c.weight = norm.channel(in[4]);
  c.sum_g = norm.scratch(), c.sum_product = norm.scratch();
  // Gradients of weight and bias are of the weight's dtype.
  const DType wide = in[1].dtype() == kF64 ? kF64 : kF32;
  Tensors direct;
  for (const Tensor& t : sums)
    direct.push_back(t.dtype() == wide ? t : empty(t.shape(), wide, stream.device));
  if (a.form.weight) c.dw = direct[0].device_data();
  if (a.form.bias) c.db = direct[a.form.weight ? 1 : 0].device_data();
  norm.grad_sums();
  write_grad(norm, a, out);
  for (size_t i = 0; i < sums.size(); ++i)
    if (!direct[i].is_same(sums[i])) convert(direct[i], sums[i], stream);
}
void run_grad_stats(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  if (in[1].numel() == 0) return zero(out, stream);
  Norm norm = grad_of(attributes_of<BatchNormAttributes>(prim), in, stream);
  norm.call.sum_g = out[0].device_data(), norm.call.sum_product = out[1].device_data();
  norm.grad_sums();
}
void run_grad_apply(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  if (in[1].numel() == 0) return;
  const auto& a = attributes_of<BatchNormAttributes>(prim);
  Norm norm = grad_of(a, in, stream);
  BatchNormCall& c = norm.call;
  c.var = norm.channel(in[3]), c.sum_g = norm.channel(in[4]), c.sum_product = norm.channel(in[5]);
  if (a.form.weight) c.weight = norm.channel(in[6]);
  write_grad(norm, a, out);
}

}  // namespace

void moments(const Tensor& x, const Tensor& mean, const Tensor& var, const Stream& stream) {
  Norm(x, stream).moments(mean, var);
}
void moments_of_sums(const Tensor& x, const Tensor& sum, const Tensor& squares, const Tensor& mean,
                     const Tensor& var, const Stream& stream) {
  BatchNormCall c{};
  c.channels = countable(x.size(1), "channels");
  c.share = double(x.size(1)) / double(x.numel());
  c.first = sum.device_data(), c.second = squares.device_data();
  c.mean = mean.device_data(), c.var = var.device_data();
  launch(batch_norm_instance(x.dtype()).name, "moments_of_sums", cover(c.channels, 256), stream, c);
}
void apply_norm(const BatchNormAttributes& a, In in, const Tensor& y, const Stream& stream) {
  Norm norm(in[0], stream);
  norm.call.mean = norm.channel(in[1]), norm.call.var = norm.channel(in[2]);
  normalize(norm, a, in.subspan(3), y);
}

namespace {

// A call that writes what has one value a channel.
Norm sums_of(const GradSums& s, const Stream& stream) {
  Norm norm(s.x, stream);
  BatchNormCall& c = norm.call;
  c.mean = norm.channel(s.mean), c.var = norm.channel(s.var);
  c.eps = s.norm.eps, c.share = 1 / double(c.rows);
  c.sum_g = s.results[0].device_data(), c.sum_product = s.results[1].device_data();
  if (s.norm.form.weight) c.dw = s.results[2].device_data();
  if (s.norm.form.bias) c.db = s.results[s.norm.form.weight ? 3 : 2].device_data();
  return norm;
}

}  // namespace

void masked_sums(const GradSums& s, const Stream& stream) {
  Norm norm = sums_of(s, stream);
  norm.call.y = norm.rows(s.y), norm.call.residual = norm.rows(s.other);
  norm.call.g = norm.call.dresidual = s.h.device_data();
  norm.masked_sums();
}
void grads_of_sums(const GradSums& s, const Tensor& sum, const Tensor& products,
                   const Stream& stream) {
  sums_of(s, stream).join_sums(sum, products);
}

void register_batch_norm(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  table.add(cuda, "batch_norm", {.plan = plan_forward, .run = run_batch_norm});
  table.add(cuda, "batch_norm_grad", {.plan = plan_grad, .run = run_grad});
  table.add(cuda, "batch_norm_stats", {.run = run_stats});
  table.add(cuda, "batch_norm_apply", {.plan = plan_apply, .run = run_apply});
  table.add(cuda, "batch_norm_grad_stats", {.run = run_grad_stats});
  table.add(cuda, "batch_norm_grad_apply", {.plan = plan_grad, .run = run_grad_apply});
}

}  // namespace tessera::cuda
