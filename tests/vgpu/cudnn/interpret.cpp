#include "tests/vgpu/cudnn/interpret.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/vgpu/cudnn/floats.h"

namespace vgpu::dnn {

namespace {

/// A value of the graph: its elements one after the other.
struct Array {
  Extents dims;
  std::vector<float> values;
};

/// Calls f(index, position in row-major order) for each element.
template <class F>
void for_each(const Extents& dims, F&& f) {
  const size_t n = dims.size();
  for (int64_t d : dims)
    if (d == 0) return;
  Extents index(n, 0);
  for (size_t at = 0;; ++at) {
    f(index, at);
    size_t d = n;
    while (d > 0 && ++index[d - 1] == dims[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}
int64_t offset(const Extents& index, const Extents& strides) {
  int64_t at = 0;
  for (size_t i = 0; i < index.size(); ++i) at += index[i] * strides[i];
  return at;
}
/// Strides of dense elements, 0 along dims that are broadcast.
Extents broadcast(const Extents& dims) {
  Extents s(dims.size());
  int64_t next = 1;
  for (size_t i = dims.size(); i-- > 0;) s[i] = dims[i] == 1 ? 0 : next, next *= dims[i];
  return s;
}

float load(const void* memory, int64_t at, int type) {
  switch (type) {
    case kFloat: return static_cast<const float*>(memory)[at];
    case kInt32: return static_cast<float>(static_cast<const int32_t*>(memory)[at]);
    case kHalf: return of_half(static_cast<const uint16_t*>(memory)[at]);
    case kBFloat16: return of_bfloat(static_cast<const uint16_t*>(memory)[at]);
    default: return static_cast<const bool*>(memory)[at];
  }
}
void store(void* memory, int64_t at, int type, float x) {
  switch (type) {
    case kFloat: static_cast<float*>(memory)[at] = x; break;
    case kInt32: static_cast<int32_t*>(memory)[at] = static_cast<int32_t>(x); break;
    case kHalf: static_cast<uint16_t*>(memory)[at] = to_half(x); break;
    case kBFloat16: static_cast<uint16_t*>(memory)[at] = to_bfloat(x); break;
    default: static_cast<bool*>(memory)[at] = x != 0;
  }
}
float rounded(float x, int type) {
  switch (type) {
    case kHalf: return of_half(to_half(x));
    case kBFloat16: return of_bfloat(to_bfloat(x));
    case kBoolean: return x != 0;
    default: return x;
  }
}

float pointwise(int mode, const float* v, const Extents& index, int64_t axis) {
  switch (mode) {
    case kAdd: return v[0] + v[1];
    case kSub: return v[0] - v[1];
    case kMul: return v[0] * v[1];
    case kDiv: return v[0] / v[1];
    case kExp: return std::exp(v[0]);
    case kLog: return std::log(v[0]);
    case kReciprocalRoot: return 1 / std::sqrt(v[0]);
    case kReluForward: return v[0] > 0 ? v[0] : 0;
    case kCompareGreaterEqual: return v[0] >= v[1];
    case kCompareLess: return v[0] < v[1];
    case kIndex: return static_cast<float>(index[static_cast<size_t>(axis)]);
    case kSelect: return v[2] != 0 ? v[0] : v[1];
    default: return v[0];  // identity
  }
}

class Interpreter {
 public:
  Interpreter(const GraphInfo& graph, int64_t engine, const std::map<int64_t, void*>& at,
              const std::map<int64_t, float>& numbers, unsigned turn)
      : at_(at), tf32_(engine == 21), backwards_(engine == 13 && turn % 2) {
    for (const TensorInfo& t : graph.read) {
      Array a = empty(t);
      for_each(t.dims, [&](const Extents& i, size_t n) {
        a.values[n] = load(at.at(t.uid), offset(i, t.strides), t.type);
      });
      values_[t.uid] = std::move(a);
    }
    for (const TensorInfo& t : graph.numbers) values_[t.uid] = {t.dims, {numbers.at(t.uid)}};
  }
  void run(const Operation& op) {
    Array y = empty(op.out);
    if (op.is_conv())
      convolve(op, y);
    else if (op.kind == kPointwiseOp)
      apply(op, y);
    else if (op.kind == kMatmulOp)
      multiply(op, y);
    else if (op.kind == kReductionOp || op.kind == kStatisticsOp)
      reduce(op, y);
    else
      reshape(op, y);
    for (float& x : y.values) x = rounded(x, op.out.type);
    if (!op.out.is_virtual)
      for_each(op.out.dims, [&](const Extents& i, size_t n) {
        store(at_.at(op.out.uid), offset(i, op.out.strides), op.out.type, y.values[n]);
      });
    values_[op.out.uid] = std::move(y);
  }

 private:
  static Array empty(const TensorInfo& t) {
    return {t.dims, std::vector<float>(static_cast<size_t>(t.count()))};
  }
  const Array& value(const TensorInfo& t) const { return values_.at(t.uid); }

  void apply(const Operation& op, Array& y) const {
    std::vector<const float*> from;
    std::vector<Extents> strides;
    for (const TensorInfo& x : op.in)
      from.push_back(value(x).values.data()), strides.push_back(broadcast(x.dims));
    for_each(y.dims, [&](const Extents& i, size_t n) {
      float v[3] = {};
      for (size_t k = 0; k < from.size(); ++k) v[k] = from[k][offset(i, strides[k])];
      y.values[n] = pointwise(op.mode, v, i, op.axis);
    });
  }

  void multiply(const Operation& op, Array& y) const {
    const Array &a = value(op.in[0]), &b = value(op.in[1]);
    const size_t n = y.dims.size();
    const int64_t rows = y.dims[n - 2], columns = y.dims[n - 1], terms = a.dims[n - 1];
    const Extents of_a = broadcast(a.dims), of_b = broadcast(b.dims);
    const Extents batch(y.dims.begin(), y.dims.end() - 2);
    for_each(batch, [&](const Extents& i, size_t at) {
      const float *x = &a.values[static_cast<size_t>(offset(i, of_a))],
                  *w = &b.values[static_cast<size_t>(offset(i, of_b))];
      float* to = &y.values[at * static_cast<size_t>(rows * columns)];
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t l = 0; l < terms; ++l) {
          const int64_t k = backwards_ ? terms - 1 - l : l;
          for (int64_t c = 0; c < columns; ++c)
            to[r * columns + c] += x[r * terms + k] * w[k * columns + c];
        }
    });
  }

  void reduce(const Operation& op, Array& y) const {
    const Array& x = value(op.in[0]);
    const Extents to = broadcast(y.dims);
    const bool most = op.kind == kReductionOp && op.mode == kReduceMax,
               squares = op.kind == kStatisticsOp && op.mode == 1;
    if (most) std::fill(y.values.begin(), y.values.end(), -std::numeric_limits<float>::infinity());
    for_each(x.dims, [&](const Extents& i, size_t n) {
      float& sum = y.values[static_cast<size_t>(offset(i, to))];
      const float v = x.values[n];
      sum = most ? std::max(sum, v) : sum + (squares ? v * v : v);
    });
  }

  // y sees the memory of x, in which x lies as its strides say, through strides of its own.
  void reshape(const Operation& op, Array& y) const {
    const Array& x = value(op.in[0]);
    int64_t last = 0;
    for (size_t d = 0; d < x.dims.size(); ++d) last += (x.dims[d] - 1) * op.in[0].strides[d];
    std::vector<float> memory(static_cast<size_t>(last) + 1);
    for_each(x.dims, [&](const Extents& i, size_t n) {
      memory[static_cast<size_t>(offset(i, op.in[0].strides))] = x.values[n];
    });
    for_each(y.dims, [&](const Extents& i, size_t n) {
      y.values[n] = memory[static_cast<size_t>(offset(i, op.out.strides))];
    });
  }

  // One loop nest for all three: the operand that is missing is summed into.
  void convolve(const Operation& op, Array& result) const {
    const bool forward = op.kind == kConvForwardOp, data = op.kind == kConvDataOp;
    Array first = value(op.in[0]), second = value(op.in[1]);
    if (tf32_)
      for (Array* a : {&first, &second})
        for (float& v : a->values) v = to_tf32(v);
    Array& x = data ? result : first;
    Array& w = forward ? second : data ? first : result;
    Array& y = forward ? result : second;
    // Always three spatial dims, of which the missing ones come first.
    const size_t n = op.stride.size();
    const auto three = [&](const Array& a) {
      Extents d{a.dims[0], a.dims[1]};
      d.insert(d.end(), 3 - n, 1);
      d.insert(d.end(), a.dims.begin() + 2, a.dims.end());
      return d;
    };
    const auto filled = [&](const Extents& e, int64_t with) {
      Extents all(3 - n, with);
      all.insert(all.end(), e.begin(), e.end());
      return all;
    };
    const Extents dx = three(x), dw = three(w), dy = three(y), stride = filled(op.stride, 1),
                  dilation = filled(op.dilation, 1), begin = filled(op.begin, 0);
    const int64_t groups = dx[1] / dw[1], outputs = dw[0] / groups, inputs = dw[1];
    const Extents spatial_y(dy.begin() + 2, dy.end()), kernel(dw.begin() + 2, dw.end());
    const int64_t places_x = dx[2] * dx[3] * dx[4], places_y = dy[2] * dy[3] * dy[4],
                  places_w = dw[2] * dw[3] * dw[4];
    const int64_t images = dx[0];
    for (int64_t step = 0; step < images; ++step) {
      const int64_t image = backwards_ ? images - 1 - step : step;
      for_each(kernel, [&](const Extents& k, size_t at_k) {
        for_each(spatial_y, [&](const Extents& o, size_t at_y) {
          int64_t at_x = 0;
          for (size_t i = 0; i < 3; ++i) {
            const int64_t p = o[i] * stride[i] - begin[i] + k[i] * dilation[i];
            if (p < 0 || p >= dx[i + 2]) return;
            at_x = at_x * dx[i + 2] + p;
          }
          for (int64_t g = 0; g < groups; ++g)
            for (int64_t co = 0; co < outputs; ++co) {
              const int64_t out = g * outputs + co;
              float& of_y = y.values[static_cast<size_t>((image * dy[1] + out) * places_y) + at_y];
              float* of_w = &w.values[static_cast<size_t>(out * inputs * places_w) + at_k];
              float* of_x =
                  &x.values[static_cast<size_t>((image * dx[1] + g * inputs) * places_x + at_x)];
              if (forward)
                for (int64_t ci = 0; ci < inputs; ++ci)
                  of_y += of_x[ci * places_x] * of_w[ci * places_w];
              else if (data)
                for (int64_t ci = 0; ci < inputs; ++ci)
                  of_x[ci * places_x] += of_y * of_w[ci * places_w];
              else
                for (int64_t ci = 0; ci < inputs; ++ci)
                  of_w[ci * places_w] += of_y * of_x[ci * places_x];
            }
        });
      });
    }
  }

  const std::map<int64_t, void*>& at_;
  const bool tf32_, backwards_;
  std::map<int64_t, Array> values_;
};

}  // namespace

void interpret(const GraphInfo& graph, int64_t engine, const std::map<int64_t, void*>& at,
               const std::map<int64_t, float>& numbers, unsigned turn) {
  Interpreter all(graph, engine, at, numbers, turn);
  for (const Operation& op : graph.operations) all.run(op);
}

}  // namespace vgpu::dnn
