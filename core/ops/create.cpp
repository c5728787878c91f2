#include "core/ops/create.h"

#include <cmath>

#include "core/dispatch/context.h"
#include "core/dispatch/sharding.h"
#include "core/ops/create_attributes.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "core/ops/scalar_range.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

// Creation has no operands: its loops are only written, and a rank makes its own part of the global
// tensor.
AxisMap created_axes(const Shape& shape) {
  AxisMap m;
  for (int64_t e : shape) m.add(Factor::kPass, e);
  m.out.push_back(broadcast_loops(shape, shape));
  return m;
}

class Full final : public PrimitiveOf<Full, FullAttributes> {
 public:
  static inline const OpInfo kOp{"full", {OpKind::kFill, Precision::kAsGiven, 0}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan) const override { return {Meta::contiguous(shape, dtype, device)}; }
  AxisMap axes(MetaSpan) const override { return created_axes(shape); }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    return PrimRef(new Full({local_shape(map.out[0], loops), value, dtype, device}));
  }
  bool differentiable() const override { return false; }
};

class Arange final : public PrimitiveOf<Arange, ArangeAttributes> {
 public:
  static inline const OpInfo kOp{"arange", {OpKind::kFill, Precision::kAsGiven, 0}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan) const override {
    TESSERA_CHECK(
        !is_storage_only(dtype),
        "arange: asked for {}, a storage format; create it in f32 and convert it by .to()",
        name_of(dtype));
    return {Meta::contiguous({count}, dtype, device)};
  }
  AxisMap axes(MetaSpan) const override { return created_axes({count}); }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    Range r = range_of(map.out[0][0], loops);
    bool real = begin.kind() == kF64 || step.kind() == kF64;
    Scalar first = real ? Scalar(begin.real() + step.real() * double(r.begin))
                        : Scalar(begin.integer() + step.integer() * r.begin);
    return PrimRef(new Arange({r.size, first, step, dtype, device}));
  }
  bool differentiable() const override { return false; }
};

Tensor create(const PrimRef& prim, const TensorOptions& o) {
  if (o.placed_like.defined())
    if (const ShardingLayer* sharding = placing(o.placed_like)) return sharding->create(prim, {});
  return dispatch1(prim, {});
}

DType dtype_or(const TensorOptions& o, Scalar value) {
  if (o.dtype) return *o.dtype;
  return value.kind() == kF64 ? context().default_dtype : value.kind();
}

// How many of begin, begin + step, ... lie before end, without leaving the integers.
int64_t steps_between(int64_t begin, int64_t end, int64_t step) {
  __int128 way = __int128(end) - begin, s = step;
  if (s < 0) way = -way, s = -s;
  const __int128 count = (way + s - 1) / s;
  TESSERA_CHECK_AS(ShapeError, count <= INT64_MAX,
                   "arange: {} to {} in steps of {} does not fit any memory", begin, end, step);
  return int64_t(count);
}

// Positions (row, column) of the last two dims, compared: column - row <= diagonal.
Tensor below_diagonal(const Tensor& x, int64_t diagonal) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() >= 2, "tril/triu: {} has fewer than 2 dims", describe(x));
  Tensor row = unsqueeze(arange(0, x.size(-2), 1, {.device = x.device()}), 1),
         column = arange(0, x.size(-1), 1, {.device = x.device()});
  return le(column - row, diagonal);
}

}  // namespace

Tensor full(const Shape& shape, Scalar value, TensorOptions o) {
  const DType t = dtype_or(o, value);
  check_holds("full", t, value);
  return create(PrimRef(new Full({shape, value, t, o.device})), o);
}
Tensor zeros(const Shape& shape, TensorOptions o) { return full(shape, 0.0, o); }
Tensor ones(const Shape& shape, TensorOptions o) { return full(shape, 1.0, o); }
Tensor zeros_like(const Tensor& x) { return full_like(x, 0.0); }
Tensor ones_like(const Tensor& x) { return full_like(x, 1.0); }
Tensor full_like(const Tensor& x, Scalar value) { return full(x.shape(), value, options_of(x)); }
Tensor empty_like(const Tensor& x) {
  const ShardingLayer* sharding = sharding_of(x);
  if (!sharding) return empty(x.shape(), x.dtype(), x.device());
  return sharding->with_local(x.meta(), empty(sharding->local.shape(), x.dtype(), x.device()));
}
TensorOptions options_of(const Tensor& t) { return {t.dtype(), t.device(), t}; }

