// Kernels that read and write by position, on [outer, n, inner] around the indexed dim. An index
// that is the same for every outer and inner element (index_select, a row of an embedding) is never
// spread out: it moves whole inner rows. Invariant: work is cut over outer and inner, never along
// the index, so the order in which sources meet does not depend on threads.
#include <algorithm>
#include <cstring>

#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/boundary.h"
#include "core/ops/dim_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kGrain = 16384;  // elements worth a thread

int dim_of(const Primitive& p) { return attributes_of<DimAttributes>(p).dim; }

// True when only `dim` moves through the storage of the index.
bool is_vector(const Tensor& index, int dim) {
  for (int d = 0; d < index.ndim(); ++d)
    if (d != dim && index.shape()[d] != 1 && index.strides()[d] != 0) return false;
  return true;
}

struct Index {
  const int64_t* p;
  int64_t stride, n, inner;
  bool vector;
  Index(const Tensor& t, int dim)
      : p(t.values<int64_t>()), stride(t.strides()[dim]), vector(is_vector(t, dim)) {
    Around a(t.shape(), dim);
    n = a.n, inner = a.inner;
  }
  int64_t at(int64_t o, int64_t k, int64_t i) const {
    return vector ? p[k * stride] : p[(o * n + k) * inner + i];
  }
};

[[noreturn, gnu::cold]] void out_of_range(const Primitive& p, const Tensor& index, int64_t value,
                                          int64_t flat, int dim, int64_t extent) {
  Dims position;
  Strides st = contiguous_strides(index.shape());
  for (int d = 0; d < index.ndim(); ++d) position.push_back(flat / st[d]), flat %= st[d];
  throw UserError(fmt::format("{}: index {} at position {} is outside dim {} of extent {}",
                              p.name(), value, to_string(position), dim, extent));
}

void check_index(const Primitive& p, const Tensor& index, int dim, int64_t extent) {
  if (index.numel() == 0) return;
  Index x(index, dim);
  int64_t outer = x.vector ? 1 : Around(index.shape(), dim).outer, inner = x.vector ? 1 : x.inner;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t k = 0; k < x.n; ++k)
      for (int64_t i = 0; i < inner; ++i)
        if (int64_t v = x.at(o, k, i); v < 0 || v >= extent)
          out_of_range(p, index, v, (o * x.n + k) * x.inner + i, dim, extent);
}

template <uint32_t kDense>
void plan_index(const Primitive& p, std::span<const Tensor> in, std::span<Meta>, Plan& plan) {
  plan.dense_in = kDense | (is_vector(in[1], dim_of(p)) ? 0u : 2u);
}

// Calls body(o, first, last) over outer index o and a range of inner elements, in parallel.
template <class F>
void over_columns(int64_t outer, int64_t n, int64_t inner, F body) {
  constexpr int64_t kColumns = limit("indexing.columns");
  meet("indexing.columns", inner);
  int64_t pieces = std::max<int64_t>(1, (inner + kColumns - 1) / kColumns);
  int64_t grain =
      std::max<int64_t>(1, kGrain / std::max<int64_t>(1, n * std::min(inner, kColumns)));
  parallel_for("indexing.threads", outer * pieces, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      int64_t first = t % pieces * kColumns;
      body(t / pieces, first, std::min(inner, first + kColumns));
    }
  });
}

template <class T>
void gather_loop(const Tensor& x, const Tensor& index, const Tensor& out, int dim) {
  const T* src = static_cast<const T*>(x.raw_values());
  T* dst = static_cast<T*>(out.raw());
  Index at(index, dim);
  Around a(x.shape(), dim);
  over_columns(a.outer, at.n, a.inner, [&](int64_t o, int64_t first, int64_t last) {
    for (int64_t k = 0; k < at.n; ++k) {
      T* row = dst + (o * at.n + k) * a.inner;
      if (at.vector) {
        std::copy(src + (o * a.n + at.at(o, k, 0)) * a.inner + first,
                  src + (o * a.n + at.at(o, k, 0)) * a.inner + last, row + first);
        continue;
      }
      for (int64_t i = first; i < last; ++i) row[i] = src[(o * a.n + at.at(o, k, i)) * a.inner + i];
    }
  });
}

template <class T>
void scatter_loop(const Tensor& index, const Tensor& src, const Tensor& out, int dim) {
  const T* s = static_cast<const T*>(src.raw_values());
  T* dst = static_cast<T*>(out.raw());
  Index at(index, dim);
  Around a(out.shape(), dim);
  over_columns(a.outer, at.n, a.inner, [&](int64_t o, int64_t first, int64_t last) {
    for (int64_t k = 0; k < at.n; ++k)
      for (int64_t i = first; i < last; ++i)
        dst[(o * a.n + at.at(o, k, i)) * a.inner + i] = s[(o * at.n + k) * a.inner + i];
  });
}

