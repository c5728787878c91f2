// Convolutions by cuDNN, where it is found and can (graphs.h); else as a gather of what each place
// of the output reads, and a product of it with the weight. Results lie channels-last, where a
// group's columns are neighbours. The columns of a piece of the output take at most kColumnBytes;
// kernels of one place need none.
#include <algorithm>

#include "core/backend/cuda/kernels/matmul.h"
#include "core/backend/cuda/kernels/scan.h"
#include "core/backend/cuda/ops/batch_norm.h"
#include "core/backend/cuda/ops/graphs.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/pointwise.h"
#include "core/backend/cuda/ops/reduce.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/ops/windows.h"
#include "core/backend/cuda/runtime.h"
#include "core/ops/conv_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;

constexpr int64_t kColumnBytes = int64_t(256) << 20;

// A convolution of x [N, C, I..] with w [O, C / groups, K..] to y [N, O, places..].
struct Convolution {
  Convolution(const ConvAttributes& a, const Shape& x, const Shape& w, const Shape& y)
      : groups(a.window.groups), inputs(w[1]), outputs(w[0] / groups), rows(x[0]), columns(w[1]) {
    for (int d = 0; d < a.spatial(); ++d) {
      const int to = 3 - a.spatial() + d;
      dims[to] = {int(x[d + 2]),
                  int(y[d + 2]),
                  int(w[d + 2]),
                  int(a.window.stride[d]),
                  int(a.window.pad_begin[d]),
                  int(a.window.dilation[d])};
      rows *= y[d + 2], columns *= w[d + 2];
    }
    countable(rows, "places of a convolution");
  }
  // The call on columns of rows [first, first + count).
  ConvCall call(int64_t first, int64_t count) const {
    ConvCall c{};
    std::copy(dims, dims + 3, c.dim);
    c.groups = unsigned(groups), c.channels = unsigned(inputs), c.columns = unsigned(columns);
    c.first = unsigned(first), c.rows = unsigned(count);
    c.count = unsigned(groups * count * columns);
    return c;
  }
  // Rows of a piece.
  int64_t piece(DType t) const {
    const int64_t row_bytes = std::max<int64_t>(1, groups * columns * int64_t(size_of(t)));
    if (is_product()) return std::max<int64_t>(rows, 1);
    return std::clamp<int64_t>(kColumnBytes / row_bytes, 1, std::max<int64_t>(rows, 1));
  }
  // Whether the columns are rows of x as they lie.
  bool is_product() const {
    return std::all_of(dims, dims + 3, [](const PoolDim& d) {
      return d.kernel == 1 && d.stride == 1 && d.padding == 0 && d.in == d.out;
    });
  }
  bool empty() const { return rows * columns * groups * outputs == 0; }

  int64_t groups, inputs, outputs, rows, columns;  // channels of a group; places; of a product
  PoolDim dims[3] = {{1, 1, 1, 1, 0, 1}, {1, 1, 1, 1, 0, 1}, {1, 1, 1, 1, 0, 1}};
};

// Columns of some rows as an operand of products, and what holds them.
struct Columns {
  Tensor held;
  const void* data;
  int64_t row, group;  // strides
};

const char* at(const Tensor& t, int64_t elements) {
  return static_cast<const char*>(t.device_data()) + elements * int64_t(size_of(t.dtype()));
}

Columns gathered(const Convolution& conv, const Tensor& x, int64_t first, int64_t count,
                 const Stream& stream) {
  if (conv.is_product()) {  // the rows of x themselves
    const int64_t all = conv.groups * conv.inputs;
    return {x, at(x, first * all), all, conv.inputs};
  }
  const Tensor columns = empty({conv.groups, count, conv.columns}, x.dtype(), stream.device);
  ConvCall c = conv.call(first, count);
  c.in = x.device_data(), c.out = columns.device_data(), c.x = strides_of(x);
  const int64_t pack = 16 / int64_t(size_of(x.dtype()));
  auto fits = [&](int64_t stride) { return stride % pack == 0; };
  const bool packs = c.x.channel == 1 && fits(conv.inputs) && fits(c.x.image) &&
                     std::all_of(c.x.dim, c.x.dim + 3, fits) &&
                     reinterpret_cast<uintptr_t>(c.in) % 16 == 0;
  launch(conv_instance(x.dtype()).name, packs ? "gather_packs" : "gather",
         cover(packs ? c.count / pack : c.count, 256), stream, c);
  return {columns, columns.device_data(), conv.columns, count * conv.columns};
}

// x as `gathered` reads it, where it need not copy.
Tensor source_of(const Convolution& conv, const Tensor& x, const Stream& stream) {
  return conv.is_product() ? channels_last(x, stream) : x;
}

