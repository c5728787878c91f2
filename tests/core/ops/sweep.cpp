#include "tests/core/ops/sweep.h"

#include <cmath>
#include <cstring>

#include "core/dispatch/dispatch.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/tensor/element.h"

namespace tessera::sweep {
namespace {

SmallVector<const Meta*, 8> pointers(const List& in) {
  SmallVector<const Meta*, 8> m;
  for (const Tensor& t : in) m.push_back(&t.meta());
  return m;
}

}  // namespace

void for_each_sample(const std::function<void(const Sample&)>& check) {
  for (const OpEntry& entry : op_registry().entries()) {
    std::vector<Sample> samples = entry.samples();
    for (size_t i = 0; i < samples.size(); ++i) {
      SCOPED_TRACE(fmt::format("{} sample {}: {} of {}", entry.name, i, to_string(*samples[i].prim),
                               describe(pointers(samples[i].in))));
      try {
        check(samples[i]);
      } catch (const std::exception& e) {
        ADD_FAILURE() << e.what();
      }
    }
  }
}

List run(const PrimRef& prim, const List& in) {
  List operands = in;
  Tensors out = dispatch(prim, operands);
  return List(out.begin(), out.end());
}
List run(const Primitive& prim, const List& in) { return run(PrimRef(&prim), in); }

std::vector<Meta> infer(const Primitive& prim, const List& in) {
  Metas out = prim.infer(pointers(in));
  return std::vector<Meta>(out.begin(), out.end());
}
AxisMap axes(const Primitive& prim, const List& in) { return prim.axes(pointers(in)); }

bool is_float(const Tensor& t) { return is_differentiable(t.dtype()); }

double at(const Tensor& t, int64_t i) {
  int64_t offset = 0;
  for (int d = t.ndim() - 1; d >= 0; --d)
    offset += i % t.shape()[d] * t.strides()[d], i /= t.shape()[d];
  return read_real(static_cast<const char*>(t.raw()) + offset * int64_t(size_of(t.dtype())),
                   t.dtype());
}

Tensor nudged(const Tensor& x, int64_t i, double step) {
  Tensor y = clone(x.detach());
  y.data<double>()[i] += step;
  return y;
}

Tensor restrided(const Tensor& x) {
  Dims order, back = Dims::filled(x.ndim(), 0);
  for (int d = 0; d < x.ndim(); ++d) order.push_back(x.ndim() - 1 - d);
  for (int d = 0; d < x.ndim(); ++d) back[int(order[d])] = d;
  Tensor y = clone(permute(x, order));
  if (y.ndim() > 0) {  // one more row in front, so that there is an offset and a gap
    Shape more = y.shape();
    ++more[y.ndim() - 1];
    const Tensor room = empty(more, y.dtype());
    std::memset(room.raw(), 0, room.nbytes());
    const Tensor place = narrow(room, y.ndim() - 1, 1, y.size(-1));
    assign_(place, y);
    y = place;
  }
  return permute(y, back);
}

List with_dtype(const List& in, DType dtype, bool keep_numbers) {
  List out;
  for (const Tensor& t : in)
    out.push_back(is_float(t) && !(keep_numbers && t.ndim() == 0) ? cast(t, dtype) : t);
  return out;
}

Tensor weights_like(const Tensor& like, uint64_t key) {
  return cast(sample_values(like.shape(), -1, 1, 1000 + key), like.dtype());
}

void expect_close(const Tensor& got, const Tensor& want, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(describe(got), describe(want)) << what;
  double scale = 1, worst = 0;
  int64_t where = -1;
  for (int64_t i = 0; i < want.numel(); ++i)
    if (std::isfinite(at(want, i))) scale = std::max(scale, std::abs(at(want, i)));
  for (int64_t i = 0; i < want.numel(); ++i) {
    double a = at(got, i), b = at(want, i);
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    double difference = std::isfinite(a - b) ? std::abs(a - b) / scale : INFINITY;
    if (difference > worst) worst = difference, where = i;
  }
  EXPECT_LE(worst, tolerance) << what << ", element " << where << ": "
                              << at(got, std::max<int64_t>(where, 0)) << " instead of "
                              << at(want, std::max<int64_t>(where, 0));
}

void expect_close(const List& got, const List& want, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i)
    expect_close(got[i], want[i], tolerance, fmt::format("{}, result {}", what, i));
}

}  // namespace tessera::sweep
