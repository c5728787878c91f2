// Convolutions as a gather of what each place of the output reads, and a product of it with the
// weight; results lie channels-last, where a group's columns are neighbours. The columns of a piece
// of the output take at most kColumnBytes.
#include <algorithm>

#include "core/backend/cuda/kernels/matmul.h"
#include "core/backend/cuda/kernels/scan.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/pointwise.h"
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
    return std::clamp<int64_t>(kColumnBytes / row_bytes, 1, std::max<int64_t>(rows, 1));
  }
  bool empty() const { return rows * columns * groups * outputs == 0; }

  int64_t groups, inputs, outputs, rows, columns;  // channels of a group; places; of a product
  PoolDim dims[3] = {{1, 1, 1, 1, 0, 1}, {1, 1, 1, 1, 0, 1}, {1, 1, 1, 1, 0, 1}};
};

Tensor gathered(const Convolution& conv, const Tensor& x, int64_t first, int64_t count,
                const Stream& stream) {
  const Tensor columns = empty({conv.groups, count, conv.columns}, x.dtype(), stream.device);
  ConvCall c = conv.call(first, count);
  c.in = x.device_data(), c.out = columns.device_data(), c.x = strides_of(x);
  launch(conv_instance(x.dtype()).name, "gather", cover(c.count, 256), stream, c);
  return columns;
}

// One product for each group.
void multiply(const Convolution& conv, DType t, int64_t m, int64_t n, int64_t k, Matrices c,
              Matrices a, Matrices b, bool accumulate, const Stream& stream) {
  const int64_t batch[] = {conv.groups};
  for (const MatmulLaunch& l : matmul_launches(t, batch, m, n, k, c, a, b, accumulate))
    launch(matmul_instance(t).name, "matmul", l.geometry, stream, l.call);
}

const char* at(const Tensor& t, int64_t elements) {
  return static_cast<const char*>(t.device_data()) + elements * int64_t(size_of(t.dtype()));
}

void plan_conv(const Primitive&, In, std::span<Meta> out, Plan& plan) {
  plan.dense_in = 2;
  out[0].strides = channels_last_strides(out[0].shape);
}
void plan_grad_weight(const Primitive&, In, std::span<Meta>, Plan&) {}

void run_conv(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const Tensor &x = in[0], &w = in[1], &y = out[0];
  const Convolution conv(attributes_of<ConvAttributes>(prim), x.shape(), w.shape(), y.shape());
  if (conv.empty()) return fill(y, 0, stream);
  const int64_t all = conv.groups * conv.outputs, piece = conv.piece(x.dtype());
  for (int64_t first = 0; first < conv.rows; first += piece) {
    const int64_t count = std::min(piece, conv.rows - first);
    const Tensor columns = gathered(conv, x, first, count, stream);
    const int64_t of_c[] = {conv.outputs}, of_a[] = {count * conv.columns},
                  of_b[] = {conv.outputs * conv.columns};
    multiply(conv, x.dtype(), count, conv.outputs, conv.columns, {at(y, first * all), all, 1, of_c},
             {columns.device_data(), conv.columns, 1, of_a},
             {w.device_data(), 1, conv.columns, of_b}, false, stream);
  }
}

void run_grad_input(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const Tensor g = channels_last(in[0], stream), &w = in[1], &dx = out[0];
  const Convolution conv(attributes_of<ConvAttributes>(prim), dx.shape(), w.shape(), g.shape());
  if (conv.empty()) return fill(dx, 0, stream);
  const int64_t images = dx.size(0), places = conv.rows / images, all = conv.groups * conv.outputs;
  const int64_t piece = std::max<int64_t>(1, conv.piece(g.dtype()) / places);
  for (int64_t first = 0; first < images; first += piece) {
    const int64_t n = std::min(piece, images - first), rows = n * places;
    const Tensor columns = empty({conv.groups, rows, conv.columns}, g.dtype(), stream.device);
    const int64_t of_c[] = {rows * conv.columns}, of_a[] = {conv.outputs},
                  of_b[] = {conv.outputs * conv.columns};
    multiply(conv, g.dtype(), rows, conv.columns, conv.outputs,
             {columns.device_data(), conv.columns, 1, of_c},
             {at(g, first * places * all), all, 1, of_a}, {w.device_data(), conv.columns, 1, of_b},
             false, stream);
    ConvCall c = conv.call(0, rows);
    c.in = columns.device_data(), c.out = const_cast<char*>(at(dx, first * dx.strides()[0]));
    c.x = strides_of(dx);
    c.count = countable(n * (dx.numel() / images), "images");
    launch(conv_instance(g.dtype()).name, "collect", cover(c.count, 256), stream, c);
  }
}

// Sums of several pieces are kept wide: a 16-bit sum would be rounded after each.
void run_grad_weight(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const Tensor &x = in[1], &dw = out[0];
  const Convolution conv(attributes_of<ConvAttributes>(prim), x.shape(), dw.shape(), in[0].shape());
  if (conv.empty()) return fill(dw, 0, stream);
  const bool widened = size_of(x.dtype()) < 4 && conv.piece(x.dtype()) < conv.rows;
  auto wide = [&](const Tensor& t) {
    if (!widened) return t;
    const Tensor copy = empty(Meta{t.shape(), t.strides(), kF32, t.device()});
    convert(t, copy, stream);
    return copy;
  };
  const Tensor source = wide(x), g = channels_last(wide(in[0]), stream),
               sum = widened ? empty(dw.shape(), kF32, stream.device) : dw;
  const int64_t all = conv.groups * conv.outputs, piece = conv.piece(source.dtype());
  for (int64_t first = 0; first < conv.rows; first += piece) {
    const int64_t count = std::min(piece, conv.rows - first);
    const Tensor columns = gathered(conv, source, first, count, stream);
    const int64_t of_c[] = {conv.outputs * conv.columns}, of_a[] = {conv.outputs},
                  of_b[] = {count * conv.columns};
    multiply(conv, source.dtype(), conv.outputs, conv.columns, count,
             {sum.device_data(), conv.columns, 1, of_c}, {at(g, first * all), 1, all, of_a},
             {columns.device_data(), conv.columns, 1, of_b}, first > 0, stream);
  }
  if (widened) convert(sum, dw, stream);
}

}  // namespace

void register_conv(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  table.add(cuda, "conv", {.plan = plan_conv, .run = run_conv});
  table.add(cuda, "conv_grad_input", {.plan = plan_conv, .run = run_grad_input});
  table.add(cuda, "conv_grad_weight", {.plan = plan_grad_weight, .run = run_grad_weight});
}

}  // namespace tessera::cuda
