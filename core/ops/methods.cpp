// Methods of Tensor that are ops, spelled so that programs read well: each calls the function of
// its name, which says what it does.
#include "core/dispatch/backward_owners.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/observer.h"
#include "core/dispatch/sharding.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/products.h"
#include "core/ops/reduce.h"
#include "core/ops/reshape_axes.h"
#include "core/ops/scan.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/element.h"
#include "core/tensor/wrapped.h"

namespace tessera {

// ---- dtype, device, layout

Tensor Tensor::to(DType dtype) const { return cast(*this, dtype); }
Tensor Tensor::to(MemoryFormat format) const { return contiguous(format); }
Tensor Tensor::to(Device device) const {
  if (device == this->device()) return *this;
  if (device.is_meta()) return empty(shape(), dtype(), device);
  TESSERA_CHECK(!this->device().is_meta(),
                "to: {} has no values that could be copied to {}; fill empty() there",
                describe(*this), to_string(device));
  check_device(device, "to");
  return dispatch1(transfer_primitive(device), operands(Tensor(*this)));
}
Tensor Tensor::cpu() const { return to(kCPU); }
Tensor Tensor::contiguous(MemoryFormat format) const { return tessera::contiguous(*this, format); }
Tensor Tensor::clone() const { return tessera::clone(*this); }

// ---- views

Tensor Tensor::view(const Shape& to) const& {
  TESSERA_CHECK_AS(ShapeError, reshape_strides(shape(), strides(), reshaped(shape(), to)),
                   "view: {} with strides {} cannot be seen as {} without a copy; use reshape",
                   describe(*this), to_string(strides()), to_string(to));
  return tessera::reshape(*this, to);
}
Tensor Tensor::t() const& {
  TESSERA_CHECK_AS(ShapeError, ndim() <= 2, "t: {} has more than 2 dims; use mT() or permute",
                   describe(*this));
  return ndim() < 2 ? *this : tessera::transpose(*this, 0, 1);
}
Tensor Tensor::mT() const& { return tessera::transpose(*this, -2, -1); }
Tensor Tensor::squeeze() const& {
  Shape to;
  for (int64_t e : shape())
    if (e != 1) to.push_back(e);
  return tessera::reshape(*this, to);
}
Tensor Tensor::expand_as(const Tensor& like) const { return tessera::expand(*this, like.shape()); }
Tensor Tensor::operator[](int64_t i) const& { return tessera::select(*this, 0, i); }

// One method a line.
// clang-format off
Tensor Tensor::reshape(const Shape& to) const& { return tessera::reshape(*this, to); }
Tensor Tensor::flatten(int64_t first, int64_t last) const& { return tessera::flatten(*this, first, last); }
Tensor Tensor::unflatten(int64_t dim, const Shape& extents) const& { return tessera::unflatten(*this, dim, extents); }
Tensor Tensor::transpose(int64_t a, int64_t b) const& { return tessera::transpose(*this, a, b); }
Tensor Tensor::permute(const Dims& order) const& { return tessera::permute(*this, order); }
Tensor Tensor::unsqueeze(int64_t dim) const& { return tessera::unsqueeze(*this, dim); }
Tensor Tensor::squeeze(int64_t dim) const& { return tessera::squeeze(*this, dim); }
Tensor Tensor::expand(const Shape& to) const { return tessera::expand(*this, to); }
Tensor Tensor::repeat(const Dims& repeats) const { return tessera::repeat(*this, repeats); }
Tensor Tensor::slice(int64_t dim, int64_t begin, int64_t end, int64_t step) const& { return tessera::slice(*this, dim, begin, end, step); }
Tensor Tensor::narrow(int64_t dim, int64_t begin, int64_t size) const& { return tessera::narrow(*this, dim, begin, size); }
Tensor Tensor::select(int64_t dim, int64_t index) const& { return tessera::select(*this, dim, index); }
Tensor Tensor::flip(const Dims& dims) const { return tessera::flip(*this, dims); }
Tensors Tensor::split(int64_t size, int64_t dim) const { return tessera::split(*this, size, dim); }
Tensors Tensor::split(std::initializer_list<int64_t> sizes, int64_t dim) const { return tessera::split(*this, sizes, dim); }
Tensors Tensor::chunk(int64_t pieces, int64_t dim) const { return tessera::chunk(*this, pieces, dim); }
Tensors Tensor::unbind(int64_t dim) const { return tessera::unbind(*this, dim); }

// ---- by position

Tensor Tensor::index_select(int64_t dim, const Tensor& index) const { return tessera::index_select(*this, dim, index); }
Tensor Tensor::gather(int64_t dim, const Tensor& index) const { return tessera::gather(*this, dim, index); }
Tensor Tensor::masked_fill(const Tensor& mask, Scalar value) const { return tessera::masked_fill(*this, mask, value); }
Tensor Tensor::masked_select(const Tensor& mask) const { return tessera::masked_select(*this, mask); }

// ---- reductions, order

Tensor Tensor::sum(const Dims& dims, bool keepdim) const { return tessera::sum(*this, dims, keepdim); }
Tensor Tensor::mean(const Dims& dims, bool keepdim) const { return tessera::mean(*this, dims, keepdim); }
Tensor Tensor::prod(const Dims& dims, bool keepdim) const { return tessera::prod(*this, dims, keepdim); }
Tensor Tensor::amax(const Dims& dims, bool keepdim) const { return tessera::amax(*this, dims, keepdim); }
Tensor Tensor::amin(const Dims& dims, bool keepdim) const { return tessera::amin(*this, dims, keepdim); }
Tensor Tensor::any(const Dims& dims, bool keepdim) const { return tessera::any(*this, dims, keepdim); }
Tensor Tensor::all(const Dims& dims, bool keepdim) const { return tessera::all(*this, dims, keepdim); }
Tensor Tensor::var(const Dims& dims, int64_t correction, bool keepdim) const { return tessera::var(*this, dims, correction, keepdim); }
Tensor Tensor::std(const Dims& dims, int64_t correction, bool keepdim) const { return stddev(*this, dims, correction, keepdim); }
Tensor Tensor::logsumexp(const Dims& dims, bool keepdim) const { return tessera::logsumexp(*this, dims, keepdim); }
Tensor Tensor::norm(double p, const Dims& dims, bool keepdim) const { return tessera::norm(*this, p, dims, keepdim); }
Tensor Tensor::max() const { return tessera::max(*this); }
Tensor Tensor::min() const { return tessera::min(*this); }
ValuesAndIndices Tensor::max(int64_t dim, bool keepdim) const { return tessera::max(*this, dim, keepdim); }
ValuesAndIndices Tensor::min(int64_t dim, bool keepdim) const { return tessera::min(*this, dim, keepdim); }
Tensor Tensor::argmax() const { return tessera::argmax(*this); }
Tensor Tensor::argmin() const { return tessera::argmin(*this); }
Tensor Tensor::argmax(int64_t dim, bool keepdim) const { return tessera::argmax(*this, dim, keepdim); }
Tensor Tensor::argmin(int64_t dim, bool keepdim) const { return tessera::argmin(*this, dim, keepdim); }
ValuesAndIndices Tensor::sort(int64_t dim, bool descending) const { return tessera::sort(*this, dim, descending); }
Tensor Tensor::argsort(int64_t dim, bool descending) const { return tessera::argsort(*this, dim, descending); }
ValuesAndIndices Tensor::topk(int64_t k, int64_t dim, bool largest) const { return tessera::topk(*this, k, dim, largest); }
Tensor Tensor::cumsum(int64_t dim) const { return tessera::cumsum(*this, dim); }

// ---- elements

Tensor Tensor::exp() const { return tessera::exp(*this); }
Tensor Tensor::log() const { return tessera::log(*this); }
Tensor Tensor::sqrt() const { return tessera::sqrt(*this); }
Tensor Tensor::rsqrt() const { return tessera::rsqrt(*this); }
Tensor Tensor::square() const { return tessera::square(*this); }
Tensor Tensor::abs() const { return tessera::abs(*this); }
Tensor Tensor::neg() const { return tessera::neg(*this); }
Tensor Tensor::sign() const { return tessera::sign(*this); }
Tensor Tensor::floor() const { return tessera::floor(*this); }
Tensor Tensor::ceil() const { return tessera::ceil(*this); }
Tensor Tensor::round() const { return tessera::round(*this); }
Tensor Tensor::sin() const { return tessera::sin(*this); }
Tensor Tensor::cos() const { return tessera::cos(*this); }
Tensor Tensor::tanh() const { return tessera::tanh(*this); }
Tensor Tensor::sigmoid() const { return tessera::sigmoid(*this); }
Tensor Tensor::relu() const { return tessera::relu(*this); }
Tensor Tensor::softmax(int64_t dim) const { return tessera::softmax(*this, dim); }
Tensor Tensor::log_softmax(int64_t dim) const { return tessera::log_softmax(*this, dim); }
Tensor Tensor::pow(const Tensor& exponent) const { return tessera::pow(*this, exponent); }
Tensor Tensor::pow(Scalar exponent) const { return tessera::pow(*this, exponent); }
Tensor Tensor::clamp(Scalar low, Scalar high) const { return tessera::clamp(*this, low, high); }
Tensor Tensor::clamp_min(Scalar low) const { return tessera::clamp_min(*this, low); }
Tensor Tensor::clamp_max(Scalar high) const { return tessera::clamp_max(*this, high); }
Tensor Tensor::add(const Tensor& o) const { return tessera::add(*this, o); }
Tensor Tensor::sub(const Tensor& o) const { return tessera::sub(*this, o); }
Tensor Tensor::mul(const Tensor& o) const { return tessera::mul(*this, o); }
Tensor Tensor::div(const Tensor& o) const { return tessera::div(*this, o); }
Tensor Tensor::add(Scalar o) const { return tessera::add(*this, o); }
Tensor Tensor::sub(Scalar o) const { return tessera::sub(*this, o); }
Tensor Tensor::mul(Scalar o) const { return tessera::mul(*this, o); }
Tensor Tensor::div(Scalar o) const { return tessera::div(*this, o); }
Tensor Tensor::eq(const Tensor& o) const { return tessera::eq(*this, o); }
Tensor Tensor::ne(const Tensor& o) const { return tessera::ne(*this, o); }
Tensor Tensor::eq(Scalar o) const { return tessera::eq(*this, o); }
Tensor Tensor::ne(Scalar o) const { return tessera::ne(*this, o); }
Tensor Tensor::lt(const Tensor& o) const { return tessera::lt(*this, o); }
Tensor Tensor::lt(Scalar o) const { return tessera::lt(*this, o); }
Tensor Tensor::le(const Tensor& o) const { return tessera::le(*this, o); }
Tensor Tensor::le(Scalar o) const { return tessera::le(*this, o); }
Tensor Tensor::gt(const Tensor& o) const { return tessera::gt(*this, o); }
Tensor Tensor::gt(Scalar o) const { return tessera::gt(*this, o); }
Tensor Tensor::ge(const Tensor& o) const { return tessera::ge(*this, o); }
Tensor Tensor::ge(Scalar o) const { return tessera::ge(*this, o); }
Tensor Tensor::isnan() const { return tessera::isnan(*this); }
Tensor Tensor::isinf() const { return tessera::isinf(*this); }
Tensor Tensor::isfinite() const { return tessera::isfinite(*this); }
Tensor Tensor::logical_not() const { return tessera::logical_not(*this); }

// ---- products

Tensor Tensor::matmul(const Tensor& o) const { return tessera::matmul(*this, o); }
Tensor Tensor::mm(const Tensor& o) const { return tessera::mm(*this, o); }
Tensor Tensor::bmm(const Tensor& o) const { return tessera::bmm(*this, o); }
Tensor Tensor::dot(const Tensor& o) const { return tessera::dot(*this, o); }

// ---- in place

const Tensor& Tensor::add_(const Tensor& o) const { return tessera::add_(*this, o), *this; }
const Tensor& Tensor::add_(Scalar o) const { return tessera::add_(*this, o), *this; }
const Tensor& Tensor::sub_(const Tensor& o) const { return tessera::sub_(*this, o), *this; }
const Tensor& Tensor::sub_(Scalar o) const { return tessera::sub_(*this, o), *this; }
const Tensor& Tensor::mul_(const Tensor& o) const { return tessera::mul_(*this, o), *this; }
const Tensor& Tensor::mul_(Scalar o) const { return tessera::mul_(*this, o), *this; }
const Tensor& Tensor::div_(const Tensor& o) const { return tessera::div_(*this, o), *this; }
const Tensor& Tensor::div_(Scalar o) const { return tessera::div_(*this, o), *this; }
const Tensor& Tensor::clamp_(Scalar low, Scalar high) const { return tessera::clamp_(*this, low, high), *this; }
const Tensor& Tensor::copy_(const Tensor& src) const { return tessera::assign_(*this, src), *this; }
const Tensor& Tensor::fill_(Scalar value) const { return tessera::fill_(*this, value), *this; }
const Tensor& Tensor::zero_() const { return tessera::zero_(*this), *this; }
const Tensor& Tensor::operator+=(Scalar o) const { return add_(o); }
const Tensor& Tensor::operator-=(Scalar o) const { return sub_(o); }
const Tensor& Tensor::operator*=(Scalar o) const { return mul_(o); }
const Tensor& Tensor::operator/=(Scalar o) const { return div_(o); }
// clang-format on

// ---- one value

namespace {

// Whether a write into `t`, a temporary, would be lost with it: all owners of its memory are `t`
// and what backward keeps of it, which nobody sees, and which backward refuses to read once it was
// overwritten. Inside function transforms each level has a handle of its own.
bool lost_with(const Tensor& t) {
  const Tensor& values = innermost(t);
  if (const ShardData* cut = shard_data(values))
    return values.ref()->use_count() == 1 && cut->use_count() == 1 && cut->local.uniquely_owned();
  const Storage* memory = values.storage().get();
  if (!memory) return false;

  SmallVector<const Tensor*, 4> handles;
  auto add_handles = [&](const Tensor* at) {
    while (!std::ranges::count(handles, at)) {
      handles.push_back(at);
      if (!wrapped(*at)) return;
      at = &wrapped(*at)->inner;
    }
  };
  add_handles(&t);
  for (const Tensor* kept : kept_by_backward(t)) add_handles(kept);

  SmallVector<const TensorImpl*, 4> impls;
  for (const Tensor* h : handles)
    if (!std::ranges::count(impls, h->impl())) impls.push_back(h->impl());
  auto owners_are = [](const auto& counted, auto& owners, auto owns) {
    return int64_t(counted.use_count()) == std::ranges::count_if(owners, owns);
  };
  return owners_are(*memory, impls,
                    [&](const TensorImpl* i) { return i->storage.get() == memory; }) &&
         std::ranges::all_of(handles, [&](const Tensor* h) {
           const Wrapped* w = wrapped(*h);
           return owners_are(*h->ref(), handles, [&](const Tensor* o) { return o->is_same(*h); }) &&
                  (!w ||
                   owners_are(*w, impls, [&](const TensorImpl* i) { return i->shard.get() == w; }));
         });
}

void check_seen(const Tensor& t) {
  TESSERA_CHECK(t.defined(),
                "operator=: the left side is an expression that gave an undefined tensor, which "
                "has no memory to write; assign to a variable");
  TESSERA_CHECK(!lost_with(t),
                "operator=: the left side is a new {} that nothing else refers to, so what is "
                "written would be lost; assign to a variable, or to a view of one (t[0] = u, "
                "slice(t, 0, 0, 2) = u); for positions in a tensor use t.index_put_({{positions}}, "
                "u)",
                describe(t));
}

}  // namespace

void Tensor::operator=(const Tensor& values) && {
  check_seen(*this);
  tessera::assign_(*this, values);
}
void Tensor::operator=(const Scalar& value) && {
  check_seen(*this);
  tessera::fill_(*this, value);
}
const Tensor& Tensor::assign_(const Tensor& values) const {
  tessera::assign_(*this, values);
  return *this;
}
const Tensor& Tensor::index_put_(std::initializer_list<Tensor> indices, const Tensor& values,
                                 bool accumulate) const {
  tessera::index_put_(*this, indices, values, accumulate);
  return *this;
}

template <class T>
T Tensor::item(std::source_location where) const {
  TESSERA_CHECK_AS(ShapeError, numel() == 1, "item: {} has {} elements, not one", describe(*this),
                   numel());
  notify(events::ValueRead{where});
  if (const Wrapped* w = wrapped(*this); w && !w->batched) return w->inner.item<T>(where);
  if (const ShardingLayer* sharding = sharding_of(*this)) return sharding->whole_value().item<T>();
  const Tensor here = on_host(*this);
  const void* value = here.raw_values();
  if constexpr (std::is_same_v<T, bool>) return read_real(value, dtype()) != 0;
  if constexpr (std::is_integral_v<T>) return T(read_integer(value, dtype()));
  return T(read_real(value, dtype()));
}
template float Tensor::item(std::source_location) const;
template double Tensor::item(std::source_location) const;
template int64_t Tensor::item(std::source_location) const;
template int Tensor::item(std::source_location) const;
template bool Tensor::item(std::source_location) const;

}  // namespace tessera
