// Facts about an op that other parts ask for: they are stated where the op is defined and looked up
// through its primitives, so that nothing above the ops lists ops by name. Invariant: an op has one
// OpInfo, which lives as long as the program; the sweep over the registry compares what it states
// with what the op does.
#pragma once
#include <cstdint>
#include <string_view>

namespace tessera {

/// Small dense number of an op's name; indexes kernel tables.
using OpId = uint16_t;
/// The number of `name`, the same for every call with it. Thread-safe.
OpId intern_op(std::string_view name);
std::string_view op_name(OpId id);
int op_count();

enum class OpKind : uint8_t {
  kUnstated,    // no op may leave it so
  kPointwise,   // an element of the result follows from the operands' elements at its place
  kReduce,      // folds loops of one operand; its primitives are ReduceAttributes
  kProduct,     // multiplies operands and sums over loops: most of the time of a step
  kView,        // metadata: the results lie in the memory of operand 0
  kFill,        // has no operands: its result follows from attributes
  kDraw,        // draws random bits by a key among its operands
  kCollective,  // exchanges values with other ranks
  kOther,
};

/// What autocast does to floating operands.
enum class Precision : uint8_t {
  kUnstated,  // no op may leave it so
  kAsGiven,   // computes in what they are
  kLow,       // fast and safe in 16 bits: they are cast to autocast's dtype
  kWide,      // loses digits in 16 bits: those are cast to f32
  kWidest,    // floats of 16 and 32 bits meet in the widest of them
};

/// Which operands are brought to one dtype before the op is recorded, where theirs differ:
/// PyTorch's result_type (core/ops/scalar.h). Under autocast they are cast by Precision first.
enum class Promotion : uint8_t {
  kNone,  // infer says what it takes
  kAll,
  kAfterFirst,  // all but operand 0
};

struct OpTraits {
  OpKind kind = OpKind::kUnstated;
  Precision precision = Precision::kUnstated;
  /// The fewest operands; Primitive::operand_count says how many an op with its attributes has.
  int operands = 0;
  /// kPointwise: vector instructions for an element, roughly. 1 is cheaper than a pass over memory.
  int cost = 0;
  bool refuses_bool = false;  // the function of this name takes no bool operands
  bool may_trap = false;      // integers may have no result (division by zero): the kernel throws
  bool keeps_nan = false;     // a NaN in any operand gives NaN; need not be stated
  bool shows_all = false;     // kView: the one result shows every element of operand 0
  bool plain = false;         // arithmetic and copies, which a fused kernel is not named after
  Promotion promotion = Promotion::kNone;
};

/// A defined op. Throws BugError where the name is taken.
struct OpInfo {
  OpInfo(std::string_view name, const OpTraits& traits);
  OpInfo(const OpInfo&) = delete;
  OpInfo& operator=(const OpInfo&) = delete;

  const OpId id;
  const std::string_view name;
  const OpTraits traits;
};

/// The op of this name. Throws BugError where there is none. Thread-safe.
const OpInfo& op_info(std::string_view name);

}  // namespace tessera
