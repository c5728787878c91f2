#include "compile/passes/closed_set.h"

#include <vector>

#include "core/ops/pointwise.h"

namespace tessera::compiler {
namespace {

bool contains(const std::vector<bool>& set, OpId id) { return id < set.size() && set[id]; }

std::vector<bool> set_of(std::initializer_list<std::string_view> names) {
  std::vector<bool> set;
  for (std::string_view name : names) {
    OpId id = intern_op(name);
    if (set.size() <= id) set.resize(size_t(id) + 1);
    set[id] = true;
  }
  return set;
}

std::vector<bool> elementwise_ops() {
  std::vector<bool> set = set_of({"cast", "where"});
  OpRegistry rows;
  register_pointwise_ops(rows);
  for (const OpEntry& row : rows.entries()) {
    OpId id = intern_op(row.name);
    if (set.size() <= id) set.resize(size_t(id) + 1);
    set[id] = true;
  }
  return set;
}

}  // namespace

bool is_elementwise(const Primitive& prim) {
  static const std::vector<bool> set = elementwise_ops();
  return contains(set, prim.id());
}

bool is_cheap(const Primitive& prim) {
  static const std::vector<bool> set =
      set_of({"add",     "sub",  "mul",         "neg",        "abs",         "square", "maximum",
              "minimum", "relu", "mul_add",     "eq",         "ne",          "lt",     "le",
              "gt",      "ge",   "logical_and", "logical_or", "logical_not", "where",  "cast"});
  return contains(set, prim.id());
}

const ReduceAttributes* as_reduction(const Primitive& prim) {
  static const std::vector<bool> set = set_of({"sum", "prod", "amax", "amin", "any", "all"});
  return contains(set, prim.id()) ? static_cast<const ReduceAttributes*>(&prim) : nullptr;
}

bool is_transparent_view(const Primitive& prim) {
  static const std::vector<bool> set = set_of({"reshape", "permute", "expand", "expand_like"});
  return contains(set, prim.id());
}

bool may_trap(const Primitive& prim, DType dtype) {
  static const std::vector<bool> set = set_of({"floor_divide", "remainder", "fmod"});
  return is_integral(dtype) && contains(set, prim.id());
}

}  // namespace tessera::compiler
