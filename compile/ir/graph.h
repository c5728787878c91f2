// What one rank runs in a step, as a flat list of ops. Invariants (verify.h): a value is defined
// once and before it is read; memory is written by effect nodes only, which give the written place
// a new value, and a value is not read once its memory was written; the order of nodes is an order
// in which they can run.
#pragma once
#include <string>
#include <vector>

#include "core/dispatch/phase.h"
#include "core/primitive/primitive.h"

namespace tessera::compiler {

/// Index into Graph::values.
using ValueId = int32_t;
using ValueIds = SmallVector<ValueId, 4>;
inline constexpr ValueId kNoValue = -1;

/// Values with one `buffer` share memory: a view with what it views, the result of an effect with
/// the place it was written to. The buffer is named by the value that made the memory. The values
/// of one without memory (kNoBuffer) are never read: it stands for a shape.
inline constexpr ValueId kNoBuffer = -1;

struct Value {
  Meta meta;           // strides as they were when it was recorded
  int64_t offset = 0;  // elements into its storage
  ValueId buffer = kNoBuffer;
};

/// What passes ask a node for, so that none has to guess from names or shapes.
enum class Role : uint8_t {
  kCompute,
  kView,        // metadata only
  kConstant,    // no operands: numbers, ranges
  kCollective,  // talks to other ranks; their order in the graph is their order on every rank
};
inline constexpr int kNumRoles = 4;
std::string_view name_of(Role role);

struct Node {
  PrimRef prim;
  ValueIds in = {}, out = {};
  // An effect: out[i] is what into[i] holds from here on, or memory of its own where into[i] is
  // kNoValue; empty: a pure op.
  ValueIds into = {};
  Phase phase = Phase::kForward;
  Role role = Role::kCompute;
  int32_t scope = 0;  // of the module that the op, or the forward op it differentiates, comes from
};

/// A tensor that existed before the trace and was not passed to it: a parameter, the state of an
/// optimizer, a generator. It is read and written where it is.
struct ImplicitInput {
  ValueId id = 0;
  Tensor tensor;
  std::string name;  // "" when nobody named it
};

struct Graph {
  std::vector<Value> values;
  std::vector<Node> nodes;
  std::vector<ValueId> inputs;  // passed to each run
  std::vector<ImplicitInput> implicit;
  std::vector<ValueId> shapes;  // values without memory
  std::vector<ValueId> outputs;
  std::vector<std::string> scopes = {""};  // paths, by Node::scope
  // Recorded in deterministic mode: passes keep the eager bits, the order of sums included.
  bool deterministic = false;

  const Value& operator[](ValueId id) const { return values[size_t(id)]; }
};

/// "%7 = gelu(%5) : f32[12, 64, 512]  # h.0.mlp forward". Lists of ids and of types are shortened:
/// "%3..%20". An effect names its places: "%9 = add(%2, %8) into %2 : i64[2]".
std::string to_string(const Graph& graph, const Node& node);
/// The mode if it is deterministic, inputs, then one line for each node, then the outputs.
std::string to_string(const Graph& graph);

}  // namespace tessera::compiler
