#include "compile/codegen/expressions.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "compile/codegen/functors.h"
#include "core/tensor/element.h"

namespace tessera::compiler {
namespace {

std::string real_literal(DType t, double v) {
  const bool wide = t == kF64;
  if (std::isnan(v)) return wide ? "double(fn::nan())" : "fn::nan()";
  if (std::isinf(v))
    return fmt::format("{}{}", v < 0 ? "-" : "", wide ? "double(fn::inf())" : "fn::inf()");
  // The shortest text that reads back as the same number.
  std::string text = wide ? fmt::format("{}", v) : fmt::format("{}", float(v));
  if (text.find_first_of(".e") == text.npos) text += ".0";
  return wide ? text : text + "f";
}

const char* infix(const std::string& op) {
  static const std::pair<const char*, const char*> table[] = {
      {"add", "+"}, {"sub", "-"}, {"mul", "*"}, {"div", "/"}, {"eq", "=="},
      {"ne", "!="}, {"lt", "<"},  {"le", "<="}, {"gt", ">"},  {"ge", ">="}};
  for (auto [name, text] : table)
    if (op == name) return text;
  return nullptr;
}

// Logic on bools stays in bools, which vector code turns into masks.
std::string logic(const Instr& i) {
  if (i.op == "logical_not") return fmt::format("!v{}", i.in[0]);
  const char* text = i.op == "logical_and" ? "&" : i.op == "logical_or" ? "|" : "^";
  return fmt::format("bool(v{} {} v{})", i.in[0], text, i.in[1]);
}

std::string pointwise(const Body& body, const Instr& i) {
  if (i.op == "where") return fmt::format("v{} ? v{} : v{}", i.in[0], i.in[1], i.in[2]);
  DType operand = body.instrs[size_t(i.in[0])].dtype;
  if (operand == kBool && i.op.starts_with("logical_")) return logic(i);
  const Functor* functor = find_functor(i.op);
  auto name = [&](size_t k) {
    return operand == kBool ? fmt::format("long(v{})", i.in[k]) : fmt::format("v{}", i.in[k]);
  };
  std::string text;
  if (const char* between = infix(i.op)) {
    text = fmt::format("{} {} {}", name(0), between, name(1));
  } else {
    text = fmt::format("functors::{}::apply({}", i.op, name(0));
    for (size_t k = 1; k < i.in.size(); ++k) text += ", " + name(k);
    text += ")";
  }
  return functor->to_bool ? text : rounded(i.dtype, text);
}

}  // namespace

std::string literal(DType t, Scalar value) {
  char element[8];
  write_scalar(element, t, value);
  if (is_floating(t)) return real_literal(t, read_real(element, t));
  int64_t v = read_integer(element, t);
  if (t == kBool) return v ? "true" : "false";
  if (v == std::numeric_limits<int64_t>::min()) return "(-9223372036854775807L - 1)";
  return fmt::format("{}L", v);
}

std::string rounded(DType t, const std::string& text) {
  switch (t) {
    case kBF16: return fmt::format("as_bf16({})", text);
    case kF16: return fmt::format("as_f16({})", text);
    case kF8E4M3: return fmt::format("as_f8e4m3({})", text);
    case kF8E5M2: return fmt::format("as_f8e5m2({})", text);
    case kI32: return fmt::format("as_i32({})", text);
    case kU8: return fmt::format("as_u8({})", text);
    case kBool: return fmt::format("({}) != 0", text);
    default: return text;
  }
}

std::string register_type(DType t) {
  return t == kBool ? "bool" : is_integral(t) ? "long" : t == kF64 ? "double" : "float";
}
std::string memory_type(DType t) {
  constexpr const char* names[] = {"bool", "unsigned char", "int",    "long",   "F16",
                                   "BF16", "float",         "double", "F8E4M3", "F8E5M2"};
  return names[int(t)];
}
std::string reduction_type(ReduceKind kind) {
  constexpr const char* names[] = {"Sum", "Prod", "Max", "Min", "Any", "All"};
  return names[int(kind)];
}

std::string loaded(DType t, const std::string& memory) {
  if (t == kBool) return fmt::format("{} != 0", memory);
  return is_floating(t) && size_of(t) <= 2 ? fmt::format("widen({})", memory) : memory;
}
std::string stored(DType t, const std::string& value) {
  switch (t) {
    case kF16: return fmt::format("to_f16({})", value);
    case kF8E4M3: return fmt::format("to_f8e4m3({})", value);
    case kF8E5M2: return fmt::format("to_f8e5m2({})", value);
    case kBF16: return fmt::format("to_bf16({})", value);
    case kI32: return fmt::format("int({})", value);
    case kU8: return fmt::format("static_cast<unsigned char>({})", value);
    default: return value;
  }
}
std::string converted(DType from, DType to, const std::string& value) {
  if (from == to) return value;
  std::string number = fmt::format("{}({})", register_type(to), value);
  if (is_integral(from) && is_floating(to)) number = fmt::format("unsigned_zero({})", number);
  switch (to) {
    case kBool: return fmt::format("{} != 0", value);
    case kU8: return fmt::format("as_u8(long({}))", value);
    case kI32:
      return is_floating(from) ? fmt::format("long(int({}))", value)
                               : fmt::format("as_i32(long({}))", value);
    case kI64: return fmt::format("long({})", value);
    case kF16: return fmt::format("as_f16({})", number);
    case kF8E4M3: return fmt::format("as_f8e4m3({})", number);
    case kF8E5M2: return fmt::format("as_f8e5m2({})", number);
    case kBF16: return fmt::format("as_bf16({})", number);
    case kF32:
    case kF64: return number;
  }
  return value;
}

std::string expression(const Body& body, const Instr& i) {
  if (i.kind == InstrKind::kConstant) return literal(i.dtype, i.value);
  if (i.kind == InstrKind::kCast)
    return converted(body.instrs[size_t(i.in[0])].dtype, i.dtype, fmt::format("v{}", i.in[0]));
  return pointwise(body, i);
}

}  // namespace tessera::compiler
