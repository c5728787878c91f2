// Ops of a program's own, which dispatch like those of the library: they are differentiated,
// batched and sharded, and are nodes of a recorded graph. An elementwise op is a formula in
// ordinary ops; an opaque op is a function that reads values. Invariant: both are pure functions.
#pragma once
#include "core/autograd/custom_op_types.h"

namespace tessera {

/// An op as users call it: CustomOp<Tensor(const Tensor&, double)>. It may be copied, and vmap,
/// grad and compile take it as they take a function. Several results are a std::array.
template <class Signature>
class CustomOp;
template <class R, class... A>
class CustomOp<R(A...)> {
 public:
  explicit CustomOp(const detail::OpDefinition& op) : op_(&op) {}

  R operator()(A... a) const {
    SmallVector<Tensor, 4> in;
    SmallVector<Scalar, 4> numbers;
    (detail::put(a, in, numbers), ...);
    Tensors out = detail::call_op(*op_, in, numbers);
    if constexpr (std::is_same_v<R, Tensor>) {
      return std::move(out[0]);
    } else {
      R all;
      std::move(out.begin(), out.end(), all.begin());
      return all;
    }
  }

 private:
  const detail::OpDefinition* op_;
};

struct CustomOpOptions {
  Precision precision = Precision::kAsGiven;  // what autocast does to floating operands
  // The loops of the op. Without them operands are taken whole: a sharded one must be replicated (a
  // ShardingError says so), and vmap runs the op on each sample, one by one.
  std::function<AxisMap(MetaSpan in)> axes = {};
};

/// The axes of an op with one result, which has the shape that the operands broadcast to and takes
/// each element from the operands' elements at its place: {.axes = elementwise_axes}.
AxisMap elementwise_axes(MetaSpan in);

/// An opaque op: `forward` reads values, through pointers or by foreign code. In a compiled step it
/// is one node, which runs at each replay.
///
///   const auto softcap = custom_op("mine::softcap",
///       [](const Meta& x, double) { return x; },
///       [](const Tensor& x, double cap, Tensor& y) {
///         for (int64_t i = 0; i < x.numel(); ++i)
///           y.data<float>()[i] = float(cap * std::tanh(x.values<float>()[i] / cap));
///       },
///       [](const Meta&, double cap, const Tensor& y, const Tensor& dy) {
///         return dy * (1.0 - square(y / cap));
///       });
///   Tensor y = softcap(x, 30.0);
///
/// forward: operands (const Tensor&), numbers and results (Tensor&), in any order. It runs
///   unrecorded on row-major dense tensors of the operands' device (a forward that reads pointers
///   begins with x.cpu()), and fills results that `infer` sized; a
///   result that it replaces by another tensor is copied, and must have that shape and dtype
///   (ShapeError). It changes no operand, keeps no tensor, and may run on several threads at once.
///   It is pure: a compiled step may run it once for two equal calls, a second time in backward, or
/// not at all where no op uses its results.
/// infer: shapes and dtypes of the results from those of the operands, before any value is there:
///   a const Meta& for each operand, numbers where forward has them; a Meta, or Metas for several
///   results. Strides and device are set for it. It throws for operands that the op does not take.
/// vjp: gradients of the operands, in ordinary ops or other opaque ones, so that they may be
///   differentiated again: what forward takes, in its order, and then the cotangent of each result
///   (undefined: zero). Where a parameter is a const Meta&, only its type is read, and nothing is
///   kept for it. It returns a Tensor, or Tensors for several operands (undefined: zero), of their
///   shapes; what broadcasts to a shape is summed. Without one, backward throws NotDifferentiable.
///
/// An op is defined once: at namespace scope (`inline` in a header), or as a static variable.
/// Throws UserError where another op has this name; errors, graphs and profiles call the op by
/// `name`.
template <class Infer, class Forward, class Vjp = std::nullptr_t>
auto custom_op(std::string_view name, Infer infer, Forward forward, Vjp vjp = nullptr,
               CustomOpOptions options = {}) {
  using Of = detail::SignatureOf<Forward>;
  detail::check_forward<typename Of::Parameters>();
  detail::check_infer<typename detail::SignatureOf<Infer>::Parameters, typename Of::Parameters>();
  detail::OpParts parts = detail::parts_of(name, typename Of::Parameters());
  parts.infer = detail::erased_infer(std::move(infer));
  parts.forward = detail::erased_forward(std::move(forward));
  if constexpr (!std::is_same_v<Vjp, std::nullptr_t>)
    detail::add_vjp<typename Of::Parameters>(parts, std::move(vjp));
  parts.precision = options.precision, parts.axes = std::move(options.axes);
  return CustomOp<detail::Call<typename Of::Parameters>>(detail::define_op(std::move(parts)));
}

/// An elementwise op: `formula` gives its result in ordinary ops, which is what runs and what a
/// compiled step fuses. Operands broadcast, and meet in one floating dtype, that of the result.
///
///   const auto squareplus = elementwise("squareplus",
///       [](const Tensor& x) { return (x + sqrt(square(x) + 4.0)) * 0.5; },
///       [](const Tensor& x, const Tensor& dy) {
///         return dy * (x / sqrt(square(x) + 4.0) + 1.0) * 0.5;
///       });
///
/// formula: operands (const Tensor&) and numbers; a Tensor of the shape that the operands broadcast
///   to and of their dtype (else ShapeError).
/// derivative: what the formula takes, then the result if it is needed, then the cotangent. As the
///   vjp of custom_op otherwise. Without one, the formula is differentiated.
///
/// It is defined once, as a custom_op is.
template <class Formula, class Derivative = std::nullptr_t>
auto elementwise(std::string_view name, Formula formula, Derivative derivative = nullptr,
                 Precision precision = Precision::kAsGiven) {
  using Of = detail::SignatureOf<Formula>;
  using Parameters = typename Of::Parameters;
  detail::check_formula<Parameters, typename Of::Result>();
  using WithResult = typename Parameters::template And<Tensor&>;
  detail::OpParts parts = detail::parts_of(name, WithResult());
  parts.formula = detail::erased_formula(std::move(formula));
  if constexpr (!std::is_same_v<Derivative, std::nullptr_t>) {
    constexpr size_t kTakes = detail::SignatureOf<Derivative>::Parameters::size;
    using Saved = std::conditional_t<kTakes == Parameters::size + 2, WithResult, Parameters>;
    detail::add_vjp<Saved>(parts, std::move(derivative));
  }
  parts.precision = precision;
  return CustomOp<detail::Call<WithResult>>(detail::define_op(std::move(parts)));
}

/// The op of this name that custom_op or elementwise defined, with arbitrary numbers;
/// with_attributes gives it others. Null where there is none. Thread-safe.
PrimRef find_custom_op(std::string_view name);

}  // namespace tessera