// One product for each group.
void multiply(const Convolution& conv, DType t, int64_t m, int64_t n, int64_t k, const Matrices& c,
              const Matrices& a, const Matrices& b, const Stream& stream,
              const MatmulSum& sum = {}) {
  const int64_t batch[] = {conv.groups};
  for (const MatmulLaunch& l : matmul_launches(t, batch, m, n, k, c, a, b, sum))
    launch(l.instance, "matmul", l.geometry, stream, l.call);
}

void plan_conv(const Primitive&, In, std::span<Meta> out, Plan&) {
  out[0].strides = channels_last_strides(out[0].shape);
}

// Weights lie as columns do: [outputs, places of the kernel, inputs].
void convolve(const ConvAttributes& a, In in, const Tensor& y, const Stream& stream) {
  const Convolution conv(a, in[0].shape(), in[1].shape(), y.shape());
  if (conv.empty()) return fill(y, 0, stream);
  const auto own = [&] { convolve(a, in, y, stream); };
  if (library_conv(dnn::ConvKind::kForward, a, in[0], in[1], y, own, stream)) return;
  const Tensor w = channels_last(in[1], stream);
  const Tensor x = source_of(conv, in[0], stream);
  const int64_t all = conv.groups * conv.outputs, piece = conv.piece(x.dtype());
  for (int64_t first = 0; first < conv.rows; first += piece) {
    const int64_t count = std::min(piece, conv.rows - first);
    const Columns columns = gathered(conv, x, first, count, stream);
    const int64_t of_c[] = {conv.outputs}, of_a[] = {columns.group},
                  of_b[] = {conv.outputs * conv.columns};
    multiply(conv, x.dtype(), count, conv.outputs, conv.columns, {at(y, first * all), all, 1, of_c},
             {columns.data, columns.row, 1, of_a}, {w.device_data(), 1, conv.columns, of_b},
             stream);
  }
}

void run_conv(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  convolve(attributes_of<ConvAttributes>(prim), in, out[0], stream);
}

// The library normalises what it stores, or y is normalised where it lies.
void run_conv_norm(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const auto& a = attributes_of<ConvNormAttributes>(prim);
  const Tensor& y = out[0];
  if (y.numel() == 0) return;
  const auto apart = [&] {
    convolve(a.conv, in, y, stream);
    Tensors of{y};
    for (const Tensor& t : in.subspan(2)) of.push_back(t);
    apply_norm(a.norm, of, y, stream);
  };
  const Convolution conv(a.conv, in[0].shape(), in[1].shape(), y.shape());
  if (conv.empty() || !library_conv_norm(a, in, y, apart, stream)) apart();
}

// Moments by sums that the library takes beside y, or from y.
void run_conv_stats(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const Tensor &y = out[0], &mean = out[1], &var = out[2];
  const auto& a = attributes_of<ConvAttributes>(prim);
  const auto apart = [&] {
    convolve(a, in, y, stream);
    if (y.numel() == 0) return fill(mean, 0, stream), fill(var, 0, stream);
    moments(y, mean, var, stream);
  };
  const Convolution conv(a, in[0].shape(), in[1].shape(), y.shape());
  if (conv.empty() || !is_channels_last(y.shape(), y.strides())) return apart();
  const Tensor sum = empty(mean.shape(), kF32, stream.device),
               squares = empty(mean.shape(), kF32, stream.device);
  if (!library_conv_sums(a, in[0], in[1], y, sum, squares, apart, stream)) return apart();
  moments_of_sums(y, sum, squares, mean, var, stream);
}

// dx by g and w, the first operands.
void grad_input(const ConvAttributes& a, In in, const Tensor& dx, const Stream& stream) {
  const Convolution conv(a, dx.shape(), in[1].shape(), in[0].shape());
  if (conv.empty()) return fill(dx, 0, stream);
  const auto own = [&] { grad_input(a, in, dx, stream); };
  if (library_conv(dnn::ConvKind::kGradInput, a, dx, in[1], in[0], own, stream)) return;
  const Tensor g = channels_last(in[0], stream), w = channels_last(in[1], stream);
  const int64_t images = dx.size(0), places = conv.rows / images, all = conv.groups * conv.outputs;
  const int64_t of_g[] = {conv.outputs}, of_w[] = {conv.outputs * conv.columns};
  const Matrices weights{w.device_data(), conv.columns, 1, of_w};
  if (conv.is_product()) {  // the rows of dx are the columns
    const int64_t of_c[] = {conv.inputs};
    return multiply(conv, g.dtype(), conv.rows, conv.inputs, conv.outputs,
                    {dx.device_data(), conv.groups * conv.inputs, 1, of_c},
                    {g.device_data(), all, 1, of_g}, weights, stream);
  }
  const int64_t piece = std::max<int64_t>(1, conv.piece(g.dtype()) / places);
  for (int64_t first = 0; first < images; first += piece) {
    const int64_t n = std::min(piece, images - first), rows = n * places;
    const Tensor columns = empty({conv.groups, rows, conv.columns}, g.dtype(), stream.device);
    const int64_t of_c[] = {rows * conv.columns};
    multiply(conv, g.dtype(), rows, conv.columns, conv.outputs,
             {columns.device_data(), conv.columns, 1, of_c},
             {at(g, first * places * all), all, 1, of_g}, weights, stream);
    ConvCall c = conv.call(0, rows);
    c.in = columns.device_data(), c.out = const_cast<char*>(at(dx, first * dx.strides()[0]));
    c.x = strides_of(dx);
    c.count = countable(n * (dx.numel() / images), "images");
    launch(conv_instance(g.dtype()).name, "collect", cover(c.count, 256), stream, c);
  }
}

