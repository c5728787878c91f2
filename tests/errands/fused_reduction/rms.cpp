// rms(x) = sqrt(mean(x^2) + eps) over the last dim: x [.., D] -> [..], f32 or f64. The CPU has a
// kernel that takes one pass; other devices run its decomposition.
#include <cmath>

#include "core/base/parallel.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/kernel.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

using namespace tessera;

namespace {

constexpr int64_t kGrain = 1 << 14;  // elements that are worth a thread

template <class T>
void reduce_rows(double eps, const Tensor& x, const Tensor& y) {
  const int64_t width = x.size(-1);
  const T* from = x.data<T>();
  T* to = y.data<T>();
  parallel_ranges(y.numel(), std::max<int64_t>(1, kGrain / width), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      double squares = 0;
      for (int64_t i = 0; i < width; ++i)
        squares += double(from[row * width + i]) * double(from[row * width + i]);
      to[row] = T(std::sqrt(squares / double(width) + eps));
    }
  });
}

struct RmsAttributes {
  double eps = 1e-6;
  static void fields(auto& a, auto& f) { f("eps", a.eps); }
};

void plan(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = 1;
}
void run(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
         const Stream&) {
  const double eps = attributes_of<RmsAttributes>(prim).eps;
  if (in[0].dtype() == kF64)
    reduce_rows<double>(eps, in[0], out[0]);
  else
    reduce_rows<float>(eps, in[0], out[0]);
}

class Rms final : public PrimitiveOf<Rms, RmsAttributes> {
 public:
  static inline const OpInfo kOp{"rms", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    Shape shape = in[0]->shape;
    TESSERA_CHECK_AS(ShapeError, !shape.empty() && shape.back() > 0, "rms: no elements in {}",
                     describe(in));
    TESSERA_CHECK(in[0]->dtype == kF32 || in[0]->dtype == kF64, "rms: takes f32 or f64, got {}",
                  describe(in));
    shape.erase(shape.size() - 1);
    return {Meta::contiguous(shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {  // rows may be split, a row may not
    AxisMap m;
    OperandLoops rows, whole;
    for (int64_t extent : in[0]->shape) whole.push_back({m.add(Factor::kPass, extent)});
    m.factors.back().kind = Factor::kWhole;
    rows = whole;
    rows.pop_back();
    m.in.push_back(whole), m.out.push_back(rows);
    return m;
  }
  SaveMask saved() const override { return {.inputs = 1, .outputs = 1}; }
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor by = v.cot[0] / (v.out[0] * double(v.in[0].size(-1)));
    return {v.in[0] * unsqueeze(by, -1)};
  }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    return {sqrt(mean(square(in[0]), {-1}) + eps)};
  }
  const Kernel* own_kernel(DeviceKind device) const override {
    static const Kernel kernel{plan, run};
    return device == DeviceKind::kCPU ? &kernel : nullptr;
  }
};

}  // namespace

Tensor rms(const Tensor& x, double eps) {
  return dispatch1(PrimRef(new Rms({eps})), operands(Tensor(x)));
}
