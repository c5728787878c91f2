// Finds where a NaN comes from: while a NonFiniteSearch lives, it checks the operands and results
// of every op of its thread. It is meant for a second run of a step that went wrong, since it costs
// several passes over all values. Invariant: results are those of the eager backend, and nothing is
// thrown for what is found, so that ranks which find nothing are not left alone in a collective.
#pragma once
#include <map>
#include <optional>
#include <string>

#include "core/dispatch/phase.h"
#include "core/dispatch/target.h"

namespace tessera::nn {

class NonFiniteSearch final : public Backend {
 public:
  /// `communicates`: whether values of other ranks enter an op's results; null: in none. Throws
  /// UserError where another backend runs (a recording).
  explicit NonFiniteSearch(bool (*communicates)(const Primitive&) = nullptr);

  struct Finding {
    std::string op, operands, scope;  // "exp", "f32[2, 3]", "h.0.mlp"
    Phase phase = Phase::kForward;
  };
  /// The first op that made a NaN of operands without any. An infinity among these is the
  /// cause rather than the op (inf - inf; what convolutions make of one: core/ops/conv.h), and
  /// first_infinity() says where it came from.
  const std::optional<Finding>& first_nan() const { return nan_; }
  /// The first op that made an infinity of finite operands, before a NaN or an infinity came from
  /// elsewhere; constants are none.
  const std::optional<Finding>& first_infinity() const { return infinity_; }
  /// The first op that was given a NaN which no op had made: a parameter or an input holds it, or
  /// another rank sent it in a message.
  const std::optional<Finding>& given_nan() const { return given_; }
  /// The first op that communicates and made a NaN of operands without any: another rank holds it,
  /// or infinities met.
  const std::optional<Finding>& received_nan() const { return received_; }
  /// The first op that communicates and made an infinity of finite operands before one was known:
  /// another rank holds it, or the sum over ranks is too large.
  const std::optional<Finding>& received_infinity() const { return received_infinity_; }

  /// How near the finding is to where the trouble began, nearest first: of several ranks' findings
  /// the nearest is reported. kNanOfInfinity: a NaN of an infinity that no op of this rank made.
  enum class Evidence {
    kNanOfNumbers,
    kNanOfOwnInfinity,
    kNanGiven,
    kInfinity,
    kNanOfInfinity,
    kReceived,
    kNothing
  };
  Evidence evidence() const;
  /// What was found, in the words of an error; "" when nothing was.
  std::string story() const;

  // Backend:
  Tensors run(const PrimRef& prim, Inputs in) override;
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override;

 private:
  struct Seen {
    bool nan = false, infinity = false;
  };
  static Seen look(std::span<const Tensor> tensors);
  Finding finding(const Primitive& prim, std::string operands);
  std::string scope_here();
  template <class Run>
  void watch(const Primitive& prim, Inputs in, Run run);
  bool nan_known() const { return nan_ || given_ || received_; }

  bool (*const communicates_)(const Primitive&);
  std::optional<Finding> nan_, infinity_, given_, received_, received_infinity_;
  bool nan_of_infinity_ = false;                   // the operands of nan_ held one
  std::map<uint64_t, std::string> scope_of_node_;  // of the op recorded by autograd node n
  BackendScope on_;
};

}  // namespace tessera::nn
