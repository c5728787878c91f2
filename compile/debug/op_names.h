// Reads and writes ops as JSON, by name and attributes. An op is made from any other op of the same
// name, so the samples of the registry serve as the table of names. Invariant: an op that is read
// fits its operands in what infer does not check: their number, and which dims the op names.
#pragma once
#include <nlohmann/json.hpp>

#include "collectives/process_group.h"
#include "compile/codegen/fused.h"
#include "compile/ir/attributes.h"

namespace tessera::compiler {

nlohmann::json json_of_attributes(const Attributes& attributes);
/// Throws UserError for JSON that does not describe attributes; so do the other functions here.
Attributes read_attributes(const nlohmann::json& j);
/// Makes the op `name` for operands of types `in`.
PrimRef read_op(const std::string& name, const Attributes& attributes, std::span<const Meta> in,
                std::span<const Ref<ProcessGroup>> groups);

nlohmann::json json_of_fused(const Fused& fused);
PrimRef read_fused(const nlohmann::json& j, std::span<const Meta> in);

inline constexpr int64_t kMaxElements = int64_t(1) << 40;  // of one value, and of its memory

/// Reads the JSON list [dtype, shape, strides].
Meta read_meta(const nlohmann::json& j);
int64_t read_integer(const nlohmann::json& j);
Dims read_dims(const nlohmann::json& j);
DType read_dtype(const nlohmann::json& j);

}  // namespace tessera::compiler
