// What the text of a kernel is written with: lines and their depth, the names of print_cpp.cpp, and
// the types that values and running totals have.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "compile/codegen/expressions.h"
#include "compile/codegen/generate.h"
#include "compile/codegen/schedule.h"

namespace tessera::compiler {

class KernelText {
 protected:
  explicit KernelText(const Schedule& s) : s_(s), b_(s.body) {}

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

  // "i0 * 768 + i1": where an access is at the indices of `loops`, "0" where it does not move.
  static std::string offset(const Access& a, LoopMask loops) {
    std::string text;
    for (size_t l = 0; l < a.strides.size(); ++l) {
      if (!(loops >> l & 1) || a.strides[l] == 0) continue;
      if (!text.empty()) text += " + ";
      text += a.strides[l] == 1 ? fmt::format("i{}", l) : fmt::format("i{} * {}", l, a.strides[l]);
    }
    return text.empty() ? "0" : text;
  }
  // Position in a dense array over the loops of `kept`.
  std::string dense(LoopMask kept) const {
    Access a{kF32, {}};
    a.strides.resize(b_.extents.size());
    int64_t stride = 1;
    for (int l = s_.loops() - 1; l >= 0; --l)
      if (kept >> l & 1) a.strides[size_t(l)] = stride, stride *= b_.extents[size_t(l)];
    return offset(a, kept);
  }
  std::string element(const Access& a, const char* base, const char* row, int number) const {
    return element(a, base, row, number, ~LoopMask(0));
  }
  std::string element(const Access& a, const char* base, const char* row, int number,
                      LoopMask loops) const {
    const bool moves = moving_loops(a) & outer(), inside = moving_loops(a) & inner();
    if (moves && inside) return fmt::format("{}{}[{}]", row, number, offset(a, inner() & loops));
    return fmt::format("{}{}[{}]", base, number, offset(a, loops));
  }
  std::string operand(int k) const { return element(b_.operands[size_t(k)], "x", "r", k); }
  std::string result(int k) const { return element(b_.stores[size_t(k)].to, "y", "w", k); }

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

  // Arrays of running totals: single precision while few elements have been added.
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
  int depth_ = 0;
};

}  // namespace tessera::compiler
