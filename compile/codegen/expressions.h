// Prints one instruction as an expression, the same for CPUs and GPUs. A register has the type that
// arithmetic on the value is done in: float for 16-bit floats (rounded), long for integers, bool.
#pragma once
#include "compile/codegen/body.h"

namespace tessera::compiler {

/// The type of a register: "float", "double", "long" or "bool".
std::string register_type(DType t);
/// The type of an element in memory: "BF16", "int".
std::string memory_type(DType t);
/// "Sum", "Prod", "Max", "Min", "Any" or "All": the type in the prologue that joins two values.
std::string reduction_type(ReduceKind kind);

/// `memory`, an element in memory of dtype `t`, as a register; and back.
std::string loaded(DType t, const std::string& memory);
std::string stored(DType t, const std::string& value);
/// The register `value` of dtype `from` converted to dtype `to`.
std::string converted(DType from, DType to, const std::string& value);

/// `text`, a result of arithmetic, rounded to dtype `t`.
std::string rounded(DType t, const std::string& text);

/// A constant of dtype `t`.
std::string literal(DType t, Scalar value);
/// Constants, pointwise ops and casts of values called v<id>.
std::string expression(const Body& body, const Instr& i);

}  // namespace tessera::compiler
