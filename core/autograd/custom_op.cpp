#include "core/autograd/custom_op.h"

#include <map>
#include <memory>
#include <mutex>

#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/kernel.h"
#include "core/ops/pointwise.h"
#include "core/primitive/attributes.h"

namespace tessera {
namespace detail {

class OpDefinition {
 public:
  explicit OpDefinition(OpParts p)
      : parts(std::move(p)),
        info(parts.name, {.kind = parts.formula ? OpKind::kPointwise : OpKind::kOther,
                          .precision = parts.precision,
                          .operands = parts.operands,
                          .cost = parts.formula ? kCost : 0}) {
    for (size_t i = 0; i < parts.numbers.size(); ++i)
      attribute_names.push_back(fmt::format("number{}", i));
  }

  static constexpr int kCost = 12;  // of an element: most formulas have a function of libm
  const OpParts parts;
  const OpInfo info;
  std::vector<std::string> attribute_names;  // of the numbers
  PrimRef zeros;                             // the op whose numbers are all zero
};

}  // namespace detail

namespace {

using detail::Numbers;
using detail::OpDefinition;

class CustomPrimitive : public Primitive {
 public:
  CustomPrimitive(const OpDefinition& op, Numbers numbers)
      : Primitive(op.info), op_(op), numbers_(numbers.begin(), numbers.end()) {}

  SaveMask saved() const override { return op_.parts.saved; }
  Tensors vjp(const VjpArgs& v) const override {
    Tensors grads = op_.parts.vjp(v, numbers_);
    TESSERA_CHECK(grads.size() == v.in.size(), "{}: vjp returned {} gradients for {} operands",
                  name(), grads.size(), v.in.size());
    for (size_t i = 0; i < grads.size(); ++i)
      grads[i] = v.wants(int(i)) && is_differentiable(v.in[i].dtype())
                     ? detail::fit_gradient(name(), i, std::move(grads[i]), v.in[i])
                     : Tensor();
    return grads;
  }
  void attributes(AttributeVisitor& v) const override {
    for (size_t i = 0; i < numbers_.size(); ++i)
      if (numbers_[i].kind() == kF64)
        v.real(op_.attribute_names[i], numbers_[i].real());
      else
        v.integer(op_.attribute_names[i], numbers_[i].integer());
  }
  PrimRef with_attributes(AttributeReader& a) const override {
    SmallVector<Scalar, 4> numbers;
    for (size_t i = 0; i < numbers_.size(); ++i)
      numbers.push_back(numbers_[i].kind() == kF64 ? Scalar(a.real(op_.attribute_names[i]))
                                                   : Scalar(a.integer(op_.attribute_names[i])));
    return with_numbers(numbers);
  }
  virtual PrimRef with_numbers(Numbers numbers) const = 0;

 protected:
  const OpDefinition& op_;
  const SmallVector<Scalar, 4> numbers_;
};

class OpaqueOp final : public CustomPrimitive {
 public:
  using CustomPrimitive::CustomPrimitive;

  Metas infer(MetaSpan in) const override {
    Metas out = op_.parts.infer(in, numbers_);
    TESSERA_CHECK_AS(ShapeError, out.size() == op_.parts.results,
                     "{}: infer gave {} results, forward has {}", name(), out.size(),
                     op_.parts.results);
    for (Meta& m : out) {
      for (int64_t extent : m.shape)
        TESSERA_CHECK_AS(ShapeError, extent >= 0, "{}: infer gave a result of shape {} for {}",
                         name(), to_string(m.shape), describe(in));
      m = Meta::contiguous(m.shape, m.dtype, device_of(in));
    }
    return out;
  }
  AxisMap axes(MetaSpan in) const override {
    return op_.parts.axes ? op_.parts.axes(in) : AxisMap();
  }
  Tensors vjp(const VjpArgs& v) const override {
    if (!op_.parts.vjp)
      throw NotDifferentiable(fmt::format(
          "{}: it was defined without a vjp; give custom_op one, or detach the operands", name()));
    return CustomPrimitive::vjp(v);
  }
  const Kernel* own_kernel(DeviceKind) const override {
    static const Kernel kernel{plan, run};
    return &kernel;
  }
  PrimRef with_numbers(Numbers numbers) const override {
    return PrimRef(new OpaqueOp(op_, numbers));
  }

 private:
  static void plan(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
    plan.all_dense = true;
  }
  // Ops that forward calls go to the eager backend, below all layers.
  static void run(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace, const Stream&) {
    const auto& op = static_cast<const OpaqueOp&>(prim);
    EagerScope unrecorded;
    Scoped<LayerMask> below_all_layers(context().enabled, 0);
    Tensors results(out.begin(), out.end());
    op.op_.parts.forward(in, op.numbers_, results);
    for (size_t i = 0; i < out.size(); ++i) {
      const Tensor& made = results[i];
      if (made.is_same(out[i])) continue;
      TESSERA_CHECK_AS(
          ShapeError,
          made.defined() && made.shape() == out[i].shape() && made.dtype() == out[i].dtype(),
          "{}: forward left {} in result {}, infer said {}", op.name(),
          made.defined() ? describe(made) : "an undefined tensor", i, describe(out[i]));
      copy_values(out[i],
                  made.device() == out[i].device() ? made : transferred(made, out[i].device()));
    }
  }
};

class ElementwiseOp final : public CustomPrimitive {
 public:
  using CustomPrimitive::CustomPrimitive;