struct Sum {
  template <class T>
  static T of(T a, T b) {
    return a + b;
  }
};
struct Product {
  template <class T>
  static T of(T a, T b) {
    return a * b;
  }
};
struct Largest {  // NaN wins
  template <class T>
  static T of(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct Smallest {
  template <class T>
  static T of(T a, T b) {
    return a < b || a != a ? a : b;
  }
};

// Combines every source with the element of `out` that it meets.
template <class Op, class T>
void combine_loop(const Tensor& index, const Tensor& src, const Tensor& out, int dim) {
  const T* s = src.values<T>();
  T* dst = out.data<T>();
  Index at(index, dim);
  Around a(out.shape(), dim);
  over_columns(a.outer, at.n, a.inner, [&](int64_t o, int64_t first, int64_t last) {
    for (int64_t k = 0; k < at.n; ++k) {
      const T* row = s + (o * at.n + k) * a.inner;
      if (at.vector) {
        T* to = dst + (o * a.n + at.at(o, k, 0)) * a.inner;
        for (int64_t i = first; i < last; ++i) to[i] = Op::of(to[i], row[i]);
        continue;
      }
      for (int64_t i = first; i < last; ++i) {
        T& to = dst[(o * a.n + at.at(o, k, i)) * a.inner + i];
        to = Op::of(to, row[i]);
      }
    }
  });
}

// Calls f with a value of the unsigned type as wide as `t`.
template <class F>
void by_width(DType t, F f) {
  switch (size_of(t)) {
    case 1: return f(uint8_t());
    case 2: return f(uint16_t());
    case 4: return f(uint32_t());
    default: return f(uint64_t());
  }
}

void run_gather(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                Workspace, const Stream&) {
  int dim = dim_of(p);
  check_index(p, in[1], dim, in[0].shape()[dim]);
  by_width(in[0].dtype(), [&](auto t) { gather_loop<decltype(t)>(in[0], in[1], out[0], dim); });
}

void run_scatter(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                 Workspace, const Stream&) {
  int dim = dim_of(p);
  check_index(p, in[1], dim, out[0].shape()[dim]);
  if (in[0].raw_values() != out[0].raw() && out[0].nbytes())
    std::memcpy(out[0].raw(), in[0].raw_values(), out[0].nbytes());
  by_width(in[0].dtype(), [&](auto t) { scatter_loop<decltype(t)>(in[1], in[2], out[0], dim); });
}

// Sums begin at zero, the others at the first operand.
template <class Op>
void run_combine(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                 Workspace, const Stream&) {
  int dim = dim_of(p);
  check_index(p, in[1], dim, out[0].shape()[dim]);
  DType compute = compute_dtype(out[0].dtype());
  // 16-bit floats and narrow integers are combined wide and narrowed once.
  Tensor src = converted(in[2], compute),
         all = compute == out[0].dtype() ? out[0] : empty(out[0].shape(), compute, out[0].device());
  if constexpr (std::is_same_v<Op, Sum>) {
    if (all.nbytes()) std::memset(all.raw(), 0, all.nbytes());
  } else if (all.raw() != in[0].raw_values()) {
    convert_into(in[0], all);
  }
  by_compute_type(compute,
                  [&](auto zero) { combine_loop<Op, decltype(zero)>(in[1], src, all, dim); });
  if (all.raw() != out[0].raw()) convert_into(all, out[0]);
}

void plan_dense(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = 1, plan.in_place = true;
}

void run_wrap_index(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                    Workspace, const Stream&) {
  int64_t extent = attributes_of<WrapIndexAttributes>(p).extent;
  const int64_t* x = in[0].values<int64_t>();
  int64_t* y = out[0].data<int64_t>();
  for (int64_t i = 0; i < in[0].numel(); ++i) {
    int64_t v = x[i];
    if (v < -extent || v >= extent) {
      Dims position;
      int64_t rest = i;
      for (int64_t st : contiguous_strides(in[0].shape()))
        position.push_back(rest / st), rest %= st;
      throw UserError(fmt::format("index: {} at position {} is outside a dim of extent {}", v,
                                  to_string(position), extent));
    }
    y[i] = v < 0 ? v + extent : v;
  }
}

}  // namespace

void register_indexing(KernelTable& t) {
  t.add(DeviceKind::kCPU, "gather", {plan_index<1>, run_gather});
  t.add(DeviceKind::kCPU, "scatter", {plan_index<5>, run_scatter});
  t.add(DeviceKind::kCPU, "scatter_sum", {plan_index<4>, run_combine<Sum>});
  t.add(DeviceKind::kCPU, "scatter_prod", {plan_index<5>, run_combine<Product>});
  t.add(DeviceKind::kCPU, "scatter_amax", {plan_index<5>, run_combine<Largest>});
  t.add(DeviceKind::kCPU, "scatter_amin", {plan_index<5>, run_combine<Smallest>});
  t.add(DeviceKind::kCPU, "wrap_index", {plan_dense, run_wrap_index});
}

}  // namespace tessera::cpu
