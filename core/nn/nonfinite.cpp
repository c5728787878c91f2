#include "core/nn/nonfinite.h"

#include <cmath>

#include "core/autograd/graph.h"
#include "core/dispatch/call.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/nn/scope.h"

namespace tessera::nn {
namespace {

template <class T>
void look_at(const T* values, int64_t n, bool& nan, bool& infinity) {
  for (int64_t i = 0; i < n; ++i) {
    nan |= std::isnan(values[i]);
    infinity |= std::isinf(values[i]);
  }
}

// Narrow floats, by their bits without the sign: `infinite`, which no number has where the format
// knows no infinity, and from `first_nan` on.
template <class Bits>
void look_at_bits(const void* values, int64_t n, Bits infinite, Bits first_nan, bool& nan,
                  bool& infinity) {
  constexpr Bits kSign = Bits(1) << (8 * sizeof(Bits) - 1);
  for (int64_t i = 0; i < n; ++i) {
    const Bits bits = static_cast<const Bits*>(values)[i] & Bits(~kSign);
    nan |= bits >= first_nan;
    infinity |= bits == infinite;
  }
}

DispatchTarget instead_of_none(Backend* own) {
  TESSERA_CHECK(!context().backend, "nonfinite: this thread runs another backend already");
  return {.backend = own};
}

}  // namespace

NonFiniteSearch::NonFiniteSearch(bool (*communicates)(const Primitive&))
    : communicates_(communicates), on_(instead_of_none(this)) {}

NonFiniteSearch::Seen NonFiniteSearch::look(std::span<const Tensor> tensors) {
  Seen seen;
  for (const Tensor& given : tensors) {
    if (!is_floating(given.dtype()) || !given.storage() || given.device().is_meta()) continue;
    if (given.device().is_cpu()) given.storage()->wait_ready();
    const Tensor t = on_host(given.is_contiguous() ? given : dense_copy(given));
    const void* values = t.raw_values();
    const int64_t n = t.numel();
    switch (t.dtype()) {
      case kF32: look_at(static_cast<const float*>(values), n, seen.nan, seen.infinity); break;
      case kF64: look_at(static_cast<const double*>(values), n, seen.nan, seen.infinity); break;
      case kF16: look_at_bits<uint16_t>(values, n, 0x7c00, 0x7c01, seen.nan, seen.infinity); break;
      case kF8E4M3: look_at_bits<uint8_t>(values, n, 0xff, 0x7f, seen.nan, seen.infinity); break;
      case kF8E5M2: look_at_bits<uint8_t>(values, n, 0x7c, 0x7d, seen.nan, seen.infinity); break;
      default: look_at_bits<uint16_t>(values, n, 0x7f80, 0x7f81, seen.nan, seen.infinity);
    }
  }
  return seen;
}

// Ops of a vjp belong to the module of the op that they differentiate: the first one that ran after
// that op's node was made.
std::string NonFiniteSearch::scope_here() {
  if (uint64_t visited = context().grad_node) {
    auto it = scope_of_node_.upper_bound(visited);
    return it == scope_of_node_.begin() ? "" : std::prev(it)->second;
  }
  std::string scope = Scope::current();
  scope_of_node_.try_emplace(GradNode::last_number(), scope);
  return scope;
}

NonFiniteSearch::Finding NonFiniteSearch::finding(const Primitive& prim, std::string operands) {
  return {std::string(prim.name()), std::move(operands), scope_here(), context().phase};
}

// Kernels may write over their operands, so those are looked at before.
template <class Run>
void NonFiniteSearch::watch(const Primitive& prim, Inputs in, Run run) {
  scope_here();
  const Seen before = look(in);
  std::string operands = describe(metas_of(in));
  if (before.nan && !nan_known()) given_ = finding(prim, operands);
  const Seen after = look(run());
  if (in.empty() || before.nan) return;
  const bool receives = communicates_ && communicates_(prim);
  if (after.nan && !nan_known()) {
    (receives ? received_ : nan_) = finding(prim, operands);
    nan_of_infinity_ = before.infinity;
  }
  const bool known = infinity_ || received_infinity_ || given_ || received_;
  if (after.infinity && !before.infinity && !known)
    (receives ? received_infinity_ : infinity_) = finding(prim, operands);
}

Tensors NonFiniteSearch::run(const PrimRef& prim, Inputs in) {
  if (prim->is_view()) {
    scope_here();
    return eager_backend().run(prim, in);
  }
  Tensors out;
  watch(*prim, in, [&] {
    out = eager_backend().run(prim, in);
    return std::span<const Tensor>(out);
  });
  return out;
}

void NonFiniteSearch::assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) {
  watch(*prim, in, [&] {
    eager_backend().assign(dst, prim, in);
    return dst;
  });
}

std::string NonFiniteSearch::story() const {
  auto place = [](const Finding& f) {
    return fmt::format("{} of {} in {} ({})", f.op, f.operands,
                       f.scope.empty() ? "no module" : f.scope, name_of(f.phase));
  };
  std::string text;
  if (given_)
    text = fmt::format("a NaN that no op of this rank made was an operand of {}", place(*given_));
  else if (received_)
    text = fmt::format("a NaN of another rank came with {}", place(*received_));
  else if (nan_)
    text = fmt::format("{} made the first NaN", place(*nan_));
  if ((infinity_ || received_infinity_) && !text.empty()) text += ", ";
  if (infinity_) text += fmt::format("{} made the first infinity", place(*infinity_));
  if (received_infinity_)
    text += fmt::format("an infinity of another rank, or of the sum over ranks, came with {}",
                        place(*received_infinity_));
  return text;
}

NonFiniteSearch::Evidence NonFiniteSearch::evidence() const {
  if (nan_ && !nan_of_infinity_) return Evidence::kNanOfNumbers;
  if (nan_ && infinity_) return Evidence::kNanOfOwnInfinity;
  if (given_) return Evidence::kNanGiven;
  if (infinity_) return Evidence::kInfinity;
  if (nan_) return Evidence::kNanOfInfinity;
  return received_ || received_infinity_ ? Evidence::kReceived : Evidence::kNothing;
}

}  // namespace tessera::nn