Tensor arange(Scalar begin, Scalar end, Scalar step, TensorOptions o) {
  bool real = begin.kind() == kF64 || end.kind() == kF64 || step.kind() == kF64;
  const double way = (end.real() - begin.real()) / step.real();
  TESSERA_CHECK(step.real() != 0 && std::isfinite(way) && std::isfinite(step.real()),
                "arange: {} to {} in steps of {}; expected finite numbers and a step that is not 0",
                begin.real(), end.real(), step.real());
  TESSERA_CHECK(way >= 0, "arange: {} to {} in steps of {}; such steps lead away from the end",
                begin.real(), end.real(), step.real());
  TESSERA_CHECK_AS(ShapeError, !real || way < 0x1p62,
                   "arange: {} to {} in steps of {} does not fit any memory", begin.real(),
                   end.real(), step.real());
  int64_t count = real ? int64_t(std::ceil(way))
                       : steps_between(begin.integer(), end.integer(), step.integer());
  DType t = o.dtype ? *o.dtype : real ? context().default_dtype : kI64;
  return dispatch1(PrimRef(new Arange({count, begin, step, t, o.device})), {});
}

Tensor arange(Scalar end, TensorOptions o) { return arange(0, end, 1, o); }

Tensor linspace(double first, double last, int64_t count, TensorOptions o) {
  TESSERA_CHECK(count >= 0, "linspace: {} values; expected 0 or more", count);
  double step = count > 1 ? (last - first) / double(count - 1) : 0;
  return dispatch1(PrimRef(new Arange({count, first, step, dtype_or(o, 0.0), o.device})), {});
}

Tensor eye(int64_t rows, int64_t columns, TensorOptions o) {
  Tensor r = unsqueeze(arange(0, rows, 1, {.device = o.device}), 1),
         c = arange(0, columns, 1, {.device = o.device});
  return cast(eq(r, c), dtype_or(o, 0.0));
}

Tensor eye(int64_t n, TensorOptions o) { return eye(n, n, o); }

Tensor from_blob(void* data, const Shape& shape, TensorOptions o) {
  const DType t = o.dtype.value_or(context().default_dtype);
  const size_t bytes = empty(shape, t, kMeta).nbytes();  // refuses what no memory holds
  TESSERA_CHECK(o.device.is_cpu() && (data || bytes == 0),
                "from_blob: {} bytes at {} on {}; give memory of the CPU", bytes,
                static_cast<const void*>(data), to_string(o.device));
  return Tensor(Meta::contiguous(shape, t, kCPU),
                Ref(new Storage(data, bytes, kCPU, Ref<RefCounted>())));
}

Tensor scalar_tensor(Scalar value, TensorOptions o) {
  return scalar_tensor(value, dtype_or(o, value), o.device);
}

TensorData::TensorData(std::initializer_list<TensorData> list) : shape(int64_t(list.size())) {
  for (const TensorData& part : list) {
    TESSERA_CHECK_AS(ShapeError, part.shape == list.begin()->shape,
                     "tensor: numbers of shape {} beside some of {}; rows have one length",
                     to_string(part.shape), to_string(list.begin()->shape));
    numbers.insert(numbers.end(), part.numbers.begin(), part.numbers.end());
  }
  if (list.size() > 0)
    for (int64_t e : list.begin()->shape) shape.push_back(e);
}
Tensor tensor(const TensorData& data, TensorOptions o) {
  DType kind = data.numbers.empty() ? kF64 : kBool;
  for (const Scalar& n : data.numbers) kind = promote(kind, n.kind());
  const DType t = o.dtype.value_or(kind == kF64 ? context().default_dtype : kind);
  Tensor out = empty(data.shape, t);
  char* at = static_cast<char*>(out.raw());
  for (const Scalar& n : data.numbers) {
    check_holds("tensor", t, n);
    write_scalar(at, t, n), at += size_of(t);
  }
  return out.to(o.device);
}

Tensor tril(const Tensor& x, int64_t diagonal) {
  return where(below_diagonal(x, diagonal), x, number_beside(x, 0, x.dtype()));
}
Tensor triu(const Tensor& x, int64_t diagonal) {
  return where(below_diagonal(x, diagonal - 1), number_beside(x, 0, x.dtype()), x);
}

void register_create_ops(OpRegistry& registry) {
  constexpr int64_t kOdd = (int64_t(1) << 53) + 1;  // no double is equal to it
  registry.add("full", [] {
    return std::vector<Sample>{{PrimRef(new Full({{2, 3}, 1.5, kF64, kCPU})), {}, false},
                               {PrimRef(new Full({{1, 3}, 1.5, kF64, kCPU})), {}, false},
                               {PrimRef(new Full({{4}, 7, kI32, kCPU})), {}, false},
                               {PrimRef(new Full({{4}, kOdd, kI64, kCPU})), {}, false}};
  });
  registry.add("arange", [] {
    return std::vector<Sample>{{PrimRef(new Arange({5, 1, 2, kI64, kCPU})), {}, false},
                               {PrimRef(new Arange({1, 3, 2, kI64, kCPU})), {}, false},
                               {PrimRef(new Arange({5, kOdd, 2, kI64, kCPU})), {}, false},
                               {PrimRef(new Arange({5, 1, 0.5, kF32, kCPU})), {}, false}};
  });
}

}  // namespace tessera
