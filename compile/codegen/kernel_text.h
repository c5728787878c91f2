// The tools that print the text of a kernel: lines and their indentation, the names listed in
// print_cpp.cpp, and the types of values and running totals.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "compile/codegen/expressions.h"
#include "compile/codegen/generate.h"
#include "compile/codegen/schedule.h"
#include "core/tensor/element.h"

namespace tessera::compiler {

class KernelText {
 protected:
  /// If `numbers` is null, numbers are written into the text. Else those that follow from the sizes
  /// of loops go into the list, and the text has a mark for each: kNumber, its index, kEnd.
  explicit KernelText(const Schedule& s, std::vector<SizedText::Number>* numbers = nullptr)
      : s_(s), b_(s.body), numbers_(numbers) {}

  // ---- numbers that follow from sizes ----

  static constexpr char kEnd = '\3';
  std::string number(SizedText::Number n) {
    if (!numbers_) return std::move(n.digits);
    numbers_->push_back(std::move(n));
    return fmt::format("{}{}{}", SizedText::kNumber, numbers_->size() - 1, kEnd);
  }
  std::string size(int64_t n) { return number({.digits = std::to_string(n), .word = n}); }
  /// The extent of an array.
  std::string capacity(int64_t n) {
    return number({.digits = std::to_string(n), .word = n, .capacity = true});
  }
  /// A constant of the body. It may follow from a size: the element count of a mean does.
  std::string constant(const Instr& i) {
    std::string digits = literal(i.dtype, i.value);
    if (i.dtype == kBool || digits.find('(') != digits.npos) return digits;  // not a plain number
    char element[8];
    write_scalar(element, i.dtype, i.value);
    if (is_integral(i.dtype))
      return number({.digits = std::move(digits), .word = read_integer(element, i.dtype)});
    return number({.digits = std::move(digits),
                   .kind = i.dtype == kF64 ? SizedText::Number::kDouble : SizedText::Number::kFloat,
                   .word = std::bit_cast<int64_t>(read_real(element, i.dtype))});
  }

  // ---- text ----

  template <class... A>
  void line(fmt::format_string<A...> format, A&&... args) {
    text_.append(size_t(depth_) * 2, ' ');
    text_ += fmt::format(format, std::forward<A>(args)...);
    text_ += '\n';
  }
  template <class... A>
  void open(fmt::format_string<A...> format, A&&... args) {
    line("{} {{", fmt::format(format, std::forward<A>(args)...));
    ++depth_;
  }
  void close(const char* end = "}") {
    --depth_;
    line("{}", end);
  }

  // ---- names and types ----

  const Instr& instr(InstrId id) const { return b_.instrs[size_t(id)]; }
  const Placed& at(InstrId id) const { return s_.at(id); }
  LoopMask outer() const { return s_.outer_mask(); }
  LoopMask inner() const { return s_.inner_mask(); }
  static int last_of(LoopMask m) { return 31 - __builtin_clz(m); }

  // "i0 * 768 + i1": the position of an access at the indices of `loops`; "0" where it is constant.
  std::string offset(const Access& a, LoopMask loops) {
    std::string text;
    for (size_t l = 0; l < a.strides.size(); ++l) {
      if (!(loops >> l & 1) || a.strides[l] == 0) continue;
      if (!text.empty()) text += " + ";
      text += a.strides[l] == 1 ? fmt::format("i{}", l)
                                : fmt::format("i{} * {}", l, size(a.strides[l]));
    }
    return text.empty() ? "0" : text;
  }
  // The position in a dense array over the loops of `kept`.
  std::string dense(LoopMask kept) {
    Access a{kF32, {}};
    a.strides.resize(b_.extents.size());
    int64_t stride = 1;
    for (int l = s_.loops() - 1; l >= 0; --l)
      if (kept >> l & 1) a.strides[size_t(l)] = stride, stride *= b_.extents[size_t(l)];
    return offset(a, kept);
  }
  std::string element(const Access& a, const char* base, const char* row, int number) {
    return element(a, base, row, number, ~LoopMask(0));
  }
  std::string element(const Access& a, const char* base, const char* row, int number,
                      LoopMask loops) {
    const bool moves = moving_loops(a) & outer(), inside = moving_loops(a) & inner();
    if (moves && inside) return fmt::format("{}{}[{}]", row, number, offset(a, inner() & loops));
    return fmt::format("{}{}[{}]", base, number, offset(a, loops));
  }
  std::string operand(int k) { return element(b_.operands[size_t(k)], "x", "r", k); }
  std::string result(int k) { return element(b_.stores[size_t(k)].to, "y", "w", k); }

  DType reduced_dtype(const Instr& i) const {  // of what is joined
    return i.reduce <= ReduceKind::kProd || i.reduce >= ReduceKind::kAny ? i.dtype
                                                                         : instr(i.in[0]).dtype;
  }
  std::string lane_type(const Instr& i) const { return register_type(reduced_dtype(i)); }
  static bool in_double(const Instr& i) {
    return i.reduce == ReduceKind::kSum && is_floating(i.dtype);
  }
  std::string total_type(const Instr& i) const { return in_double(i) ? "double" : lane_type(i); }
  // The operand as it enters the reduction.
  std::string fed(const Instr& i) const {
    DType from = instr(i.in[0]).dtype, to = reduced_dtype(i);
    std::string v = fmt::format("v{}", i.in[0]);
    if (i.reduce >= ReduceKind::kAny) return from == kBool ? v : v + " != 0";
    return register_type(from) == register_type(to) ? v : converted(from, to, v);
  }
  // A finished total as a value.
  std::string finished(const Instr& i, const std::string& total) const {
    if (i.dtype == kBF16 || i.dtype == kF16 || i.dtype == kF32)
      return converted(kF64, i.dtype, total);
    return total;
  }
  std::string join(const Instr& i, const std::string& to, const std::string& v) const {
    const char* sign = i.reduce == ReduceKind::kSum ? "+" : "*";
    if (i.reduce <= ReduceKind::kProd) return fmt::format("{} = {} {} {}", to, to, sign, v);
    return fmt::format("{} = {}::join({}, {})", to, reduction_type(i.reduce), to, v);
  }

  // The loops that an array of running totals is over. Totals are in single precision while few
  // elements have been added.
  LoopMask kept(const Instr& i) const { return i.loops & inner(); }
  bool reduces_vector(const Instr& i, const Nest& n) const {
    return i.reduced >> last_of(n.loops) & 1;
  }
  std::string array_type(const Instr& i, const Nest& n) const {
    const bool many = s_.count(i.reduced & inner()) > kSumRows;
    return in_double(i) && (reduces_vector(i, n) || many) ? "double" : lane_type(i);
  }
  const Nest* nest_of(InstrId id) const {
    for (const Nest& n : s_.nests)
      if (std::count(n.reductions.begin(), n.reductions.end(), id)) return &n;
    return nullptr;
  }

  const Schedule& s_;
  const Body& b_;
  std::string text_;

 private:
  std::vector<SizedText::Number>* const numbers_;
  int depth_ = 0;
};

}  // namespace tessera::compiler