void run_grad_input(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  grad_input(attributes_of<ConvAttributes>(prim), in, out[0], stream);
}

// The library masks and sums what it stores, or that is done where it lies.
void run_grad_norm(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const auto& a = attributes_of<ConvNormAttributes>(prim);
  const BatchNormForm& form = a.norm.form;
  const Tensor& h = out[0];
  if (h.numel() == 0) {
    for (const Tensor& t : out.subspan(1)) fill(t, 0, stream);
    return;
  }
  const GradSums s{.norm = a.norm,
                   .x = in[2],
                   .mean = in[3],
                   .var = in[4],
                   .y = form.relu ? in[5] : Tensor(),
                   .other = form.residual ? in.back() : Tensor(),
                   .h = h,
                   .results = out.subspan(1)};
  const auto apart = [&] {
    grad_input(a.conv, in, h, stream);
    masked_sums(s, stream);
  };
  const Convolution conv(a.conv, h.shape(), in[1].shape(), in[0].shape());
  if (conv.empty()) return apart();
  const Tensor sum = empty({h.size(1)}, kF32, stream.device),
               products = empty({h.size(1)}, kF32, stream.device);
  if (!library_conv_grad_sums(a.conv, in[0], in[1], s, sum, products, apart, stream))
    return apart();
  grads_of_sums(s, sum, products, stream);
}

// The sum over all rows has few elements and is long: it is cut into parts, which are added in
// their order, in f32 at least.
void run_grad_weight(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const auto& a = attributes_of<ConvAttributes>(prim);
  const Tensor& dw = out[0];
  const Convolution conv(a, in[1].shape(), dw.shape(), in[0].shape());
  if (conv.empty()) return fill(dw, 0, stream);
  const auto own = [&] { run_grad_weight(prim, in, out, {}, stream); };
  if (library_conv(dnn::ConvKind::kGradWeight, a, in[1], dw, in[0], own, stream)) return;
  const Tensor g = channels_last(in[0], stream);
  const Tensor x = source_of(conv, in[1], stream);
  const DType t = x.dtype(), wide = t == kF64 ? kF64 : kF32;
  const int64_t all = conv.groups * conv.outputs, size = all * conv.columns, piece = conv.piece(t),
                pieces = (conv.rows + piece - 1) / piece;
  const int64_t parts = matmul_parts(t, conv.groups, conv.outputs, conv.columns, piece);
  const Tensor partial = empty({pieces * parts, size}, wide, stream.device);
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t first = i * piece, count = std::min(piece, conv.rows - first);
    const Columns columns = gathered(conv, x, first, count, stream);
    const int64_t of_c[] = {conv.outputs * conv.columns}, of_a[] = {conv.outputs},
                  of_b[] = {columns.group};
    multiply(conv, t, conv.outputs, conv.columns, count,
             {at(partial, i * parts * size), conv.columns, 1, of_c},
             {at(g, first * all), 1, all, of_a}, {columns.data, columns.row, 1, of_b}, stream,
             {.parts = parts, .part_stride = size, .wide = true});
  }
  // [outputs, places of the kernel, inputs], which dw has in another order.
  Tensor sum = partial;
  if (pieces * parts > 1) {
    const bool as_is = is_channels_last(dw.shape(), dw.strides());
    sum = as_is ? dw : empty({size}, wide, stream.device);
    reduce_to("sum", partial, sum, 1, pieces * parts, size, stream);
    if (as_is) return;
  }
  convert(Tensor(Meta{dw.shape(), channels_last_strides(dw.shape()), wide, stream.device},
                 sum.storage(), sum.offset()),
          dw, stream);
}

}  // namespace

void register_conv(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  table.add(cuda, "conv", {.plan = plan_conv, .run = run_conv});
  table.add(cuda, "conv_norm", {.plan = plan_conv, .run = run_conv_norm});
  table.add(cuda, "conv_stats", {.plan = plan_conv, .run = run_conv_stats});
  table.add(cuda, "conv_grad_input", {.plan = plan_conv, .run = run_grad_input});
  table.add(cuda, "conv_grad_norm", {.plan = plan_conv, .run = run_grad_norm});
  table.add(cuda, "conv_grad_weight", {.run = run_grad_weight});
}

}  // namespace tessera::cuda
