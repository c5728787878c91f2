#include "core/backend/cpu/elementwise.h"

#include <algorithm>

#include "core/base/boundary.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kGrain = 32768;  // elements worth a thread

bool try_single_row(std::span<const Tensor* const> tensors, Walk& w) {
  const Shape& shape = tensors[0]->shape();
  for (const Tensor* t : tensors)
    if (!(t->shape() == shape) || !t->is_contiguous()) {
      if (t->numel() != 1 || t == tensors[0]) return false;
    }
  for (int i = 0; i < w.operands; ++i) {
    const Tensor& t = *tensors[size_t(i)];
    w.row_stride[i] = t.numel() == 1 && w.n != 1 ? 0 : int64_t(size_of(t.dtype()));
  }
  return true;
}

// Outermost first by the result's strides, ties by the operands'.
void sort_dims(Walk& w) {
  auto before = [&](int a, int b) {
    for (int i = 0; i < w.operands; ++i) {
      int64_t x = std::abs(w.stride[i][a]), y = std::abs(w.stride[i][b]);
      if (x != 0 && y != 0 && x != y) return x > y;
    }
    return false;
  };
  for (int d = 1; d < w.ndim; ++d)
    for (int e = d; e > 0 && before(e, e - 1); --e) {
      std::swap(w.extent[e], w.extent[e - 1]);
      for (int i = 0; i < w.operands; ++i) std::swap(w.stride[i][e], w.stride[i][e - 1]);
    }
}

void merge_dims(Walk& w) {
  int kept = 0;
  for (int d = 0; d < w.ndim; ++d) {
    bool merged = kept > 0;
    for (int i = 0; i < w.operands && merged; ++i)
      merged = w.stride[i][kept - 1] == w.extent[d] * w.stride[i][d];
    if (merged) {
      w.extent[kept - 1] *= w.extent[d];
      for (int i = 0; i < w.operands; ++i) w.stride[i][kept - 1] = w.stride[i][d];
    } else {
      w.extent[kept] = w.extent[d];
      for (int i = 0; i < w.operands; ++i) w.stride[i][kept] = w.stride[i][d];
      ++kept;
    }
  }
  w.ndim = kept;
}

}  // namespace

Walk make_walk(std::span<const Tensor* const> tensors) {
  Walk w;
  w.operands = int(tensors.size());
  for (int i = 0; i < w.operands; ++i)  // the backend has waited for them
    w.base[i] = static_cast<char*>(tensors[size_t(i)]->device_data());
  w.n = tensors[0]->numel();
  if (try_single_row(tensors, w)) return w;

  const Shape& shape = tensors[0]->shape();
  Strides st[kMaxWalked];
  for (int i = 0; i < w.operands; ++i)
    st[i] = broadcast_strides(tensors[size_t(i)]->shape(), tensors[size_t(i)]->strides(), shape);
  for (int d = 0; d < shape.size(); ++d) {
    if (shape[d] == 1) continue;
    w.extent[w.ndim] = shape[d];
    for (int i = 0; i < w.operands; ++i)
      w.stride[i][w.ndim] = st[i][d] * int64_t(size_of(tensors[size_t(i)]->dtype()));
    ++w.ndim;
  }
  if (w.n == 0 || w.ndim == 0) {
    w.ndim = 0;
    for (int i = 0; i < w.operands; ++i)
      w.row_stride[i] = int64_t(size_of(tensors[size_t(i)]->dtype()));
    return w;
  }
  sort_dims(w);
  merge_dims(w);
  --w.ndim;
  w.n = w.extent[w.ndim];
  for (int i = 0; i < w.operands; ++i) w.row_stride[i] = w.stride[i][w.ndim];
  return w;
}

void run_walk(const Walk& w, FunctionRef<void(char* const*, const int64_t*, int64_t)> row) {
  if (w.n == 0) return;
  int64_t rows = w.rows();
  if (rows == 1) {
    if (w.n < 2 * kGrain) {
      meet_threads("elementwise.threads", w.n, kGrain);
      return row(w.base, w.row_stride, w.n);
    }
    parallel_for("elementwise.threads", w.n, kGrain, [&](int64_t begin, int64_t end) {
      char* p[kMaxWalked];
      for (int i = 0; i < w.operands; ++i) p[i] = w.base[i] + begin * w.row_stride[i];
      row(p, w.row_stride, end - begin);
    });
    return;
  }
  const int64_t grain = std::max<int64_t>(1, kGrain / w.n);
  parallel_for("elementwise.row_threads", rows, grain, [&](int64_t begin, int64_t end) {
    int64_t index[kMaxDims];
    char* p[kMaxWalked];
    std::copy(w.base, w.base + w.operands, p);
    int64_t rest = begin;
    for (int d = w.ndim - 1; d >= 0; --d) {
      index[d] = rest % w.extent[d];
      rest /= w.extent[d];
      for (int i = 0; i < w.operands; ++i) p[i] += index[d] * w.stride[i][d];
    }
    for (int64_t r = begin; r < end; ++r) {
      row(p, w.row_stride, w.n);
      for (int d = w.ndim - 1; d >= 0; --d) {
        for (int i = 0; i < w.operands; ++i) p[i] += w.stride[i][d];
        if (++index[d] < w.extent[d]) break;
        for (int i = 0; i < w.operands; ++i) p[i] -= w.extent[d] * w.stride[i][d];
        index[d] = 0;
      }
    }
  });
}

}  // namespace tessera::cpu
