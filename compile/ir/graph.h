// A graph: what one rank runs in a step, as a flat list of ops. Invariants (verify.h): a value is
// defined once and before it is read. Only effect nodes write memory; they give the written place a
// new value, and a value is not read after its memory was written. Nodes can run in the order of
// the list.
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

/// Values with the same `buffer` share memory: a view and what it views, the result of an effect
/// and the place it was written to. A buffer is named by the value that made the memory. A value
/// without memory (kNoBuffer) only stands for a shape and is never read.
inline constexpr ValueId kNoBuffer = -1;

struct Value {
  Meta meta;           // strides as they were when it was recorded
  int64_t offset = 0;  // elements into its storage
  ValueId buffer = kNoBuffer;
};

/// What a node is to passes, so that none has to guess it from names or shapes.
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
  // Empty for a pure op. For an effect, out[i] is the value that into[i] holds from here on, or
  // memory of its own where into[i] is kNoValue.
  ValueIds into = {};
  Phase phase = Phase::kForward;
  Role role = Role::kCompute;
  int32_t scope = 0;  // the module of the op, or of the forward op that it differentiates
};

/// A tensor that existed before the trace and was not passed to it: a parameter, the state of an
/// optimizer, a generator. It is read and written where it is.
struct ImplicitInput {
  ValueId id = 0;
  Tensor tensor;
  std::string name;  // "" when it was given no name
};

struct Graph {
  std::vector<Value> values;
  std::vector<Node> nodes;
  std::vector<ValueId> inputs;  // passed to each run
  std::vector<ImplicitInput> implicit;
  std::vector<ValueId> shapes;  // values without memory
  std::vector<ValueId> outputs;
  std::vector<std::string> scopes = {""};  // paths, by Node::scope
  // The graph was recorded in deterministic mode: passes keep the bits of eager mode, which
  // includes the order of sums.
  bool deterministic = false;

  const Value& operator[](ValueId id) const { return values[size_t(id)]; }
};

/// "%7 = gelu(%5) : f32[12, 64, 512] # h.0.mlp forward". Long lists of ids and of types are
/// shortened: "%3..%20". An effect names the places it writes: "%9 = add(%2, %8) into %2 : i64[2]".
std::string to_string(const Graph& graph, const Node& node);
/// Prints the mode if it is deterministic, the inputs, one line for each node, and the outputs.
std::string to_string(const Graph& graph);

}  // namespace tessera::compiler