  Metas infer(MetaSpan in) const override {
    for (const Meta* m : in)
      TESSERA_CHECK(m->dtype == in[0]->dtype, "{}: operands are {}; convert them to one dtype",
                    name(), describe(in));
    return {Meta::contiguous(shape_of(in), in[0]->dtype, device_of(in))};
  }
  AxisMap axes(MetaSpan in) const override { return elementwise_axes(in); }
  SaveMask saved() const override {
    return op_.parts.vjp ? op_.parts.saved : SaveMask{.inputs = ~0u};
  }
  Tensors vjp(const VjpArgs& v) const override {
    return op_.parts.vjp ? CustomPrimitive::vjp(v) : vjp_by_decomposition(*this, v);
  }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    SmallVector<const Meta*, 4> metas;
    for (const Tensor& t : in) metas.push_back(&t.meta());
    Tensor y = op_.parts.formula(in, numbers_);
    TESSERA_CHECK_AS(ShapeError,
                     y.defined() && y.shape() == shape_of(metas) && y.dtype() == in[0].dtype(),
                     "{}: its formula gives {} for operands {}; an elementwise op gives the shape "
                     "that they broadcast to, and their dtype",
                     name(), y.defined() ? describe(y) : "an undefined tensor", describe(metas));
    for (const Tensor& t : in)  // results have memory of their own
      if (y.is_same(t) || (y.storage() && y.storage() == t.storage())) return {y.clone()};
    return {y};
  }
  PrimRef with_numbers(Numbers numbers) const override {
    return PrimRef(new ElementwiseOp(op_, numbers));
  }

 private:
  Shape shape_of(MetaSpan in) const {
    Shape shape = in[0]->shape;
    for (const Meta* m : in.subspan(1)) shape = broadcast(shape, m->shape, name());
    return shape;
  }
};

// Casts the operands of an elementwise op to one floating dtype, as pointwise functions do.
void meet_in_one_dtype(Inputs in, std::string_view name) {
  Tensor all = in[0];
  for (const Tensor& t : in.subspan(1)) {
    const DType dtype = result_type(all, t);
    all = empty(broadcast(all.shape(), t.shape(), name), dtype, kMeta);
  }
  const DType dtype = is_floating(all.dtype()) ? all.dtype() : context().default_dtype;
  for (Tensor& t : in) t = cast(std::move(t), dtype);
}

struct CustomOps {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<OpDefinition>, std::less<>> of_name;
};
CustomOps& custom_ops() {
  static auto* ops = new CustomOps;
  return *ops;
}

}  // namespace

namespace detail {

const OpDefinition& define_op(OpParts parts) {
  const std::string name = parts.name;
  CustomOps& ops = custom_ops();
  std::lock_guard lock(ops.mutex);
  std::unique_ptr<OpDefinition> op;
  try {
    op = std::make_unique<OpDefinition>(std::move(parts));
  } catch (const BugError&) {  // another op has the name, perhaps one of the library
    throw UserError(
        fmt::format("custom_op: there is an op {} already; define an op once, at namespace scope "
                    "or as a static variable, under a name of its own (mine::{})",
                    name, name));
  }
  op->zeros = op->parts.formula ? PrimRef(new ElementwiseOp(*op, op->parts.numbers))
                                : PrimRef(new OpaqueOp(*op, op->parts.numbers));
  return *(ops.of_name[name] = std::move(op));
}

Tensors call_op(const OpDefinition& op, Inputs in, Numbers numbers) {
  for (size_t i = 0; i < in.size(); ++i)
    TESSERA_CHECK(in[i].defined(), "{}: operand {} is undefined", op.info.name, i);
  if (op.parts.formula) meet_in_one_dtype(in, op.info.name);
  if (numbers.empty()) return dispatch(op.zeros, in);
  return dispatch(static_cast<const CustomPrimitive&>(*op.zeros).with_numbers(numbers), in);
}

Tensor fit_gradient(std::string_view op, size_t i, Tensor g, const Tensor& in) {
  if (!g.defined()) return g;
  const Shape &to = in.shape(), &from = g.shape();
  const int more = from.size() - to.size();
  bool fits = more >= 0 && is_floating(g.dtype());
  for (int d = 0; fits && d < to.size(); ++d) fits = to[d] == 1 || to[d] == from[d + more];
  TESSERA_CHECK_AS(ShapeError, fits, "{}: vjp returned {} as the gradient of input {}, {}", op,
                   describe(g), i, describe(in));
  return cast(sum_to(std::move(g), to), in.dtype());
}

}  // namespace detail

AxisMap elementwise_axes(MetaSpan in) {
  Shape shape = in[0]->shape;
  for (const Meta* m : in.subspan(1)) shape = broadcast(shape, m->shape, "elementwise_axes");
  return pointwise_axes(in, shape);
}

PrimRef find_custom_op(std::string_view name) {
  CustomOps& ops = custom_ops();
  std::lock_guard lock(ops.mutex);
  auto op = ops.of_name.find(name);
  return op == ops.of_name.end() ? nullptr : op->second->zeros;
}

}  // namespace tessera
