// Facts about an op that other parts of the library ask for. They are stated where the op is
// defined and read through its primitives, so that nothing above the ops lists ops by name.
// Invariant: an op has one OpInfo, which lives as long as the program; the tests' sweep over the
// registry compares what it states with what the op does.
#pragma once
#include <cstdint>
#include <string_view>

namespace tessera {

/// A small dense number that stands for an op's name; it indexes kernel tables.
using OpId = uint16_t;
/// The number of `name`, the same at every call. Thread-safe.
OpId intern_op(std::string_view name);
std::string_view op_name(OpId id);
int op_count();

enum class OpKind : uint8_t {
  kUnstated,    // no op may leave it so
  kPointwise,   // an element of the result depends on the operands' elements at its place
  kReduce,      // folds loops of one operand; its primitives are ReduceAttributes
  kProduct,     // multiplies operands and sums over loops: most of the time of a step
  kView,        // metadata: the results lie in the memory of operand 0
  kFill,        // has no operands: the result depends on attributes alone
  kDraw,        // draws random bits; one of its operands is the key
  kCollective,  // exchanges values with other ranks
  kOther,
};

/// What autocast does to the floating operands of an op.
enum class Precision : uint8_t {
  kUnstated,  // no op may leave it so
  kAsGiven,   // nothing: the op computes in their dtype
  kLow,       // casts them to its dtype: the op is fast and safe in 16 bits
  kWide,      // casts those of 16 bits to f32: the op loses digits in 16 bits
  kWidest,    // casts those of 16 and 32 bits to the widest dtype among them
};

/// Which operands, where their dtypes differ, are cast to one dtype before the op is recorded: that
/// of PyTorch's result_type (core/ops/scalar.h). Autocast, if it is on, casts by Precision first.
enum class Promotion : uint8_t {
  kNone,  // none: infer refuses dtypes that the op does not take
  kAll,
  kAfterFirst,  // all but operand 0
};

struct OpTraits {
  OpKind kind = OpKind::kUnstated;
  Precision precision = Precision::kUnstated;
  /// The least number of operands; Primitive::operand_count says how many the op has.
  int operands = 0;
  /// kPointwise: roughly the vector instructions per element; 1 is cheaper than a pass over memory.
  int cost = 0;
  bool refuses_bool = false;  // the function of this name takes no bool operands
  bool may_trap = false;      // on integers the kernel may throw (division by zero)
  bool keeps_nan = false;     // a NaN in any operand gives NaN; false is always safe
  bool shows_all = false;     // kView: the one result shows every element of operand 0
  bool plain = false;         // arithmetic or a copy: names of fused kernels leave it out
  Promotion promotion = Promotion::kNone;
  bool takes_storage =
      false;  // takes storage formats (core/tensor/dtype.h), which its kind does not say

  /// Dispatch refuses operands in a storage format where this is false.
  constexpr bool may_take_storage() const {
    return takes_storage || kind == OpKind::kView || kind == OpKind::kCollective;
  }
};

/// The name and traits of an op, defined once. Throws BugError where the name is taken.
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
